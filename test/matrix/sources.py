# SPDX-License-Identifier: Apache-2.0
"""Finds what a dotted path names in an engine's Python sources, which are not imported.

A path names what our plug-ins use: ``vllm.config.VllmConfig.model_config.dtype``. The step ``()``
is what a call returns, and ``[]`` an element. Types come from annotations. Without an annotation
the rest of a path is Unknown, which is no error.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
# Bases outside of the engine that add no members of interest.
_PLAIN = {"ABC", "object", "Generic", "Protocol", "NamedTuple", "Struct", "Enum", "IntEnum", "str"}
_INNER = {"Optional", "Final", "ClassVar", "Annotated", "Required", "type"}


class Unknown(Exception):
    """The sources have no type for it."""


@dataclass(frozen=True)
class Thing:
    """A module, class, function or value, and the module that has it."""

    module: str
    node: ast.AST


@dataclass(frozen=True)
class Signature:
    names: tuple[str, ...]  # in their order, without self
    positional: int  # the first ones, which may be given by position
    required: frozenset[str]
    star: bool
    star_star: bool

    def __str__(self) -> str:
        shown = [n if n in self.required else f"{n}=" for n in self.names]
        return f"({', '.join(shown + ['*'] * self.star + ['**'] * self.star_star)})"


def _holds(annotation: ast.AST) -> bool:
    """Whether an annotation is that of a container."""
    return isinstance(annotation, ast.Subscript) and (
        ast.unparse(annotation.value).rpartition(".")[2] not in _INNER
    )


def scope(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """The names that statements define, also below if, try and with."""
    out: dict[str, ast.AST] = {}
    for s in body:
        if isinstance(s, (*Function, ast.ClassDef)):
            out[s.name] = s
        elif isinstance(s, (ast.Import, ast.ImportFrom)):
            for a in s.names:
                out[a.asname or (a.name.partition(".")[0])] = s
        elif isinstance(s, ast.AnnAssign):
            out[ast.unparse(s.target)] = s
        elif isinstance(s, ast.Assign):
            for name in (n for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                out[name.id] = s
        else:
            for part in ("body", "orelse", "finalbody"):
                out = scope(getattr(s, part, [])) | out
            for handler in getattr(s, "handlers", []):
                out = scope(handler.body) | out
    return out


def members(cls: ast.ClassDef) -> dict[str, ast.AST]:
    """The names of a class, and the attributes that its methods set."""
    out: dict[str, ast.AST] = {}
    for method in (s for s in scope(cls.body).values() if isinstance(s, Function)):
        given = {a.arg: a.annotation for a in (*method.args.args, *method.args.kwonlyargs)}
        for s in ast.walk(method):
            if not isinstance(s, (ast.Assign, ast.AnnAssign)):
                continue
            for t in s.targets if isinstance(s, ast.Assign) else [s.target]:
                if not isinstance(t, ast.Attribute) or ast.unparse(t.value) != "self":
                    continue
                typed = given.get(s.value.id) if isinstance(s.value, ast.Name) else None
                made = ast.AnnAssign(t, typed, None, 0) if typed is not None else s
                if isinstance(made, ast.AnnAssign) or t.attr not in out:
                    out[t.attr] = made
    return out | scope(cls.body)


def signature(function: ast.AST, bound: bool = True) -> Signature:
    """The signature of a function. bound: without its first parameter, unless it is static."""
    assert isinstance(function, Function)
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    optional = {p.arg for p in positional[len(positional) - len(a.defaults) :] if a.defaults}
    optional |= {p.arg for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
    if bound and "staticmethod" not in decorators(function):
        positional = positional[1:]
    names = [p.arg for p in (*positional, *a.kwonlyargs)]
    required = frozenset(names) - optional
    return Signature(tuple(names), len(positional), required, bool(a.vararg), bool(a.kwarg))


def decorators(node: ast.AST) -> set[str]:
    """Their last names: dataclass, property, abstractmethod."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in getattr(node, "decorator_list", ())]
    return {ast.unparse(d).rpartition(".")[2] for d in calls}


