"""Two graphs -> TraceDiff: what became of the flow of gradients between two recordings.

Leaves are paired by name; ops by module path and name. Lines that moved, other norms and another
number of the same node are no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from gradtrace._flow import Flow
from gradtrace._outline import TOP, CutKey, Outline
from gradtrace._records import Cut, Leaf, Status

Norms = tuple[float | None, ...]
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class LeafDiff:
    """What changed for one leaf.

    Attributes:
        name: As in both traces.
        before: Its status in the first trace; None where it isn't in it.
        after: Its status in the second trace; None where it isn't in it.
        cuts_gained: Cuts that only the second trace has.
        cuts_lost: Cuts that only the first trace has.
        paths_gained: Ways to a root, in words, that only the second trace has.
        paths_lost: Ways that only the first trace has.
        arrivals_before: Passes, and terms of the loss, that brought gradients in the first trace.
        arrivals_after: The same in the second.
        norms_before: Norms of the gradients that arrived, in order. Not compared.
        norms_after: The same in the second.
    """

    name: str
    before: Status | None
    after: Status | None
    cuts_gained: tuple[Cut, ...]
    cuts_lost: tuple[Cut, ...]
    paths_gained: tuple[str, ...]
    paths_lost: tuple[str, ...]
    arrivals_before: tuple[str, ...]
    arrivals_after: tuple[str, ...]
    norms_before: Norms
    norms_after: Norms

    def __bool__(self) -> bool:
        return (
            self.before is not self.after
            or self.arrivals_before != self.arrivals_after
            or any((self.cuts_gained, self.cuts_lost, self.paths_gained, self.paths_lost))
        )

    def __str__(self) -> str:
        return "\n".join(_group_lines([self]))

    @property
    def verdict(self) -> str:
        """The status before and after, in words."""
        if self.before is None:
            return f"new, {self.after}"
        if self.after is None:
            return f"gone, was {self.before}"
        return f"{self.before} -> {self.after}" if self.before is not self.after else self.after

    def changes(self) -> Iterator[str]:
        """Yield what else changed but the ways, a line each."""
        yield from (f"- cut: {text}" for text in _limited(list(map(_cut_text, self.cuts_lost))))
        yield from (f"+ cut: {text}" for text in _limited(list(map(_cut_text, self.cuts_gained))))
        if self.arrivals_before != self.arrivals_after and self.before and self.after:
            yield f"- reached in {'; '.join(self.arrivals_before) or 'no pass'}"
            yield f"+ reached in {'; '.join(self.arrivals_after) or 'no pass'}"


@dataclass(frozen=True, slots=True)
class OpDiff:
    """Ops of one name that one module makes more or fewer of.

    Attributes:
        op: The op's name.
        before: Path of the module that made it in the first trace; None where it is new.
        after: Path of the module that makes it in the second trace; None where it is gone.
        count: How many.
    """

    op: str
    before: str | None
    after: str | None
    count: int

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count > 1 else ""
        if self.before is None:
            return f"+ op: {self.op}{times} {_within(self.after or '')}"
        if self.after is None:
            return f"- op: {self.op}{times} {_within(self.before)}"
        return f"~ op: {self.op}{times} moved from {self.before or TOP} to {self.after or TOP}"


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """What changed between two traces. False where the flow of gradients is the same.

    `str()` is what a person reads in a review.

    Attributes:
        leaves: The leaves that changed, by name.
        ops: Ops on ways from leaves to roots that are new, gone or in another module.
        passes_gained: Backward passes, in words, that only the second trace has.
        passes_lost: Those that only the first has.
        norms: For each leaf of both traces the norms of what arrived, before and after. Not part of
            the comparison: another seed changes them all.
    """

    leaves: tuple[LeafDiff, ...]
    ops: tuple[OpDiff, ...]
    passes_gained: tuple[str, ...]
    passes_lost: tuple[str, ...]
    norms: dict[str, tuple[Norms, Norms]]

    def __bool__(self) -> bool:
        return bool(self.leaves or self.ops or self.passes_gained or self.passes_lost)

    def __str__(self) -> str:
        if not self:
            return "The flow of gradients is the same."
        return "\n".join(chain.from_iterable(self._sections()))

    def _sections(self) -> Iterator[Iterable[str]]:
        yield [self._headline()]
        yield (f"- pass: {text}" for text in self.passes_lost)
        yield (f"+ pass: {text}" for text in self.passes_gained)
        yield _limited(self.ops)
        yield _alike(self.leaves)

    def _headline(self) -> str:
        changed = Counter(
            f"{leaf.before or 'new'} -> {leaf.after or 'gone'}"
            for leaf in self.leaves
            if leaf.before is not leaf.after
        )
        counts = [f"{_leaves(count)} {what}" for what, count in changed.items()]
        others = len(self.leaves) - sum(changed.values())
        if others:
            counts.append(f"{_leaves(others)} with other ways")
        return "The flow of gradients differs" + (f": {', '.join(counts)}." if counts else ".")


def diff(before: Flow, after: Flow) -> TraceDiff:
    """Compare two flows of gradients."""
    one, other = Outline(before), Outline(after)
    names = list(dict.fromkeys((*one.leaves, *other.leaves)))
    leaves = (_leaf_diff(name, (before, one), (after, other)) for name in names)
    passes_before, passes_after = Counter(one.passes()), Counter(other.passes())
    return TraceDiff(
        leaves=tuple(leaf for leaf in leaves if leaf),
        ops=tuple(_op_diffs(one.ops(), other.ops())),
        passes_gained=tuple((passes_after - passes_before).elements()),
        passes_lost=tuple((passes_before - passes_after).elements()),
        norms={
            name: (_norms(before, one.leaves[name]), _norms(after, other.leaves[name]))
            for name in names
            if name in one.leaves and name in other.leaves
        },
    )


def _leaf_diff(name: str, before: tuple[Flow, Outline], after: tuple[Flow, Outline]) -> LeafDiff:
    (flow_before, one), (flow_after, other) = before, after
    leaf_before, leaf_after = one.leaves.get(name), other.leaves.get(name)
    cuts_before = {} if leaf_before is None else one.cuts(leaf_before)
    cuts_after = {} if leaf_after is None else other.cuts(leaf_after)
    ways_before, ways_after = _ways((one, leaf_before), (other, leaf_after))
    return LeafDiff(
        name=name,
        before=None if leaf_before is None else leaf_before.status,
        after=None if leaf_after is None else leaf_after.status,
        cuts_gained=tuple(_surplus(cuts_after, cuts_before)),
        cuts_lost=tuple(_surplus(cuts_before, cuts_after)),
        paths_gained=tuple((ways_after - ways_before).elements()),
        paths_lost=tuple((ways_before - ways_after).elements()),
        arrivals_before=() if leaf_before is None else tuple(one.arrivals(leaf_before)),
        arrivals_after=() if leaf_after is None else tuple(other.arrivals(leaf_after)),
        norms_before=() if leaf_before is None else _norms(flow_before, leaf_before),
        norms_after=() if leaf_after is None else _norms(flow_after, leaf_after),
    )


def _ways(
    before: tuple[Outline, Leaf | None], after: tuple[Outline, Leaf | None]
) -> tuple[Counter[str], Counter[str]]:
    """Return the ways of a leaf in both traces, told alike: op by op where that is possible."""
    sides = [(outline, leaf) for outline, leaf in (before, after) if leaf is not None]
    if len(sides) < 2:  # that the leaf is new, or gone, says it
        return Counter(), Counter()
    one, other = [outline.ways(leaf) for outline, leaf in sides]
    if one is None or other is None:
        one, other = [outline.steps_from(leaf) for outline, leaf in sides]
    return one, other


def _surplus(cuts: Mapping[CutKey, list[Cut]], others: Mapping[CutKey, list[Cut]]) -> Iterator[Cut]:
    """Yield the cuts of which there are more than among the others."""
    for key, alike in cuts.items():
        yield from alike[len(others.get(key, ())) :]


def _op_diffs(
    before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]
) -> Iterator[OpDiff]:
    """Yield moved ops, then those that are gone, then those that are new."""
    gone, new = before - after, after - before
    for module, op in list(gone):
        for other, same in list(new):
            count = min(gone[module, op], new[other, same]) if same == op else 0
            if count:
                gone[module, op] -= count
                new[other, op] -= count
                yield OpDiff(op, module, other, count)
    yield from (OpDiff(op, module, None, count) for (module, op), count in (+gone).items())
    yield from (OpDiff(op, None, module, count) for (module, op), count in (+new).items())


def _norms(flow: Flow, leaf: Leaf) -> Norms:
    return tuple(gradient.norm for gradient in flow.gradients_at(leaf.node))


# -- in words --------------------------------------------------------------------------------------


def _within(module: str) -> str:
    return f"in {module}" if module else f"at {TOP}"


def _alike(leaves: Iterable[LeafDiff]) -> Iterator[str]:
    """Yield what changed, once for leaves that changed in the same way."""
    groups: dict[tuple[str, ...], list[LeafDiff]] = {}
    for leaf in leaves:
        groups.setdefault((leaf.verdict, *leaf.changes()), []).append(leaf)
    for group in groups.values():
        yield ""
        yield from _group_lines(group)


def _group_lines(group: Sequence[LeafDiff]) -> Iterator[str]:
    """Yield what changed for leaves that changed alike, with the ways that all of them share."""
    yield f"{_names(group)}: {group[0].verdict}{_norm_change(group)}"
    yield from (f"  {change}" for change in group[0].changes())
    for sign, of in (("-", attrgetter("paths_lost")), ("+", attrgetter("paths_gained"))):
        shared = set.intersection(*(set(of(leaf)) for leaf in group))
        ways = [way for way in of(group[0]) if way in shared]
        yield from (f"  {sign} way: {way}" for way in _limited(ways))


def _leaves(count: int) -> str:
    return f"{count} {'leaf' if count == 1 else 'leaves'}"


def _names(leaves: Sequence[LeafDiff]) -> str:
    shown = ", ".join(leaf.name for leaf in leaves[:_SHOWN])
    return f"{shown} and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else shown


def _norm_change(leaves: Sequence[LeafDiff]) -> str:
    """Return the last norms of a leaf that is alone."""
    before, after = (_last(norms) for norms in (leaves[0].norms_before, leaves[0].norms_after))
    if len(leaves) > 1 or before == after:
        return ""
    return f" (last norm {before} -> {after})"


def _last(norms: Norms) -> str:
    return "none" if not norms else "not seen" if norms[-1] is None else f"{norms[-1]:.4g}"


def _cut_text(cut: Cut) -> str:
    where = "" if cut.location is None else f" at {cut.location}"
    source = f": {cut.source}" if cut.source else ""
    return f"{CutKey.of(cut)}{where}{source}"


def _limited(lines: Sequence[object]) -> Iterator[str]:
    yield from map(str, lines[:_SHOWN])
    if len(lines) > _SHOWN:
        yield f"... and {len(lines) - _SHOWN} more"
