"""Graph -> hazards: what a program does to memory or drops, and likely does not mean."""

from __future__ import annotations

from typing import Any

from gradtrace._flow import Flow, location_of
from gradtrace._records import Hazard, HazardKind, Need

Attributes = dict[str, Any]


def hazards(flow: Flow) -> tuple[Hazard, ...]:
    """Return the writes to what backward still needed, then the calls whose result was dropped."""
    overwrites: dict[tuple[object, ...], Hazard] = {}
    for facts in map(dict, flow.graph.graph["overwrites"]):
        hazard = _overwrite(flow, facts)
        # The same line, again and again in a loop, is one hazard.
        key = hazard.kind, hazard.location, hazard.source, hazard.tensor, hazard.needed_by
        overwrites.setdefault(key, hazard)
    dropped: dict[tuple[object, ...], Hazard] = {}
    for facts in flow.nodes.values():
        if facts["dropped"]:
            hazard = _dropped(facts)
            dropped.setdefault((hazard.location, hazard.source), hazard)
    return (*overwrites.values(), *dropped.values())


def _overwrite(flow: Flow, facts: Attributes) -> Hazard:
    needed_by = flow.nodes[facts["needed_by"]]
    return Hazard(
        kind=HazardKind.SILENT_WRITE if facts["silent"] else HazardKind.WRITE,
        op=facts["op"],
        location=location_of(facts),
        called_from=location_of(facts, "called_from_"),
        source=facts["source"],
        module=facts["module"],
        tensor=facts["tensor"],
        needed_by=Need(
            op=needed_by["op"] or "",
            node=facts["needed_by"],
            location=location_of(needed_by),
            source=needed_by["source"],
            backward_pass=facts["backward_pass"],
        ),
    )


def _dropped(facts: Attributes) -> Hazard:
    return Hazard(
        kind=HazardKind.DROPPED,
        op=facts["op"],
        location=location_of(facts),
        called_from=None,
        source=facts["source"],
        module=facts["module"],
        tensor=None,
        needed_by=None,
    )
