"""What autograd did on each of its edges, seen by a walk and by hooks of the tests' own.

Of gradtrace it takes one thing, the number that a recording writes on the autograd node of an op's
result, and holds that against torch first: against the order in which the nodes were made, their
names, shapes and dtypes. From there on torch is asked: which op is fed by which, and whether a
defined gradient was passed there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradtrace

Found = dict["Way", list[bool]]


class Place(NamedTuple):
    """A tensor as the graph of a trace knows it: a node, and which of its results."""

    node: int
    output: int


class Way(NamedTuple):
    """What leads back from an op to a tensor that it took."""

    consumer: int
    producer: Place


def node_of(tensor: Tensor) -> Any:
    """Return autograd's node of a tensor, that of a leaf included."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    return torch.autograd.graph.get_gradient_edge(tensor).node


def is_leaf_node(node: Any) -> bool:
    """Whether one of autograd's nodes stands for a leaf."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


class Walk:
    """Autograd's graph behind some roots, and what one pass through it does while this is on."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.nodes: dict[Any, None] = dict.fromkeys(map(node_of, roots))
        waiting = list(self.nodes)
        while waiting:
            for following, _ in waiting.pop().next_functions:
                if following is not None and following not in self.nodes:
                    self.nodes[following] = None
                    waiting.append(following)
        self._passed: dict[Any, tuple[bool, ...]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Walk:
        for node in self.nodes:
            if not is_leaf_node(node):
                self._hooks.append(node.register_hook(partial(self._note, node)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note(self, node: Any, grad_inputs: Any, _: Any) -> None:
        self._passed[node] = tuple(gradient is not None for gradient in grad_inputs)

    def passed(self, node: Any, slot: int) -> bool:
        """Whether a node passed a defined gradient on along one of its edges."""
        return slot < len(self._passed.get(node, ())) and self._passed[node][slot]

    def arrived(self, tensor: Tensor) -> bool:
        """Whether a defined gradient was passed to a tensor by what took it."""
        place = node_of(tensor), tensor.output_nr
        return any(
            following == place and self.passed(node, slot)
            for node in self.nodes
            for slot, following in enumerate(node.next_functions)
        )


class Comparison:
    """The edges of a trace's graph, held against a walk that saw the latest of its passes."""

    def __init__(self, walk: Walk, trace: gradtrace.Trace) -> None:
        self._walk = walk
        self._trace = trace
        self._pass = len(trace.backward_passes) - 1
        self._marks = {node: dict(_marks(node)) for node in walk.nodes}
        self._leaves = {
            node: trace.explain(node.variable).node for node in walk.nodes if is_leaf_node(node)
        }
        self.edges = trace.graph.number_of_edges()

    def faults(self) -> list[str]:
        """Return what is not as autograd has it."""
        return [*self._wrong_marks(), *self._wrong_edges()]

    # -- which op made which node ----------------------------------------------------------------

    def _wrong_marks(self) -> Iterator[str]:
        made = sorted(
            (n for n in self._walk.nodes if self._marks[n]), key=lambda n: n._sequence_nr()
        )
        latest = -1
        for node in made:
            owner = min(place.node for place in self._marks[node].values())
            if owner < latest and not self._is_one_call(owner, latest):
                yield f"{node.name()} is of op {owner}, but was made after op {latest}"
            latest = max(owner, latest)
            for output, place in self._marks[node].items():
                yield from self._wrong_mark(node, output, place)

    def _is_one_call(self, first: int, last: int) -> bool:
        """Whether a call that makes each result of one input (`meshgrid`) made both."""
        calls = {
            tuple(self._trace.graph.nodes[node][fact] for fact in ("op", "file", "line"))
            for node in (first, last)
        }
        return len(calls) == 1

    def _wrong_mark(self, node: Any, output: int, place: Place) -> Iterator[str]:
        facts = self._trace.graph.nodes[place.node]
        name = type(node).__name__
        if place.output == 0 and facts["grad_fn"] != name:
            yield f"{name} is of op {place.node}, whose grad_fn is {facts['grad_fn']}"
        if output >= len(node._input_metadata):
            return
        result = node._input_metadata[max(output, 0)]
        shapes = facts["result_shapes"] or (facts["shape"],)
        if place.output < len(shapes) and tuple(result.shape) != shapes[place.output]:
            given = shapes[place.output]
            yield f"{name} has shape {tuple(result.shape)}, not {given} as in op {place}"

    # -- edges -----------------------------------------------------------------------------------

    def _wrong_edges(self) -> Iterator[str]:
        right, drawn = self._right(), self._drawn()
        for way in sorted({*right, *drawn}):
            passed, reached = right.get(way, []), drawn.get(way, [])
            if any(passed) != any(reached):
                yield f"{self._words(way)}: reached {reached}, but autograd says {passed}"
            elif passed and not reached:
                yield f"{self._words(way)}: no edge, though autograd has one"
            elif len(passed) == len(reached) and sum(passed) != sum(reached):
                yield f"{self._words(way)}: reached {reached}, but autograd says {passed}"

    def _drawn(self) -> Found:
        """Return for each way whether its edges in the trace's graph are marked as reached."""
        found = defaultdict(list)
        for producer, consumer, facts in self._trace.graph.edges(data=True):
            way = Way(consumer, Place(producer, facts["output"]))
            found[way].append(self._pass in facts["reached"])
        return dict(found)

    def _right(self) -> Found:
        """Return for each way whether autograd's edges passed a gradient from op to tensor."""
        made_by = defaultdict(list)
        for node, marks in self._marks.items():
            for owner in {place.node for place in marks.values()}:
                made_by[owner].append(node)
        found = defaultdict(list)
        for owner, nodes in made_by.items():
            for place, passed in self._out_of(owner, nodes):
                found[Way(owner, place)].append(passed)
        return dict(found)

    def _out_of(self, owner: int, nodes: list[Any]) -> Iterator[tuple[Place, bool]]:
        """Follow autograd from an op's nodes to tensors: what lies between is inside the op."""
        out: dict[tuple[Any, int], tuple[Place, bool]] = {}
        seen = {(node, True) for node in nodes}
        waiting = list(seen)
        while waiting:
            node, live = waiting.pop()
            for slot, (following, output) in enumerate(node.next_functions):
                if following is None:
                    continue
                passed = live and self._walk.passed(node, slot)
                place = self._place(following, output)
                if place is None and (following, passed) not in seen:
                    seen.add((following, passed))
                    waiting.append((following, passed))
                elif place is not None and place.node != owner:
                    before = out.get((node, slot), (place, False))[1]
                    out[node, slot] = place, passed or before
        yield from out.values()

    def _place(self, node: Any, output: int) -> Place | None:
        """Return which tensor of the trace one of a node's results is; None inside an op."""
        marks = self._marks[node]
        if marks:
            return marks.get(output, marks.get(-1))
        return Place(self._leaves[node], 0) if node in self._leaves else None

    def _words(self, way: Way) -> str:
        def word(node: int) -> str:
            facts = self._trace.graph.nodes[node] if node in self._trace.graph else {}
            return f"{facts.get('op') or facts.get('kind')} ({node})"

        return f"from {word(way.consumer)} to {word(way.producer.node)}.{way.producer.output}"


def _marks(node: Any) -> Iterator[tuple[int, Place]]:
    """Yield what a recording wrote on a node: which tensor each result is; -1: any result."""
    for key, mark in node.metadata.items():
        if key.startswith("gradtrace."):
            given = mark if isinstance(mark, dict) else {-1: mark}
            for output, value in given.items():
                yield output, Place(value >> 20, value & (2**20 - 1))
