#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what our plug-ins use of an engine in the pinned release and in another one, the newest
that the package index has. Nothing is imported. The exit status is 1 if something that is used is
gone or takes other arguments.

usage: compare.py [--vllm VERSION] [--sglang VERSION]
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
from dataclasses import dataclass, field

import packages
import uses
from packages import ROOT
from sources import Function, Signature, Sources, Thing, Unknown, decorators, signature
from uses import Subclass, Use

OURS = ("integration/vllm/src", "integration/sglang/src", "pybind/python")


@dataclass
class Page:
    broken: dict[str, list[str]] = field(default_factory=dict)  # what: where it is used
    changed: dict[str, list[str]] = field(default_factory=dict)
    added: dict[str, list[str]] = field(default_factory=dict)
    names: int = 0  # that were compared

    def show(self, title: str) -> None:
        print(f"{title}: {self.names} names in use\n")
        for heading, found in (
            ("Gone or incompatible", self.broken),
            ("Changed, or gone where our source handles that", self.changed),
            ("New in base classes of ours", self.added),
        ):
            print(f"{heading}: {len(found) or 'nothing'}")
            for what, where in found.items():
                places = list(dict.fromkeys(where))
                more = f" and {len(places) - 2} more" if len(places) > 2 else ""
                print(f"  {what}\n      {', '.join(places[:2])}{more}")
            print()


def changes(old: Signature, new: Signature) -> str:
    """The differences in words; empty if there are none."""
    if old == new:
        return ""
    gone = [n for n in old.names if n not in new.names]
    came = [n for n in new.names if n not in old.names]
    out = []
    for n in list(gone):  # in the same place
        at = old.names.index(n)
        if at < len(new.names) and new.names[at] in came and len(gone) == len(came):
            out.append(f"{n} is now {new.names[at]}")
            gone.remove(n)
            came.remove(new.names[at])
    out += [f"without {n}" for n in gone]
    out += [f"with {n}{'' if n in new.required else ' (optional)'}" for n in came]
    kept = [n for n in old.names if n in new.names]
    if kept != [n for n in new.names if n in old.names]:
        out.append(f"in another order: {new}")
    out += [f"{n} must be given" for n in kept if n in new.required - old.required]
    return ", ".join(out) or f"{old} is now {new}"


def call_problem(call: ast.Call, to: Signature) -> str:
    """Why a call of ours no longer fits."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(not k.arg for k in call.keywords):
        return ""
    given = {*to.names[: len(call.args)], *(k.arg for k in call.keywords if k.arg)}
    if len(call.args) > to.positional and not to.star:
        return f"our call gives {len(call.args)} arguments by position"
    if not to.star_star and (unknown := given - set(to.names)):
        return f"our call gives {', '.join(sorted(unknown))}"
    if missing := to.required - given:
        return f"our call does not give {', '.join(sorted(missing))}"
    return ""


def override_problem(ours: Signature, base: Signature) -> str:
    """Why a method of ours can no longer replace the engine's."""
    lacking = [n for n in base.names if n not in ours.names]
    if lacking and not ours.star_star:
        return f"our method lacks {', '.join(lacking)}"
    if extra := ours.required - set(base.names):
        return "" if base.star or base.star_star else f"our method needs {', '.join(sorted(extra))}"
    return ""


