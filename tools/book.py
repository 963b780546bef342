"""Make _book/, a web site of the executed notebooks that needs no network: `make book`.

Formulas are typeset by MathJax, one file that lies beside the pages. Nothing is loaded from elsewhere, which is checked
at the end. The controls need a kernel and are left out; their pictures stay.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
from bs4 import BeautifulSoup
from jinja2 import DictLoader
from nbconvert import HTMLExporter
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
MATHJAX_PACKAGE = "mathjax@3.2.2"
MATHJAX_FILE = "tex-svg-full.js"  # all of TeX and its fonts in one file
MATHJAX_SHA256 = "a4354ff94fd868aea0cc6eaaa79a57fda0588646fc46ee3700a349ee0a11cbe6"

TEMPLATE = """
{% extends "lab/index.html.j2" %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_js_mathjax %}
<script>
MathJax = {tex: {inlineMath: [["$", "$"], ["\\\\(", "\\\\)"]], processEscapes: true}, options: {enableMenu: false}};
</script>
<script defer src="MATHJAX_FILE"></script>
{% endblock %}
{% block html_head_css %}
<style>
main { max-width: 62rem; margin: 0 auto; }
nav { display: flex; gap: 2rem; max-width: 62rem; margin: 1rem auto; padding: 0 1rem; font-family: sans-serif; }
a:focus-visible, [tabindex]:focus-visible { outline: 3px solid #0072B2; }
</style>
{% endblock %}
{% block body_header %}
{{ super() | replace("<main>", "") }}
<nav aria-label="Course">
{% for name, text in resources.links %}<a href="{{ name }}.html">{{ text }}</a>{% endfor %}
</nav>
<main>
{% endblock %}
{% block data_png scoped %}
{% set alt = output | get_metadata("alt", "image/png") or "described in the text below" %}
{{ super() | replace("<img ", '<img alt="' ~ (alt | e) ~ '" ') }}
{% endblock %}
""".replace("MATHJAX_FILE", MATHJAX_FILE)


def main() -> int:
    target = ROOT / "_book"
    build(sorted((ROOT / "notebooks").glob("*.ipynb")), target, fetch_mathjax(ROOT / "build"))
    if found := [f"{path.name}: {source}" for path in target.glob("*.html") for source in remote_sources(path)]:
        print("These pages would need a network:", *found, sep="\n  ", file=sys.stderr)
        return 1
    print(f"Made {target / 'index.html'}")
    return 0


def build(notebooks: list[Path], target: Path, mathjax: Path) -> None:
    """Write a page for each notebook, an index of them, and the file `mathjax` into a new folder `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(mathjax, target / MATHJAX_FILE)
    nodes = {path.stem: nbformat.read(path, as_version=4) for path in notebooks}
    names = list(nodes)
    for number, (name, node) in enumerate(nodes.items()):
        links = [(names[number - 1], "← " + title(nodes[names[number - 1]]))] if number else []
        links.append(("index", "Contents"))
        links += [(after, title(nodes[after]) + " →") for after in names[number + 1 : number + 2]]
        _write(node, target / f"{name}.html", links)
    rows = [
        f"{number}. [{title(node)}]({name}.ipynb)  \n{_question(node)}"
        for number, (name, node) in enumerate(nodes.items(), 1)
    ]
    contents = nbformat.v4.new_markdown_cell("# Contents\n\n" + "\n".join(rows))
    _write(nbformat.v4.new_notebook(cells=[contents]), target / "index.html", [])


def _write(node: NotebookNode, path: Path, links: list[tuple[str, str]]) -> None:
    node.metadata["title"] = title(node)
    exporter = HTMLExporter(template_file="page.html.j2", extra_loaders=[DictLoader({"page.html.j2": TEMPLATE})])
    html, _ = exporter.from_notebook_node(node, resources={"links": links})
    html = re.sub(r'(href="[\w.-]+)\.ipynb([#"])', r"\1.html\2", html)
    path.write_text(html, encoding="utf-8")


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
