"""Random programs against an oracle that never looks at gradtrace's code, and torch's own hooks."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import pytest
from machine import Answers, Cut, Key, Machine, Step, execute, namespace, random_steps, shrunk
from torch import Tensor

import gradtrace


def _recorded(machine: Machine) -> tuple[gradtrace.Trace, dict[str, Any], list[str | None]]:
    names, errors = namespace(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradtrace.record() as trace:
            for line, text in enumerate(machine.lines, 1):
                errors.append(execute(line, text, names))
    return trace, names, errors


def faults(steps: list[Step]) -> tuple[Machine, list[str]]:
    """Run a program plainly and recorded, and return in words what is wrong in the recording."""
    machine = Machine()
    machine.run(steps)
    trace, names, errors = _recorded(machine)
    found = []
    if errors != machine.errors:
        found.append(f"errors: {errors} instead of {machine.errors}")
    for name in machine.order:
        for what in ("", "grad"):
            plain, recorded = machine.names[name], names[name]
            if what:
                plain, recorded = _grad(plain), _grad(recorded)
            if _bits(plain) != _bits(recorded):
                found.append(f"{name}.{what}: {recorded} instead of {plain}")
    answers = Answers(machine)
    judge = _Judge(trace, names, machine, answers)
    found += judge.oracle()
    for name in machine.leaves:
        found += [f"{name}: {text}" for text in judge.leaf(name)]
    if not machine.wrote:
        found += judge.edges()
        found += [text for name in machine.order for text in judge.result(name)]
    found += judge.passes()
    return machine, found


def _grad(tensor: Tensor) -> Any:
    with contextlib.suppress(RuntimeError):  # a stale view
        return tensor.grad if tensor.is_leaf else None
    return None


def _bits(tensor: Tensor | None) -> Any:
    """Return all that can be seen of a tensor."""
    if tensor is None:
        return None
    flags: Any
    try:
        flags = tensor.requires_grad, tensor.is_leaf
    except RuntimeError as error:
        flags = str(error)
    plain = tensor.detach()
    return flags, plain.shape, plain.stride(), plain.contiguous().numpy().tobytes()


class _Judge:
    """Holds one trace against what is right."""

    def __init__(
        self, trace: gradtrace.Trace, names: dict[str, Any], machine: Machine, answers: Answers
    ) -> None:
        self.trace = trace
        self.names = names
        self.machine = machine
        self.answers = answers
        self.nodes = trace.graph.nodes

    def _key(self, node: int) -> Key:
        facts = self.nodes[node]
        return facts["line"], facts["op"]

    def oracle(self) -> list[str]:
        """Return where the machine's own sweep differs from what torch's hooks told."""
        found = []
        for name, state in self.machine.leaves.items():
            told = {each.at for each in self.machine.arrivals[name]}
            for index, done in enumerate(self.machine.passes):
                if not done.error and (state.link in done.arrived) != (index in told):
                    found.append(f"MACHINE: {name} in pass {index}: hooks say {index in told}")
        return found

    def leaf(self, name: str) -> list[str]:
        """Return what is wrong about a leaf."""
        explanation = self.trace.explain(self.names[name])
        right = self.answers.status(name)
        if explanation.status not in right.split("|"):
            return [f"{explanation.status} instead of {right}"]
        cuts = {(self._key(each.node), str(each.kind)) for each in explanation.cuts}
        return self._cuts(name, explanation.status, cuts)

    def result(self, name: str) -> list[str]:
        """Return whether a result, which is no leaf, is wrongly called reached or not.

        The results of one op are not told apart here, nor what came before an error.
        """
        state, passes = self.machine.variables[name].state, self.machine.passes
        several = [
            each for each in self.machine.variables.values() if each.state.link is state.link
        ]
        if state.link is None or state.leaf is not None or len(several) > 1:
            return []
        if any(done.error for done in passes):
            return []
        status = self.trace.explain(self.names[name]).status
        right = any(state.link in done.arrived for done in passes)
        wrong = (status == "reached") != right
        return [f"{name} is {status}, and {'was' if right else 'was not'} reached"] if wrong else []

    def _cuts(self, name: str, status: str, cuts: set[Cut]) -> list[str]:
        state = self.machine.leaves[name]
        if status in ("no_backward", "unused", "frozen"):
            return [f"cuts {cuts}"] if cuts else []
        must = self.answers.stops(state)
        may: set[Cut] = set()
        if status == "cut" and state not in self.answers.leading:
            must = self.answers.last_resort(state)
            may = self.answers.said_twice(state)
        else:
            never, may = self.answers.of_passes(state)
            must |= never
        missing = [cut for cut in must if not any(_same(cut, each) for each in cuts)]
        wrong = [cut for cut in cuts if not any(_same(each, cut) for each in must | may)]
        return [f"lacks {each}" for each in missing] + [f"has {each}" for each in wrong]

    def edges(self) -> list[str]:
        """Return the edges on which passes are wrong; after writes autograd has others."""
        leaf_of = {}
        for name in self.machine.leaves:
            leaf_of[self.trace.explain(self.names[name]).node] = name
        found = {
            (leaf_of.get(producer) or self._key(producer), self._key(consumer), index)
            for producer, consumer, passes in self.trace.graph.edges(data="reached")
            for index in passes
            if not self.machine.passes[index].error
        }
        right = {edge for edge in self.answers.edges() if not self.machine.passes[edge[2]].error}
        return [f"edge {each} missing" for each in right - found] + [
            f"edge {each} wrong" for each in found - right
        ]

    def passes(self) -> list[str]:
        """Return what is wrong about passes and arrivals."""
        found = []
        right = [(done.line, done.kind, done.error) for done in self.machine.passes]
        seen = [
            (done.location.line if done.location else 0, done.kind, done.error is not None)
            for done in self.trace.backward_passes
        ]
        if seen != right:
            found.append(f"passes {seen} instead of {right}")
        for name in self.machine.leaves:
            node = self.trace.explain(self.names[name]).node
            arrived = [
                (each.backward_pass, each.norm)
                for each in self.trace.gradients
                if each.node == node
            ]
            told = [
                (each.at, each.norm)
                for each in self.machine.arrivals[name]
                if not (each_pass := self.machine.passes[each.at]).error
                or each_pass.kind == "backward"
            ]
            same = len(arrived) == len(told) and all(
                one[0] == other[0] and _close(one[1], other[1])
                for one, other in zip(arrived, told, strict=True)
            )
            cleared = [
                each.cleared.line if each.cleared else None
                for each in self.trace.gradients
                if each.node == node
            ]
            if cleared != self._cleared(name):
                found.append(f"{name}: cleared {cleared} instead of {self._cleared(name)}")
            if not same:
                found.append(f"{name}: gradients {arrived} instead of {told}")
        return found

    def _cleared(self, name: str) -> list[int | None]:
        """Return where each gradient of a leaf was cleared, those of `grad` nowhere."""
        lines = iter(self.machine.cleared[name])
        return [
            next(lines, None) if self.machine.passes[each.at].kind == "backward" else None
            for each in self.machine.arrivals[name]
            if not self.machine.passes[each.at].error
            or self.machine.passes[each.at].kind == "backward"
        ]


def _close(one: float | None, other: float) -> bool:
    if one is None:
        return False
    return (math.isnan(one) and math.isnan(other)) or one == pytest.approx(other, rel=1e-9)


def _same(right: Cut, cut: Cut) -> bool:
    return right[0] == cut[0] and cut[1] in right[1].split("|")


def check(steps: list[Step]) -> None:
    """Fail with the smallest program that is judged wrongly."""
    if not faults(steps)[1]:
        return
    machine, found = faults(shrunk(steps, lambda smaller: bool(faults(smaller)[1])))
    raise AssertionError("\n".join(["", machine.text, *found]))


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_programs_get_the_right_verdicts(first: int) -> None:
    """Status, cuts, edges, passes and gradients are those that a program's description implies."""
    for seed in range(first, first + 100):
        check(random_steps(seed))


