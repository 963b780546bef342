"""What a piece of code depends on within its package: the definitions that it uses, those that they use, and so on.

Read from the files, without importing them. Comments, layout, docstrings, type hints and the names that imports are
given do not count; the contents of a TOML file that stands beside a module and is named in the code do. What another
module adds to a table from outside is not seen: tables are written down where they are defined.
"""

import ast
import hashlib
import re
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
    return _follow(full for full in used if full.startswith("dlscale."))


def python(source: str) -> str:
    """The source of a notebook's cell as Python: magics become empty statements."""
    return re.sub(r"^( *)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


def digest(values: Iterable[Any]) -> str:
    """A SHA-256 of plain values, as 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(map(repr, values)).encode()).hexdigest()[:16]


class _Module:
    """A module's file: what its top-level statements define, and what its imports stand for."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.folder = name, path.parent
        tree = ast.parse(text)
        self.imports = dict(_imports(tree))
        self.definitions: dict[str, list[ast.stmt]] = {}
        documented = ast.get_docstring(tree) is not None
        body = [part for part in tree.body[documented:] if not isinstance(part, ast.Import | ast.ImportFrom)]
        # what binds no name, such as `f.defvjp(...)` and `TABLE["f"] = f`, comes last: part of all that it mentions
        for statement in sorted(body, key=lambda statement: not any(_bound(statement))):
            mentioned = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            for name in set(_bound(statement)) or mentioned & self.definitions.keys() or list(self.definitions):
                self.definitions.setdefault(name, []).append(statement)

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
    """What defines the full names, and all that it uses of their packages, through imports.

    Raises ValueError where that cannot be said.
    """
    found: Definitions = {}
    waiting = list(names)
    packages = {full.partition(".")[0] for full in waiting}
    while waiting:
        if (full := waiting.pop()).partition(".")[0] not in packages:
            continue
        parts = full.split(".")
        last = next(end for end in range(len(parts), 0, -1) if _file(".".join(parts[:end])))
        if last == len(parts):
            raise ValueError(
                f"The module {full} is used as a value: write {parts[-1]}.NAME for each thing it is used for."
            )
        module, name = _module(".".join(parts[:last])), parts[last]
        if name in module.definitions:
            if (place := f"{module.name}.{name}") not in found:
                found[place], used = module.read(module.definitions[name])
                waiting += used
        elif name in module.imports:
            waiting.append(".".join([module.imports[name], *parts[last + 1 :]]))
        elif not name.startswith("__"):  # as `__file__` does
            raise ValueError(f"{module.name} neither defines nor imports {name}, which is used as {full}.")
    return dict(sorted(found.items()))


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


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a top-level statement defines, in its branches too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif not isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
        for inner in ast.iter_child_nodes(node):
            yield from _bound(inner)


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
