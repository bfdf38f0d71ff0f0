"""Graph -> Explanation: the verdict on one tensor, in words.

Takes the flow of a graph (`_flow.py`) and nothing else, so that a loaded trace explains itself as
the live one did.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gradtrace import _advice
from gradtrace._flow import Flow, Spot, location_of
from gradtrace._hazards import hazards
from gradtrace._records import Cut, CutKind, Gradient, Hazard, HazardKind, Location, Status

_PATHS_SHOWN = 8
_CONVERSIONS = frozenset({"to", "cuda", "cpu", "float", "double", "half", "bfloat16", "type"})


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a tensor got the gradient that it got, or none. `str()` is what a person reads.

    Attributes:
        name: What the tensor is called.
        node: Its node in `trace.graph`.
        status: The verdict over the whole recording.
        cuts: Where its ways to a root are cut; also those of a tensor that is reached.
        gradients: The gradients that arrived at it, in order.
        paths: Some ways from it to a root, as nodes of `trace.graph`; `trace.paths` gives more.
        leaf: Whether it is a leaf, so that its `.grad` is filled.
        made_from: For a tensor that is no leaf: names of the leaves that it was made from.
        origin: For `zero` and `nonfinite`: where in backward the zeros or the NaN arose, such as
            "sign at train.py:12"; None where that was not watched for.
        hints: What happened and what to do, a sentence or two each.
    """

    name: str
    node: int
    status: Status
    cuts: tuple[Cut, ...]
    gradients: tuple[Gradient, ...]
    paths: tuple[tuple[int, ...], ...]
    leaf: bool
    made_from: tuple[str, ...]
    origin: str | None
    hints: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def explain_unmet(flow: Flow, name: str, *, requires_grad: bool, leaf: bool) -> Explanation:
    """Explain a tensor that no op in the recording took."""
    hints: tuple[str, ...]
    if not requires_grad:
        status, hints = Status.FROZEN, (_advice.FROZEN,)
    elif not flow.passes:
        status, hints = Status.NO_BACKWARD, (_advice.NO_BACKWARD,)
    elif flow.may_miss_uses:
        status, hints = Status.UNKNOWN, tuple(_not_observed(flow))
    else:
        status, hints = Status.UNUSED, (_advice.UNUSED_NOTHING,)
    text = _layout(f"{name} is {status}: {_advice.VERDICTS[status]}", [], hints)
    return Explanation(name, -1, status, (), (), (), leaf, (), None, hints, text)


def _not_observed(flow: Flow) -> Iterator[str]:
    """Say what may hide a use of any tensor."""
    if any(not done.observed for done in flow.passes):
        yield _advice.STRAY_PASS
    for unseen in flow.hidden[:1]:
        yield _advice.MAY_BE_IN_UNSEEN.format(unseen=flow.label(unseen))
    for trouble in flow.troubles[:3]:
        yield _advice.NOT_OBSERVED.format(trouble=trouble)


def explain(flow: Flow, spot: Spot) -> Explanation:
    """Explain one tensor."""
    return _Explainer(flow, spot).explain()


