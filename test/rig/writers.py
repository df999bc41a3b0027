"""Finds the functions of an engine's sources that write parameters of a model in place."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable

PARAMETERS = {"parameters", "named_parameters", "state_dict", "get_parameter", "_model_state"}
NO_WRITE = {"requires_grad_", "share_memory_", "detach_"}


def find(root: pathlib.Path, directories: Iterable[str]) -> dict[str, pathlib.Path]:
    """Functions, "Class.method" or "function", and where the first of each name is."""
    found: dict[str, pathlib.Path] = {}
    for directory in directories:
        for path in sorted((root / directory).rglob("*.py")):
            text = path.read_text()
            if ".data" in text or any(p in text for p in PARAMETERS):
                for name in _writers(ast.parse(text)):
                    found.setdefault(name, path.relative_to(root))
    return found


def _writers(tree: ast.AST, outer: str = "") -> list[str]:
    out: list[str] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _writes(node):
            out.append(outer + node.name)
        out += _writers(node, node.name + "." if isinstance(node, ast.ClassDef) else "")
    return out


def _writes(function: ast.AST) -> bool:
    """It writes to ``x.data``; or it asks for parameters and calls a method that works in place."""
    calls = [
        n.func
        for n in ast.walk(function)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
    asks = any(c.attr in PARAMETERS for c in calls)
    targets = [t for n in ast.walk(function) if isinstance(n, ast.Assign) for t in n.targets]
    return any(_in_place(c.attr) and (_is_data(c.value) or asks) for c in calls) or any(
        _is_data(t) or isinstance(t, ast.Subscript) and _is_data(t.value) for t in targets
    )


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and name not in NO_WRITE


def _is_data(node: ast.AST) -> bool:
    """Not ``self.data``, which is an object's own."""
    own = (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
    return isinstance(node, ast.Attribute) and node.attr == "data" and not own
