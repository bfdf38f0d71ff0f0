"""Which nodes of a graph a picture shows, and in which module each of them lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import networkx as nx

from gradtrace._errors import UnknownNameError, nearest
from gradtrace._records import BackwardPass, Cut, Gradient, Leaf, Status

DrawnEdge = tuple[int, int, Mapping[str, Any]]

_SOURCES = frozenset({"leaf", "input"})


class Analysis(Protocol):
    """What renderers read of an analysed graph."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves with their status."""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """All cuts with the leaves that they block."""

    @property
    def passes(self) -> tuple[BackwardPass, ...]:
        """All backward passes in the order in which they started."""

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """All gradients that arrived at leaves, in order of arrival."""

    @property
    def leads_to_root(self) -> Collection[int]:
        """Nodes from which a data path leads to a root, roots included."""


@dataclass(frozen=True, slots=True)
class View:
    """The part of a graph that is drawn.

    Attributes:
        graph: The whole graph.
        nodes: Attributes of the drawn nodes, in order of creation: the graph's, but for the names
            of leaves and the places of cuts, which are those that the analysis gives.
        status: Verdicts of the leaves among them.
        modules: Dotted path of the module that each node lies in, "" outside any.
        wanting: Nodes that a leaf which wants a gradient flows into, such leaves included. Of all
            others no gradient is to be expected.
        edges: What is drawn between the nodes: (producer, consumer, attributes).
    """

    graph: nx.MultiDiGraph
    nodes: Mapping[int, Mapping[str, Any]]
    status: Mapping[int, Status]
    modules: Mapping[int, str]
    wanting: Collection[int]
    edges: Sequence[DrawnEdge]


def select(
    graph: nx.MultiDiGraph,
    analysis: Analysis,
    *,
    full: bool = False,
    only: str | None = None,
    gradient_graph_only: bool = False,
) -> View:
    """Return the part of a graph that answers where gradients went.

    That is what leads to a root, all leaves that require grad, and the way from a leaf to a cut
    that lies off the way to a root. Without a root it is everything.

    Args:
        graph: The whole graph.
        analysis: Of the same graph.
        full: Take every node.
        only: Name of a tensor: take only its ways to the roots, and to what cuts them.
        gradient_graph_only: Leave out what no gradient can come to: data, frozen leaves, and what
            is made of these or lies behind a cut.

    Raises:
        UnknownNameError: `only` names nothing in this graph.
    """
    if only is not None:
        drawn = _story(graph, analysis, only)
    else:
        drawn = set(graph) if full or not _has_root(graph) else _of_interest(graph, analysis)
    if gradient_graph_only:
        drawn &= _gradient_graph(graph, analysis)
    judged = _judged(graph, analysis)
    nodes = {node: judged.get(node, graph.nodes[node]) for node in sorted(drawn)}
    status = {leaf.node: leaf.status for leaf in analysis.leaves if leaf.node in nodes}
    edges = tuple(_drawn_edges(graph, nodes))
    return View(graph, nodes, status, _modules(nodes), _wanting(graph, analysis), edges)


def _drawn_edges(
    graph: nx.MultiDiGraph, nodes: Mapping[int, Mapping[str, Any]]
) -> Iterator[DrawnEdge]:
    """Yield edges between drawn nodes; a write into another tensor only where it is a cut."""
    for tail, head, edge in graph.edges(nodes, data=True):
        if head in nodes and (carries_data(edge) or nodes[tail]["cut"]):
            yield tail, head, edge


def _gradient_graph(graph: nx.MultiDiGraph, analysis: Analysis) -> set[int]:
    """Return leaves that require grad, and what they lead to up to the cuts.

    Behind a cut it goes on where a gradient came through it all the same, from another input.
    """
    cuts = {cut.node for cut in analysis.cuts}

    def heads(node: int) -> Iterator[int]:
        if node not in cuts or graph.nodes[node]["reached"]:
            edges = graph.out_edges(node, data=True)
            yield from (head for _, head, edge in edges if carries_data(edge))

    found = _closure((leaf.node for leaf in analysis.leaves if leaf.requires_grad), heads)
    return found | {node for node, passes in graph.nodes(data="root_of") if passes}


def _wanting(graph: nx.MultiDiGraph, analysis: Analysis) -> set[int]:
    """Return what a leaf flows into in any way; a write into another tensor is a way as well."""
    leaves = (leaf.node for leaf in analysis.leaves if leaf.status is not Status.FROZEN)
    return _closure(leaves, graph.successors)


def _judged(graph: nx.MultiDiGraph, analysis: Analysis) -> dict[int, Mapping[str, Any]]:
    """Return attributes of leaves and cuts with what the analysis knows better."""
    judged: dict[int, Mapping[str, Any]] = {
        cut.node: {**graph.nodes[cut.node], **_blame(cut)} for cut in analysis.cuts
    }
    judged |= {leaf.node: {**graph.nodes[leaf.node], "name": leaf.name} for leaf in analysis.leaves}
    return judged