class _Explainer:
    """One explanation in the making."""

    def __init__(self, flow: Flow, spot: Spot) -> None:
        self._flow = flow
        self._spot = spot
        self._node = node = spot.node
        self._facts = flow.nodes[node]
        self._name, self._shape = flow.facts_of(spot)
        self._status = flow.status(spot)
        self._cuts = flow.cuts_of(spot)
        self._gradients = flow.gradients_at(node)

    def explain(self) -> Explanation:
        flow, node = self._flow, self._node
        hints = tuple(self._hints())
        leaf = flow.is_leaf(node) or self._facts["kind"] == "input"
        return Explanation(
            name=self._name,
            node=node,
            status=self._status,
            cuts=self._cuts,
            gradients=self._gradients,
            paths=tuple(flow.paths(self._spot, _PATHS_SHOWN)),
            leaf=leaf,
            made_from=() if leaf else tuple(self._made_from()),
            origin=self._origin(),
            hints=hints,
            text=_layout(self._headline(), list(self._body()), hints),
        )

    # -- the parts of the text -------------------------------------------------------------------

    def _headline(self) -> str:
        verdict = _advice.VERDICTS[self._status]
        if self._status is Status.REACHED and self._cuts:
            verdict = f"a gradient arrived, but not along every way ({_count(self._cuts, 'cut')})."
        return f"{self._name}{self._size()} is {self._status}: {verdict}"

    def _size(self) -> str:
        shape = self._shape
        return "" if not shape else f" [{' × '.join(map(str, shape))}]"

    def _body(self) -> Iterator[str]:
        yield from self._arrivals()
        alike: dict[Cut, list[Cut]] = {}
        for cut in self._cuts:  # the same line again and again, as in a loop, is told once
            alike.setdefault(replace(cut, node=0, blocked=()), []).append(cut)
        for cuts in alike.values():
            yield from self._cut(cuts[0], f" × {len(cuts):,}" if len(cuts) > 1 else "")

    def _arrivals(self) -> Iterator[str]:
        for gradient in self._gradients[:3]:
            norm = "not looked at" if gradient.norm is None else f"{gradient.norm:.4g}"
            cleared = f", cleared{_at(gradient.cleared)}" if gradient.cleared else ""
            yield f"  arrived in pass {gradient.backward_pass}: norm {norm}{cleared}"
        if len(self._gradients) > 3:
            yield f"  ... and in {len(self._gradients) - 3} more"

    def _cut(self, cut: Cut, times: str) -> Iterator[str]:
        call = f"{cut.op}, its indices" if self._is_of_indices(cut) else call_of(cut)
        yield f"  cut: {call}{times}{_at(cut.location)}"
        if cut.source:
            yield f"       {cut.source}"
        if cut.called_from is not None:
            yield f"       called from{_at(cut.called_from).removeprefix(' at')}"
        if cut.module:
            yield f"       in module {cut.module}"
        if cut.passes:
            yield f"       in backward pass {', '.join(map(str, cut.passes))}"
        yield from textwrap.wrap(
            f"way: {self._way(cut)}",
            100,
            initial_indent=" " * 7,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _way(self, cut: Cut) -> str:
        """Return a way through a cut in words: `X -> add (K) -> detach // -> mul (L)`."""
        flow = self._flow
        before = flow.way(self._node, cut.node) or (self._node, cut.node)
        after = next(flow.paths(Spot(cut.node), 1), (cut.node,))[1:]
        words = [self._word(node) for node in before]
        words[-1] += " //"
        return " -> ".join(_shortened(words + [self._word(node) for node in after], len(words)))

    def _word(self, node: int) -> str:
        facts = self._flow.nodes[node]
        if facts["op"] is None or self._flow.is_leaf(node):
            return self._flow.label(node)
        return f"{facts['op']} ({facts['name']})" if facts["name"] else str(facts["op"])

    # -- hints -----------------------------------------------------------------------------------

    def _hints(self) -> Iterator[str]:
        yield from self._about_kind_of_tensor()
        for kind in dict.fromkeys(cut.kind for cut in self._cuts):
            cut = next(cut for cut in self._cuts if cut.kind is kind)
            yield from self._about_cut(cut)
        yield from self._if_meant()
        yield from self._about_status()
        yield from map(_advice.OVERWRITTEN.format, self._overwritten())

    def _about_cut(self, cut: Cut) -> Iterator[str]:
        """Yield what happened at a cut, and what to do."""
        if cut.op == "checkpoint" and cut.kind is CutKind.NO_GRAD:
            left = self._flow.nodes[cut.node]["grad_fn"] is not None
            yield _advice.HAPPENED_IN_CHECKPOINT
            yield _advice.LEFT_CHECKPOINT if left else _advice.CHECKPOINT
            return
        happened = _advice.INDICES if self._is_of_indices(cut) else _advice.HAPPENED[cut.kind]
        yield happened.format(op=cut.op)
        yield _advice.REMEDIES[cut.kind]

    def _is_of_indices(self, cut: Cut) -> bool:
        """Whether an op cuts by the indices only that it gives beside values, as `topk` does."""
        gives = self._flow.nodes[cut.node]["result_requires_grad"]
        return cut.kind is CutKind.NON_DIFFERENTIABLE and any(gives)

    def _if_meant(self) -> Iterator[str]:
        """Yield how to assert the first cut that people make on purpose."""
        meant = [cut for cut in self._cuts if cut.kind in _advice.OFTEN_MEANT]
        if meant:
            is_cut = self._status is Status.CUT
            advice = _advice.ASSERT_CUT if is_cut else _advice.ASSERT_STOP
            kind, source = meant[0].kind, meant[0].source or str(meant[0].kind)
            yield advice.format(name=self._name, kind=kind, source=source)

    def _about_kind_of_tensor(self) -> Iterator[str]:
        facts = self._facts
        if facts["kind"] != "op":
            return
        made_from = list(self._made_from())
        of = f" from {', '.join(made_from[:3])}" if made_from else ""
        at = _at(location_of(facts))
        text = _advice.NOT_A_LEAF.format(op=f"`{facts['op']}`", at=at, of=of)
        converts = facts["op"] in _CONVERSIONS or facts["grad_fn"] == "ToCopyBackward0"
        yield text + (_advice.CREATE_IT_THERE if converts else "")

    def _made_from(self) -> Iterator[str]:
        """Yield the names of the leaves that a result was made from, nearest first."""
        seen, waiting = {self._node}, [self._node]
        while waiting:
            at = waiting.pop(0)
            for producer in self._flow.graph.predecessors(at):
                if producer in seen:
                    continue
                seen.add(producer)
                if self._flow.is_leaf(producer):
                    yield self._flow.label(producer)
                else:
                    waiting.append(producer)

    def _about_status(self) -> Iterator[str]:
        status = self._status
        if status is Status.UNUSED:
            yield self._unused()
        elif status is Status.FROZEN:
            yield self._frozen()
        elif status is Status.NO_BACKWARD:
            yield _advice.NO_BACKWARD
        elif status in (Status.ZERO, Status.NONFINITE):
            yield from self._about_values()
        elif status is Status.UNKNOWN:
            yield from self._unknown()

    def _unused(self) -> str:
        if not self._flow.graph.out_degree(self._node):
            return _advice.UNUSED_NOTHING
        roots = [name for done in self._flow.passes for name in done.roots]
        named = ", ".join(dict.fromkeys(roots)) or "a root"
        return _advice.UNUSED_ELSEWHERE.format(roots=named)

    def _frozen(self) -> str:
        if self._facts["kind"] != "op":
            return _advice.FROZEN
        return "Its history was left behind: explain the tensors that it was made from."

    def _about_values(self) -> Iterator[str]:
        zero = self._status is Status.ZERO
        origin = self._origin()
        if origin is not None:
            yield f"The {'zeros' if zero else 'NaN or infinity'} arose in the backward of {origin}."
        elif self._flow.graph.graph["values"] != "edges":
            yield _advice.ASK_FOR_EDGES
        yield _advice.ZERO if zero else _advice.NONFINITE

    def _unknown(self) -> Iterator[str]:
        if self._facts["filled_unseen"]:
            yield _advice.FILLED_UNSEEN
        if self._flow.is_used_unseen(self._node):
            yield _advice.HOLDS_OTHERS
        reach = self._flow.reach(self._spot)
        for index in reach.interrupted:
            error = self._flow.passes[index].error
            yield _advice.BROKE_OFF.format(index=index, error=error or "nothing")
        for unseen in reach.unseen:
            yield _advice.SEE_UNSEEN.format(unseen=self._flow.label(unseen))
        yield from _not_observed(self._flow)

    def _overwritten(self) -> Iterator[Hazard]:
        """Yield the writes that make gradients on the tensor's ways wrong without a word."""
        silent = [h for h in hazards(self._flow) if h.kind is HazardKind.SILENT_WRITE]
        if silent and self._status in (Status.REACHED, Status.ZERO, Status.NONFINITE):
            passed = {edge.consumer for edge in self._flow.reach(self._spot).connected}
            yield from (h for h in silent if h.needed_by and h.needed_by.node in passed)

    # -- where values went wrong -----------------------------------------------------------------

    def _origin(self) -> str | None:
        """Return the op in whose backward zeros or NaNs arose, where norms on edges were kept."""
        if self._status not in (Status.ZERO, Status.NONFINITE):
            return None
        is_bad = _is_zero if self._status is Status.ZERO else _is_nonfinite
        bad = [g for g in self._gradients if g.norm is not None and is_bad(g.norm)]
        if not bad or self._flow.graph.graph["values"] != "edges":
            return None
        found = self._flow.origin(self._node, bad[0].backward_pass, is_bad)
        if found is None:
            return None
        facts = self._flow.nodes[found]
        return f"{facts['op'] or self._flow.label(found)}{_at(location_of(facts))}"


def _is_zero(norm: float) -> bool:
    return norm == 0


def _is_nonfinite(norm: float) -> bool:
    return not math.isfinite(norm)


def call_of(cut: Cut) -> str:
    """Return what a cut's op looks like in a program: `.detach()`, `.data`, `torch.tensor(...)`."""
    known = {
        CutKind.DETACH: ".detach()",
        CutKind.DETACH_: ".detach_()",
        CutKind.NO_GRAD: f"{cut.op} under no_grad",
        CutKind.INFERENCE_MODE: f"{cut.op} in inference_mode",
        CutKind.DATA: ".data" if cut.op in ("data", "data =") else f"{cut.op} through .data",
        CutKind.ESCAPE: _escape(cut.op),
        CutKind.COPY: f"copy by {cut.op}",
        CutKind.NON_DIFFERENTIABLE: f"{cut.op}, not differentiable",
        CutKind.NO_GRADIENT: f"{cut.op}, no gradient for this input",
        CutKind.NOT_REQUESTED: f"not requested, before {cut.op}",
        CutKind.NOT_REQUIRED: f"{cut.op} took it while requires_grad was False",
        CutKind.FIRST_ORDER: f"{cut.op} without create_graph",
    }
    return known[cut.kind]


def _escape(op: str) -> str:
    return f"{op.strip('_')}(...)" if op.startswith("__") else f".{op}()"


def _at(location: Location | None) -> str:
    if location is None:
        return ""
    function = "" if location.function == "<module>" else f" in {location.function}"
    return f" at {_near(location)}{function}"


def _near(location: Location) -> str:
    """Return a place as one reads and clicks it: below the working folder without that folder."""
    here = os.path.join(os.getcwd(), "")
    return f"{location.file.removeprefix(here)}:{location.line}"


def _count(things: Iterable[object], noun: str) -> str:
    number = len(list(things))
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shortened(words: list[str], cut_at: int) -> list[str]:
    """Leave out the middle of a long way, but never the cut."""
    if len(words) <= 9:
        return words
    head = words[:cut_at] if cut_at <= 5 else [*words[:3], "...", words[cut_at - 1]]
    tail = words[cut_at:]
    return head + (tail if len(tail) <= 3 else ["...", tail[-1]])


def _layout(headline: str, body: list[str], hints: Iterable[str]) -> str:
    lines = textwrap.wrap(headline, 100, break_long_words=False, break_on_hyphens=False)
    lines += body
    for hint in hints:
        lines += textwrap.wrap(
            hint,
            100,
            initial_indent="  - ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
