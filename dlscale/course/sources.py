"""What a piece of code depends on within its package: the definitions that it uses, those that they use, and so on.

Read from the files, without importing them. Comments, layout, docstrings, type hints and the names that imports are
given do not count; the contents of a TOML file that stands beside a module and is named in the code do. What another
module adds to a table from outside is not seen: tables are written down where they are defined.
"""

from __future__ import annotations

import ast
import hashlib
import symtable
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HIDDEN = {"import_module", "__import__", "eval", "exec", "globals"}  # what cannot be followed
IGNORED = {"annotation", "returns", "type_comment", "kind", "ctx"}  # fields of syntax trees

Definitions = dict[str, Any]  # what defines a name, in plain values, by "package.module.name"


def of(*functions: Callable[..., Any]) -> Definitions:
    """All that top-level functions depend on within their packages, themselves included."""
    return _follow(f"{function.__module__}.{function.__qualname__.partition('.')[0]}" for function in functions)


def of_code(code: str) -> Definitions:
    """All of this package that the code of a notebook depends on."""
    _, used = _Module("notebook", Path(), code).read(ast.parse(code).body)
    package = __name__.partition(".")[0]
    return _follow(full for full in used if full.partition(".")[0] == package)


def digest(values: Iterable[Any]) -> str:
    """A SHA-256 of plain values, as 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(map(repr, values)).encode()).hexdigest()[:16]


class _Module:
    """A module's file: what its top-level statements define, and what its imports stand for."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.folder = name, path.parent
        tree = ast.parse(text)
        body = tree.body if ast.get_docstring(tree) is None else tree.body[1:]
        self.imports = dict(_imports(tree))
        self.definitions: dict[str, list[ast.stmt]] = {}
        effects = []
        for statement in body:
            for made in (bound := set(_bound(statement))):
                self.definitions.setdefault(made, []).append(statement)
            if not bound and not isinstance(statement, ast.Import | ast.ImportFrom):
                effects.append(statement)
        for statement in effects:  # such as `f.defvjp(...)` and `TABLE["f"] = f`: part of all that they mention
            mentioned = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            for definition in mentioned & self.definitions.keys() or self.definitions:
                self.definitions[definition].append(statement)

    def read(self, statements: Iterable[ast.stmt]) -> tuple[list[Any], set[str]]:
        """Top-level statements of this module as plain values, and the full names that they use."""
        own = {name: f"{self.name}.{name}" for name in self.definitions}
        plain, used = [], set()
        for statement in statements:
            free = _globals(symtable.symtable(ast.unparse(statement), self.name, "exec"))
            names = {local: full for local, full in (own | self.imports).items() if local in free}
            plain.append(_plain(statement, names | dict(_imports(statement)), used, self.folder))
            if hidden := sorted(HIDDEN & (free | {full.rpartition(".")[2] for full in used})):
                raise ValueError(f"{self.name} calls {hidden[0]}: what that uses is not to be seen beforehand.")
        return plain, used


def _follow(names: Iterable[str]) -> Definitions:
    found: Definitions = {}
    waiting = list(names)
    while waiting:
        if (place := _place(waiting.pop())) and ".".join(place) not in found:
            module, name = place
            found[f"{module}.{name}"], used = _module(module).read(_module(module).definitions[name])
            waiting += [full for full in used if full.partition(".")[0] == module.partition(".")[0]]
    return dict(sorted(found.items()))


def _place(full: str) -> tuple[str, str] | None:
    """The module and the top-level name in it that `full` leads to, through imports; None for `__file__` and the like.

    Raises ValueError where that cannot be said.
    """
    parts = full.split(".")
    last = next(end for end in range(len(parts), 0, -1) if _file(".".join(parts[:end])))
    module, rest = ".".join(parts[:last]), parts[last:]
    if not rest:
        raise ValueError(f"The module {full} is used as a value: write {parts[-1]}.NAME for each thing it is used for.")
    if rest[0] in _module(module).definitions:
        return module, rest[0]
    if rest[0] in _module(module).imports:
        other = ".".join([_module(module).imports[rest[0]], *rest[1:]])
        return _place(other) if other.partition(".")[0] == parts[0] else None
    if rest[0].startswith("__"):
        return None
    raise ValueError(f"{module} neither defines nor imports {rest[0]}, which is used as {full}.")


def _file(module: str) -> Path | None:
    top, *rest = module.split(".")
    start = Path(find_spec(top).origin)
    inner = start.parent.joinpath(*rest)
    candidates = [inner / "__init__.py", inner.with_suffix(".py")] if rest else [start]
    return next((path for path in candidates if path.is_file()), None)


def _module(name: str) -> _Module:
    path = _file(name)
    return _parse(name, path, path.read_text(encoding="utf-8"))


_parse = lru_cache(maxsize=256)(_Module)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that imports bind, with what they stand for. Raises ValueError for a wildcard and for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.names[0].name == "*":
                raise ValueError(f"`{ast.unparse(node)}` hides what is used: import each name from its full module.")
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement defines, in its branches too."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
            yield from _bound(node)


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Names that code takes from the module around it, in its inner functions too."""
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() or table.get_type() == "module"}
    return own.union(*map(_globals, table.get_children()))


def _plain(node: Any, names: dict[str, str], used: set[str], folder: Path) -> Any:
    """A syntax tree as plain values, the same in each Python, with full names for `names`; those go to `used`."""
    if isinstance(node, list):
        return [_plain(part, names, used, folder) for part in node]
    if not isinstance(node, ast.AST):
        return node
    parts, root = [], node
    while isinstance(root, ast.Attribute):
        parts, root = [root.attr, *parts], root.value
    if isinstance(root, ast.Name) and root.id in names:
        used.add(full := ".".join([names[root.id], *parts]))
        return full
    if isinstance(node, ast.Constant) and str(node.value).endswith(".toml") and (folder / node.value).is_file():
        return tomllib.loads((folder / node.value).read_text(encoding="utf-8"))
    fields = {name: value for name, value in ast.iter_fields(node) if name not in IGNORED}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    plain = {name: _plain(value, names, used, folder) for name, value in fields.items()}
    return type(node).__name__, [(name, value) for name, value in plain.items() if value not in (None, [])]
