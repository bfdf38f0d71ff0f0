"""Random programs against an oracle that never looks at gradtrace's code, and torch's own hooks.

A program is a list of steps; operands are counted back from the latest result. `Machine` runs them
in torch and keeps its own little graph beside, by the rules of autograd; what arrives at the leaves
is told by torch's own tensor hooks.
"""

# Torch gives no types to `backward`, `apply` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradtrace

_BINARY = ("add", "mul", "matmul")
_UNARY = ("sin", "scale", "clone", "rows")
_VIEWS = ("transpose", "view", "slice")
_STOPS = ("detach", "data", "copy", "compare")
_WRITES = ("add_", "scale_", "copy_", "row =")
_PASSES = ("backward", "backward for", "grad")
_OPS = (*_BINARY, *_UNARY, *_VIEWS, *_STOPS, *_WRITES, "escape", *_PASSES)


class Step(NamedTuple):
    """One step; operands are counted back from the latest value, and round."""

    op: str
    first: int
    second: int
    grad_mode: bool


_RECENT = st.sampled_from((0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 8))
_STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(_OPS),
        _RECENT,
        _RECENT,
        st.sampled_from((True, True, True, False)),
    ),
    min_size=4,
    max_size=14,
)


@dataclass
class Node:
    """One op, leaf, datum or escape; a join has no number and cuts nothing."""

    inputs: list[int]
    number: int | None = None  # among the recorded ops
    requires_grad: bool = False
    stop: str | None = None
    escape: bool = False


@dataclass
class Value:
    """One variable of the program: the tensor, its node, and the memory that it shares."""

    tensor: Tensor
    node: int
    memory: int
    writable: bool = True


