"""Graph -> sides of one step: which pass reached which leaf, and which term of a loss.

# NOTE [ Terms of a loss ]
A loss is a sum of terms where scalars were added up: from the root, sums are followed backwards
through `+`, `-`, `sum([...])`, `torch.stack([...]).sum()` and factors that need no gradient
(`(a + b) / 2`), to what was added. A tensor with more than one element is no sum of terms but a
residual connection, so only scalars are followed. What a term reaches is read from the edges that
the pass went along: autograd adds up what comes from several terms, so that an edge behind the
place where they meet was reached by each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from gradtrace._flow import Edge, Flow, location_of
from gradtrace._records import Leaf, Term

_SUMS: Final = frozenset(
    """
    add sub __add__ __radd__ __sub__ __rsub__ __iadd__ __isub__ add_ sub_ rsub subtract subtract_
    """.split()
)
_PASSES_ON: Final = frozenset(
    """
    mul div __mul__ __rmul__ __truediv__ __imul__ __itruediv__ mul_ div_ true_divide multiply divide
    sum mean neg __neg__ clone to float double half bfloat16 squeeze reshape view nansum nanmean
    """.split()
)
_COLLECTS: Final = frozenset({"stack", "cat", "hstack", "vstack", "concat", "concatenate"})


def reached_by(flow: Flow, index: int) -> tuple[Leaf, ...]:
    """Return the leaves at which a gradient of one pass arrived."""
    arrived = {g.node for g in flow.gradients if g.backward_pass == index}
    return tuple(leaf for leaf in flow.leaves if leaf.node in arrived)


def terms_of(flow: Flow, index: int) -> tuple[Term, ...]:
    """Return the terms that the roots of one pass add up, in the order of the program.

    A root that is no sum is a term itself.
    """
    roots = dict(flow.graph.graph["passes"][index])["roots"]
    found: dict[int, None] = {}
    for root in roots:
        found.update(dict.fromkeys(_addends(flow, root, index)))
    return tuple(_term(flow, node, index) for node in sorted(found))


def _addends(flow: Flow, root: int, index: int) -> Iterator[int]:
    """Yield the nodes of the terms of a root; see NOTE [ Terms of a loss ]."""
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        parts = _parts(flow, node, index)
        if not parts:
            yield node
        for part in parts:
            if part not in seen:
                seen.add(part)
                waiting.append(part)


def _parts(flow: Flow, node: int, index: int) -> list[int]:
    """Return what a node adds up; nothing where it is a term itself."""
    op, carriers = flow.nodes[node]["op"], _carriers(flow, node, index)
    producers = [edge.producer for edge in carriers]
    if (op in _SUMS and _are_scalars(carriers)) or _is_sum(op, carriers):
        return producers
    passes_on = op in _PASSES_ON and len(producers) == 1
    return producers if passes_on and _leads_to_sum(flow, producers[0], index) else []


def _leads_to_sum(flow: Flow, node: int, index: int) -> bool:
    """Whether a node is a sum, or passes one on; else what stands before it is the term."""
    while True:
        op, carriers = flow.nodes[node]["op"], _carriers(flow, node, index)
        if _is_sum(op, carriers):
            return True
        if op not in _SUMS | _PASSES_ON or len(carriers) != 1:
            return False
        node = carriers[0].producer


def _carriers(flow: Flow, node: int, index: int) -> list[Edge]:
    """Return the edges into a node that a pass went along."""
    return [edge for edge in flow.into(node) if index in edge.facts["reached"]]


def _is_sum(op: str | None, carriers: list[Edge]) -> bool:
    """Whether an op adds up, or collects, several scalars."""
    return op in _SUMS | _COLLECTS and len(carriers) > 1 and _are_scalars(carriers)


def _are_scalars(edges: list[Edge]) -> bool:
    return bool(edges) and all(math.prod(edge.facts["shape"]) == 1 for edge in edges)


def _term(flow: Flow, node: int, index: int) -> Term:
    facts: dict[str, Any] = flow.nodes[node]
    reached = _upstream(flow, node, index)
    return Term(
        name=facts["name"] or facts["source"] or flow.label(node),
        node=node,
        location=location_of(facts),
        source=facts["source"],
        leaves=tuple(leaf.name for leaf in flow.leaves if leaf.node in reached),
    )


def _upstream(flow: Flow, node: int, index: int) -> set[int]:
    """Return the nodes that a pass reached from one node on, itself included."""
    found, waiting = {node}, [node]
    while waiting:
        for edge in _carriers(flow, waiting.pop(), index):
            if edge.producer not in found:
                found.add(edge.producer)
                waiting.append(edge.producer)
    return found
