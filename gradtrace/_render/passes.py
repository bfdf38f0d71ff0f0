"""A graph as if only some of its backward passes had run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

import networkx as nx

from gradtrace._errors import ExportError

_OF_NODES: Final = ("reached", "root_of")
_OF_EDGES: Final = ("reached", "undefined", "not_requested", "missed")


def of_passes(graph: nx.MultiDiGraph, passes: Iterable[int]) -> nx.MultiDiGraph:
    """Return a copy without what other passes did. Passes that ran inside of those given stay.

    Raises:
        ExportError: There is no such pass.
    """
    recorded = [dict(done) for done in graph.graph["passes"]]
    kept = set(passes)
    if unknown := sorted(kept.difference(done["index"] for done in recorded)):
        known = ", ".join(str(done["index"]) for done in recorded) or "none"
        raise ExportError(
            f"passes={sorted(kept)} was given, and this trace has no backward pass {unknown[0]}. "
            f"Those recorded are {known}; trace.backward_passes lists them."
        )
    for done in recorded:  # in the order in which they started, so outer ones come first
        if done["inside"] in kept:
            kept.add(done["index"])
    chosen = nx.MultiDiGraph(**_graph(graph.graph, kept))
    chosen.add_nodes_from((node, _node(facts, kept)) for node, facts in graph.nodes.items())
    chosen.add_edges_from(
        (tail, head, key, _edge(facts, kept))
        for tail, head, key, facts in graph.edges(keys=True, data=True)
    )
    return chosen


def _graph(facts: dict[str, Any], kept: Collection[int]) -> dict[str, Any]:
    return {
        **facts,
        "passes": tuple(done for done in facts["passes"] if dict(done)["index"] in kept),
        "gradients": _by_pass(facts["gradients"], kept),
        "overwrites": _by_pass(facts["overwrites"], kept),
    }


def _by_pass(found: Iterable[tuple[Any, ...]], kept: Collection[int]) -> tuple[Any, ...]:
    return tuple(pairs for pairs in found if dict(pairs)["backward_pass"] in kept)


def _node(facts: dict[str, Any], kept: Collection[int]) -> dict[str, Any]:
    return {**_some(facts, _OF_NODES, kept), "cut": None}  # what is cut then, the flow finds out


def _edge(facts: dict[str, Any], kept: Collection[int]) -> dict[str, Any]:
    norms = tuple((index, norm) for index, norm in facts["norms"] if index in kept)
    return {**_some(facts, _OF_EDGES, kept), "norms": norms}


def _some(facts: dict[str, Any], names: Iterable[str], kept: Collection[int]) -> dict[str, Any]:
    return facts | {name: tuple(i for i in facts[name] if i in kept) for name in names}