@dataclass
class Machine:
    """Runs a program in torch, and knows what is right."""

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    passes: list[tuple[int, frozenset[int] | None]] = field(default_factory=list)
    arrivals: dict[int, list[Tensor]] = field(default_factory=dict)
    ops: int = 0
    memories: int = 0
    wrote: bool = False

    def leaf(self, tensor: Tensor) -> None:
        """Take in a tensor from outside."""
        node = self._node(Node([], requires_grad=tensor.requires_grad))
        if tensor.requires_grad:
            self.arrivals[node] = []
            tensor.register_hook(self.arrivals[node].append)
        self._value(tensor, node, writable=False)

    def _node(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _value(
        self, tensor: Tensor, node: int, *, memory: int | None = None, writable: bool = True
    ) -> None:
        if memory is None:
            self.memories += 1
            memory = self.memories
        self.values.append(Value(tensor, node, memory, writable))

    def _op(self, inputs: list[Value], stop: str | None = None) -> int:
        nodes = [value.node for value in inputs]
        flows = any(self.nodes[node].requires_grad for node in nodes)
        if stop is None and flows and not torch.is_grad_enabled():
            stop = "no_grad"
        self.ops += 1
        return self._node(
            Node(nodes, self.ops - 1, flows and stop is None, stop if flows else None)
        )

    # -- steps -----------------------------------------------------------------------------------

    def run(self, step: Step) -> None:
        """Run one step, if the program can have it at this place."""
        x, y = (self.values[-1 - at % len(self.values)] for at in (step.first, step.second))
        if step.op in _PASSES:
            self._backward(step, x, y)
        elif step.op in _WRITES:
            self._write(step.op, x, y)
        elif step.op in _VIEWS:
            self._view(step.op, x)
        elif step.op in _STOPS:
            self._stop(step.op, x)
        elif step.op == "escape":
            self._escape(x, y)
        else:
            with torch.set_grad_enabled(step.grad_mode):
                self._compute(step.op, x, y)

    def _compute(self, op: str, x: Value, y: Value) -> None:
        if op == "add":
            self._value(x.tensor + y.tensor, self._op([x, y]))
        elif op == "mul":
            self._value(x.tensor * y.tensor, self._op([x, y]))
        elif op == "matmul":
            self._value(x.tensor @ y.tensor, self._op([x, y]))
        elif op == "sin":
            self._value(x.tensor.sin(), self._op([x]))
        elif op == "scale":
            self._value(x.tensor * 1.5, self._op([x]))
        elif op == "clone":
            self._value(x.tensor.clone(), self._op([x]))
        else:
            self._value(x.tensor[[1, 0]], self._op([x]))

    def _view(self, op: str, x: Value) -> None:
        if op == "transpose":
            tensor = x.tensor.t()
        elif op == "view":
            tensor = x.tensor.view(2, 2) if x.tensor.is_contiguous() else x.tensor.t()
        else:
            tensor = x.tensor[:2]
        self._value(tensor, self._op([x]), memory=x.memory, writable=x.writable)

    def _stop(self, op: str, x: Value) -> None:
        if op == "detach":
            self._share(x, x.tensor.detach(), "detach")
        elif op == "data":
            self._share(x, x.tensor.data, "data")
        elif op == "copy":
            self._value(torch.tensor(x.tensor), self._op([x], "copy"))
        else:
            above = x.tensor > 0.5
            node = self._op([x], "non_differentiable")
            self._value(above, node)
            mask = self.values.pop()
            self._value(mask.tensor.double(), self._op([mask]))

    def _share(self, x: Value, tensor: Tensor, kind: str) -> None:
        for value in self.values:
            value.writable &= value.memory != x.memory
        self._value(tensor, self._op([x], kind), memory=x.memory, writable=False)

    def _escape(self, x: Value, y: Value) -> None:
        self._value(x.tensor.sum(), self._op([x]))
        total = self.values.pop()
        number = total.tensor.item()
        self._node(Node([total.node], escape=True))
        self._value(y.tensor * number, self._op([y]))

    def _write(self, op: str, x: Value, y: Value) -> None:
        if not x.writable or x.memory == y.memory:
            return
        if op == "add_":
            x.tensor.add_(y.tensor)
        elif op == "scale_":
            x.tensor.mul_(1.5)
        elif op == "copy_":
            x.tensor.copy_(y.tensor)
        else:
            x.tensor[0] = 0.25
        self.wrote = True
        taken = {"add_": [x, y], "copy_": [y]}.get(op, [x])
        node = self._op(taken)
        for value in self.values:
            if value.memory == x.memory and value is not x:
                inputs = [value.node, node]
                flows = any(self.nodes[at].requires_grad for at in inputs)
                value.node = self._node(Node(inputs, requires_grad=flows))
        x.node = node

    def _backward(self, step: Step, x: Value, y: Value) -> None:
        if not x.tensor.requires_grad:
            return
        total = x.tensor.sum()
        root = self._op([x])
        if step.op == "backward":
            self.passes.append((root, None))
            total.backward(retain_graph=True)
            return
        leaves = [value for value in self.values if value.node in self.arrivals]
        asked = leaves[step.second % len(leaves)]
        if not self.leads(asked.node, {root}, connected=True):
            return
        self.passes.append((root, frozenset([asked.node])))
        if step.op == "grad":
            torch.autograd.grad(total, asked.tensor, retain_graph=True)
        else:
            total.backward(retain_graph=True, inputs=[asked.tensor])

    # -- what is right ---------------------------------------------------------------------------

    def consumers(self, node: int) -> Iterator[int]:
        """Yield the nodes that took a node."""
        return (at for at, each in enumerate(self.nodes) if node in each.inputs)

    def leads(self, node: int, goals: set[int], *, connected: bool = False) -> bool:
        """Whether data leads from a node to a goal; with `connected`, a gradient too."""
        if node in goals:
            return True
        return any(
            self.leads(at, goals, connected=connected)
            for at in self.consumers(node)
            if not connected or self.nodes[at].requires_grad
        )

    def reached_by(self, index: int) -> set[tuple[int, int]]:
        """Return the edges along which one pass brings gradients."""
        root, asked = self.passes[index]
        found: set[tuple[int, int]] = set()
        waiting = [root]
        while waiting:
            at = waiting.pop()
            for node in self.nodes[at].inputs:
                goes = self.nodes[node].requires_grad and (
                    asked is None or any(self._executes(node, goal) for goal in asked)
                )
                if goes and (node, at) not in found:
                    found.add((node, at))
                    waiting.append(node)
        return found

    def _executes(self, node: int, goal: int) -> bool:
        return self.leads(goal, {node}, connected=True)

    def stops(self, leaf: int) -> set[tuple[int, str]]:
        """Return the cuts that lie on a leaf's ways whatever the passes do."""
        roots = {root for root, _ in self.passes}
        found: set[tuple[int, str]] = set()
        for node in self._connected(leaf):
            for at in self.consumers(node):
                each = self.nodes[at]
                if each.stop is not None and self.leads(at, roots):
                    found.add((at, each.stop))
        return found

    def _connected(self, leaf: int) -> set[int]:
        found, waiting = {leaf}, [leaf]
        while waiting:
            for at in self.consumers(waiting.pop()):
                if self.nodes[at].requires_grad and at not in found:
                    found.add(at)
                    waiting.append(at)
        return found

    def not_requested(self, leaf: int) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
        """Return the cuts of passes that were asked for others: those never gone, and all."""
        ever = set().union(*map(self.reached_by, range(len(self.passes))))
        never: set[tuple[int, str]] = set()
        every: set[tuple[int, str]] = set()
        for index, (root, asked) in enumerate(self.passes):
            edges = self.reached_by(index)
            arrived = {root} | {node for node, _ in edges}
            for node in self._connected(leaf):
                for at in self.consumers(node):
                    if asked is None or at not in arrived or not self.nodes[at].requires_grad:
                        continue
                    if (node, at) not in edges and self.leads(at, {root}, connected=True):
                        every.add((at, "not_requested"))
                        if (node, at) not in ever:
                            never.add((at, "not_requested"))
        return never, every

    def last_resort(self, leaf: int) -> set[tuple[int | None, str]]:
        """Return where a leaf with no way to a root left torch."""
        ends = {at for at, node in enumerate(self.nodes) if node.escape}
        found: set[tuple[int | None, str]] = set()
        for node in self._connected(leaf):
            for at in self.consumers(node):
                each = self.nodes[at]
                if each.escape:
                    found.add((None, "escape"))
                elif each.stop is not None and self.leads(at, ends):
                    found.add((at, each.stop))
        return found

    def status(self, leaf: int) -> str:
        """Return a leaf's status."""
        arrived = self.arrivals[leaf]
        if not self.passes:
            return "no_backward"
        if arrived:
            return "reached" if any(bool(gradient.any()) for gradient in arrived) else "zero"
        if self.leads(leaf, {root for root, _ in self.passes}):
            return "cut"
        return "cut" if self.last_resort(leaf) else "unused"


def _start() -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [torch.rand(2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    return [*leaves, torch.rand(2, 2, dtype=torch.float64)]


def _run(steps: list[Step]) -> tuple[gradtrace.Trace, Machine]:
    machine = Machine()
    for tensor in _start():
        machine.leaf(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradtrace.record() as trace:
            for step in steps:
                try:
                    machine.run(step)
                except RuntimeError as error:
                    assume("inplace" not in str(error))  # torch itself refuses such a program
                    raise
    return trace, machine


def _nodes_of_ops(trace: gradtrace.Trace) -> dict[int, int]:
    """Return the nodes of the program's own ops by number; a pass that made gradients is none."""
    ops = [op for op in trace.ops if op.op != "autograd.grad"]
    return {number: op.node for number, op in enumerate(ops)}


def _ask_about_leaf(trace: gradtrace.Trace, machine: Machine, leaf: int) -> None:
    explanation = trace.explain(machine.values[leaf].tensor)
    status = machine.status(leaf)
    assert explanation.status == status
    node_of = _nodes_of_ops(trace)

    def placed(cuts: set[tuple[int, str]]) -> set[tuple[int, str]]:
        return {(node_of[machine.nodes[at].number or 0], kind) for at, kind in cuts}

    found = {(each.node, str(each.kind)) for each in explanation.cuts}
    if status in ("no_backward", "unused"):
        assert not found
        return
    if not machine.leads(leaf, {root for root, _ in machine.passes}):
        kinds = {(at, kind) for at, kind in machine.last_resort(leaf) if at is not None}
        assert {each for each in found if each[1] != "escape"} == placed(kinds)
        return
    stops = placed(machine.stops(leaf))
    never, every = machine.not_requested(leaf)
    assert stops | placed(never) <= found
    assert found <= stops | placed(every)


def _ask_about_edges(trace: gradtrace.Trace, machine: Machine) -> None:
    """Compare every edge of every pass; for programs without writes, which change autograd's."""
    node_of = _nodes_of_ops(trace)
    at_of = {
        at: node_of[node.number] for at, node in enumerate(machine.nodes) if node.number is not None
    }
    for leaf in machine.arrivals:
        node = trace.explain(machine.values[leaf].tensor).node
        if node >= 0:
            at_of[leaf] = node
    right = {
        (at_of[producer], at_of[consumer], index)
        for index in range(len(machine.passes))
        for producer, consumer in machine.reached_by(index)
    }
    found = {
        (producer, consumer, index)
        for producer, consumer, passes in trace.graph.edges(data="reached")
        for index in passes
    }
    assert found == right


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(_STEPS)
def test_random_programs_get_the_right_verdicts(steps: list[Step]) -> None:
    """Status, cuts and reached edges of any program are those that its description implies."""
    trace, machine = _run([*steps, Step("backward", 0, 0, True)])
    for leaf in machine.arrivals:
        _ask_about_leaf(trace, machine, leaf)
    if not machine.wrote:
        _ask_about_edges(trace, machine)


def test_the_machine_tells_programs_apart() -> None:
    """The oracle itself gives four different answers to four different programs."""
    programs = {
        "reached": [Step("sin", 3, 0, True), Step("backward", 0, 0, True)],
        "cut": [
            Step("detach", 3, 0, True),
            Step("mul", 0, 3, True),
            Step("backward", 0, 0, True),
        ],
        "unused": [Step("sin", 2, 0, True), Step("backward", 0, 0, True)],
        "no_backward": [Step("sin", 3, 0, True)],
    }
    assert {name: _run(steps)[1].status(0) for name, steps in programs.items()} == {
        name: name for name in programs
    }
