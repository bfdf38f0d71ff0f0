"""Items of a list of modules that did the same, so that one of them can stand for all.

Alike are items that follow one another in their list, whose nodes are the same ones in the same
order with the same results, whose leaves have the same names, shapes and verdicts, and whose edges
were reached by the same passes. An item with a cut in it, with a leaf that is cut, or with a root
is like no other: no fold hides it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from gradtrace._records import Status
from gradtrace._render.selection import View

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Which nodes are repeats of which.

    Attributes:
        first: By node the one that it repeats, which repeats none itself.
        runs: By path of the first item of a run the number of the last one.
    """

    first: Mapping[int, int]
    runs: Mapping[str, int]

    def text(self, path: str) -> str:
        """Return a path with the items that it stands for: "encoder.layer.0–11.attention"."""
        parts = path.split(".")
        for at in range(len(parts)):
            last = self.runs.get(".".join(path.split(".")[: at + 1]))
            if last is not None:
                parts[at] = f"{parts[at]}–{last}"
        return ".".join(parts)

    def times(self, path: str) -> int:
        """Return how many items the first one at a path stands for; 1 where it is no first one."""
        last = self.runs.get(path)
        return 1 if last is None else last - int(path.rpartition(".")[2]) + 1


def find_repeats(view: View) -> Repeats:
    """Return the repeats of a view: outermost lists first, then those inside of what is left."""
    finder = _Finder(view)
    deepest = max(map(len, finder.paths.values()), default=0)
    for level in range(1, deepest + 1):
        finder.fold(level)
    return Repeats(finder.resolved(), finder.runs)


class _Finder:
    def __init__(self, view: View) -> None:
        self._view = view
        self._into: defaultdict[int, list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
        self._out: defaultdict[int, list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
        for tail, head, edge in view.edges:
            self._into[head].append((tail, edge))
            self._out[tail].append((head, edge))
        self.paths = {node: self._path(node) for node in view.nodes}
        self.first: dict[int, int] = {}
        self.runs: dict[str, int] = {}

    def resolved(self) -> dict[int, int]:
        """Return by node the one that stands for it: an outer list's item may be folded inside."""
        return {node: self._resolve(node) for node in self.first}

    def _resolve(self, node: int) -> int:
        while node in self.first:
            node = self.first[node]
        return node

    def _path(self, node: int) -> Path:
        """Return the module that a node belongs to; data belongs to the one that takes it."""
        path = self._view.modules[node]
        if path or self._view.nodes[node]["kind"] != "input":
            return tuple(path.split(".")) if path else ()
        takers = {tuple(self._view.modules[head].split(".")) for head, _ in self._out[node]}
        levels = takewhile(lambda parts: len(set(parts)) == 1, zip(*takers, strict=False))
        return tuple(parts[0] for parts in levels)

    def fold(self, level: int) -> None:
        """Fold the lists whose items have so many parts in their paths."""
        items: defaultdict[Path, list[int]] = defaultdict(list)
        for node, path in self.paths.items():
            if len(path) >= level and path[level - 1].isdecimal() and node not in self.first:
                items[path[:level]].append(node)
        lists: defaultdict[Path, dict[int, Path]] = defaultdict(dict)
        for path in items:
            lists[path[:-1]][int(path[-1])] = path
        for numbered in lists.values():
            for run in self._runs(numbered, items):
                self._fold_run(run, numbered, items)

    def _runs(
        self, numbered: Mapping[int, Path], items: Mapping[Path, Sequence[int]]
    ) -> Iterator[list[int]]:
        """Yield the numbers of two or more successive items that are alike."""
        likeness = {number: self._likeness(path, items[path]) for number, path in numbered.items()}
        run: list[int] = []
        for number in sorted(numbered):
            follows = run and number == run[-1] + 1 and likeness[number] is not None
            if follows and likeness[number] == likeness[run[-1]]:
                run.append(number)
                continue
            if len(run) > 1:
                yield run
            run = [number]
        if len(run) > 1:
            yield run

    def _fold_run(
        self,
        run: Sequence[int],
        numbered: Mapping[int, Path],
        items: Mapping[Path, Sequence[int]],
    ) -> None:
        originals = items[numbered[run[0]]]
        for number in run[1:]:
            self.first |= dict(zip(items[numbered[number]], originals, strict=True))
        self.runs[".".join(numbered[run[0]])] = run[-1]

    def _likeness(self, path: Path, nodes: Sequence[int]) -> Hashable:
        """Return all that like items share, or None for one that is like no other."""
        if any(self._stands_out(node) for node in nodes):
            return None
        position = {node: at for at, node in enumerate(nodes)}
        return tuple(self._node(path, node, position) for node in nodes)

    def _stands_out(self, node: int) -> bool:
        facts = self._view.nodes[node]
        return bool(facts["cut"] or facts["root_of"] or self._view.status.get(node) is Status.CUT)

    def _node(self, path: Path, node: int, position: Mapping[int, int]) -> Hashable:
        facts = self._view.nodes[node]
        is_leaf = facts["kind"] == "leaf"
        return (
            facts["kind"],
            facts["op"],
            facts["shape"] if is_leaf else None,  # an op's can come from the data
            facts["reached"],
            self._view.status.get(node),
            node in self._view.wanting,
            self.paths[node][len(path) :],
            (facts["name"] or "").removeprefix(".".join(path)) if is_leaf else None,
            tuple(self._edge(tail, edge, position) for tail, edge in self._into[node]),
            frozenset(
                (edge["output"], edge["reached"])
                for head, edge in self._out[node]
                if head not in position
            ),
        )

    def _edge(self, tail: int, edge: Mapping[str, Any], position: Mapping[int, int]) -> Hashable:
        where = position.get(tail)
        outside = None if where is not None else tail in self._view.wanting
        return where, outside, edge["input"], edge["output"], edge["reached"]
