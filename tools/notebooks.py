"""Run the notebooks that changed, or whose library changed, and store their outputs: `make notebooks`.

A notebook remembers, in its metadata, a hash of its own sources and one of all that it uses of `dlscale`, definition by
definition, with its claims, records and data. Where both still fit, the file is left untouched. What differs from run
to run (times, widgets, the machine) is not stored. The source of a cell that only draws or asks is folded.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from dlscale.course import claims, contents, sources

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
CELL_SECONDS = 300
WIDGET = "application/vnd.jupyter.widget-view+json"
FOLDED = "hide-input"  # the tag; JupyterLab and Colab have words of their own for it
SHOWING = {"figures", "widgets"}  # modules whose functions draw and ask
TAUGHT = {"jax", "jnp", "lax", "optax", "train"}  # modules whose calls are what a notebook teaches
PACKAGES = ("jax", "numpy", "optax")  # whose versions are told with the claims
VARYING_CELL_METADATA = ("execution", "collapsed", "scrolled", "trusted", "ExecuteTime")


class Failed(Exception):
    """A notebook that did not run cleanly; the message says where and why."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/, further ones too")
    parser.add_argument("--all", action="store_true", help="run also what has not changed")
    parser.add_argument("--check", action="store_true", help="run nothing; exit with 1 if a notebook is stale")
    options = parser.parse_args(arguments)
    code = 0
    for path in options.notebooks or contents.paths(FOLDER):
        why = "asked for" if options.all else stale(path)
        if not why:
            print(f"{path.name}: up to date")
        elif options.check:
            print(f"{path.name}: {why} since its outputs were stored. Run `make notebooks`.")
            code = 1
        else:
            print(f"{path.name}: {why}, running …", flush=True)
            start = time.perf_counter()
            try:
                store(path)
            except Failed as error:
                print(f"{path.name}: not stored. {error}", file=sys.stderr)
                return 1
            print(f"{path.name}: stored after {time.perf_counter() - start:.0f} s")
    return code


def subject(name: str) -> str:
    """The name of the subject's lesson, also of its further notebook."""
    return name.removesuffix("_further")


def room(name: str) -> str:
    """The package of a notebook: its subject without the number."""
    return subject(name).partition("_")[2]


def stale(path: Path) -> str:
    """Say what changed since the outputs of the notebook were stored; "" if nothing did."""
    notebook = nbformat.read(path, as_version=4)
    stored = notebook.metadata.get("dlscale", {})
    changed = [name for name, now in hashes(notebook, path.stem).items() if stored.get(name) != now]
    return f"{' and '.join(changed)} changed" if changed else ""


def hashes(notebook: NotebookNode, name: str) -> dict[str, str]:
    """Return SHA-256 sums of the notebook's sources and of the library behind it."""
    cells = [(cell.cell_type, cell.id, cell.metadata.get("tags", []), cell.source) for cell in notebook.cells]
    return {"sources": _sha256(map(repr, cells)), "library": _sha256(_library(notebook, name))}


def _sha256(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _library(notebook: NotebookNode, name: str) -> Iterable[str]:
    """Yield what the notebook's results hang on: definitions in the library, claims, records, data."""
    code = _code(notebook)
    yield repr(sources.of_code(code))
    claims = ROOT / "dlscale" / room(name) / "claims.toml"
    rules = tomllib.loads(claims.read_text(encoding="utf-8")) if claims.is_file() else {}
    yield repr({key: {**rule, "telling": None, "history": None} for key, rule in rules.items()})  # on no card
    records = sorted((ROOT / "data" / "results").glob("*-*.json"))  # each knows the code that made it
    yield from (path.read_text(encoding="utf-8") for path in records if path.stem in code)
    yield from (repr(entry) for key, entry in kept_claims().items() if key in code and entry["notebook"] != name)
    yield (ROOT / "data" / "SHA256SUMS").read_text(encoding="utf-8")


def _code(notebook: NotebookNode) -> str:
    return sources.python("\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code"))


# Folding


def shows(part: ast.AST) -> bool:
    """Whether code draws, or asks the reader."""
    found = (_path(node.func) for node in ast.walk(part) if isinstance(node, ast.Call))
    return any(path[0] in SHOWING and len(path) > 1 for path in found)


def teaches(cell: ast.Module, captions: Iterable[str]) -> bool:
    """Whether a cell trains or computes with JAX, or defines a function that neither draws nor captions."""
    calls = {_path(node.func)[0] for node in ast.walk(cell) if isinstance(node, ast.Call)}
    defined = [part for part in cell.body if isinstance(part, ast.FunctionDef | ast.ClassDef) and not shows(part)]
    return bool(calls & TAUGHT) or any(part.name not in captions for part in defined)


def plumbing(notebook: NotebookNode) -> dict[str, bool]:
    """For each code cell that draws, captions or asks, by id: whether it does nothing else. "# Plumbing" folds any.

    The first cell, which imports and sets up, is folded, too. A line that calls a room's `drawing` is not: how it draws
    is not seen anyway.
    """
    cells = {cell.id: syntax(cell) for cell in notebook.cells if cell.cell_type == "code"}
    explorers = [node for cell in cells.values() for node in ast.walk(cell) if isinstance(node, ast.Call)]
    given = [word.value for call in explorers if _path(call.func)[-1] == "explore" for word in call.keywords]
    captions = {value.id for value in given if isinstance(value, ast.Name)}
    shown = {name: cell for name, cell in cells.items() if shows(cell) or captions & _defined(cell)}
    marked = {cell.id: True for cell in notebook.cells if cell.source.startswith("# Plumbing\n")}
    proofs = {cell.id: True for cell in notebook.cells if cell.source.endswith("course.verdicts()")}  # for nbval alone
    first = dict.fromkeys([*cells][:1], True)
    return {name: not teaches(cell, captions) for name, cell in shown.items()} | marked | proofs | first


