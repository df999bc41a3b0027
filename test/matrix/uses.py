# SPDX-License-Identifier: Apache-2.0
"""What our Python sources use of the engines, as paths (sources.py). They are read, not imported:
imports, subclasses and the methods that they override, calls, attributes of imported names and of
values of their types, and engines' paths in strings, which hooks and wrapped methods have.
"""

from __future__ import annotations

import ast
import pathlib
import re
from dataclasses import dataclass, field

from sources import Function

ENGINES = ("vllm", "sglang")
_PATH = re.compile(rf"({'|'.join(ENGINES)})(\.\w+)+")
_GUARDS = {"ImportError", "AttributeError", "ModuleNotFoundError", "Exception"}


@dataclass(frozen=True)
class Use:
    path: str
    where: str  # file:line
    call: ast.Call | None = None
    override: ast.AST | None = None  # our method, in the place of the engine's
    guarded: bool = False  # our source handles its absence

    @property
    def engine(self) -> str:
        return self.path.partition(".")[0]


@dataclass(frozen=True)
class Subclass:
    base: str
    name: str
    where: str
    own: frozenset[str]


@dataclass
class Package:
    """What one of our packages uses."""

    uses: list[Use] = field(default_factory=list)
    subclasses: list[Subclass] = field(default_factory=list)
    # Names of attributes, and where they are used: the type of their object may be unknown.
    attributes: dict[str, list[str]] = field(default_factory=dict)
    # Names in strings, and attributes whose absence is caught.
    guarded: dict[str, list[str]] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)  # names that the package defines itself