@pytest.mark.long
@pytest.mark.parametrize("first", range(400, 10_400, 1000))
def test_ten_thousand_random_programs_get_the_right_verdicts(first: int) -> None:
    """The same promise for many more programs; each run has the same ones."""
    for seed in range(first, first + 1000):
        check(random_steps(seed))


def test_the_machine_tells_programs_apart() -> None:
    """The oracle itself gives different answers to different programs."""
    programs = {
        "reached": [Step("sin", 3), Step("backward")],
        "cut": [Step("detach", 3), Step("mul", 0, 3), Step("backward")],
        "unused": [Step("sin", 2), Step("backward")],
        "zero": [Step("times zero", 3), Step("backward")],
        "no_backward": [Step("sin", 3)],
        "frozen": [Step("freeze", 0), Step("backward")],
    }
    for status, steps in programs.items():
        machine = Machine()
        machine.run(steps)
        assert Answers(machine).status("w0") == status, machine.text


def test_a_wrong_trace_is_found_out() -> None:
    """The comparison can fail: an oracle that is told of another status says so."""
    steps = [Step("sin", 3), Step("backward")]
    machine = Machine()
    machine.run(steps)
    trace, names, _ = _recorded(machine)
    machine.arrivals["w0"].clear()
    judge = _Judge(trace, names, machine, Answers(machine))
    assert judge.leaf("w0")
    assert judge.passes()
