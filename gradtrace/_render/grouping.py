"""Which nodes share one box: modules collapse and repeats fold until a picture can be read."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gradtrace._render.selection import View

Groups = Mapping[Hashable, Sequence[int]]


class Fold(IntEnum):
    """What besides modules becomes one box; each member includes those before it."""

    NOTHING = 0
    SIBLINGS = 1  # collapsed items of one list of modules that are alike and without a cut
    LINES = 2  # ops of one line of source
    LEAVES = 3  # leaves whose names differ in a number only
    FUNCTIONS = 4  # ops of one function, leaves of one status


@dataclass(frozen=True, slots=True)
class Plan:
    """How coarsely to draw.

    Attributes:
        depth: Levels of modules that are drawn open; those below are a box each.
        fold: What else becomes one box.
    """

    depth: int
    fold: Fold


def group(
    view: View, limit: int, *, full: bool = False, depth: int | None = None
) -> tuple[Plan, Groups]:
    """Return the finest plan that keeps to a number of boxes, or the coarsest, and its groups.

    Args:
        view: What is drawn.
        limit: Number of boxes to keep to.
        full: Give every node a box of its own.
        depth: Levels of modules to draw open; None for as many as fit.

    Returns:
        The plan, and by a key that tells what they share the nodes of each box.
    """
    for plan in _plans(view, full=full, depth=depth):
        groups = _apply(plan, view)
        if len(groups) <= limit:
            break
    return plan, groups


def _plans(view: View, *, full: bool, depth: int | None) -> Iterator[Plan]:
    """Yield ways to draw, the finest first.

    The outermost modules stay open while folding lines helps: one box "model" would say nothing.
    """
    deepest = max((len(path_parts(path)) for path in view.modules.values()), default=0)
    if full:
        yield Plan(deepest, Fold.NOTHING)
    elif depth is not None:
        yield from (Plan(depth, fold) for fold in Fold)
    else:
        levels = range(deepest, 0, -1)
        yield from (Plan(depth, fold) for depth in levels for fold in (Fold(0), Fold.SIBLINGS))
        yield from (Plan(depth, Fold.LINES) for depth in levels)
        yield from (Plan(0, fold) for fold in Fold)


def _apply(plan: Plan, view: View) -> dict[Hashable, list[int]]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for node in view.nodes:
        groups[_key(plan, view, node)].append(node)
    return dict(groups) if plan.fold < Fold.SIBLINGS else _merge_siblings(view, groups)


def _merge_siblings(view: View, groups: Groups) -> dict[Hashable, list[int]]:
    """Put collapsed modules that are alike into the group of the first."""
    merged: dict[Hashable, list[int]] = {}
    first: dict[Hashable, Hashable] = {}
    for key, nodes in groups.items():
        likeness = _likeness(view, key, nodes)
        merged.setdefault(first.setdefault(likeness, key), []).extend(nodes)
    return {key: sorted(nodes) for key, nodes in merged.items()}


def _likeness(view: View, key: Hashable, nodes: Sequence[int]) -> Hashable:
    """Return what siblings share: the module they are a numbered item of, verdicts, and no cut."""
    path = module_of(key) or ""
    around, _, number = path.rpartition(".")
    if not number.isdecimal() or any(view.nodes[node]["cut"] for node in nodes):
        return key
    verdicts = Counter(view.status.get(node) for node in nodes)
    return "siblings", around, frozenset(verdicts.items())


def module_of(key: Hashable) -> str | None:
    """Return the path of the module that a group's key stands for, None for other groups."""
    return str(key[1]) if isinstance(key, tuple) and key[0] == "module" else None


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
    alike = _family(view, node) if plan.fold is Fold.LEAVES else None
    return "leaf", view.modules[node], view.status.get(node), alike


def _call_key(plan: Plan, view: View, node: int) -> Hashable:
    """Keep apart what a reader tells apart: cuts by kind, ops by whether a gradient arrived."""
    data = view.nodes[node]
    where = data["line"] if plan.fold < Fold.FUNCTIONS else data["function"]
    alike = _family(view, node) if data["kind"] == "input" else None
    looks = data["kind"], data["cut"], bool(data["reached"]), bool(data["root_of"]), alike
    return "call", view.modules[node], data["file"], where, looks


def _family(view: View, node: int) -> str:
    """Return a name without what counts: "w7" is one of "w#"."""
    return re.sub(r"\d+", "#", view.nodes[node]["name"] or "")


def path_parts(path: str) -> list[str]:
    """Return the parts of a dotted path, none for ""."""
    return path.split(".") if path else []
