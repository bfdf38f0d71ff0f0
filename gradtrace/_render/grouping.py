"""Which nodes share one box: modules collapse and repeats fold until a picture can be read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import networkx as nx

from gradtrace._render.repeats import Repeats, find_repeats
from gradtrace._render.selection import View

LONGEST_WAY = 40  # boxes in a row that fit into 4,000 pixels with text of 9 points still legible
_MANY_LEAVES = 5
_SOURCES = frozenset({"leaf", "input"})

Owners = Mapping[int, Hashable]


class Fold(IntEnum):
    """What besides modules becomes one box; each member includes those before it."""

    NOTHING = 0
    BUNDLES = 1  # many leaves of one module, of one status, that go to the same boxes
    REPEATS = 2  # successive items of a list of modules that are alike
    CHAINS = 3  # ops in a row; any leaves that go to the same boxes
    LINES = 4  # ops of one line of source
    LEAVES = 5  # leaves whose names differ in a number only
    FUNCTIONS = 6  # ops of one function, leaves of one status


_SHARES = {Fold.NOTHING: 0.25, Fold.BUNDLES: 0.5, Fold.REPEATS: 0.75}  # of the limit


@dataclass(frozen=True, slots=True)
class Plan:
    """How coarsely to draw.

    Attributes:
        depth: Levels of modules that are drawn open; those below are a box each.
        fold: What else becomes one box.
    """

    depth: int
    fold: Fold


class Form(IntEnum):
    """Why nodes share a box."""

    SINGLE = 0
    MODULE = 1
    CHAIN = 2
    ALIKE = 3


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of one box.

    Attributes:
        form: Why they share it.
        nodes: All of them, in order.
        shown: Those that stand for the others: of repeated modules the first one's.
        path: Of the collapsed module, or else of the one around.
    """

    form: Form
    nodes: tuple[int, ...]
    shown: tuple[int, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Grouping:
    """All boxes of a picture.

    Attributes:
        plan: How coarsely they are drawn.
        groups: In order of creation.
        repeats: The lists of modules that are folded.
    """

    plan: Plan
    groups: tuple[Group, ...]
    repeats: Repeats


def group(view: View, limit: int, *, full: bool = False, depth: int | None = None) -> Grouping:
    """Return the finest way to draw that can be read, or else the coarsest.

    Args:
        view: What is drawn.
        limit: Number of boxes to keep to.
        full: Give every node a box of its own.
        depth: Levels of modules to draw open; None for as many as fit.
    """
    grouper = _Grouper(view)
    for plan in _plans(view, full=full, depth=depth):
        owners = grouper.owners(plan)
        if full or grouper.fits(owners, _most_boxes(plan, limit), any_length=depth is not None):
            break
    return grouper.grouping(plan, owners)


def _most_boxes(plan: Plan, limit: int) -> int:
    """Return how many boxes a plan may have: fewer where what is alike has not folded yet."""
    return max(1, round(limit * _SHARES.get(plan.fold, 1.0)))


def _plans(view: View, *, full: bool, depth: int | None) -> Iterator[Plan]:
    """Yield ways to draw, the finest first.

    The outermost modules stay open while folding lines helps: one box "model" would say nothing.
    """
    deepest = max((len(path_parts(path)) for path in view.modules.values()), default=0)
    if full:
        yield Plan(deepest, Fold.NOTHING)
        return
    if depth is not None:
        yield from (Plan(depth, fold) for fold in Fold)
        return
    levels = range(deepest, 0, -1)
    yield from (Plan(deepest, fold) for fold in (Fold.NOTHING, Fold.BUNDLES, Fold.REPEATS))
    yield from (Plan(level, Fold.CHAINS) for level in levels)
    yield from (Plan(level, Fold.LINES) for level in levels)
    yield from (Plan(0, fold) for fold in Fold if fold)


class _Grouper:
    """Gives nodes to boxes. What all plans need of a view is found once."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._edges = view.edges

    @cached_property
    def _repeats(self) -> Repeats:
        return find_repeats(self._view)

    def _repeats_of(self, plan: Plan) -> Repeats:
        return self._repeats if plan.fold >= Fold.REPEATS else Repeats({}, {})

    def owners(self, plan: Plan) -> Owners:
        """Return by node what it has in common with the others in its box."""
        first = self._repeats_of(plan).first
        keys: dict[int, Hashable] = {
            node: _key(plan, self._view, node) for node in self._view.nodes if node not in first
        }
        keys |= {node: keys[like] for node, like in first.items()}
        keys |= self._parted(keys, first)
        if plan.fold >= Fold.BUNDLES:
            least = 2 if plan.fold >= Fold.CHAINS else _MANY_LEAVES
            keys = _renamed(keys, self._bundled(keys, least))
        if plan.fold >= Fold.CHAINS:
            keys = _renamed(keys, self._chained(keys))
        return keys

    def fits(self, owners: Owners, most: int, *, any_length: bool) -> bool:
        """Whether there are few enough boxes, and not too many of them in a row."""
        if len(set(owners.values())) > most:
            return False
        return any_length or self._longest_way(owners) <= LONGEST_WAY

    def _longest_way(self, owners: Owners) -> int:
        order: dict[Hashable, int] = {}
        for node in self._view.nodes:
            order.setdefault(owners[node], len(order))
        followers: defaultdict[int, set[int]] = defaultdict(set)
        for tail, head, _ in self._edges:
            if order[owners[tail]] < order[owners[head]]:
                followers[order[owners[tail]]].add(order[owners[head]])
        length = [1] * len(order)
        for box in range(len(order)):
            for follower in followers[box]:
                length[follower] = max(length[follower], length[box] + 1)
        return max(length, default=0)

    def grouping(self, plan: Plan, owners: Owners) -> Grouping:
        """Return the boxes of a plan."""
        members: defaultdict[Hashable, list[int]] = defaultdict(list)
        for node in self._view.nodes:
            members[owners[node]].append(node)
        repeats = self._repeats_of(plan)
        groups = (self._group(key, nodes, repeats) for key, nodes in members.items())
        return Grouping(plan, tuple(groups), repeats)

    def _group(self, key: Hashable, nodes: Sequence[int], repeats: Repeats) -> Group:
        shown = tuple(node for node in nodes if node not in repeats.first)
        if isinstance(key, tuple) and key[0] == "module":
            return Group(Form.MODULE, tuple(nodes), shown, str(key[1]))
        path = self._view.modules[shown[0]]
        if isinstance(key, tuple) and key[0] == "chain":
            return Group(Form.CHAIN, tuple(nodes), shown, path)
        form = Form.ALIKE if len(shown) > 1 else Form.SINGLE
        return Group(form, tuple(nodes), shown, path)

    def _parted(self, keys: Owners, first: Mapping[int, int]) -> dict[int, Hashable]:
        """Return new keys that tell the calls of a collapsed module without leaves apart.

        An activation that is called at three places would else be one box with loops around it.
        """
        with_leaves = {keys[node] for node in self._view.status}
        modules = {node: key for node, key in keys.items() if isinstance(key, tuple)}
        calls = {n for n, key in modules.items() if key[0] == "module" and key not in with_leaves}
        parts = nx.utils.UnionFind(calls)
        for tail, head, _ in self._edges:
            if tail in calls and head in calls and keys[tail] == keys[head]:
                parts.union(tail, head)
        for node in calls.intersection(first):
            parts.union(node, first[node])
        found: dict[int, Hashable] = {}
        for part in parts.to_sets():
            shown = {first.get(node, node) for node in part}
            key = min(shown) if len(shown) == 1 else (*modules[min(shown)], min(shown))
            found |= dict.fromkeys(part, key)
        return found

    # -- steps, each of which returns new keys by old ones ----------------------------------------

    def _bundled(self, keys: Owners, least: int) -> dict[Hashable, Hashable]:
        """Put leaves, or inputs, of one module together that go to the same boxes alike."""
        ways: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
        for tail, head, edge in self._edges:
            ways[keys[tail]].add((keys[head], edge["reached"]))
        alike: defaultdict[Hashable, list[int]] = defaultdict(list)
        for node in self._own(keys, _SOURCES):
            facts = self._view.nodes[node]
            looks = facts["kind"], self._view.status.get(node), facts["reached"]
            alike[self._view.modules[node], looks, frozenset(ways[node])].append(node)
        bundles = (nodes for nodes in alike.values() if len(nodes) >= least)
        return {node: ("bundle", nodes[0]) for nodes in bundles for node in nodes}

    def _chained(self, keys: Owners) -> dict[Hashable, Hashable]:
        """Put ops together of which each takes the one before and nothing else."""
        ahead: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
        behind: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
        passes: dict[tuple[Hashable, Hashable], set[tuple[int, ...]]] = defaultdict(set)
        for tail, head, edge in self._edges:
            ahead[keys[tail]].add(keys[head])
            behind[keys[head]].add(keys[tail])
            passes[keys[tail], keys[head]].add(edge["reached"])
        plain = set(self._own(keys, {"op"}))
        found: dict[Hashable, Hashable] = {}
        for node in sorted(plain):
            if len(behind[node]) != 1:
                continue
            (before,) = behind[node]
            if not isinstance(before, int) or before not in plain or ahead[before] != {node}:
                continue
            if self._alike(before, node, passes[before, node]):
                found.setdefault(before, ("chain", before))
                found[node] = found[before]
        return found

    def _alike(self, one: int, other: int, passes: set[tuple[int, ...]]) -> bool:
        view = self._view
        reached = {*passes, view.nodes[one]["reached"], view.nodes[other]["reached"]}
        return (
            len(reached) == 1
            and view.modules[one] == view.modules[other]
            and (one in view.wanting) == (other in view.wanting)
        )

    def _own(self, keys: Owners, kinds: frozenset[str] | set[str]) -> Iterator[int]:
        """Yield nodes of some kinds that have a box of their own, are no cut and no root."""
        for node, facts in self._view.nodes.items():
            stands_out = facts["cut"] or facts["root_of"]
            if keys[node] == node and facts["kind"] in kinds and not stands_out:
                yield node


def _renamed(keys: Owners, names: Mapping[Hashable, Hashable]) -> dict[int, Hashable]:
    return {node: names.get(key, key) for node, key in keys.items()}


def _key(plan: Plan, view: View, node: int) -> Hashable:
    """Return what a node has in common with the others in its box; its number if it has its own."""
    parts = path_parts(view.modules[node])
    is_root = bool(view.nodes[node]["root_of"])
    if len(parts) > plan.depth and not is_root:
        return "module", ".".join(parts[: plan.depth + 1])
    if plan.fold < Fold.LINES:
        return node
    if view.nodes[node]["kind"] == "leaf":
        return _leaf_key(plan, view, node)
    return _call_key(plan, view, node)


def _leaf_key(plan: Plan, view: View, node: int) -> Hashable:
    if plan.fold is Fold.LINES:
        return node
    alike = _family(view.nodes[node]) if plan.fold is Fold.LEAVES else None
    root = bool(view.nodes[node]["root_of"])
    return "leaf", view.modules[node], view.status.get(node), alike, root


def _call_key(plan: Plan, view: View, node: int) -> Hashable:
    """Keep apart what a reader tells apart: cuts by kind, ops by whether a gradient arrived."""
    data = view.nodes[node]
    where = data["line"] if plan.fold < Fold.FUNCTIONS else data["function"]
    alike = _family(data) if data["kind"] == "input" else None
    looks = data["kind"], data["cut"], bool(data["reached"]), bool(data["root_of"]), alike
    return "call", view.modules[node], data["file"], where, looks


def _family(data: Mapping[str, Any]) -> str:
    """Return a name without what counts: "w7" is one of "w#"."""
    return re.sub(r"\d+", "#", data["name"] or "")


def path_parts(path: str) -> list[str]:
    """Return the parts of a dotted path, none for ""."""
    return path.split(".") if path else []
