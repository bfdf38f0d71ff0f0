"""Graph -> what reached, and where each gradient stopped. Takes the graph and nothing else.

# NOTE [ Where a path is cut ]
From a leaf, edges are followed forwards as long as autograd connects them: the op's result requires
grad and autograd has a link from the op to this input. Where a path that leads to a root is not
connected, the op is a cut; behind it nothing requires grad, so nothing further on that path is one.
Where a path is connected all the way to the root of a backward pass, that pass went along it from
the root: the first edge that it did not reach lies before the op at which the gradient ended.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx

from gradtrace._cuts import STOPS, stop_kind
from gradtrace._records import BackwardPass, Cut, CutKind, Gradient, Leaf, Location, Op, Status

Attributes = dict[str, Any]


class Spot(NamedTuple):
    """One tensor of the graph: a node, and which of its outputs; None for all of them."""

    node: int
    output: int | None = None


class Edge(NamedTuple):
    """One edge of the graph, with its attributes."""

    producer: int
    consumer: int
    key: int
    facts: Attributes


class Stop(NamedTuple):
    """One place at which one leaf loses a way."""

    node: int
    kind: CutKind
    passes: tuple[int, ...]


@dataclass(frozen=True)
class Reach:
    """How far one tensor's gradient could go, and where it could not.

    Attributes:
        stops: Cuts on paths to roots.
        connected: Edges on connected ways.
        interrupted: Passes that raised before they had come to it.
        unseen: Nodes through which the way goes and that could not be observed.
        has_path: Whether any data path leads to a root.
    """

    stops: tuple[Stop, ...]
    connected: tuple[Edge, ...]
    interrupted: tuple[int, ...]
    unseen: tuple[int, ...]
    has_path: bool


def location_of(facts: Attributes, prefix: str = "") -> Location | None:
    """Return the place that is kept in attributes under a prefix, or None."""
    if facts.get(f"{prefix}line") is None:
        return None
    return Location(
        facts[f"{prefix}file"], facts[f"{prefix}line"], facts[f"{prefix}function"] or ""
    )


def is_floating(dtype: str | None) -> bool:
    """Whether tensors of a dtype can carry a gradient."""
    return dtype is not None and dtype.startswith(("float", "bfloat", "complex"))


class Flow:
    """The flow of gradients in one graph. Reads the graph, and caches what it works out."""

    def __init__(self, graph: nx.MultiDiGraph) -> None:
        self.graph = graph
        self.nodes: dict[int, Attributes] = dict(graph.nodes(data=True))
        self._out: dict[int, list[Edge]] = defaultdict(list)
        self._into: dict[int, list[Edge]] = defaultdict(list)
        for producer, consumer, key, facts in graph.edges(keys=True, data=True):
            edge = Edge(producer, consumer, key, facts)
            self._out[producer].append(edge)
            self._into[consumer].append(edge)
        self._reaches: dict[Spot, Reach] = {}

    @classmethod
    def of(cls, graph: nx.MultiDiGraph) -> Flow:
        """Return the flow of a graph that was just built, after marking its cuts on its nodes."""
        flow = cls(graph)
        for cut in flow.cuts:
            graph.nodes[cut.node]["cut"] = str(cut.kind)
        return flow

    # -- records ---------------------------------------------------------------------------------

    @cached_property
    def passes(self) -> tuple[BackwardPass, ...]:
        """The backward passes, in the order in which they started."""
        return tuple(self._pass(dict(facts)) for facts in self.graph.graph["passes"])

    @cached_property
    def _pass_facts(self) -> dict[int, Attributes]:
        """By index, since a graph need not have all that were recorded."""
        return {facts["index"]: facts for facts in map(dict, self.graph.graph["passes"])}

    def _pass(self, facts: Attributes) -> BackwardPass:
        return BackwardPass(
            index=facts["index"],
            kind=facts["kind"],
            roots=facts["root_names"],
            location=location_of(facts),
            inputs=facts["inputs"],
            create_graph=facts["create_graph"],
            retain_graph=facts["retain_graph"],
            error=facts["error"],
            inside=facts["inside"],
            observed=facts["observed"],
        )

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """The gradients that arrived at leaves, in order."""
        return tuple(self._gradient(dict(facts)) for facts in self.graph.graph["gradients"])

    def _gradient(self, facts: Attributes) -> Gradient:
        return Gradient(
            leaf=self.label(facts["node"]),
            node=facts["node"],
            backward_pass=facts["backward_pass"],
            shape=facts["shape"],
            dtype=facts["dtype"],
            norm=facts["norm"],
            order=facts["order"],
            cleared=location_of(facts, "cleared_"),
        )

    @cached_property
    def _gradients_at(self) -> dict[int, list[Gradient]]:
        found: dict[int, list[Gradient]] = defaultdict(list)
        for gradient in self.gradients:
            found[gradient.node].append(gradient)
        return found

    def gradients_at(self, node: int) -> tuple[Gradient, ...]:
        """Return the gradients that arrived at one node."""
        return tuple(self._gradients_at.get(node, ()))

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every leaf and parameter, with its status."""
        return tuple(
            Leaf(
                name=self.label(node),
                node=node,
                shape=facts["shape"],
                dtype=facts["dtype"],
                device=facts["device"],
                requires_grad=facts["requires_grad"],
                status=self.status(Spot(node)),
            )
            for node, facts in self.nodes.items()
            if self.is_leaf(node)
        )

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every recorded op."""
        return tuple(self._op(n, f) for n, f in self.nodes.items() if f["kind"] == "op")

    def _op(self, node: int, facts: Attributes) -> Op:
        return Op(
            node=node,
            op=facts["op"],
            name=facts["name"],
            location=location_of(facts),
            source=facts["source"],
            module=facts["module"],
            grad_fn=facts["grad_fn"],
            cut=None if facts["cut"] is None else CutKind(facts["cut"]),
            reached=facts["reached"],
        )

    def is_leaf(self, node: int) -> bool:
        """Whether a node is something that could get a `.grad`: a leaf or a frozen parameter."""
        facts = self.nodes[node]
        if facts["kind"] == "input":
            return bool(facts["requires_grad"] or facts["flavour"] == "parameter")
        return bool(facts["kind"] == "leaf")

    @cached_property
    def _labels(self) -> dict[int, str]:
        """Names that tell nodes apart: a name that several leaves have gets a number."""
        labels: dict[int, str] = {}
        taken: dict[str, int] = defaultdict(int)
        for node, facts in self.nodes.items():
            if self.is_leaf(node):
                name = facts["name"] or f"leaf {node}"
                taken[name] += 1
                labels[node] = name if taken[name] == 1 else f"{name}#{taken[name]}"
        return labels

    def label(self, node: int) -> str:
        """Return what a node is called in texts."""
        facts = self.nodes[node]
        return self._labels.get(node) or facts["name"] or facts["op"] or f"input {node}"

    def facts_of(self, spot: Spot) -> tuple[str, tuple[int, ...] | None]:
        """Return what one tensor is called and its shape: another output has its own of both."""
        facts = self.nodes[spot.node]
        if spot.output is None or spot.output >= len(facts["result_names"]):
            return self.label(spot.node), facts["shape"]
        name = facts["result_names"][spot.output] or f"{facts['op']}[{spot.output}]"
        return name, facts["result_shapes"][spot.output]

    @property
    def troubles(self) -> tuple[str, ...]:
        """Calls that could not be observed: what seems unused may have flowed through them."""
        return tuple(self.graph.graph.get("troubles", ()))

    # -- roots -----------------------------------------------------------------------------------

    @cached_property
    def _roots(self) -> dict[int, list[tuple[int, int]]]:
        """Return the (node, output) pairs that each pass starts from."""
        found: dict[int, list[tuple[int, int]]] = {}
        for facts in map(dict, self.graph.graph["passes"]):
            found[facts["index"]] = list(zip(facts["roots"], facts["root_outputs"], strict=True))
        return found

    @cached_property
    def leads_to_root(self) -> frozenset[int]:
        """Nodes from which a data path leads to some root, roots included."""
        return self._upstream(node for roots in self._roots.values() for node, _ in roots)

    @cached_property
    def _transformed(self) -> frozenset[int]:
        """Nodes that torch.func differentiated: no link tells what its gradients are made from."""
        return frozenset(
            node for facts in map(dict, self.graph.graph["passes"]) for node in facts["transformed"]
        )

    @cached_property
    def leads_to_end(self) -> frozenset[int]:
        """Nodes from which data leads out of autograd's sight: an escape, a write, a transform."""
        ends = [n for n, f in self.nodes.items() if f["kind"] == "escape" or self._is_write(n)]
        return self._upstream((*ends, *self._transformed), weak=True)

    def _is_write(self, node: int) -> bool:
        facts = self.nodes[node]
        return facts["kind"] == "op" and bool(facts["writes_to"])

    def _upstream(self, nodes: Iterable[int], *, weak: bool = False) -> frozenset[int]:
        found = set(nodes)
        waiting = list(found)
        while waiting:
            for edge in self._into[waiting.pop()]:
                if edge.producer not in found and (weak or not edge.facts["weak"]):
                    found.add(edge.producer)
                    waiting.append(edge.producer)
        return frozenset(found)

    def into(self, node: int) -> list[Edge]:
        """Return the edges that lead to a node."""
        return self._into[node]

    def out_of(self, node: int) -> list[Edge]:
        """Return the edges that lead from a node."""
        return self._out[node]

    # -- one step --------------------------------------------------------------------------------

    def _connects(self, edge: Edge, requires_grad: bool) -> bool:
        """Whether autograd leads from the consumer's result back along this edge."""
        facts, consumer = edge.facts, self.nodes[edge.consumer]
        if not (facts["requires_grad"] and requires_grad):
            return False
        if facts["linked"] is False:
            # torch.func builds graphs of its own: that there is no link in ours says nothing.
            return bool(consumer["flavour"] == "transformed")
        if consumer["grad_mode"] != "grad" and not facts["linked"]:
            return False
        if consumer["op"] in STOPS and consumer["kind"] == "op" and not facts["linked"]:
            return bool(consumer["grad_fn"] is not None)
        if facts["captured"] and not facts["linked"]:
            return bool(consumer["flavour"] == "checkpoint")
        return True

    def _kind(
        self, edge: Edge, dtype: str | None, requires_grad: bool, apart: str | None = None
    ) -> CutKind:
        """Name the reason why an edge is not connected."""
        facts, consumer = edge.facts, self.nodes[edge.consumer]
        if not facts["requires_grad"] and self._requires_grad(edge):
            return CutKind.NOT_REQUIRED
        if apart is not None and consumer["grad_mode"] == "grad":
            return CutKind(apart)
        flavour = consumer["flavour"]
        outside = flavour == "pass" or consumer["grad_mode"] != "grad"
        if requires_grad and not outside:
            return STOPS.get(consumer["op"], CutKind.NO_GRADIENT)
        return stop_kind(consumer["op"], consumer["grad_mode"], flavour, is_floating(dtype))

    def _requires_grad(self, edge: Edge) -> bool:
        """Whether what stands at an edge's beginning came to require a gradient, if too late."""
        producer = self.nodes[edge.producer]
        return bool(producer["requires_grad"] or producer["kind"] == "leaf")

    def _results(self, node: int) -> Iterator[tuple[bool, str | None, str | None]]:
        """Yield (requires_grad, dtype, apart) of a node's results on each way to a root."""
        for edge in self._out[node]:
            facts = edge.facts
            if not facts["weak"] and edge.consumer in self.leads_to_root:
                yield facts["requires_grad"], facts["dtype"], facts["apart"]
        facts = self.nodes[node]
        if facts["root_of"]:
            yield facts["grad_fn"] is not None, facts["dtype"], None

    # -- from one tensor -------------------------------------------------------------------------

    def reach(self, spot: Spot) -> Reach:
        """Follow a tensor's data to the roots and see where its gradient stopped."""
        if spot not in self._reaches:
            self._reaches[spot] = self._follow(spot)
        return self._reaches[spot]

    def _follow(self, spot: Spot) -> Reach:
        stops: dict[tuple[int, CutKind], Stop] = {}
        connected: list[Edge] = []
        waiting = [spot]
        seen = {spot.node}
        while waiting:
            for edge in self._uses(waiting.pop()):
                if edge.facts["weak"] or edge.consumer not in self.leads_to_root:
                    continue
                if self._is_dead_end(edge):
                    continue
                if self._step(edge, stops):
                    connected.append(edge)
                    if edge.consumer not in seen:
                        seen.add(edge.consumer)
                        waiting.append(Spot(edge.consumer))
        interrupted = self._see_passes(connected, seen, stops)
        unseen = tuple(n for n in seen if self.nodes[n]["flavour"] == "unseen" and n != spot.node)
        return Reach(
            tuple(stops.values()), tuple(connected), interrupted, unseen, self._has_path(spot)
        )

    def _is_dead_end(self, edge: Edge) -> bool:
        """Whether an op's result requires no grad, as indices beside values: it was cut there."""
        if edge.facts["apart"] is not None:
            return True
        return self.nodes[edge.producer]["kind"] == "op" and not edge.facts["requires_grad"]

    def _has_path(self, spot: Spot) -> bool:
        if self._is_root(spot):
            return True
        return any(
            not edge.facts["weak"] and edge.consumer in self.leads_to_root
            for edge in self._uses(spot)
        )

    def _is_root(self, spot: Spot) -> bool:
        return any(self.starts(index, spot) for index in self._roots)

    def starts(self, index: int, spot: Spot) -> bool:
        """Whether a pass starts from a tensor."""
        return any(
            node == spot.node and spot.output in (None, output)
            for node, output in self._roots[index]
        )

    def _step(self, edge: Edge, stops: dict[tuple[int, CutKind], Stop]) -> bool:
        """Go through an edge's consumer; note the cuts, and return whether any way goes on."""
        if self.nodes[edge.consumer]["kind"] == "leaf":
            return False
        goes_on = False
        for requires_grad, dtype, apart in self._results(edge.consumer):
            if apart is None and self._connects(edge, requires_grad):
                goes_on = True
            else:
                kind = self._kind(edge, dtype, requires_grad, apart)
                stop = Stop(edge.consumer, kind, ())
                stops.setdefault((edge.consumer, kind), stop)
        return goes_on

    def _see_passes(
        self,
        connected: list[Edge],
        seen: set[int],
        stops: dict[tuple[int, CutKind], Stop],
    ) -> tuple[int, ...]:
        """Add the cuts that only a backward pass shows, and return the passes that broke off."""
        broken = {
            done.index
            for done in self.passes
            if done.error is not None and any(n in seen for n, _ in self._roots[done.index])
        }
        for edge in connected:
            facts, consumer = edge.facts, self.nodes[edge.consumer]
            arrived = (*consumer["reached"], *consumer["root_of"])
            for kind, passes in (
                (CutKind.NO_GRADIENT, facts["undefined"]),
                (CutKind.NOT_REQUESTED, () if facts["reached"] else facts["not_requested"]),
            ):
                here = tuple(index for index in passes if index in arrived)
                if here:
                    before = stops.get((edge.consumer, kind))
                    here = tuple(dict.fromkeys((*(before.passes if before else ()), *here)))
                    stops[edge.consumer, kind] = Stop(edge.consumer, kind, here)
        return tuple(sorted(broken))

    # -- ways ------------------------------------------------------------------------------------

    def _uses(self, spot: Spot) -> Iterator[Edge]:
        """Yield the edges on which one tensor is taken."""
        for edge in self._out[spot.node]:
            if spot.output is None or edge.facts["output"] == spot.output:
                yield edge

    def paths(self, spot: Spot, limit: int) -> Iterator[tuple[int, ...]]:
        """Yield up to `limit` ways from a node to a root, as node numbers.

        Every step leads towards some root, so that none is in vain.
        """
        roots = {node for pairs in self._roots.values() for node, _ in pairs}
        start = spot.node
        if not self._has_path(spot):
            return
        trail, choices = [start], [iter(self._followers(spot))]
        if start in roots:
            yield (start,)
            limit -= 1
        while trail and limit > 0:
            following = next(choices[-1], None)
            if following is None:
                trail.pop()
                choices.pop()
                continue
            trail.append(following)
            choices.append(iter(self._followers(Spot(following))))
            if following in roots:
                yield tuple(trail)
                limit -= 1

    def _followers(self, spot: Spot) -> list[int]:
        return list(
            dict.fromkeys(
                edge.consumer
                for edge in self._uses(spot)
                if not edge.facts["weak"] and edge.consumer in self.leads_to_root
            )
        )

    def way(self, start: int, goal: int) -> tuple[int, ...]:
        """Return a shortest way along data from one node to another, both included, or ()."""
        came_from = {start: start}
        waiting = deque([start])
        while waiting and goal not in came_from:
            at = waiting.popleft()
            for edge in self._out[at]:
                if edge.consumer not in came_from:
                    came_from[edge.consumer] = at
                    waiting.append(edge.consumer)
        if goal not in came_from:
            return ()
        trail = [goal]
        while trail[-1] != start:
            trail.append(came_from[trail[-1]])
        return tuple(reversed(trail))

    # -- verdicts --------------------------------------------------------------------------------

    def status(self, spot: Spot) -> Status:
        """Return what became of a tensor's gradient over the whole recording."""
        norms = [gradient.norm for gradient in self.gradients_at(spot.node)]
        if norms:
            return _status_of(norms)
        if not self.requires_grad(spot):
            return Status.FROZEN
        if self.nodes[spot.node]["filled_unseen"]:
            return Status.UNKNOWN
        if not self.passes:
            return Status.NO_BACKWARD
        return Status.REACHED if self._is_reached(spot) else self._status_unreached(spot)

    def requires_grad(self, spot: Spot) -> bool:
        """Whether a tensor requires a gradient, or came to."""
        facts = self.nodes[spot.node]
        results = facts["result_requires_grad"]
        if spot.output is None or spot.output >= len(results):
            return bool(facts["requires_grad"])
        return bool(results[spot.output])

    def _is_reached(self, spot: Spot) -> bool:
        facts = self.nodes[spot.node]
        if facts["kind"] != "op":
            # What a pass that raised sent on its way to a leaf was not put there.
            return any(self.passes[index].error is None for index in facts["reached"])
        if spot.output is None:
            return bool(facts["reached"])
        if any(edge.facts["reached"] for edge in self._uses(spot)):
            return True
        for facts in map(dict, self.graph.graph["passes"]):
            roots = zip(facts["roots"], facts["root_outputs"], strict=True)
            if (spot.node, spot.output) in facts["captured"]:
                return True
            if facts["error"] is None and (spot.node, spot.output) in roots:
                return True
        return False

    def _status_unreached(self, spot: Spot) -> Status:
        reach = self.reach(spot)
        if reach.interrupted:
            return Status.UNKNOWN
        if reach.stops:
            return Status.CUT
        if reach.has_path and reach.connected:
            return Status.UNKNOWN
        if self.may_miss_uses or self.is_used_unseen(spot.node):
            return Status.UNKNOWN
        return Status.CUT if self._last_resort(spot) else Status.UNUSED

    def is_used_unseen(self, node: int) -> bool:
        """Whether no op took a parameter that holds others, with which FSDP2 computes."""
        return self.nodes[node]["flavour"] == "holder" and not self._out[node]

    @property
    def may_miss_uses(self) -> bool:
        """Whether what seems unused may have flowed through something that was not observed."""
        return bool(self.troubles or self.hidden or any(not p.observed for p in self.passes))

    @cached_property
    def hidden(self) -> tuple[int, ...]:
        """Nodes on ways to a root that stand for what was not seen.

        A graph that was built before the recording or in another thread shows what it is linked to,
        and nothing of what was detached. What torch.func returns is met as unseen, too; but what
        goes into it is seen.
        """
        if self._transformed:
            return ()
        return tuple(
            node
            for node in sorted(self.leads_to_root)
            if self.nodes[node]["flavour"] == "unseen"
            and self.nodes[node]["op"] != "shared storage"
        )

    def _last_resort(self, spot: Spot) -> tuple[Stop, ...]:
        """Return where a tensor with no way to a root left autograd's sight for another use."""
        if spot.node not in self.leads_to_end or self._has_path(spot):
            return ()
        found: dict[tuple[int, CutKind], Stop] = {}
        waiting, seen = [spot], {spot.node}
        while waiting:
            for edge in self._uses(waiting.pop()):
                if edge.consumer not in self.leads_to_end or edge.consumer in seen:
                    continue
                stop = self._end(spot.node, edge)
                consumer = self.nodes[edge.consumer]
                if stop is not None:
                    found.setdefault((stop.node, stop.kind), stop)
                    if not consumer["writes_to"]:
                        continue
                if consumer["kind"] == "op" and not edge.facts["weak"]:
                    seen.add(edge.consumer)
                    waiting.append(Spot(edge.consumer))
        return tuple(found.values())

    def _end(self, start: int, edge: Edge) -> Stop | None:
        """Return the stop where an edge leads out of autograd's sight, or None."""
        consumer = self.nodes[edge.consumer]
        if consumer["kind"] == "escape":
            return Stop(edge.consumer, CutKind.ESCAPE, ())
        if edge.facts["weak"] or consumer["writes_to"]:
            if start in consumer["writes_to"] or not consumer["writes_to"]:
                return None
            kind = stop_kind(consumer["op"], consumer["grad_mode"], consumer["flavour"], True)
            return Stop(edge.consumer, kind, ())
        results = [f for f in self._out[edge.consumer] if f.consumer in self.leads_to_end]
        if not results or any(
            f.facts["apart"] is None and self._connects(edge, f.facts["requires_grad"])
            for f in results
        ):
            return None
        first = results[0].facts
        if not self._ends_elsewhere(start, edge.consumer):
            return None
        kind = self._kind(edge, first["dtype"], first["requires_grad"], first["apart"])
        return Stop(edge.consumer, kind, ())

    def _ends_elsewhere(self, start: int, node: int) -> bool:
        """Whether data leads from a node to an escape, a transform, or another leaf."""
        waiting, seen = [node], {node}
        while waiting:
            at = waiting.pop()
            facts = self.nodes[at]
            elsewhere = self._is_write(at) and start not in facts["writes_to"]
            if facts["kind"] == "escape" or elsewhere or at in self._transformed:
                return True
            for edge in self._out[at]:
                if edge.consumer not in seen and edge.consumer in self.leads_to_end:
                    seen.add(edge.consumer)
                    waiting.append(edge.consumer)
        return False

    def stops(self, spot: Spot) -> tuple[Stop, ...]:
        """Return the cuts that concern one tensor."""
        status = self.status(spot)
        if status in (Status.FROZEN, Status.NO_BACKWARD):
            return ()
        stops = self.reach(spot).stops
        if status is Status.CUT:
            return stops or self._last_resort(spot)
        return tuple(stop for stop in stops if not self._is_for_its_own_use(stop))

    def _is_for_its_own_use(self, stop: Stop) -> bool:
        """Whether a gradient was taken to be differentiated again, as a penalty's is."""
        return stop.kind is CutKind.NOT_REQUESTED and all(
            self._pass_facts[index]["create_graph"] for index in stop.passes
        )

    def origin(self, node: int, index: int, is_bad: Callable[[float], bool]) -> int | None:
        """Return the op in whose backward pass a gradient first became bad, or None.

        From the leaf the bad edges are followed towards the root, up to an op all of whose own
        incoming gradients were still good.
        """
        waiting, seen = [node], {node}
        while waiting:
            at = waiting.pop()
            for edge in self._out[at]:
                norms = [norm for passed, norm in edge.facts["norms"] if passed == index]
                if not any(map(is_bad, norms)) or edge.consumer in seen:
                    continue
                seen.add(edge.consumer)
                if not self._any_bad(edge.consumer, index, is_bad):
                    return edge.consumer
                waiting.append(edge.consumer)
        return None

    def _any_bad(self, node: int, index: int, is_bad: Callable[[float], bool]) -> bool:
        return any(
            is_bad(norm)
            for edge in self._out[node]
            for passed, norm in edge.facts["norms"]
            if passed == index
        )

    # -- cuts ------------------------------------------------------------------------------------

    def cuts_of(self, spot: Spot) -> tuple[Cut, ...]:
        """Return the cuts on one tensor's ways, in the order of the program."""
        stops = sorted(self.stops(spot), key=lambda stop: stop.node)
        return tuple(self.cut(stop, self._blocked[stop.node, stop.kind]) for stop in stops)

    @cached_property
    def _blocked(self) -> dict[tuple[int, CutKind], tuple[str, ...]]:
        found: dict[tuple[int, CutKind], list[str]] = defaultdict(list)
        for node in self.nodes:
            if self.is_leaf(node):
                for stop in self.stops(Spot(node)):
                    found[stop.node, stop.kind].append(self.label(node))
        return defaultdict(tuple, {key: tuple(names) for key, names in found.items()})

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Every cut that blocks at least one leaf, in the order of the program."""
        found: dict[tuple[int, CutKind], Stop] = {}
        for node in self.nodes:
            if self.is_leaf(node):
                for stop in self.stops(Spot(node)):
                    found.setdefault((stop.node, stop.kind), stop)
        ordered = sorted(found.values(), key=lambda stop: stop.node)
        return tuple(self.cut(stop, self._blocked[stop.node, stop.kind]) for stop in ordered)

    def cut(self, stop: Stop, blocked: tuple[str, ...]) -> Cut:
        """Return the record of one stop."""
        facts = self.nodes[stop.node]
        place = facts
        if stop.kind is CutKind.NOT_REQUESTED and stop.passes:
            place = self._pass_facts[stop.passes[0]]
        return Cut(
            kind=stop.kind,
            op=facts["op"] or "",
            node=stop.node,
            location=location_of(place),
            called_from=location_of(place, "called_from_"),
            source=place["source"],
            module=facts["module"],
            blocked=blocked,
            passes=stop.passes,
        )

    # -- finding by name -------------------------------------------------------------------------

    @cached_property
    def by_name(self) -> dict[str, Spot]:
        """Tensors by what they are called; leaves come first, then the latest result."""
        found: dict[str, Spot] = {}
        for node, facts in self.nodes.items():
            names = facts["result_names"]
            if not names and facts["name"] is not None:
                found[facts["name"]] = Spot(node)
            for output, name in enumerate(names):
                if name is not None:
                    found[name] = Spot(node, output)
        found.update({label: Spot(node) for node, label in self._labels.items()})
        return found

    def matching(self, pattern: str) -> tuple[int, ...]:
        """Return the leaves whose names match a shell-style pattern."""
        return tuple(
            node for node, label in self._labels.items() if fnmatch.fnmatchcase(label, pattern)
        )


def _status_of(norms: list[float | None]) -> Status:
    known = [norm for norm in norms if norm is not None]
    if any(norm != norm or norm == float("inf") for norm in known):
        return Status.NONFINITE
    return Status.ZERO if len(known) == len(norms) and not any(known) else Status.REACHED
