"""Graph -> what a page knows besides its pictures, as plain values for JSON.

All texts are made printable here: names, sources and paths come from the traced program. What a
page can't hold is left out by number, never by luck, and the page says so.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from gradtrace import _advice, _source
from gradtrace._explain import call_of, explain
from gradtrace._flow import Flow, Spot
from gradtrace._hazards import hazards
from gradtrace._records import BackwardPass, Cut, Hazard, Leaf, Location, Status
from gradtrace._render.page_picture import Edge, Picture
from gradtrace._render.scene import Arrow, Box, arrow_sample
from gradtrace._render.wording import many, printable, shape_text
from gradtrace._terms import terms_of

_LEAVES: Final = 3_000  # rows of the table
_EXPLAINED: Final = 1_000
_WORK: Final = 1_000_000  # nodes that all explanations may walk over: each may walk over every one
_CUTS: Final = 1_000
_NODES: Final = 4_000
_HAZARDS: Final = 200
_PASSES: Final = 400
_TABLES: Final = 12  # passes whose terms are shown
_PATH_TERMS: Final = 40
_BLOCKED: Final = 200  # names of leaves at one cut
_AROUND: Final = 4  # lines before and behind the one that is meant
_URGENCY: Final = (
    Status.CUT,
    Status.UNUSED,
    Status.NONFINITE,
    Status.ZERO,
    Status.UNKNOWN,
    Status.NO_BACKWARD,
    Status.REACHED,
    Status.FROZEN,
)

Facts = dict[str, Any]


Thing = TypeVar("Thing", bound=Hashable)
Spelled = tuple[str, int, str, str | None]  # file, line, function, source


class _Numbers(Generic[Thing]):
    """Gives each thing that occurs a number, in order of occurrence."""

    def __init__(self) -> None:
        self.known: dict[Thing, int] = {}

    def of(self, thing: Thing) -> int:
        return self.known.setdefault(thing, len(self.known))


def page_facts(flow: Flow, pictures: Sequence[Picture]) -> Facts:
    """Return all that a page shows of one trace besides its pictures."""
    return _Collector(flow, pictures).collect()


class _Collector:
    """The numbers that facts refer to one another by."""

    def __init__(self, flow: Flow, pictures: Sequence[Picture]) -> None:
        self._flow = flow
        self._pictures = pictures
        self._places: _Numbers[Spelled] = _Numbers()
        self._edges: _Numbers[Edge] = _Numbers()
        self._passes = flow.passes[:_PASSES]
        urgent = sorted(flow.leaves, key=lambda leaf: _URGENCY.index(leaf.status))
        self._leaves = sorted(urgent[:_LEAVES], key=lambda leaf: leaf.node)
        most = min(_EXPLAINED, _WORK // max(len(flow.nodes), 1))
        self._explained = {leaf.node for leaf in urgent[:most]}
        self._names = {leaf.name: number for number, leaf in enumerate(self._leaves)}
        self._cuts = flow.cuts[:_CUTS]
        self._hazards = hazards(flow)
        self._nodes = self._wanted()

    def _wanted(self) -> list[int]:
        """Return the nodes that are told in detail: leaves and cuts, then what is drawn alone."""
        boxes = [box for picture in self._pictures for box in picture.scene.boxes]
        found = dict.fromkeys(leaf.node for leaf in self._leaves)
        found |= dict.fromkeys(cut.node for cut in self._cuts)
        needs = (hazard.needed_by for hazard in self._hazards[:_HAZARDS])
        found |= dict.fromkeys(need.node for need in needs if need)
        for alone in (True, False):
            some = (box.nodes for box in boxes if (len(box.nodes) == 1) is alone)
            found |= dict.fromkeys(node for nodes in some for node in nodes)
        return sorted(list(found)[:_NODES])

    def collect(self) -> Facts:
        known = set(self._nodes)
        drawn = {n for picture in self._pictures for box in picture.scene.boxes for n in box.nodes}
        graph = self._flow.graph
        for edge in graph.edges(keys=True):
            if edge[0] in known and edge[1] in known:
                self._edges.of(edge)
        facts: Facts = {
            "about": self._about(),
            "statuses": {str(status): _advice.VERDICTS[status] for status in Status},
            "complete": drawn <= known,
            "passes": [self._pass(done) for done in self._passes],
            "leaves": [self._leaf(leaf) for leaf in self._leaves],
            "cuts": [self._cut(cut) for cut in self._cuts],
            "hazards": [self._hazard(hazard) for hazard in self._hazards[:_HAZARDS]],
            "terms": [*self._terms()],
            "nodes": {node: self._node(node) for node in self._nodes},
            "edges": [self._edge(edge) for edge in self._edges.known],
            "pictures": [self._picture(picture, known) for picture in self._pictures],
        }
        return {**facts, **self._sources()}

    # -- the whole -------------------------------------------------------------------------------

    def _about(self) -> Facts:
        flow, graph = self._flow, self._flow.graph.graph
        return {
            "gradtrace": printable(str(graph.get("gradtrace", ""))),
            "torch": printable(str(graph.get("torch", ""))),
            "when": printable(str(graph.get("when", ""))),
            "values": printable(str(graph.get("values", ""))),
            "ops": sum(facts["kind"] == "op" for facts in flow.nodes.values()),
            "leaves": len(flow.leaves),
            "cuts": len(flow.cuts),
            "hazards": len(self._hazards),
            "passes": len(flow.passes),
            "troubles": [printable(text) for text in flow.troubles[:20]],
        }

    def _pass(self, done: BackwardPass) -> Facts:
        roots = [printable(name) for name in done.roots[:_PATH_TERMS]]
        return _present(
            kind=printable(done.kind),
            roots=roots,
            nodes=list(dict(self._flow.graph.graph["passes"][done.index])["roots"])[:_PATH_TERMS],
            place=self._place(done.location),
            inputs=None if done.inputs is None else many(len(done.inputs), "tensor"),
            create_graph=done.create_graph,
            error=done.error and printable(done.error),
            inside=done.inside,
            unseen=not done.observed,
        )

    def _terms(self) -> Iterator[Facts]:
        for done in self._passes[:_TABLES]:
            terms = terms_of(self._flow, done.index)
            if len(terms) > 1:
                yield {
                    "pass": done.index,
                    "terms": [
                        _present(
                            name=printable(term.name),
                            node=term.node,
                            place=self._place(term.location, term.source),
                            leaves=self._numbers(term.leaves),
                        )
                        for term in terms[:_PATH_TERMS]
                    ],
                }

    def _hazard(self, hazard: Hazard) -> Facts:
        need = hazard.needed_by
        return _present(
            kind=str(hazard.kind),
            op=printable(hazard.op),
            text=printable(str(hazard)),
            place=self._place(hazard.location, hazard.source),
            caller=self._place(hazard.called_from),
            need=need and need.node,
        )

    # -- leaves and cuts -------------------------------------------------------------------------

    def _leaf(self, leaf: Leaf) -> Facts:
        gradients = self._flow.gradients_at(leaf.node)
        cuts = {(stop.node, stop.kind) for stop in self._flow.stops(Spot(leaf.node))}
        return _present(
            name=printable(leaf.name),
            node=leaf.node,
            status=str(leaf.status),
            arrived=[
                [gradient.backward_pass, _norm(gradient.norm), self._cleared(gradient.cleared)]
                for gradient in gradients[:_PATH_TERMS]
            ],
            cuts=[n for n, cut in enumerate(self._cuts) if (cut.node, cut.kind) in cuts]
            if cuts
            else None,
            text=self._explanation(leaf),
        )

    def _cleared(self, location: Location | None) -> str:
        return "" if location is None else printable(str(location))

    def _explanation(self, leaf: Leaf) -> str | None:
        if leaf.node not in self._explained:
            return None
        return "\n".join(map(_visible, str(explain(self._flow, Spot(leaf.node))).splitlines()))

    def _numbers(self, names: Iterable[str]) -> list[int]:
        return [self._names[name] for name in names if name in self._names]

    def _cut(self, cut: Cut) -> Facts:
        return _present(
            kind=str(cut.kind),
            call=printable(call_of(cut)),
            node=cut.node,
            place=self._place(cut.location, cut.source),
            caller=self._place(cut.called_from),
            module=printable(cut.module),
            blocked=self._numbers(cut.blocked)[:_BLOCKED],
            count=len(cut.blocked),
            passes=list(cut.passes),
            happened=printable(_advice.HAPPENED[cut.kind].format(op=cut.op)),
            remedy=printable(_advice.REMEDIES[cut.kind]),
        )

    # -- nodes and edges -------------------------------------------------------------------------

    def _node(self, node: int) -> Facts:
        facts = self._flow.nodes[node]
        mode = facts["grad_mode"]
        shared = facts["shares_storage_with"]
        return _present(
            kind=facts["kind"],
            label=self._label(node),
            name=facts["name"] and facts["kind"] == "op" and printable(facts["name"]),
            op=facts["op"] and printable(facts["op"]),
            tensor=_tensor_text(facts["shape"], facts["dtype"]),
            device="" if facts["device"] in {None, "cpu"} else printable(facts["device"]),
            grad_fn=printable(facts["grad_fn"] or ""),
            module=printable(facts["module"]),
            mode="" if mode == "grad" else printable(mode),
            wants=bool(facts["requires_grad"]),
            reached=list(facts["reached"]),
            root=list(facts["root_of"]),
            leads=node in self._flow.leads_to_root,
            shares=shared if shared in self._flow.nodes else None,
            place=self._place(_location(facts), facts["source"]),
            caller=self._place(_location(facts, "called_from_")),
        )

    def _label(self, node: int) -> str:
        facts = self._flow.nodes[node]
        nameless = facts["kind"] == "input" and not facts["name"] and not self._flow.is_leaf(node)
        return "data" if nameless else printable(self._flow.label(node))

    def _edge(self, edge: Edge) -> list[Any]:
        facts = self._flow.graph.edges[edge]
        more = _present(
            tensor=facts["tensor"] and printable(facts["tensor"]),
            size=_tensor_text(facts["shape"], facts["dtype"]),
            reached=list(facts["reached"]),
            norms=[[index, _norm(norm)] for index, norm in facts["norms"]],
            undefined=list(facts["undefined"]),
            not_requested=list(facts["not_requested"]),
            wants=facts["requires_grad"],
            weak=facts["weak"],
        )
        return [edge[0], edge[1], more]

    # -- pictures --------------------------------------------------------------------------------

    def _picture(self, picture: Picture, known: set[int]) -> Facts:
        scene = picture.scene
        return {
            "key": picture.key,
            "label": picture.label,
            "boxes": {box.id: self._box(box, known) for box in scene.boxes},
            "arrows": [
                self._arrow(arrow, edges)
                for arrow, edges in zip(scene.arrows, picture.edges, strict=True)
            ],
            "copies": picture.originals,
            "legend": list(map(str, scene.legend)),
            "notes": [printable(note) for note in scene.notes],
        }

    def _box(self, box: Box, known: set[int]) -> Facts:
        return _present(
            title=box.title,
            kind=str(box.kind),
            lines=list(box.lines) if len(box.nodes) != 1 else None,
            cuts=list(box.cuts),
            hint=box.hint if len(box.nodes) != 1 else None,
            frame=printable(box.frame),
            nodes=[node for node in box.nodes if node in known],
            count=len(box.nodes),
            times=box.times if box.times > 1 else None,
        )

    def _arrow(self, arrow: Arrow, edges: Sequence[Edge]) -> list[Any]:
        numbers = [self._edges.known[edge] for edge in edges if edge in self._edges.known]
        return [
            arrow.tail,
            arrow.head,
            list(arrow.reached),
            arrow_sample(arrow).replace(" ", "-"),
            numbers,
        ]

    # -- source ----------------------------------------------------------------------------------

    def _place(self, location: Location | None, source: str | None = None) -> int | None:
        if location is None:
            return None
        return self._places.of((location.file, location.line, location.function, source))

    def _sources(self) -> Facts:
        """Return the places, and the lines around them where they are known for certain."""
        files: _Numbers[str] = _Numbers()
        lines: dict[int, dict[int, str]] = {}
        places = []
        for file, line, function, source in self._places.known:
            number = files.of(file)
            around = _lines_around(file, line, source)
            lines.setdefault(number, {}).update(around)
            places.append(
                [number, line, printable(function), printable(source or ""), int(bool(around))]
            )
        return {
            "places": places,
            "files": [printable(file) for file in files.known],
            "lines": [lines[number] for number in range(len(files.known))],
        }


def _location(facts: Mapping[str, Any], prefix: str = "") -> Location | None:
    file, line = facts[f"{prefix}file"], facts[f"{prefix}line"]
    if file is None or line is None:
        return None
    return Location(file, line, facts[f"{prefix}function"] or "")


def _lines_around(file: str, line: int, source: str | None) -> dict[int, str]:
    """Return lines of the program by number; nothing where they may not be what ran."""
    text = _source.known_lines(file)
    if not source or not _stands_at(text, line, source):
        return {}
    first = max(1, line - _AROUND)
    shown = text[first - 1 : line + _AROUND]
    return {first + number: _visible(each)[:200] for number, each in enumerate(shown)}


def _stands_at(text: Sequence[str], line: int, source: str) -> bool:
    """Whether an expression begins in a line, spaces aside."""
    found = re.sub(r"\s", "", "".join(text[line - 1 : line + 7]))
    return re.sub(r"\s", "", source)[:24] in found


def _visible(line: str) -> str:
    """Return a line with its spaces, and with what cannot be seen written as escapes."""
    whole = line.rstrip().expandtabs(4)
    return "".join(sign if sign == " " else printable(sign) or " " for sign in whole)


def _norm(norm: float | None) -> str:
    return "" if norm is None else f"{norm:.4g}"


def _tensor_text(shape: Sequence[int] | None, dtype: str | None) -> str:
    """Return "[3 × 4] float32", or as much of it as is known."""
    size = "" if shape is None else shape_text(shape)
    return printable(" ".join(filter(None, (size, dtype))))


def _present(**facts: Any) -> Facts:
    """Return facts without those that say nothing; a zero does say something."""
    return {name: value for name, value in facts.items() if value or type(value) is int}