class _Reader(ast.NodeVisitor):
    def __init__(self, file: str, package: Package) -> None:
        self.file, self.package = file, package
        self._names: dict[str, str] = {}  # of this scope: what is or has the type of a path
        self._attributes: dict[str, str] = {}  # of self
        self._own: set[str] = set()
        self._base = ""
        self._guards = 0

    def _at(self, node: ast.AST) -> str:
        return f"{self.file}:{getattr(node, 'lineno', 0)}"

    def _use(self, node: ast.AST, path: str, guarded: bool = False, **more: ast.AST) -> None:
        self.package.uses.append(
            Use(path, self._at(node), guarded=guarded or self._guards > 0, **more)
        )

    def path(self, e: ast.AST | None) -> str:
        """The path of an expression; empty if it is nothing of an engine's."""
        if isinstance(e, ast.Name):
            return self._names.get(e.id, "")
        if isinstance(e, ast.Attribute):
            if isinstance(e.value, ast.Name) and e.value.id == "self":
                if e.attr in self._attributes or e.attr in self._own:
                    return self._attributes.get(e.attr, "")
            before = self.path(e.value)
            return before and f"{before}.{e.attr}"
        if isinstance(e, ast.Call):
            if ast.unparse(e.func) == "super":
                return self._base
            called = self.path(e.func)
            return called and f"{called}.()"
        if isinstance(e, ast.Subscript):
            held = self.path(e.value)
            return held and f"{held}.[]"
        return self.path(e.value) if isinstance(e, ast.NamedExpr) else ""

    def _annotated(self, e: ast.AST | None) -> str:
        if isinstance(e, ast.Constant) and isinstance(e.value, str):
            e = ast.parse(e.value, mode="eval").body
        if isinstance(e, ast.BinOp):
            return self._annotated(e.left) or self._annotated(e.right)
        return self.path(e) if isinstance(e, (ast.Name, ast.Attribute)) else ""

    # -- what defines names

    def visit_Import(self, node: ast.Import) -> None:
        for a in node.names:
            if a.name.partition(".")[0] in ENGINES:
                self._use(node, a.name)
                self._names[a.asname or a.name.partition(".")[0]] = (
                    a.name if a.asname else a.name.partition(".")[0]
                )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and (node.module or "").partition(".")[0] in ENGINES:
            for a in node.names:
                path = f"{node.module}.{a.name}"
                self._use(node, path)
                self._names[a.asname or a.name] = path

    def visit_Try(self, node: ast.Try) -> None:
        caught = {n.id for h in node.handlers for n in ast.walk(h.type or h) if
                  isinstance(n, ast.Name)}  # fmt: skip
        self._guards += bool(caught & _GUARDS)
        for s in node.body:
            self.visit(s)
        self._guards -= bool(caught & _GUARDS)
        for s in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(s)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.package.own.add(node.name)
        saved = self._attributes, self._own, self._base
        bases = list(filter(None, map(self.path, node.bases)))
        self._attributes, self._base = {}, bases[0] if bases else ""
        methods = [s for s in node.body if isinstance(s, Function)]
        self._own = {m.name for m in methods}
        for base in bases:
            self.package.subclasses.append(
                Subclass(base, node.name, self._at(node), frozenset(self._own))
            )
            for m in methods:
                self._use(m, f"{base}.{m.name}", override=m)
        self.generic_visit(node)
        self._attributes, self._own, self._base = saved

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.package.own.add(node.name)
        saved = self._names
        self._names = dict(saved)
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self._names[a.arg] = self._annotated(a.annotation)
        if self._base and node.args.args[:1] and node.args.args[0].arg == "self":
            self._names["self"] = self._base
        self.generic_visit(node)
        self._names = saved

    visit_AsyncFunctionDef = visit_FunctionDef

    def _assign(self, target: ast.expr, value: ast.expr | None, path: str) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for t, v in zip(target.elts, value.elts, strict=False):
                self._assign(t, v, self.path(v))
        elif isinstance(target, ast.Name):
            self._names[target.id] = path
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            self._attributes[target.attr] = path

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for t in node.targets:
            self.visit(t)
            self._assign(t, node.value, self.path(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.package.own.add(ast.unparse(node.target))
        self.generic_visit(node)
        self._assign(node.target, None, self._annotated(node.annotation))

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        held = self.path(node.iter)
        self._assign(node.target, None, held and f"{held}.[]")
        self.generic_visit(node)

    visit_comprehension = visit_For

    def _comprehension(self, node: ast.AST) -> None:
        saved = dict(self._names)
        for g in node.generators:  # type: ignore[attr-defined]
            self.visit(g)
        for part in ("elt", "key", "value"):
            if (e := getattr(node, part, None)) is not None:
                self.visit(e)
        self._names = saved

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    # -- what uses them

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self.package.own.add(node.attr)
        else:
            table = self.package.guarded if self._guards else self.package.attributes
            table.setdefault(node.attr, []).append(self._at(node))
        if (path := self.path(node)) and isinstance(node.ctx, ast.Load):
            self._use(node, path)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if path := self.path(node.func):
            self._use(node, path, call=node)
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[of, ast.Constant(str(n))]):
                guarded = node.func.id == "hasattr"
            case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(str(n)), _]):
                guarded = True
            case _:
                return self.generic_visit(node)
        if path := self.path(of):
            self._use(node, f"{path}.{n}", guarded=guarded)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        if _PATH.fullmatch(node.value) and "kvspray" not in node.value:
            self._use(node, node.value)
        elif node.value.isidentifier():
            self.package.guarded.setdefault(node.value, []).append(self._at(node))

    def visit_Tuple(self, node: ast.Tuple) -> None:
        """(module, name): of a class whose methods we wrap."""
        match node.elts:
            case [ast.Constant(str(module)), ast.Constant(str(name))] if name.isidentifier():
                if _PATH.fullmatch(module):
                    self._use(node, f"{module}.{name}")
        self.generic_visit(node)


def read(root: pathlib.Path, package: str) -> Package:
    """What all Python files below a directory of the checkout use."""
    out = Package()
    for path in sorted((root / package).rglob("*.py")):
        _Reader(str(path.relative_to(root)), out).visit(ast.parse(path.read_bytes()))
    return out
