"""Make _book/, a web site of the course that needs neither a kernel nor a network: `make book`.

Sphinx builds it, with MyST-NB and the Sphinx Book Theme (docs/conf.py), from copies of the notebooks in build/site. A
copy has what those do not know: frames of its explorers (`frames.py`), hints and solutions folded under each exercise,
alt texts, entries of the index. Each notebook is run for it; what was drawn is kept in build/frames until the notebook
or its library changes.
"""

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib import import_module
from pathlib import Path

import frames
import nbformat
import readme

import notebooks as stored
from dlscale.course import claims, contents, exercises, sources

ROOT = Path(__file__).resolve().parent.parent
MOST_MB, CELL_SECONDS = 60, 1800
BEGIN = "__import__('sys').path.append({!r}); __import__('frames').begin({!r}, {!r})"  # no new name comes into it
TOCTREE = "\n```{{toctree}}\n:hidden:\n:caption: {}\n{}\n```\n"
NO_NOTEBOOK = shutil.ignore_patterns("*.ipynb")
IMAGE = {"property=og:image": "https://dlscale.github.io/dlscale/_images/start.png"}
ARXIV = re.compile(r"(?<!\[)arXiv:(\d{4}\.\d{4,5})")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
ENTRY = "```{{index}} ! single: {}\n```\n\n"
ANSWER = '<span class="dlscale-answer" data-guess="{}"></span>'
CLAIM = '<p class="dlscale-claim"><a href="{}docs/CLAIMS.html#{}">This claim among all</a></p>'
HINT = "<details><summary>Hint {}</summary><p>{}</p></details>\n"
SOLUTION = "<details><summary>Solution</summary>\n\n```python\n{}\n```\n\n</details>"


def main() -> str | None:
    npm_packages()
    build(contents.paths(ROOT / "notebooks"), ROOT / "_book", ROOT / "build" / "site", ROOT / "build" / "frames")
    megabytes = sum(path.stat().st_size for path in (ROOT / "_book").rglob("*")) / 1e6
    print(f"Made _book/index.html, {megabytes:.0f} MB in all.")
    return f"At most {MOST_MB} MB are allowed." if megabytes > MOST_MB else None


def npm_packages() -> None:
    """Install what package-lock.json names, if it is not there. Raises OSError or CalledProcessError if it cannot."""
    if not (ROOT / "node_modules" / ".package-lock.json").is_file():
        subprocess.run([shutil.which("npm") or "npm", "ci", "--silent", "--ignore-scripts"], cwd=ROOT, check=True)


def build(paths: list[Path], target: Path, work: Path, drawn: Path) -> None:
    """Run the notebooks, or take them from the folder `drawn`; let Sphinx build a new folder `target` from them.

    Its sources are put together in a new folder `work`. Raises CalledProcessError if Sphinx fails.
    """
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", work / "docs", ignore=shutil.ignore_patterns("_*", "*.py", "*.js", "index.md"))
    shutil.copy(ROOT / "README.md", work)
    (work / "notebooks" / "further").mkdir(parents=True)
    front = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    ran = [kept(path, drawn) for path in paths]
    with ThreadPoolExecutor(2) as pool:
        [*pool.map(run, paths, ran)]  # raises what they do
    listed: dict[str, list[str]] = {"Lessons": [], "Further": []}
    for path in ran:
        shutil.copytree(path.parent, target / "_static" / "frames", ignore=NO_NOTEBOOK, dirs_exist_ok=True)
        node = nbformat.read(path, as_version=4)
        told = [output for cell in node.cells for output in cell.get("outputs", []) if "dlscale-about" in str(output)]
        if told:  # as in the README, the last picture of the first notebook
            front = front.replace("<!-- explorer -->", told[-1].data["text/html"])
        folder, caption = ("notebooks", "Lessons") if "further" not in path.stem else ("notebooks/further", "Further")
        title = prepare(node, path.stem, "../" * (1 + folder.count("/")))
        listed[caption].append(f"{path.stem[:2]} {title.partition(':')[0]} <{folder}/{path.stem}>")
        nbformat.write(node, work / folder / path.name)
    trees = "".join(TOCTREE.format(caption, "\n".join(entries)) for caption, entries in listed.items())
    (work / "index.md").write_text(front.replace("<!-- lessons -->", trees), encoding="utf-8")
    options = ["-q", "-E", "-j", "2", "-c", ROOT / "docs", "-d", work / "_doctrees"]
    subprocess.run([sys.executable, "-m", "sphinx", *options, work, target], check=True)


def kept(path: Path, drawn: Path) -> Path:
    """Where the notebook lies once it was run, among its frames: another place when it or its library changed."""
    hashes = stored.hashes(nbformat.read(path, as_version=4), path.stem).values()
    return drawn / f"{path.stem}-{sources.digest([*hashes, Path(frames.__file__).read_text()])}" / path.name


def run(path: Path, made: Path) -> None:
    """Run the notebook, with frames of its explorers, unless it lies at `made` already, and write it there."""
    if not made.is_file():
        print(f"{path.name}: running, and drawing its explorers …", flush=True)
        for old in made.parent.parent.glob(f"{path.stem}-*"):
            shutil.rmtree(old)
        made.parent.mkdir(parents=True)
        node = nbformat.read(path, as_version=4)
        call = BEGIN.format(str(Path(__file__).parent), str(made.parent), path.stem)
        node.cells.insert(0, nbformat.v4.new_code_cell(call))
        stored.execute(node, path.parent, CELL_SECONDS)
        stored.clean(node)
        del node.cells[0]
        nbformat.write(node, made)


def prepare(node: nbformat.NotebookNode, name: str, root: str) -> str:
    """Add to a copy of a notebook, in place, what Sphinx does not know; return the subject's title.

    `root` leads from the notebook's page to the site's.
    """
    book = next(book for book in contents.contents() if book.name == stored.subject(name))
    node.metadata["myst"] = {"html_meta": {"description": book.question} | IMAGE}
    items = [item for item in book.items if item.further == name.endswith("_further")]
    entries = {item.section: "" for item in items}
    for method, words in readme.methods().items():
        for section in {item.section for item in items if words.search(f"{item.item}\n{item.section}")}:
            entries[section] += ENTRY.format(method)
    known = vars(import_module(f"dlscale.{book.room}.exercises")).values()
    tagged = {f"answer-{one.id}": one for one in known if isinstance(one, exercises.Exercise)}
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = HEADING.sub(lambda found: entries.get(found[1], "") + found[0], cell.source)
            cell.source = ARXIV.sub(r"[\g<0>](https://arxiv.org/abs/\1)", cell.source)
        for output in cell.get("outputs", []):
            data, metadata = output.get("data", {}), output.get("metadata", {})
            if alt := metadata.get("image/png", {}).get("alt"):
                cell.metadata["mystnb"] = {"image": {"alt": alt}}
            if question := metadata.get("dlscale", {}).get("guess"):
                data["text/markdown"] = ANSWER.format(escape(question)) + data["text/markdown"]
            if claim := data.pop(claims.CLAIM_TYPE, None):
                data["text/html"] += CLAIM.format(root, claim["id"])
        for exercise in (tagged[tag] for tag in cell.metadata.get("tags", []) if tag in tagged):
            hints = "".join(HINT.format(*pair) for pair in enumerate(map(escape, exercise.hints), 1))
            folded = {"text/markdown": hints + SOLUTION.format(exercise.code.strip())}
            cell.outputs.append(nbformat.v4.new_output("display_data", folded))
    return book.title


if __name__ == "__main__":
    sys.exit(main())