def _defined(cell: ast.Module) -> set[str]:
    return {part.name for part in cell.body if isinstance(part, ast.FunctionDef | ast.ClassDef)}


def _path(expression: ast.expr) -> list[str]:
    """The names of a.b.c, and of what stands before a call or an index in it."""
    match expression:
        case ast.Attribute(value, name):
            return [*_path(value), name]
        case ast.Call(inner) | ast.Subscript(inner):
            return _path(inner)
    return [getattr(expression, "id", "")]


def syntax(cell: NotebookNode) -> ast.Module:
    """The cell's syntax tree; lines with magics count as empty statements."""
    return ast.parse(sources.python(cell.source))


def fold(notebook: NotebookNode) -> None:
    """Hide, in place, the sources of the cells that only draw or ask, or are tagged so: one click shows them."""
    only = plumbing(notebook)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if only.get(cell.id) or FOLDED in tags:
            cell.metadata["tags"] = sorted({*tags, FOLDED})
            cell.metadata |= {"jupyter": {"source_hidden": True}, "cellView": "form"}


# Running


def store(path: Path) -> None:
    """Run the notebook in its folder and write it with its outputs. Raises Failed, with the file as it was."""
    notebook = nbformat.read(path, as_version=4)
    fold(notebook)
    before = hashes(notebook, path.stem)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    try:
        execute(notebook, path.parent, CELL_SECONDS)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise Failed(str(error)) from None
    complaints = [
        f"Cell {cell.id} wrote to stderr:\n{output.text}"
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    ]
    if complaints:
        raise Failed("\n".join(complaints))
    clean(notebook)
    notebook.metadata["dlscale"] = before
    nbformat.validate(notebook)
    content = nbformat.writes(notebook)
    path.write_text(content if content.endswith("\n") else content + "\n", encoding="utf-8", newline="\n")
    keep_claims(notebook, path.stem)


def execute(notebook: NotebookNode, folder: Path, seconds: int) -> None:
    """Run the notebook, in place, in `folder`, with `seconds` for each cell."""
    resources = {"metadata": {"path": os.fspath(folder.resolve())}}
    options = {"timeout": seconds, "kernel_name": "python3", "coalesce_streams": True, "resources": resources}
    environment = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    client = NotebookClient(notebook, store_widget_state=False, **options)
    asyncio.run(client.async_execute(env=environment | {"JAX_PLATFORMS": "cpu"}))  # in any thread


def clean(notebook: NotebookNode) -> None:
    """Remove, in place, what varies between runs and machines, and widgets, which are dead without a kernel."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        for key in VARYING_CELL_METADATA:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not dead(output)]
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)


def dead(output: NotebookNode) -> bool:
    """Whether an output is a widget and nothing else: a question has its text beside it."""
    data = output.get("data", {})
    return WIDGET in data and "text/markdown" not in data


# Claims


def keep_claims(notebook: NotebookNode, name: str) -> None:
    """Renew in `claims.json` what this notebook decided; a claim of it that is gone goes there, too."""
    outputs = (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    made = {data[claims.CLAIM_TYPE]["id"]: data[claims.CLAIM_TYPE] for data in outputs if claims.CLAIM_TYPE in data}
    new = {key: claim_entry(name, card) for key, card in made.items() if card["decided"]}
    old = {key: entry for key, entry in kept_claims().items() if entry["notebook"] != name and key not in new}
    ordered = sorted((old | new).items(), key=lambda pair: pair[1]["notebook"])
    lines = (f"{json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in ordered)
    after = "{\n" + ",\n".join(lines) + "\n}\n"  # a claim a line, so that a change shows in a diff as what it is
    path = ROOT / "data" / "results" / claims.FILE
    if after != path.read_text(encoding="utf-8"):
        path.with_suffix(".new").write_text(after, encoding="utf-8", newline="\n")
        path.with_suffix(".new").replace(path)


def kept_claims() -> dict[str, dict[str, Any]]:
    """The entries of `claims.json` by id."""
    return json.loads((ROOT / "data" / "results" / claims.FILE).read_text(encoding="utf-8"))


def claim_entry(notebook: str, card: dict[str, Any]) -> dict[str, Any]:
    """What `claims.json` says of a claim: its texts and its rule, and what its card shows, to six digits."""
    rule = claims.rules()[card["id"]]
    texts = {
        name: rule[name] for name in ("statement", "source", "source_figure", "measure", "rule", "threshold", "unit")
    }
    numbers = {name: float(f"{card[name]:.6g}") for name in ("mean", "low", "high")}
    return {
        "notebook": notebook,
        "of": rule.get("of", "lecture"),
        **texts,
        "seeds": card["seeds"],
        "samples_are": claims.counted(rule),
        "chance": rule.get("chance", True),
        **numbers,
        "verdict": card["verdict"],
        "status": card["status"],
        "samples": [float(f"{sample:.6g}") for sample in card["samples"]],
        "versions": {"python": python_version()} | {package: metadata.version(package) for package in PACKAGES},
    }


if __name__ == "__main__":
    sys.exit(main())
