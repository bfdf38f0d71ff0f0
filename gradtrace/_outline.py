"""Graph -> what of a flow of gradients can be compared with another recording's.

Names of leaves, module paths, names of ops and kinds of cuts stay the same when lines move, seeds
change or another machine runs the program; lines, node numbers and norms don't, and are left out.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

from gradtrace._flow import Edge, Flow, Spot
from gradtrace._records import Cut, Leaf
from gradtrace._terms import terms_of

TOP: Final = "the top level"  # the outermost module's own forward, and what no module does
_MANY_OPS: Final = 200  # above, ways are told by module and no longer op by op
_MANY_WAYS: Final = 40


class CutKey(NamedTuple):
    """By what a cut is known again."""

    kind: str
    op: str
    module: str

    @classmethod
    def of(cls, cut: Cut) -> CutKey:
        """Return a cut's key."""
        return cls(str(cut.kind), cut.op, cut.module)

    def __str__(self) -> str:
        at = "" if self.op == self.kind else f" at {self.op}"
        return f"{self.kind}{at}{_within(self.module)}"


def _within(module: str) -> str:
    return f" in {module}" if module else ""


class Outline:
    """One flow of gradients, as far as another can be like it."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._terms = {done.index: terms_of(flow, done.index) for done in flow.passes}

    @property
    def leaves(self) -> dict[str, Leaf]:
        """The leaves by name."""
        return {leaf.name: leaf for leaf in self._flow.leaves}

    # -- passes ----------------------------------------------------------------------------------

    def passes(self) -> Iterator[str]:
        """Yield for each pass, in order, what it is."""
        for done in self._flow.passes:
            roots = ", ".join(done.roots) or "an unseen root"
            only = "" if done.inputs is None else f" for {', '.join(done.inputs)}"
            kept = " with create_graph" if done.create_graph else ""
            inside = "" if done.inside is None else f" inside pass {done.inside}"
            error = "" if done.error is None else f", raised {done.error.partition(':')[0]}"
            yield f"{done.kind} from {roots}{only}{kept}{inside}{error}"

    def arrivals(self, leaf: Leaf) -> Iterator[str]:
        """Yield the passes that brought a leaf gradients, with the terms that they came from."""
        for index in dict.fromkeys(g.backward_pass for g in self._flow.gradients_at(leaf.node)):
            terms = self._terms[index]
            by = ", ".join(term.name for term in terms if leaf.name in term.leaves)
            yield f"pass {index} by {by}" if len(terms) > 1 and by else f"pass {index}"

    # -- cuts and ways ---------------------------------------------------------------------------

    def cuts(self, leaf: Leaf) -> dict[CutKey, list[Cut]]:
        """Return the cuts on a leaf's ways, by what they are known again by."""
        found: dict[CutKey, list[Cut]] = defaultdict(list)
        for cut in self._flow.cuts_of(Spot(leaf.node)):
            found[CutKey.of(cut)].append(cut)
        return found

    def ways(self, leaf: Leaf) -> Counter[str] | None:
        """Return the ways from a leaf to a root, op by op; None where they are many.

        `//` stands behind the op that no gradient came back through.
        """
        if len(self._flow.leads_to_root) > _MANY_OPS:
            return None
        ways = list(self._flow.paths(Spot(leaf.node), _MANY_WAYS + 1))
        if len(ways) > _MANY_WAYS:
            return None
        stops = {stop.node for stop in self._flow.reach(Spot(leaf.node)).stops}
        return Counter(self._way(nodes, stops) for nodes in ways)

    def _way(self, nodes: tuple[int, ...], stops: set[int]) -> str:
        words = [self._word(node) for node in nodes[1:]]
        missed = [
            at for at, pair in enumerate(itertools.pairwise(nodes)) if not self._passed(*pair)
        ]
        if missed:
            stopped = (at for at, node in enumerate(nodes[1:]) if node in stops)
            words[next(stopped, missed[0])] += " //"
        return " -> ".join(words) or "itself a root"

    def _passed(self, producer: int, consumer: int) -> bool:
        """Whether a gradient came along between two nodes."""
        edges = self._flow.out_of(producer)
        return any(edge.facts["reached"] for edge in edges if edge.consumer == consumer)

    def _word(self, node: int) -> str:
        facts = self._flow.nodes[node]
        if facts["op"] is None or self._flow.is_leaf(node):
            return self._flow.label(node)
        return f"{facts['op']}{_within(facts['module'])}"

    def steps_from(self, leaf: Leaf) -> Counter[str]:
        """Return the same as steps from module to module."""
        return Counter(dict.fromkeys(self._steps_from(leaf), 1))

    def _steps_from(self, leaf: Leaf) -> Iterator[str]:
        reach = self._flow.reach(Spot(leaf.node))
        for edge in reach.connected:
            yield from self._step(edge)
        for stop in reach.stops:
            yield f"{self._place(leaf.node)} -> {self._word(stop.node)} //"

    def steps(self) -> Iterator[str]:
        """Yield the steps from module to module that gradients take, or don't."""
        for node in self._flow.leads_to_root:
            for edge in self._flow.into(node):
                if edge.facts["requires_grad"] and not edge.facts["weak"]:
                    yield from self._step(edge)

    def _step(self, edge: Edge) -> Iterator[str]:
        producer, consumer = self._place(edge.producer), self._place(edge.consumer)
        if producer != consumer:
            yield f"{producer} -> {consumer}{'' if edge.facts['reached'] else ' //'}"

    def _place(self, node: int) -> str:
        """Return the module that a node belongs to; a leaf belongs to the one that holds it."""
        if self._flow.is_leaf(node):
            label = self._flow.label(node)
            return label.rpartition(".")[0] or label
        return self._flow.nodes[node]["module"] or TOP

    # -- ops -------------------------------------------------------------------------------------

    def ops(self) -> Counter[tuple[str, str]]:
        """Return how often which module makes which op on ways from leaves to roots."""
        nodes = self._flow.nodes
        return Counter(
            (nodes[node]["module"], nodes[node]["op"])
            for node in self._flow.leads_to_root
            if nodes[node]["kind"] == "op" and self._carries(node)
        )

    def _carries(self, node: int) -> bool:
        """Whether something that requires grad flows into an op, or out of it."""
        if self._flow.nodes[node]["requires_grad"]:
            return True
        return any(edge.facts["requires_grad"] for edge in self._flow.into(node))