class Sources:
    """The sources of one release, below a directory like site-packages. A program has two of
    them."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    @functools.cache  # noqa: B019
    def module(self, name: str) -> Thing | None:
        base = self.root.joinpath(*name.split("."))
        for path in (base / "__init__.py", base.with_name(base.name + ".py")):
            if path.exists():
                return Thing(name, ast.parse(path.read_bytes()))
        return Thing(name, ast.Module([], [])) if base.is_dir() else None

    @functools.cache  # noqa: B019
    def find(self, path: str) -> Thing | None:
        """None: the release does not have it. Raises Unknown."""
        before, _, name = path.rpartition(".")
        if not before:
            return self.module(path)
        thing = self.find(before)
        return None if thing is None else self._step(thing, name)

    def _step(self, thing: Thing, name: str) -> Thing | None:
        node = thing.node
        if name == "()" and isinstance(node, Function):
            return self._type(thing.module, node.returns)
        if name == "()" and isinstance(node, ast.ClassDef):
            return thing
        if name == "[]":
            held = getattr(node, "annotation", None) or getattr(node, "returns", None)
            if not isinstance(held, ast.Subscript):
                raise Unknown
            parts = held.slice.elts if isinstance(held.slice, ast.Tuple) else [held.slice]
            parts = [p for p in parts if not isinstance(p, ast.Constant) or p.value is not ...]
            return self._type(thing.module, parts[-1])
        if isinstance(node, ast.Module):
            return self._of_module(thing, node, name)
        if isinstance(node, ast.ClassDef):
            return self.member(thing, name)
        if isinstance(node, ast.AnnAssign) and not _holds(node.annotation):
            return self._step(self._type(thing.module, node.annotation), name)
        if isinstance(node, Function) and {"property", "cached_property"} & decorators(node):
            return self._step(self._type(thing.module, node.returns), name)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            return self._step(self._type(thing.module, node.value.func), name)
        raise Unknown

    def _of_module(self, thing: Thing, module: ast.Module, name: str) -> Thing | None:
        own = scope(module.body)
        node = own.get(name)
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = thing.module.split(".")
                if not (self.root.joinpath(*package) / "__init__.py").exists():
                    package = package[:-1]
                package = package[: len(package) + 1 - node.level]
                source = ".".join([*package, *filter(None, [source])])
            if self.module(source.partition(".")[0]) is None:
                return Thing(thing.module, node)  # of another distribution
            (real,) = (a.name for a in node.names if name == (a.asname or a.name))
            return self.find(f"{source}.{real}") or Thing(thing.module, node)
        if node is None and (below := self.module(f"{thing.module}.{name}")):
            return below
        if node is None and "__getattr__" in own:
            raise Unknown
        return None if node is None else Thing(thing.module, node)

    def _type(self, module: str, annotation: ast.expr | None) -> Thing:
        """The class that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):  # of X | None
            left = annotation.left
            none = isinstance(left, ast.Constant) and left.value is None
            return self._type(module, annotation.right if none else left)
        if isinstance(annotation, ast.Subscript):
            if not _holds(annotation):
                inner = annotation.slice
                return self._type(module, inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
            return Thing(module, ast.AnnAssign(annotation.value, annotation, None, 0))
        if isinstance(annotation, (ast.Name, ast.Attribute)):
            found = self.find(f"{module}.{ast.unparse(annotation)}")
            if found is not None:
                return found
        raise Unknown

    def lineage(self, cls: Thing) -> Iterator[Thing | None]:
        """A class and its bases, roughly in Python's order; None for a base of another
        distribution."""
        yield cls
        assert isinstance(cls.node, ast.ClassDef)
        for base in cls.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if ast.unparse(plain).rpartition(".")[2] in _PLAIN:
                continue
            try:
                thing = self._type(cls.module, plain)
            except Unknown:
                thing = None
            if thing is not None and isinstance(thing.node, ast.ClassDef):
                yield from self.lineage(thing)
            else:
                yield None

    def member(self, cls: Thing, name: str) -> Thing | None:
        classes = list(self.lineage(cls))
        for c in filter(None, classes):
            assert isinstance(c.node, ast.ClassDef)
            own = members(c.node)
            if name in own:
                return Thing(c.module, own[name])
            if "__getattr__" in own:
                raise Unknown
        if None in classes:
            raise Unknown
        return self._of_subclass(cls, name)

    def _of_subclass(self, cls: Thing, name: str) -> Thing | None:
        """A value with the type of a class is often of a subclass in the same module."""
        module = self.module(cls.module)
        assert module is not None and isinstance(module.node, ast.Module)
        for node in scope(module.node.body).values():
            other = Thing(cls.module, node)
            if isinstance(node, ast.ClassDef) and node is not cls.node:
                found = members(node).get(name)
                value = not isinstance(found, Function) or "property" in decorators(found)
                if found is not None and value and cls in self.lineage(other):
                    return Thing(cls.module, found)
        return None

    def methods(self, cls: Thing) -> dict[str, ast.AST]:
        """All methods of a class, its own and those of its bases."""
        out: dict[str, ast.AST] = {}
        for c in filter(None, self.lineage(cls)):
            assert isinstance(c.node, ast.ClassDef)
            found = scope(c.node.body)
            out = {k: v for k, v in found.items() if isinstance(v, Function)} | out
        return out

    def parameters(self, thing: Thing) -> Signature | None:
        """The parameters of a call of a function or class; None if the sources do not show them."""
        if isinstance(thing.node, Function):
            return signature(thing.node, bool(thing.node.args.args[:1]) and
                             thing.node.args.args[0].arg in ("self", "cls"))  # fmt: skip
        if not isinstance(thing.node, ast.ClassDef):
            return None
        classes = list(self.lineage(thing))
        if None in classes:
            return None
        made = self.methods(thing).get("__init__")
        if made is not None:
            return signature(made)
        names: dict[str, bool] = {}  # fields, and whether one has to be given
        for c in reversed([c for c in classes if c is not None]):
            assert isinstance(c.node, ast.ClassDef)
            for s in c.node.body:
                if isinstance(s, ast.AnnAssign) and "ClassVar" not in ast.unparse(s.annotation):
                    names[ast.unparse(s.target)] = s.value is None
        if not names:
            return None
        required = frozenset(n for n, needed in names.items() if needed)
        return Signature(tuple(names), len(names), required, False, False)