class Comparison:
    def __init__(self, old: Sources, new: Sources) -> None:
        self.old, self.new, self.page = old, new, Page()
        self._gone: set[str] = set()

    def _look(self, use: Use) -> None:
        if any(use.path.startswith(f"{g}.") for g in self._gone):
            return
        try:
            before, after = self.old.find(use.path), self.new.find(use.path)
        except Unknown:
            return
        if before is None:
            return
        if after is None:
            self._gone.add(use.path)
            moved = "" if use.guarded else self._elsewhere(use.path)
            table = self.page.changed if use.guarded else self.page.broken
            table.setdefault(f"{use.path} is gone{moved}", []).append(use.where)
            return
        a, b = self.old.parameters(before), self.new.parameters(after)
        if a is None or b is None:
            return
        if isinstance(after.node, ast.ClassDef) and use.call is None:
            return  # we do not call its constructor
        problem = ""
        if use.call is not None and not call_problem(use.call, a):
            problem = call_problem(use.call, b)
        if use.override is not None and isinstance(after.node, Function):
            ours = signature(use.override)
            problem = problem or override_problem(ours, b)
            if problem == override_problem(ours, a):  # as it was
                problem = ""
        if change := changes(a, b):
            what = f"{use.path}: {change}" + (f"; {problem}" if problem else "")
            table = self.page.broken if problem else self.page.changed
            table.setdefault(what, []).append(use.where)

    def _elsewhere(self, path: str) -> str:
        """The file of the new release that defines this name."""
        name = path.rpartition(".")[2]
        defined = re.compile(rf"^\s*(?:class|def|async def) {name}\b", re.M)
        root = self.new.root / path.partition(".")[0]
        for file in sorted(root.rglob("*.py")):
            if defined.search(file.read_text(errors="replace")):
                return f"; {file.relative_to(self.new.root)} has one"
        return ""

    def _base(self, sub: Subclass) -> None:
        """Methods that a base class of ours has only in the new release."""
        try:
            before, after = self.old.find(sub.base), self.new.find(sub.base)
        except Unknown:
            return
        if not (before and after and isinstance(after.node, ast.ClassDef)):
            return
        had, has = self.old.methods(before), self.new.methods(after)
        for name in sorted(has.keys() - had.keys()):
            abstract = "abstractmethod" in decorators(has[name]) and name not in sub.own
            if name.startswith("_") and not abstract:
                continue
            table = self.page.broken if abstract else self.page.added
            kind = "abstract and not ours" if abstract else "a hook"
            if name in sub.own:
                kind = "a hook that we have"
            what = f"{sub.base}.{name}{signature(has[name])}: {kind}"
            table.setdefault(what, []).append(f"{sub.where} {sub.name}")

    def run(self, engine: str, ours: list[uses.Package]) -> Page:
        """ours: of each of our packages."""
        ours = [f for f in ours if any(u.engine == engine for u in f.uses)]
        used = [u for f in ours for u in f.uses if u.engine == engine]
        self.page.names = len({u.path for u in used if self._known(u.path)})
        for use in sorted(used, key=lambda u: (u.path, u.where)):
            self._look(use)
        for sub in (s for f in ours for s in f.subclasses if s.base.startswith(f"{engine}.")):
            self._base(sub)
        last = {path.rpartition(".")[2] for path in self._gone}
        lost = _words(self.old.root / engine) - _words(self.new.root / engine) - last
        for f in ours:
            tables = (f.attributes, self.page.broken), (f.guarded, self.page.changed)
            for found, table in tables:
                for word in sorted(lost & found.keys() - f.own):
                    table[f"no {word} is anywhere in {engine} any more"] = found[word]
        return self.page

    def _known(self, path: str) -> Thing | None:
        try:
            return self.old.find(path)
        except Unknown:
            return None


def _words(root: pathlib.Path) -> set[str]:
    out: set[str] = set()
    for file in root.rglob("*.py"):
        out |= set(re.findall(r"[A-Za-z_]\w+", file.read_text(errors="replace")))
    return out


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for engine in uses.ENGINES:
        ap.add_argument(f"--{engine}", default="", metavar="VERSION")
    args = ap.parse_args()
    ours = [uses.read(ROOT, package) for package in OURS]
    broken = 0
    for engine in uses.ENGINES:
        pin = packages.PINS[engine]
        version = getattr(args, engine) or packages.newest(engine)
        title = f"{engine} {pin.partition('==')[2]} (pinned) to {version}"
        if pin.endswith(f"=={version}"):
            print(f"{title}: the newest is the pinned one\n")
            continue
        comparison = Comparison(
            Sources(packages.unpacked(pin)), Sources(packages.unpacked(f"{engine}=={version}"))
        )
        page = comparison.run(engine, ours)
        page.show(title)
        broken += len(page.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except packages.Failed as err:
        print(f"test-next: {err}", file=sys.stderr)
        sys.exit(2)
