"""Applies the map of renames (``docs/reference/renames.csv``) to Python files, documents and configuration.

    python docs/tools/rename.py [--dry-run] [--where PREFIX ...] [MAP]

Names are resolved as Python resolves them: imports, scopes and classes by syntax tree, attributes of other objects by
the types that mypy infers. Where mypy infers no type, an attribute is renamed if only one family of classes has it.
Rows whose name no longer exists are skipped, so a second run changes nothing. A row whose new name is taken where it
would stand is reported as a collision, and none of its uses change.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "relax_hetero"
FOLDERS = ("python", "tests/python", "apps", "docs")
TEXTS = ("*.md", "*.toml", "*.yml", "*.yaml", "Makefile", "*.cff", "*.sh", "*.html", "*.js")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# What mypy's nodes refer to beside their children: definitions elsewhere.
NOT_CHILDREN = {"node", "info", "type", "original_def", "analyzed", "def_or_infer_vars", "expanded", "names", "imports"}
NOT_RENAMED = ("docs/reference/renames.csv", "CHANGELOG.md", "docs/tools/rename.py", "tests/python/test_rename.py")


@dataclass(frozen=True)
class Row:
    kind: str  # module, class, function, method, attribute, constant, parameter, variable, option, word
    where: str  # dotted scope below the package: a module, a class or a function
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.kind} {self.where}.{self.old} -> {self.new}"


@dataclass
class File:
    """A Python file: its module, tree, scopes and bindings."""

    path: Path
    module: str
    text: bytes
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)  # names that imports bind anywhere in the file -> full names
    importers: dict[str, set[ast.AST]] = field(default_factory=lambda: defaultdict(set))  # scopes with the import
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    types: dict[tuple[int, int, int, int], set[str]] = field(
        default_factory=dict
    )  # positions -> classes of expressions

    @cached_property
    def starts(self) -> list[int]:
        """Offsets of the lines."""
        return [0, *(match.end() for match in re.finditer(rb"\n", self.text))]


def module_of(path: Path, root: Path) -> str:
    for folder in FOLDERS:
        if path.is_relative_to(root / folder):
            parts = path.relative_to(root / folder).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise ValueError(path)


def read_files(root: Path) -> dict[Path, File]:
    files = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py*")):
            if path.suffix not in (".py", ".pyi"):
                continue
            text = path.read_bytes()
            file = File(path, module_of(path, root), text, ast.parse(text))
            for node in ast.walk(file.tree):
                for child in ast.iter_child_nodes(node):
                    file.parents[child] = node
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    for alias in node.names:
                        name = alias.asname or alias.name
                        if isinstance(node, ast.ImportFrom):
                            file.imports[name] = f"{source_of(node, file)}.{alias.name}"
                        else:
                            name = name if alias.asname else name.split(".")[0]
                            file.imports[name] = alias.name if alias.asname else name
                        file.importers[name].add(scope_of(node, file))
            files[path] = file
    return files


def scope_of(node: ast.AST, file: File) -> ast.AST:
    """The innermost function, class or module around a statement."""
    while not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
        node = file.parents[node]
    return node


def source_of(node: ast.ImportFrom, file: File) -> str:
    """The module that a statement imports from."""
    if not node.level:
        return node.module or ""
    parts = file.module.split(".")
    depth = len(parts) - node.level + (file.path.stem == "__init__")
    return ".".join(parts[:depth] + ([node.module] if node.module else []))


def bound_names(scope: ast.AST) -> set[str]:
    """Names that a function, class, comprehension or module binds itself, without nested scopes."""
    names: set[str] = set()
    declared: set[str] = set()  # global or nonlocal
    if isinstance(scope, FUNCTIONS):
        names |= {arg.arg for arg in arguments_of(scope)}

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(child.name)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, (ast.Store, ast.Del)):
                names.add(child.id)
            elif isinstance(child, ast.ExceptHandler) and child.name:
                names.add(child.name)
            elif isinstance(child, (ast.MatchAs, ast.MatchStar)) and child.name:
                names.add(child.name)
            elif isinstance(child, (ast.Global, ast.Nonlocal)):
                declared.update(child.names)
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                names.update(alias.asname or alias.name.split(".")[0] for alias in child.names)
            if isinstance(child, COMPREHENSIONS):
                names.update(n.target.id for n in ast.walk(child) if isinstance(n, ast.NamedExpr))
            elif not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                visit(child)

    visit(scope)
    return names - declared


def arguments_of(node: ast.AST) -> list[ast.arg]:
    args = node.args  # type: ignore[attr-defined]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *(a for a in (args.vararg, args.kwarg) if a)]


@dataclass
class ClassInfo:
    name: str
    bases: list[str]
    members: set[str]
    node: ast.ClassDef


class Names:
    """Full names of what is defined, and of what expressions mean."""

    def __init__(self, files: dict[Path, File]) -> None:
        self.files = files
        self.modules = {file.module: file for file in files.values() if file.path.suffix == ".py"}
        for file in files.values():
            if file.path.suffix == ".pyi":  # what a package exports, by a stub that names its imports
                file.imports = {**self.modules[file.module].imports, **file.imports}
                self.modules[file.module].imports = file.imports
        self.packages = {name.rpartition(".")[0] for name in self.modules}
        self.classes: dict[str, ClassInfo] = {}
        self.functions: dict[str, ast.AST] = {}
        self.tops: dict[str, set[str]] = {}  # what a module binds at its top
        self._bound: dict[ast.AST, set[str]] = {}
        for file in files.values():
            self.tops.setdefault(file.module, set()).update(bound_names(file.tree))
        for file in files.values():
            if file.path.suffix == ".py":
                self._define(file, file.tree, file.module)
        self.related: dict[str, set[str]] = {}
        self.subclasses = defaultdict(set)
        for name in self.classes:
            for base in self.mro(name)[1:]:
                self.subclasses[base].add(name)

    def bound(self, scope: ast.AST) -> set[str]:
        if scope not in self._bound:
            self._bound[scope] = bound_names(scope)
        return self._bound[scope]

    def _define(self, file: File, scope: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                name = f"{prefix}.{node.name}"
                self.classes[name] = ClassInfo(name, [], members_of(node), node)
                self.classes[name].bases = [full for b in node.bases if (full := self.meaning(bare(b), file))]
                self._define(file, node, name)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions[f"{prefix}.{node.name}"] = node
                self._define(file, node, f"{prefix}.{node.name}")
            elif not isinstance(node, ast.expr):
                self._define(file, node, prefix)

    def canonical(self, name: str) -> str:
        """The name where it is defined, when a module imports it from another."""
        for _ in range(10):
            module, _, last = name.rpartition(".")
            if name in self.modules or module not in self.modules or last not in self.modules[module].imports:
                return name
            target = self.modules[module].imports[last]
            if target == name:
                return name
            name = target
        return name

    def mro(self, name: str) -> list[str]:
        found, todo = [], [name]
        while todo:
            current = self.canonical(todo.pop(0))
            if current in self.classes and current not in found:
                found.append(current)
                todo += self.classes[current].bases
        return found

    def member(self, owner: str, name: str) -> str | None:
        return next((f"{c}.{name}" for c in self.mro(owner) if name in self.classes[c].members), None)

    def family(self, owner: str, name: str) -> set[str]:
        """The classes related to one that define a member of this name too: overrides change together."""
        roots = {c for c in self.mro(owner) if name in self.classes[c].members} | {owner}
        return {c for root in roots for c in {root, *self.subclasses[root]} if name in self.classes[c].members}

    def scopes(self, node: ast.AST, file: File) -> Iterator[ast.AST]:
        """The scopes that a name at a node is looked up in, from the inside."""
        child, is_first = node, True
        while (parent := file.parents.get(child)) is not None:
            if isinstance(parent, FUNCTIONS) and is_inside(child, parent):
                yield parent
                is_first = False
            elif isinstance(parent, COMPREHENSIONS):
                yield parent
            elif isinstance(parent, ast.ClassDef) and is_first and child in parent.body:
                yield parent
                is_first = False
            child = parent
        yield file.tree

    def path(self, scope: ast.AST, file: File) -> str:
        parts: list[str] = []
        node: ast.AST | None = scope
        while node is not None:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                parts.append(node.name)
            elif isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
                parts.append(f"<{node.lineno}:{node.col_offset}>")
            node = file.parents.get(node)
        return ".".join([file.module, *reversed(parts)])

    def name(self, identifier: str, node: ast.AST, file: File) -> str:
        """The full name of what an identifier means at a node."""
        for scope in self.scopes(node, file):
            if identifier in self.bound(scope):
                local = f"{self.path(scope, file)}.{identifier}"
                if identifier in file.imports and scope in file.importers[identifier]:
                    return self.canonical(file.imports[identifier])
                return local
        return identifier

    def meaning(self, node: ast.AST | None, file: File) -> str | None:
        """The full name of a module, class, function, constant or local that an expression names."""
        if isinstance(node, ast.Name):
            return self.name(node.id, node, file)
        if isinstance(node, ast.Attribute):
            base = self.meaning(node.value, file)
            if base is not None and base in self.modules:
                return self.canonical(f"{base}.{node.attr}")
            if base is not None and (base in self.classes or base in self.packages):
                return self.member(base, node.attr) or f"{base}.{node.attr}"
        return None

    def owners(self, node: ast.AST, file: File) -> set[str]:
        """The classes of an expression's value."""
        if isinstance(node, ast.Name) and node.id in ("self", "cls"):
            enclosing = enclosing_class(node, file)
            if enclosing is not None:
                return {self.path(enclosing, file)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            enclosing = enclosing_class(node, file)
            if enclosing is not None:
                return set(self.classes[self.path(enclosing, file)].bases)
        return file.types.get(position(node), set())

    def callees(self, node: ast.Call, file: File) -> set[str]:
        """Functions and classes that a call may call."""
        full = self.meaning(node.func, file)
        if full is not None and (full in self.classes or full in self.functions):
            return {full}
        if isinstance(node.func, ast.Name) and node.func.id == "cls":
            return self.owners(node.func, file)
        if isinstance(node.func, ast.Attribute):
            owners = self.owners(node.func.value, file)
            return {m for owner in owners if (m := self.member(owner, node.func.attr))}
        return set()


def bare(node: ast.AST) -> ast.AST:
    return node.value if isinstance(node, ast.Subscript) else node


def is_inside(child: ast.AST, function: ast.AST) -> bool:
    """Whether a child of a function is in its scope: the body and the parameters' names, no defaults or decorators."""
    body = function.body  # type: ignore[attr-defined]
    return child is body or (isinstance(body, list) and child in body)


def members_of(node: ast.ClassDef) -> set[str]:
    members = bound_names(node)
    for function in node.body:
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.args.args:
            own = function.args.args[0].arg
            for child in ast.walk(function):
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                    if isinstance(child.value, ast.Name) and child.value.id == own:
                        members.add(child.attr)
    return members


def enclosing_class(node: ast.AST, file: File) -> ast.ClassDef | None:
    current: ast.AST | None = node
    while current is not None and not isinstance(current, ast.ClassDef):
        current = file.parents.get(current)
    return current


def position(node: ast.AST) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def infer_types(root: Path, names: Names, wanted: set[str]) -> None:
    """Notes the classes of what stands before each ``.name`` of the wanted names, as mypy infers them."""
    from mypy import build
    from mypy.find_sources import create_source_list
    from mypy.modulefinder import BuildSource
    from mypy.nodes import Argument, Block, Expression, Statement
    from mypy.options import Options
    from mypy.patterns import Pattern
    from mypy.types import AnyType, CallableType, Instance, TupleType, TypeType, TypeVarType, UnionType, get_proper_type

    def classes(kind: object) -> set[str]:
        kind = get_proper_type(kind)  # type: ignore[call-overload]
        if isinstance(kind, Instance):
            return {kind.type.fullname}
        if isinstance(kind, UnionType):
            return {name for item in kind.items for name in classes(item)}
        if isinstance(kind, TupleType):
            return {kind.partial_fallback.type.fullname}
        if isinstance(kind, TypeType):
            return classes(kind.item)
        if isinstance(kind, TypeVarType):
            return classes(kind.upper_bound)
        if isinstance(kind, CallableType) and kind.is_type_obj():
            return classes(kind.ret_type)
        return {"?"} if isinstance(kind, AnyType) else set()

    options = Options()
    options.incremental = False
    options.export_types = options.preserve_asts = True
    options.check_untyped_defs = True
    options.explicit_package_bases = options.namespace_packages = True
    options.ignore_missing_imports = True
    options.follow_imports = "silent"
    options.mypy_path = [str(root / folder) for folder in FOLDERS]
    options.cache_dir = "/dev/null"
    outside = ("tvm", "tvm_ffi", "onnx", "torch", "ray", "onnxruntime", "tokenizers", "transformers", "cupy", "pandas")
    for package in outside:
        options.per_module_options[f"{package}.*"] = {"follow_imports": "skip", "ignore_missing_imports": True}
    wide = re.compile(rb"\.(?:%s)\b|\b(?:%s)\s*=" % (("|".join(sorted(wanted)).encode(),) * 2))
    paths = [str(path) for path, file in names.files.items() if path.suffix == ".py" and wide.search(file.text)]
    sources: list[BuildSource] = create_source_list(paths, options)
    result = build.build(sources, options)
    for source in sources:
        tree, file = result.files.get(source.module), names.files.get(Path(source.path or "").resolve())
        if tree is None or file is None:
            continue
        todo: list[object] = [tree]
        seen = set()
        while todo:
            node = todo.pop()
            if isinstance(node, (list, tuple)):
                todo += node
            elif isinstance(node, (Statement, Expression, Argument, Block, Pattern)) or node is tree:
                if id(node) in seen:
                    continue
                seen.add(id(node))
                if node in result.types:
                    place = (node.line, node.column, node.end_line or 0, node.end_column or 0)
                    file.types.setdefault(place, set()).update(classes(result.types[node]))
                attributes = {name for kind in type(node).__mro__ for name in getattr(kind, "__mypyc_attrs__", ())}
                todo += [getattr(node, name, None) for name in attributes - NOT_CHILDREN]


class Renamer:
    """Collects the edits of all rows, then writes them."""

    def __init__(self, root: Path, rows: list[Row]) -> None:
        self.root = root.resolve()
        self.names = Names(read_files(self.root))
        self.rows: dict[Row, dict[str, str]] = {}  # rows -> full names, and the new ones
        self.messages: list[str] = []
        self.renamed: dict[str, tuple[str, Row]] = {}
        self.modules: dict[str, tuple[str, Row]] = {}
        self.edits: dict[Path, set[tuple[int, int, bytes, Row]]] = defaultdict(set)
        self.options = [row for row in rows if row.kind == "option"]
        self._moved = {
            f"{r.where}.{r.old}".strip("."): f"{r.where}.{r.new}".strip(".") for r in rows if r.kind == "module"
        }
        for row in rows:
            if row.kind not in ("option", "word"):
                self._resolve(row)
        self._check_collisions()

    def _resolve(self, row: Row) -> None:
        """Finds what a row renames; the scope may have its new name already."""
        for where in dict.fromkeys([row.where, self._where_now(row.where)]):
            scope = f"{PACKAGE}.{where}".rstrip(".") if where or row.kind != "module" else PACKAGE
            full = f"{scope}.{row.old}"
            if row.kind == "module":
                tests = ".".join(filter(None, [where, f"test_{row.old}"]))  # its tests go with it
                for old, base in ((full, row.new), (tests, f"test_{row.new}")):
                    new = f"{old.rpartition('.')[0]}.{base}".lstrip(".")
                    if old in self.names.modules and new in self.names.modules:
                        self.messages.append(f"collision: {row}: there is a module {new}")
                    elif old in self.names.modules:
                        self.modules[old] = (new, row)
                        self.renamed[old] = (base, row)
            elif row.kind in ("class", "function", "constant"):
                if scope in self.names.tops and row.old in self.names.tops[scope]:
                    self.rows.setdefault(row, {})[full] = row.new
            elif row.kind in ("method", "attribute"):
                if scope in self.names.classes and row.old in self.names.classes[scope].members:
                    for owner in self.names.family(scope, row.old):
                        self.rows.setdefault(row, {})[f"{owner}.{row.old}"] = row.new
            elif row.kind in ("parameter", "variable"):
                for function in self._overrides(scope):
                    if row.old in self.names.bound(self.names.functions[function]):
                        self.rows.setdefault(row, {})[f"{function}.{row.old}"] = row.new
            else:
                raise ValueError(f"{row}: {row.kind} is not a kind of row")

    def _where_now(self, where: str) -> str:
        for old, new in sorted(self._moved.items(), key=lambda pair: -len(pair[0])):
            if where == old or where.startswith(f"{old}."):
                return new + where[len(old) :]
        return where

    def _overrides(self, function: str) -> set[str]:
        owner, _, name = function.rpartition(".")
        if owner in self.names.classes and not name.startswith("__"):
            return {f"{c}.{name}" for c in self.names.family(owner, name) if f"{c}.{name}" in self.names.functions}
        return {function} if function in self.names.functions else set()

    def _check_collisions(self) -> None:
        for row, targets in self.rows.items():
            taken = [full for full, new in targets.items() if self._is_taken(full.rpartition(".")[0], new)]
            if taken:
                self.messages.append(f"collision: {row}: {taken[0].rpartition('.')[0]} has {row.new} already")
            else:
                self.renamed.update({full: (new, row) for full, new in targets.items()})

    def _is_taken(self, scope: str, new: str) -> bool:
        if scope in self.names.classes:
            return any(new in self.names.classes[c].members for c in self.names.mro(scope))
        if scope in self.names.functions:
            function = self.names.functions[scope]
            is_read = any(isinstance(node, ast.Name) and node.id == new for node in ast.walk(function))
            return is_read or new in self.names.bound(function)
        return new in self.names.tops.get(scope, set())

    def run(self) -> None:
        members = {f.rpartition(".")[2] for f in self.renamed if self._is_member(f)}
        parameters = {f.rpartition(".")[2] for f, (_, r) in self.renamed.items() if r.kind == "parameter"}
        if members | parameters:
            infer_types(self.root, self.names, members | parameters)
        self.old_names = {full.rpartition(".")[2] for full in self.renamed}
        self.unique = {name for name in members if self._is_one_family(name)}
        for file in self.names.files.values():
            self._visit(file)
        dropped = {row for row in self.rows if self._shadowed(row)}
        for edits in self.edits.values():
            edits -= {edit for edit in edits if edit[3] in dropped}
        self.renamed = {full: pair for full, pair in self.renamed.items() if pair[1] not in dropped}

    def _is_member(self, full: str) -> bool:
        return full.rpartition(".")[0] in self.names.classes

    def _renames_member(self, name: str) -> bool:
        return any(self._is_member(full) and full.endswith(f".{name}") for full in self.renamed)

    def _is_one_family(self, name: str) -> bool:
        """Whether all members of this name get the same new name, and no module or top-level name is called so."""
        owners = [c for c in self.names.classes.values() if name in c.members]
        return len({self.renamed.get(f"{c.name}.{name}", (None,))[0] for c in owners}) == 1

    def _shadowed(self, row: Row) -> bool:
        return any(message.startswith(f"collision: {row}:") for message in self.messages)

    def _edit(self, file: File, line: int, column: int, old: str, new: str, row: Row, node: ast.AST) -> None:
        begin = file.starts[line - 1] + column
        if file.text[begin : begin + len(old.encode())] == old.encode():
            self.edits[file.path].add((begin, begin + len(old.encode()), new.encode(), row))
            return
        text: ast.AST | None = node  # inside of an f-string, positions are not exact before Python 3.12
        while text is not None and not isinstance(text, ast.JoinedStr):
            text = file.parents.get(text)
        while text is not None and isinstance(file.parents.get(text), (ast.JoinedStr, ast.FormattedValue)):
            text = file.parents[text]
        if text is None:
            self.messages.append(f"unclear: {file.path}:{line}: {row}")
            return
        first, last = (
            file.starts[text.lineno - 1] + text.col_offset,
            file.starts[text.end_lineno - 1] + text.end_col_offset,
        )
        for braces in re.finditer(rb"\{[^{}]*\}", file.text[first:last]):
            for match in re.finditer(rb"\b%s\b" % old.encode(), braces.group()):
                begin = first + braces.start() + match.start()
                self.edits[file.path].add((begin, begin + len(old.encode()), new.encode(), row))

    def _use(self, file: File, node: ast.AST, full: str | None, line: int, column: int, written: str) -> None:
        """Renames one use of a full name, where it is written under its own name."""
        if full not in self.renamed or written != full.rpartition(".")[2]:  # type: ignore[union-attr]
            return
        new, row = self.renamed[full]  # type: ignore[index]
        if isinstance(node, (ast.Name, ast.arg, ast.alias)) and not self._is_member(full):  # type: ignore[arg-type]
            for scope in self.names.scopes(node, file):
                is_own = self.names.path(scope, file) == full.rpartition(".")[0]  # type: ignore[union-attr]
                if new in self.names.bound(scope) and not is_own:
                    if not (scope is file.tree and written not in self.names.bound(scope)):
                        place = f"{file.path.relative_to(self.root)}:{line}"
                        self.messages.append(f"collision: {row}: {place} has {new} already")
                        return
                if written in self.names.bound(scope):
                    break
        self._edit(file, line, column, written, new, row, node)

    def _visit(self, file: File) -> None:
        words = {name for name in self.old_names if name.encode() in file.text}
        if not words:
            return
        names = self.names
        for node in ast.walk(file.tree):
            if isinstance(node, (*FUNCTIONS[:2], ast.ClassDef)) and ast.get_docstring(node, clean=False):
                self._docstring(file, node, words)
            if isinstance(node, ast.Name) and node.id in words:
                self._use(file, node, names.name(node.id, node, file), node.lineno, node.col_offset, node.id)
            elif isinstance(node, ast.Attribute) and node.attr in words:
                column = node.end_col_offset - len(node.attr.encode())
                for full in self._attribute(node, file):
                    self._use(file, node, full, node.end_lineno, column, node.attr)
            elif isinstance(node, ast.arg) and node.arg in words:
                self._use(file, node, self._argument(node, file), node.lineno, node.col_offset, node.arg)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in words:
                full = f"{names.path(file.parents[node], file)}.{node.name}"
                self._word(file, node, full, node.name, rb"(?:def|class)\s+(%s)\b")
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                for name in node.names:
                    self._word(file, node, names.name(name, node, file), name, rb"\b(%s)\b")
            elif isinstance(node, ast.ExceptHandler) and node.name in words:
                self._word(file, node, names.name(node.name, node.body[0], file), node.name, rb"\bas\s+(%s)\b")
            elif isinstance(node, ast.MatchAs) and node.name in words:
                full = names.name(node.name, node, file)
                self._use(file, node, full, node.end_lineno, node.end_col_offset - len(node.name.encode()), node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(node, file)
            elif isinstance(node, ast.Call):
                self._call(node, file)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value in words:
                    self._string(node, file)
                elif file.path.stem == "__init__" and re.fullmatch(r"(\.\w+)+", node.value):
                    self._module_string(node, file)

    def _docstring(self, file: File, node: ast.AST, words: set[str]) -> None:
        """Names of parameters and attributes in a docstring: at the head of a text, or as code."""
        own = self.names.path(node, file)
        scopes = [own, f"{own}.__init__"]
        if (owner := enclosing_class(file.parents[node], file)) is not None:
            scopes.append(self.names.path(owner, file))
        string = node.body[0].value  # type: ignore[attr-defined]
        begin = file.starts[string.lineno - 1] + string.col_offset
        end = file.starts[string.end_lineno - 1] + string.end_col_offset
        for line in re.finditer(rb"^[ ]+\*{0,2}\w+(?:, \*{0,2}\w+)* : .*$", file.text[begin:end], re.MULTILINE):
            for match in re.finditer(rb"\b[A-Z]\w+", line.group()):
                if (old := match.group().decode()) in words:
                    full = self.names.name(old, node, file)
                    full = full if full in self.renamed else self._classes.get(old, "")
                    if full in self.renamed and full.endswith(f".{old}"):
                        place = begin + line.start() + match.start()
                        new, row = self.renamed[full]
                        self.edits[file.path].add((place, place + len(match.group()), new.encode(), row))
        for scope in scopes:
            for old in words:
                if (pair := self.renamed.get(f"{scope}.{old}")) is not None:
                    new, row = pair
                    head = rb"^[ ]+(?:\*?\w+, )*(%s)(?=(?:, \w+)* ?:)" % old.encode()
                    for pattern in (head, rb"`(%s)`" % old.encode()):
                        for match in re.finditer(pattern, file.text[begin:end], re.MULTILINE):
                            place = (begin + match.start(1), begin + match.end(1), new.encode(), row)
                            self.edits[file.path].add(place)

    @cached_property
    def _classes(self) -> dict[str, str]:
        """Full names of classes whose name no other has."""
        found: dict[str, list[str]] = defaultdict(list)
        for full in self.names.classes:
            found[full.rpartition(".")[2]].append(full)
        return {name: fulls[0] for name, fulls in found.items() if len(fulls) == 1}

    def _argument(self, node: ast.arg, file: File) -> str:
        function = file.parents[file.parents[node]]
        return f"{self.names.path(function, file)}.{node.arg}"

    def _attribute(self, node: ast.Attribute, file: File) -> list[str]:
        full = self.names.meaning(node, file)
        if full is not None:
            return [full]
        owners = self.names.owners(node.value, file)
        found = [m for owner in owners if (m := self.names.member(owner, node.attr))]
        if not found and node.attr in self.unique and (not owners or "?" in owners):
            found = [f"{c.name}.{node.attr}" for c in self.names.classes.values() if node.attr in c.members][:1]
        elif not found and (not owners or "?" in owners) and self._renames_member(node.attr):
            self.messages.append(f"look: {file.path.relative_to(self.root)}:{node.lineno}: the attribute {node.attr}")
        changes = {self.renamed.get(full, (None,))[0] for full in found}
        if len(changes) > 1:
            rows = [self.renamed[full][1] for full in found if full in self.renamed]
            self.messages.append(f"unclear: {file.path.relative_to(self.root)}:{node.lineno}: {rows[0]}")
            return []
        return found[:1]

    def _call(self, node: ast.Call, file: File) -> None:
        named = {k.arg: k for k in node.keywords if k.arg in self.old_names}
        callees = self.names.callees(node, file) if named else set()
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("replace", "_replace") and named:
            first = node.args[0] if name == "replace" and node.args else getattr(node.func, "value", None)
            callees = callees | (self.names.owners(first, file) if first is not None else set())
        takes_any = any(getattr(getattr(self.names.functions.get(c), "args", None), "kwarg", None) for c in callees)
        for keyword in named.values() if takes_any or not callees else ():
            if self._renames_member(keyword.arg or ""):
                where = f"{file.path.relative_to(self.root)}:{keyword.lineno}"
                self.messages.append(f"look: {where}: the keyword {keyword.arg}")
        for callee in callees:
            for keyword in named.values():
                for full in self._parameter(callee, keyword.arg or ""):
                    self._use(file, keyword, full, keyword.lineno, keyword.col_offset, keyword.arg or "")
        if name in ("setattr", "getattr", "hasattr", "delattr", "object") and len(node.args) > 1:
            key = node.args[1]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                base = self.names.meaning(node.args[0], file)
                fulls = [self.names.canonical(f"{base}.{key.value}")] if base in self.names.modules else []
                owners = {base} if base in self.names.classes else self.names.owners(node.args[0], file)
                fulls += [m for owner in owners if owner and (m := self.names.member(owner, key.value))]
                for full in fulls[:1]:
                    self._use(file, key, full, key.lineno, key.col_offset + 1, key.value)

    def _parameter(self, callee: str, keyword: str) -> list[str]:
        if callee in self.names.classes:
            init = self.names.member(callee, "__init__") or self.names.member(callee, "__new__")
            member = self.names.member(callee, keyword)
            return [f"{init}.{keyword}"] if init else [member] if member else []
        return [f"{callee}.{keyword}"]

    def _import(self, node: ast.Import | ast.ImportFrom, file: File) -> None:
        source = source_of(node, file) if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and node.module:
            match = re.compile(rb"from\s+\.*([\w.]+)").match(file.text, file.starts[node.lineno - 1] + node.col_offset)
            first, begin = source.count(".") - node.module.count("."), match.start(1) if match else 0
            for i, part in enumerate(node.module.split(".")):
                full = ".".join(source.split(".")[: first + i + 1])
                if full in self.modules:
                    new, row = self.renamed[full]
                    self.edits[file.path].add((begin, begin + len(part), new.encode(), row))
                begin += len(part) + 1
        for alias in node.names:
            full = f"{source}.{alias.name}" if source else alias.name
            if isinstance(node, ast.ImportFrom):
                full = self.names.canonical(full)
                self._use(file, alias, full, alias.lineno, alias.col_offset, alias.name)
                if alias.asname == alias.name:  # exported by the file
                    column = alias.end_col_offset - len(alias.asname)
                    self._use(file, alias, full, alias.end_lineno, column, alias.asname)

    def _word(self, file: File, node: ast.AST, full: str, written: str, pattern: bytes) -> None:
        if full in self.renamed and written == full.rpartition(".")[2]:
            begin = file.starts[node.lineno - 1] + node.col_offset
            match = re.compile(pattern % written.encode()).search(file.text, begin)
            if match:
                new, row = self.renamed[full]
                self.edits[file.path].add((*match.span(1), new.encode(), row))

    def _module_string(self, node: ast.Constant, file: File) -> None:
        """The name of a module, relative to a package that imports it late."""
        full, column = file.module, node.col_offset + 1
        for part in node.value[1:].split("."):
            full, column = f"{full}.{part}", column + 1
            if full in self.modules:
                self._edit(file, node.lineno, column, part, *self.renamed[full], node)
            column += len(part)

    def _string(self, node: ast.Constant, file: File) -> None:
        """Strings that name something: exports of a package, ``__slots__``, quoted annotations."""
        parent = file.parents.get(node)
        full = None
        if node.value.isidentifier():
            if file.path.stem == "__init__" and isinstance(parent, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
                full = self.names.canonical(file.imports.get(node.value, ""))
            owner = enclosing_class(node, file)
            if owner is not None and f"{self.names.path(owner, file)}.{node.value}" in self.renamed:
                statement = parent if isinstance(parent, ast.Assign) else file.parents.get(parent or node)
                is_slots = isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__slots__"
                if is_slots or (isinstance(parent, ast.Tuple) and isinstance(file.parents.get(parent), ast.For)):
                    full = f"{self.names.path(owner, file)}.{node.value}"
            if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") == "cast" and parent.args[0] is node:
                full = self.names.name(node.value, node, file)
        if full in self.renamed and full.endswith(f".{node.value}"):  # type: ignore[union-attr]
            self._edit(file, node.lineno, node.col_offset + 1, node.value, *self.renamed[full], node)  # type: ignore[index]
        elif self._renames_member(node.value):
            self.messages.append(f"look: {file.path.relative_to(self.root)}:{node.lineno}: the text {node.value!r}")

    @cached_property
    def texts(self) -> dict[Path, bytes]:
        """All files that change, with their new text."""
        changed: dict[Path, bytes] = {}
        for path, file in self.names.files.items():
            data = file.text
            for begin, end, new, _ in sorted(self.edits[path], key=lambda edit: edit[0], reverse=True):
                data = data[:begin] + new + data[end:]
            data = self._in_text(data, rb"``?([\w.]+)(\(\))?``?", path)
            if data != file.text:
                changed[path] = data
        paths = {
            p for folder in (*FOLDERS, ".github") for pattern in TEXTS for p in (self.root / folder).rglob(pattern)
        }
        for path in sorted(paths | {p for pattern in TEXTS for p in self.root.glob(pattern)}):
            old = path.read_bytes()
            if (data := self._in_text(old, rb"`([\w.]+)(\(\))?`", path)) != old:
                changed[path] = data
        return changed

    def _in_text(self, data: bytes, code: bytes, path: Path) -> bytes:
        """Dotted names and paths of modules, options, and code spans whose name means one thing."""
        if str(path.relative_to(self.root)) in NOT_RENAMED:
            return data

        def dotted(match: re.Match[bytes]) -> bytes:
            parts, joint, last = match[1].decode().split("."), (match[2] or b"").decode(), (match[3] or b"").decode()
            written = [*parts, last] if last else parts
            names = [PACKAGE, *written[1:]]
            new = [self._new_name(".".join(names[: i + 1]), part) for i, part in enumerate(written)]
            return f"{'.'.join(new[: len(parts)])}{joint}{new[-1] if last else ''}".encode()

        def file(match: re.Match[bytes]) -> bytes:
            parts = match[0].decode().split("/")
            first = parts.index(PACKAGE) + 1 if PACKAGE in parts else 0
            new = self.modules.get(".".join([PACKAGE, *parts[first:]]), (None,))[0]
            return match[0] if new is None else "/".join([*parts[:first], *new.split(".")[1:]]).encode()

        data = re.sub(rb"(?<![\w./])((?:rh|%s)(?:\.\w+)+)(?:(:|\", \")(\w+))?" % PACKAGE.encode(), dotted, data)
        data = re.sub(rb"(?<![\w.])\w+(?:/\w+)+(?=\.py\b)", file, data)
        for old, new in self._phrases.items():  # names of two words in capitals, such as those of passes, are no prose
            data = re.sub(rb"(?<![\w.])%s(?!\w)" % old.encode(), new.encode(), data)
        for row in self.options:
            data = re.sub(rb"(?<![\w-])%s(?![\w-])" % re.escape(row.old.encode()), row.new.encode(), data)

        def span(match: re.Match[bytes]) -> bytes:
            head, dot, last = match[1].decode().rpartition(".")
            new = self._spans.get((head.rpartition(".")[2], last)) or self._spans.get(("", last))
            if new is None:
                return match[0]
            begin = match.start(1) - match.start() + len((head + dot).encode())
            return match[0][:begin] + new.encode() + match[0][begin + len(last.encode()) :]

        return re.sub(code, span, data) if self._spans else data

    @cached_property
    def _phrases(self) -> dict[str, str]:
        defined: dict[str, set[str | None]] = defaultdict(set)
        for module, tops in self.names.tops.items():
            for name in tops - set(self.names.modules[module].imports):
                defined[name].add(self.renamed.get(f"{module}.{name}", (None,))[0])
        is_camel = re.compile(r"(?:[A-Z][a-z0-9]+){2,}").fullmatch
        return {old: new for old, (new, *more) in defined.items() if new is not None and not more and is_camel(old)}

    def _new_name(self, full: str, written: str) -> str:
        """The new last part of a full name, also of one that a package exports from elsewhere."""
        for name in (full, self.names.canonical(full)):
            if name in self.renamed and name.rpartition(".")[2] == written:
                return self.renamed[name][0]
        return written

    @cached_property
    def _spans(self) -> dict[tuple[str, str], str]:
        """(Owner, name) -> new name, for code spans; without owner where no other definition has the name."""
        table: dict[tuple[str, str], str] = {}
        defined: dict[str, set[str | None]] = defaultdict(set)
        for module, tops in self.names.tops.items():
            for name in tops - set(self.names.modules[module].imports):
                defined[name].add(self.renamed.get(f"{module}.{name}", (None,))[0])
        for info in self.names.classes.values():
            for name in info.members:
                defined[name].add(self.renamed.get(f"{info.name}.{name}", (None,))[0])
        for full, (new, row) in self.renamed.items():
            scope, _, old = full.rpartition(".")
            if row.kind in ("parameter", "variable"):
                continue
            table[scope.rpartition(".")[2], old] = new
            if defined[old] == {new} and ("_" in old.strip("_") or not old.islower()):
                table["", old] = new
        return table

    def write(self) -> None:
        for path, data in self.texts.items():
            path.write_bytes(data)
        for old, (new, _) in self.modules.items():
            source = self.names.modules[old].path
            source = source.parent if source.stem == "__init__" else source
            target = source.with_name(new.rpartition(".")[2] + source.suffix)
            subprocess.run(["git", "-C", str(self.root), "mv", str(source), str(target)], check=True)


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [Row(**{key: value or "" for key, value in row.items()}) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Applies the map of renames.")
    parser.add_argument("map", nargs="?", type=Path, help="Map to apply; by default docs/reference/renames.csv.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="Folder of the repository.")
    parser.add_argument("--where", nargs="*", default=[""], help="Prefixes of the scopes whose rows are applied.")
    parser.add_argument("--dry-run", action="store_true", help="Say what would change, and write nothing.")
    args = parser.parse_args()
    rows = read_rows(args.map or args.root / "docs/reference/renames.csv")
    rows = [r for r in rows if any(r.where == w or r.where.startswith(f"{w}." if w else "") for w in args.where)]
    renamer = Renamer(args.root, rows)
    renamer.run()
    for message in dict.fromkeys(renamer.messages):
        print(message)
    print(f"{len(renamer.renamed) + len(renamer.modules)} names, {len(renamer.texts)} files")
    if not args.dry_run:
        renamer.write()
    sys.exit(any(message.startswith("collision") for message in renamer.messages))


if __name__ == "__main__":
    main()
