"""Make _book/, a web site of the notebooks that needs neither a kernel nor a network: `make book`.

Each notebook is run, and its explorers' frames are drawn, so that they move in the page (`frames.py`); what was drawn
is kept in build/frames until the notebook or its library changes. `--stored` runs nothing: the pages show what the
notebooks store, explorers as pictures. Formulas are typeset by MathJax, one file that lies beside the pages. Nothing
is loaded from elsewhere, which is checked at the end; links to Binder and Colab are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import frames
import nbformat
from bs4 import BeautifulSoup
from jinja2 import DictLoader
from nbconvert import HTMLExporter
from nbformat import NotebookNode

import notebooks as stored
from dlscale.course import sources
from dlscale.course.exercises import Exercise

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "dlscale/dlscale"
MATHJAX_PACKAGE = "mathjax@3.2.2"
MATHJAX_FILE = "tex-svg-full.js"  # all of TeX and its fonts in one file
MATHJAX_SHA256 = "a4354ff94fd868aea0cc6eaaa79a57fda0588646fc46ee3700a349ee0a11cbe6"

TEMPLATE = """
{% extends "lab/index.html.j2" %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_js_mathjax %}
<script>
MathJax = {tex: {inlineMath: [["$", "$"], ["\\(", "\\)"]], processEscapes: true}, options: {enableMenu: false}};
</script>
<script defer src="MATHJAX_FILE"></script>
{% endblock %}
{% block html_head_css %}<style>{{ resources.style }}</style>{% endblock %}
{% block body_header %}
{{ super() | replace("<main>", "") }}
<header class="bar">
<nav aria-label="Course"><details><summary>Contents</summary><ol start="0">
{% for page, text in resources.pages %}<li><a href="{{ page }}.html">{{ text | e }}</a></li>{% endfor %}
</ol></details></nav>
<label>Search <input id="search" type="search" autocomplete="off" aria-controls="found"></label>
<div id="found" role="region" aria-label="Found" hidden></div>
<nav class="buttons" aria-label="This notebook">
{% for address, text in resources.buttons %}<a href="{{ address }}">{{ text }}</a>{% endfor %}
</nav>
</header>
<main>
{% endblock %}
{% block body_footer %}
<nav class="foot" aria-label="Neighbours">
{% for page, text in resources.links %}<a href="{{ page }}.html">{{ text | e }}</a>{% endfor %}
</nav>
<script type="module">{{ resources.script }}</script>
{{ super() }}
{% endblock %}
{% block input_group %}
{% set hidden = cell.metadata.get("jupyter", {}).get("source_hidden") %}
{% set folded = hidden or "hide-input" in cell.metadata.get("tags", []) %}
{% if folded %}<details class="folded"><summary>Show the code</summary>{% endif %}
{{ super() }}
{% if folded %}</details>{% endif %}
{% endblock %}
{% block data_png scoped %}
{% set alt = output | get_metadata("alt", "image/png") or "described in the text below" %}
{{ super() | replace("<img ", '<img alt="' ~ (alt | e) ~ '" ') }}
{% if "explorer" in output.metadata %}
<script type="application/json" class="explorer">{{ output.metadata.explorer }}</script>
{% endif %}
{% endblock %}
""".replace("MATHJAX_FILE", MATHJAX_FILE)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--stored", action="store_true", help="run nothing; show stored outputs")
    options = parser.parse_args(arguments)
    paths = options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    target = ROOT / "_book"
    build(paths, target, fetch_mathjax(ROOT / "build"), None if options.stored else ROOT / "build" / "frames")
    if found := [f"{path.name}: {source}" for path in target.glob("*.html") for source in remote_sources(path)]:
        print("These pages would need a network:", *found, sep="\n  ", file=sys.stderr)
        return 1
    print(f"Made {target / 'index.html'}")
    return 0


def build(paths: list[Path], target: Path, mathjax: Path, drawn: Path | None = None) -> None:
    """Write a page for each notebook, an index of them, what they search in, and MathJax into a new folder `target`.

    With a folder `drawn`, the notebooks are run, or taken from there if they were run before, and their explorers move.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(mathjax, target / MATHJAX_FILE)
    nodes = {}
    for path in paths:
        shutil.copy(path, target / path.name)
        nodes[path.stem], explorers = run(path, drawn) if drawn else (nbformat.read(path, as_version=4), [])
        for number, explorer in enumerate(explorers):
            pack = f"{path.stem}-{number:02}"
            (target / f"{pack}.js").write_text(frames.pack(pack, explorer), encoding="utf-8")
    names = list(nodes)
    pages = [("index", "Contents"), *((name, title(node)) for name, node in nodes.items())]
    for number, (name, node) in enumerate(nodes.items()):
        links = [(names[number - 1], "← " + title(nodes[names[number - 1]]))] if number else []
        links += [(after, title(nodes[after]) + " →") for after in names[number + 1 : number + 2]]
        add_exercises(node, name)
        _write(node, target / f"{name}.html", {"links": links, "pages": pages[1:], "buttons": buttons(name)})
    rows = [
        f"{number}. [{title(node)}]({name}.ipynb)  \n{_question(node)}"
        for number, (name, node) in enumerate(nodes.items())
    ]
    contents = nbformat.v4.new_markdown_cell("# Contents\n\n" + "\n".join(rows))
    index = nbformat.v4.new_notebook(cells=[contents])
    _write(index, target / "index.html", {"links": [], "pages": pages[1:], "buttons": buttons(names[0])[:2]})
    sections = [section for name in names for section in _sections(target / f"{name}.html")]
    text = json.dumps(sections, ensure_ascii=False, separators=(",", ":"))
    (target / "search.js").write_text(f"dlscaleSearch({text});\n", encoding="utf-8")


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
            node, explorers = frames.run(path, Path(folder))
        for output in (output for cell in node.cells for output in cell.get("outputs", [])):
            if (number := output.get("metadata", {}).get("explorer")) is not None:
                about = {name: explorers[number][name] for name in ("controls", "alone")}
                about |= {"name": f"{path.stem}-{number:02}", "alt": output.data["text/plain"]}
                output.metadata["explorer"] = json.dumps(about).replace("<", "\\u003c")
        kept.write_text(json.dumps([node, explorers]), encoding="utf-8")
    node, explorers = json.loads(kept.read_text(encoding="utf-8"))
    return nbformat.from_dict(node), explorers