def _blame(cut: Cut) -> dict[str, Any]:
    blame: dict[str, Any] = {"cut": cut.kind, "source": cut.source}
    for prefix, location in (("", cut.location), ("called_from_", cut.called_from)):
        blame[f"{prefix}file"] = location and location.file
        blame[f"{prefix}line"] = location and location.line
        blame[f"{prefix}function"] = location and location.function
    return blame


def _has_root(graph: nx.MultiDiGraph) -> bool:
    return any(passes for _, passes in graph.nodes(data="root_of"))


def _of_interest(graph: nx.MultiDiGraph, analysis: Analysis) -> set[int]:
    drawn = set(analysis.leads_to_root) | _ways_to_cuts(graph, analysis)
    drawn.update(_sources_taken_by(graph, drawn))
    return drawn | {leaf.node for leaf in analysis.leaves if leaf.requires_grad}


def _ways_to_cuts(graph: nx.MultiDiGraph, analysis: Analysis) -> set[int]:
    """Return cuts that lead to no root (an escape, say) and the ways to them."""
    cuts = [cut for cut in analysis.cuts if cut.node not in analysis.leads_to_root]
    blocked = {name for cut in cuts for name in cut.blocked}
    leaves = {leaf.node for leaf in analysis.leaves if leaf.name in blocked}
    stops = {cut.node for cut in cuts}
    return _between(graph, leaves, stops) | stops


def _between(graph: nx.MultiDiGraph, starts: Iterable[int], ends: Iterable[int]) -> set[int]:
    return _after(graph, starts) & _before(graph, ends)


def _sources_taken_by(graph: nx.MultiDiGraph, drawn: Collection[int]) -> list[int]:
    """Return inputs and leaves, frozen ones among them, that a drawn node takes."""
    edges = graph.edges(data=True)
    taken = {tail for tail, head, edge in edges if head in drawn and carries_data(edge)}
    return [node for node in taken if graph.nodes[node]["kind"] in _SOURCES]


def _story(graph: nx.MultiDiGraph, analysis: Analysis, name: str) -> set[int]:
    """Return the nodes of one name, their ways to roots, and those to what cuts them elsewhere."""
    starts = [leaf.node for leaf in analysis.leaves if leaf.name == name]
    starts = starts or [node for node, text in graph.nodes(data="name") if text == name]
    if not starts:
        names = {text for _, text in graph.nodes(data="name") if text}
        raise UnknownNameError(
            f"this trace has no tensor named {name!r}.\n{nearest(name, names)}"
            "All leaves are in trace.leaves; without only= the whole trace is drawn."
        )
    story = _after(graph, starts)
    if _has_root(graph):
        stops = {cut.node for cut in analysis.cuts if name in cut.blocked}
        story &= _before(graph, stops.union(analysis.leads_to_root))
    return story.union(starts)


def _after(graph: nx.MultiDiGraph, starts: Iterable[int]) -> set[int]:
    def heads(node: int) -> Iterator[int]:
        edges = graph.out_edges(node, data=True)
        return (head for _, head, edge in edges if carries_data(edge))

    return _closure(starts, heads)


def _before(graph: nx.MultiDiGraph, ends: Iterable[int]) -> set[int]:
    def tails(node: int) -> Iterator[int]:
        edges = graph.in_edges(node, data=True)
        return (tail for tail, _, edge in edges if carries_data(edge))

    return _closure(ends, tails)


def carries_data(edge: Mapping[str, Any]) -> bool:
    """Return whether an edge is part of a data path: writing into a leaf (a step, say) is not."""
    return not edge["weak"]


def _closure(starts: Iterable[int], step: Callable[[int], Iterable[int]]) -> set[int]:
    """Return all nodes that steps lead to, the starts included."""
    found = set(starts)
    pending = list(found)
    while pending:
        new = set(step(pending.pop())) - found
        found |= new
        pending += new
    return found


def _modules(nodes: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return the module in which each node ran, or to which its dotted name belongs."""
    siblings = Counter(parent(data["name"]) for data in nodes.values() if data["kind"] == "leaf")
    known = {data["module"] for data in nodes.values() if data["kind"] not in _SOURCES}
    known |= {path for path, leaves in siblings.items() if leaves > 1}
    around = {ancestor for path in known for ancestor in ancestors(path)}
    return {node: _module(data, around) for node, data in nodes.items()}


def _module(data: Mapping[str, Any], known: Collection[str]) -> str:
    if data["kind"] not in _SOURCES:
        return str(data["module"])
    return next((path for path in ancestors(parent(data["name"])) if path in known), "")


def parent(name: str | None) -> str:
    """Return a dotted name without its last part, "" where it has one part."""
    return (name or "").rpartition(".")[0]


def ancestors(path: str) -> Iterator[str]:
    """Yield a dotted path and those of the modules around it, the innermost first."""
    while path:
        yield path
        path = parent(path)
