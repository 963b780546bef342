"""Make _book/, a web site of the course that needs neither a kernel nor a network: `make book`.

Sphinx builds it, with MyST-NB and the Sphinx Book Theme (docs/conf.py), from copies of the notebooks in build/site. A
copy has what those do not know: frames of its explorers (`frames.py`), hints and solutions folded under each exercise,
alt texts, entries of the index. Each notebook is run for it; what was drawn is kept in build/frames until the notebook
or its library changes. `--stored` runs nothing: the pages show what the notebooks store, explorers as pictures.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import frames
import nbformat
from nbformat import NotebookNode

import notebooks as stored
from dlscale.course import sources
from dlscale.course.claims import CLAIM_TYPE
from dlscale.course.contents import contents
from dlscale.course.contents import paths as paths_in
from dlscale.course.exercises import Exercise

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 60_000_000
ADDRESS = "https://dlscale.github.io/dlscale/"
FRONT = "<!-- explorer -->"
LOOK_UP = ["Methods A to Z <docs/INDEX>", "Index of words <genindex>", "Every claim <docs/CLAIMS>",
           "For instructors <docs/INSTRUCTORS>", "Measuring <docs/MEASURING>"]  # fmt: skip
MATHJAX = (  # all of TeX and its fonts in one file
    "mathjax@3.2.2",
    "mathjax/es5/tex-svg-full.js",
    "a4354ff94fd868aea0cc6eaaa79a57fda0588646fc46ee3700a349ee0a11cbe6",
)
ARXIV = re.compile(r"(?<!\[)arXiv:(\d{4}\.\d{4,5})")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
ENTRY = "```{{index}} ! single: {}\n```\n\n"
ANSWER = '<span class="dlscale-answer" data-guess="{}"></span>'
CLAIM = '<p class="dlscale-claim"><a href="{}">This claim among all</a></p>'
SOLUTION = "<details><summary>Solution</summary>\n\n```python\n{}\n```\n\n</details>"
ONLINE = re.compile(r"\[Read online\]\(\S+\)\n+")
REMOTE = re.compile(
    r"""(?:<(?:script|img|source|audio|video|iframe)\b[^>]*?\b(?:src|srcset|poster)=|url\(|@import |import\("""
    r"""|<link\b(?=[^>]*(?:stylesheet|preload|icon))[^>]*?href=)\s*["']?((?:https?:)?//[^"')\s>]+)"""
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/, with notebooks/further/")
    parser.add_argument("--stored", action="store_true", help="run nothing; show stored outputs")
    options = parser.parse_args(arguments)
    paths = options.notebooks or sorted(paths_in(ROOT / "notebooks"), key=lambda path: path.stem)
    drawn = None if options.stored else ROOT / "build" / "frames"
    build(paths, ROOT / "_book", fetch(*MATHJAX, ROOT / "build" / "npm"), ROOT / "build" / "site", drawn)
    files = [path for path in (ROOT / "_book").rglob("*") if path.is_file()]
    wrong = [f"{path.relative_to(ROOT)} would need a network: {source}" for path in files for source in remote(path)]
    if (size := sum(path.stat().st_size for path in files)) > MAX_BYTES:
        wrong.append(f"The site takes {size:,} bytes, over {MAX_BYTES:,}.")
    print(*wrong or [f"Made _book/index.html, {size / 1e6:.0f} MB in all."], sep="\n")
    return bool(wrong)


def build(paths: Iterable[Path], target: Path, mathjax: Path, work: Path, drawn: Path | None = None) -> None:
    """Put the site's sources together in a new folder `work`, and let Sphinx build a new folder `target` from them.

    With a folder `drawn`, the notebooks are run, or taken from there if they were run before, and their explorers move.
    Raises RuntimeError if Sphinx fails.
    """
    shutil.rmtree(work, ignore_errors=True)
    pages, built = work / "pages", work / "built"
    (built / "_static" / "frames").mkdir(parents=True)
    shutil.copytree(ROOT / "docs", pages / "docs", ignore=shutil.ignore_patterns("_*", "*.py", "*.js", "index.md"))
    for name in ("README.md", "docs/docutils.conf"):
        shutil.copy(ROOT / name, pages)
    shutil.copy(mathjax, built / "_static")
    script, site = ROOT / "dlscale" / "page" / "explorer.js", ROOT / "docs" / "_static" / "site.js"
    text = script.read_text(encoding="utf-8").partition("export default")[0] + site.read_text(encoding="utf-8")
    (built / "_static" / "dlscale.js").write_text(f"(() => {{\n{text}\n}})();\n", encoding="utf-8")
    listed: dict[str, list[str]] = {"Lessons": [], "Further": [], "Look up": LOOK_UP}
    front = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for path in paths:
        node, explorers = run(path, drawn) if drawn else (nbformat.read(path, as_version=4), [])
        for number, explorer in enumerate(explorers):
            pack = built / "_static" / "frames" / f"{path.stem}-{number:02}.js"
            pack.write_text(f'dlscalePack("{pack.stem}", {json.dumps(explorer["frames"])});\n', encoding="utf-8")
            for image, content in enumerate(explorer["images"]):
                pack.with_name(f"{pack.stem}-{image}.webp").write_bytes(base64.b64decode(content))
            if FRONT in front and explorer is explorers[-1]:  # as in the README, the last picture of the first notebook
                front = front.replace(FRONT, about(pack.stem, explorer))
                (pages / "docs" / "start.png").write_bytes(base64.b64decode(picture(node, number)))
        folder = "notebooks/further" if path.parent.name == "further" else "notebooks"
        prepare(node, path.stem, "../" * (folder.count("/") + 1), explorers)
        (pages / folder).mkdir(parents=True, exist_ok=True)
        nbformat.write(node, pages / folder / path.name)
        heading = node.cells[0].source.partition("\n")[0].lstrip("# ")
        title = next((book.title for book in contents() if book.name == stored.subject(path.stem)), heading)
        group = listed["Further" if folder.endswith("further") else "Lessons"]
        group.append(f"{path.stem[:2]} {title.partition(':')[0]} <{folder}/{path.stem}>")
    for caption, entries in listed.items():
        front += "\n".join(["\n```{toctree}", ":hidden:", f":caption: {caption}", *entries, "```\n"]) if entries else ""
    (pages / "index.md").write_text(front, encoding="utf-8")
    options = ["-q", "-E", "-c", str(ROOT / "docs"), "-d", str(work / "doctrees")]
    if subprocess.run([sys.executable, "-m", "sphinx", *options, str(pages), str(built)], check=False).returncode:
        raise RuntimeError("Sphinx did not make the site, see above.")
    for path in paths:  # to download, small: running it makes its outputs again
        node = nbformat.read(path, as_version=4)
        for cell in node.cells:
            cell.update({"outputs": [], "execution_count": None} if cell.cell_type == "code" else {})
        nbformat.write(node, next((built / "_sources").rglob(path.name)))
    for path in [*built.rglob("*.map"), built / "_static" / "locales"]:  # for who works on the theme
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(built, target)


def run(path: Path, drawn: Path) -> tuple[NotebookNode, list[dict[str, Any]]]:
    """Return the notebook, run, and its explorers' frames; both are kept in the folder `drawn`."""
    hashes = stored.hashes(nbformat.read(path, as_version=4), path.stem).values()
    kept = drawn / f"{path.stem}-{sources.digest([*hashes, Path(frames.__file__).read_text(encoding='utf-8')])}.json"
    if not kept.is_file():
        print(f"{path.name}: running, and drawing its explorers …", flush=True)
        drawn.mkdir(parents=True, exist_ok=True)
        for old in drawn.glob(f"{path.stem}-*.json"):
            old.unlink()
        with tempfile.TemporaryDirectory() as folder:
            kept.write_text(json.dumps(frames.run(path, Path(folder))), encoding="utf-8")
    node, explorers = json.loads(kept.read_text(encoding="utf-8"))
    return nbformat.from_dict(node), explorers


def prepare(node: NotebookNode, name: str, root: str, explorers: list[dict[str, Any]]) -> None:
    """Add to a copy of a notebook, in place, what Sphinx does not know; `root` leads from its page to the site's."""
    entries: dict[str, str] = {}
    for book in (book for book in contents() if book.name == stored.subject(name)):
        about_links = {"property=og:title": book.title, "property=og:image": f"{ADDRESS}_images/start.png"}
        node.metadata["myst"] = {"html_meta": {"description": book.question, **about_links}}
        for item in (item for item in book.items if item.further == name.endswith("_further")):
            entries[item.section] = entries.get(item.section, "") + "".join(map(ENTRY.format, words(item.item)))
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = HEADING.sub(lambda found: entries.get(found[1], "") + found[0], cell.source)
            cell.source = ARXIV.sub(r"[\g<0>](https://arxiv.org/abs/\1)", ONLINE.sub("", cell.source))
            continue
        outputs, cell.outputs = cell.outputs, []
        for output in outputs:
            data, metadata = output.get("data", {}), output.get("metadata", {})
            if alt := metadata.get("image/png", {}).get("alt"):
                cell.metadata["mystnb"] = {"image": {"alt": alt}}
            if question := metadata.get("dlscale", {}).get("guess"):
                data["text/markdown"] = ANSWER.format(escape(question)) + data["text/markdown"]
            if claim := data.pop(CLAIM_TYPE, None):
                data["text/html"] += CLAIM.format(f"{root}docs/CLAIMS.html#{claim['id']}")
            cell.outputs.append(output)
            if "explorer" in metadata:
                number = metadata["explorer"]
                cell.outputs.append(display("text/html", about(f"{name}-{number:02}", explorers[number])))
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("answer-"):
                known = vars(import_module(f"dlscale.{stored.room(name)}.exercises")).values()
                exercises = {exercise.id: exercise for exercise in known if isinstance(exercise, Exercise)}
                cell.outputs.append(display("text/markdown", folds(exercises[tag.removeprefix("answer-")])))


def picture(node: NotebookNode, number: int) -> str:
    """The stored picture of a run notebook's explorer, in base64."""
    outputs = (output for cell in node.cells for output in cell.get("outputs", []))
    return next(output.data["image/png"] for output in outputs if output.get("metadata", {}).get("explorer") == number)


def display(kind: str, text: str) -> NotebookNode:
    return nbformat.v4.new_output("display_data", {kind: text})


def words(item: str) -> list[str]:
    """What an item of the lectures is looked up under: how it begins, names in it, and what stands in parentheses."""
    first, *rest = (part.strip() for part in re.split(r"[:;,](?= )|[()]", item.replace("`", "")))
    inside = re.findall(r"\(.*?\)", item)
    return [first, *(part for part in rest if part and (part != part.lower() or part in "".join(inside)))]


def about(name: str, explorer: dict[str, Any]) -> str:
    """What the page is told about an explorer, beside the picture; its frames come later."""
    _, alt = explorer["frames"][frames.key(look["start"] for look in explorer["controls"])]
    told = {"name": name, "alt": alt, "controls": explorer["controls"], "alone": explorer["alone"]}
    text = json.dumps(told).replace("<", "\\u003c")
    return f'<script type="application/json" class="dlscale-about">{text}</script>'


def folds(exercise: Exercise) -> str:
    """Hints and the solution, folded, in Markdown."""
    texts = enumerate(map(escape, exercise.hints), 1)
    hints = [f"<details><summary>Hint {number}</summary><p>{text}</p></details>" for number, text in texts]
    return "\n".join([*hints, SOLUTION.format(exercise.code.strip())])


def remote(path: Path) -> list[str]:
    """What a page or its style would load from a network. Links are no such thing."""
    return REMOTE.findall(path.read_text(encoding="utf-8")) if path.suffix in (".html", ".css") else []


def fetch(package: str, inside: str, sha256: str, folder: Path) -> Path:
    """Return a file of an npm package, installed in `folder` if it is not there. Ends with a message if it cannot."""
    file, npm = folder / package / "node_modules" / inside, shutil.which("npm")
    if npm and not file.is_file():
        (folder / package).mkdir(parents=True, exist_ok=True)
        options = ["--silent", "--no-save", "--ignore-scripts", "--prefix", str(folder / package)]
        subprocess.run([npm, "install", *options, package], check=False)
    if not file.is_file():
        sys.exit(f"npm could not fetch {package}. Install Node.js and be online, or put the package's file at {file}.")
    if hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
        sys.exit(f"{file} is not that of {package}. Remove it and try again.")
    return file


if __name__ == "__main__":
    sys.exit(main())