def buttons(name: str) -> list[tuple[str, str]]:
    """Addresses and labels of the places where a notebook can be run, and of its file."""
    return [
        (f"https://mybinder.org/v2/gh/{REPOSITORY}/HEAD?urlpath=lab/tree/notebooks/{name}.ipynb", "Run on Binder"),
        (f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{name}.ipynb", "Run on Colab"),
        (f"{name}.ipynb", "Download"),
    ]


def add_exercises(node: NotebookNode, name: str) -> None:
    """Fold hints and the solution under every cell for an answer."""
    tagged = [(cell, tag) for cell in node.cells for tag in cell.metadata.get("tags", []) if tag.startswith("answer-")]
    if not tagged:
        return
    known = vars(import_module(f"dlscale.{name.partition('_')[2]}.exercises")).values()
    exercises = {f"answer-{exercise.id}": exercise for exercise in known if isinstance(exercise, Exercise)}
    for cell, tag in tagged:
        exercise = exercises[tag]
        folds = [(f"Hint {i}", f"<p>{escape(hint)}</p>") for i, hint in enumerate(exercise.hints, 1)]
        folds.append(("Solution", f'<pre class="mathjax_ignore">{escape(exercise.code.strip())}</pre>'))
        html = "".join(f"<details><summary>{text}</summary>{inside}</details>" for text, inside in folds)
        cell.outputs.append(nbformat.v4.new_output("display_data", {"text/html": f'<div class="help">{html}</div>'}))


def _write(node: NotebookNode, path: Path, resources: dict[str, Any]) -> None:
    node.metadata["title"] = title(node)
    page = ROOT / "dlscale" / "page"
    files = [page / "explorer.css", ROOT / "tools" / "book.css", page / "explorer.js", ROOT / "tools" / "book.js"]
    styles, more, explorer, book = (file.read_text(encoding="utf-8") for file in files)
    resources |= {"style": styles + more, "script": explorer + book}
    exporter = HTMLExporter(template_file="page.html.j2", extra_loaders=[DictLoader({"page.html.j2": TEMPLATE})])
    html, _ = exporter.from_notebook_node(node, resources=resources)
    notebook = r'(href="(?!https:)[\w.-]+)\.ipynb([#"])'
    head, download, rest = html.partition(f'href="{path.stem}.ipynb">Download')  # the file itself
    html = re.sub(notebook, r"\1.html\2", head) + download + re.sub(notebook, r"\1.html\2", rest)
    path.write_text(html, encoding="utf-8")


def _sections(path: Path) -> list[dict[str, str]]:
    """The page's headings with their ids and the words below them, for the search."""
    soup = BeautifulSoup(path.read_text(encoding="utf-8"), features="html.parser")
    found: list[dict[str, str]] = []
    for tag in soup.main.find_all(["h1", "h2", "h3", "h4", "p", "li", "pre", "td"]):
        text = tag.get_text(" ", strip=True).removesuffix("¶").strip()
        if tag.name.startswith("h"):
            found.append({"page": path.stem, "id": tag.get("id", ""), "heading": text, "text": ""})
        elif found and not tag.find_parent(["li", "td", "p"]):
            found[-1]["text"] = f"{found[-1]['text']} {text}".strip()
    return [section | {"title": soup.title.get_text()} for section in found]


def title(node: NotebookNode) -> str:
    """The text of the notebook's first heading."""
    return node.cells[0].source.splitlines()[0].lstrip("# ")


def _question(node: NotebookNode) -> str:
    return next((line for line in node.cells[0].source.splitlines() if "?" in line), "")


def remote_sources(path: Path) -> list[str]:
    """Return what the page would load from a network: sources of scripts, styles and media. Links are no such thing."""
    soup = BeautifulSoup(path.read_text(encoding="utf-8"), features="html.parser")
    sources = [tag[name] for name in ("src", "srcset", "data", "poster") for tag in soup.select(f"[{name}]")]
    sources += [link["href"] for link in soup.select("link[href]")]
    for style in [*soup.select("style"), *soup.select("[style]")]:
        css = style.get("style") or style.get_text()
        sources += re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s]+)""", css)
    for script in soup.select("script:not([src])"):
        sources += re.findall(r"""(?:import\(|from|src\s*=)\s*["']([^"']+)""", script.get_text())
    return [source for source in sources if re.match(r"(https?:)?//", source)]


def fetch_mathjax(folder: Path) -> Path:
    """Return MathJax's file in `folder`, fetched with npm if it is not there yet. Ends with a message if it cannot."""
    file = folder / MATHJAX_FILE
    if not file.is_file():
        npm = shutil.which("npm")
        if npm is None:
            sys.exit(f"npm is missing. Install Node.js, or put {MATHJAX_FILE} of {MATHJAX_PACKAGE} into {folder}.")
        folder.mkdir(exist_ok=True)
        command = [
            npm,
            "install",
            "--silent",
            "--no-save",
            "--ignore-scripts",
            "--prefix",
            str(folder),
            MATHJAX_PACKAGE,
        ]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"npm could not fetch {MATHJAX_PACKAGE}; is there a network?")
        shutil.copy(folder / "node_modules" / "mathjax" / "es5" / MATHJAX_FILE, file)
    if hashlib.sha256(file.read_bytes()).hexdigest() != MATHJAX_SHA256:
        sys.exit(f"{file} is not that of {MATHJAX_PACKAGE}. Remove it and try again.")
    return file


if __name__ == "__main__":
    sys.exit(main())
