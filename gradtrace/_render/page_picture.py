"""Scene -> SVG that stands inside a page: classes in place of colours, names for every box.

Graphviz's SVG is read, and what is known is written anew; nothing of it is copied as it stands.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import networkx as nx

from gradtrace._render.dot import scene_to_dot
from gradtrace._render.layout import lay_out
from gradtrace._render.page_colours import MARKED, NAMES
from gradtrace._render.scene import Arrow, Box, Kind, Scene, arrow_sample
from gradtrace._render.selection import carries_data
from gradtrace._render.wording import printable, shorten

_SVG = "{http://www.w3.org/2000/svg}"
_NUMBERS = re.compile(r"[\d\s.,eMCLmcl-]+")
# Elements that are written anew, with those attributes that say where and how large.
_SHAPES: Mapping[str, Sequence[str]] = {
    "polygon": ("points",),
    "polyline": ("points",),
    "path": ("d",),
    "ellipse": ("cx", "cy", "rx", "ry"),
    "text": ("x", "y", "font-size"),
}

Edge = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """One way to draw a trace.

    Attributes:
        key: A short word, unique in the page; the ids of its elements begin with it.
        label: What the switch between pictures calls it.
        scene: What is drawn.
        svg: The element `svg`, as text.
        edges: For each arrow of the scene the edges of the graph that it stands for.
        originals: For each box that draws another box once more, that box.
    """

    key: str
    label: str
    scene: Scene
    svg: str
    edges: tuple[tuple[Edge, ...], ...]
    originals: Mapping[int, int]


def draw(
    graph: nx.MultiDiGraph,
    scene: Scene,
    key: str,
    label: str,
    *,
    direction: str = "TB",
    timeout: float | None,
) -> tuple[Picture, set[str]]:
    """Return a picture of a scene, and the colours that its classes name (see `page_colours`).

    Raises:
        LayoutError: There is no layout program, or it failed.
        TimeoutError: It took too long.
    """
    bare = replace(scene, legend=(), notes=())  # the page has them as text
    text = scene_to_dot(bare, direction=direction, theme=MARKED)
    found = ElementTree.fromstring(lay_out(text, "svg", boxes=len(scene.boxes), timeout=timeout))
    originals = _originals(graph, scene)
    writer = _Writer(scene, key, label)
    svg = writer.write(found)
    edges = tuple(_edges_of_arrows(graph, scene, originals))
    return Picture(key, label, scene, svg, edges, originals), writer.colours


class _Writer:
    """Writes one picture, and remembers the colours that it met."""

    def __init__(self, scene: Scene, key: str, label: str) -> None:
        self._scene = scene
        self._key = key
        self._label = label
        self.colours: set[str] = set()

    def write(self, found: Element) -> str:
        view = found.get("viewBox") or ""
        svg = Element("svg", {"class": "picture", "role": "group", "data-picture": self._key})
        svg.set("viewBox", view if _NUMBERS.fullmatch(view) else "0 0 1 1")
        svg.set("aria-labelledby", f"{self._key}-title")
        svg.set("aria-describedby", f"{self._key}-desc")
        self._words(svg, "title", f"{self._key}-title").text = f"Picture: {self._label}"
        self._words(svg, "desc", f"{self._key}-desc").text = _description(self._scene)
        groups = _groups(found)
        inner = SubElement(svg, "g", {"transform": _shift(found)})
        self._frames(SubElement(inner, "g"), groups)
        self._arrows(SubElement(inner, "g"), groups)
        self._boxes(SubElement(inner, "g"), groups)
        return ElementTree.tostring(svg, encoding="unicode")

    def _words(self, parent: Element, tag: str, name: str) -> Element:
        return SubElement(parent, tag, {"id": name})

    def _frames(self, parent: Element, groups: Mapping[str, Sequence[Element]]) -> None:
        for group in groups["cluster"]:
            self._shapes(SubElement(parent, "g", {"class": "frame"}), group)

    def _arrows(self, parent: Element, groups: Mapping[str, Sequence[Element]]) -> None:
        titles = {box.id: box.title for box in self._scene.boxes}
        for number, group in _matched(self._scene.arrows, groups["edge"]):
            arrow = self._scene.arrows[number]
            written = SubElement(parent, "g")
            written.set("class", f"arrow {arrow_sample(arrow).replace(' ', '-')}")
            written.set("data-arrow", str(number))
            written.set("role", "button")
            written.set("tabindex", "-1")
            text = f"{titles[arrow.tail]} to {titles[arrow.head]}, {arrow_sample(arrow)}"
            written.set("aria-label", f"arrow from {text}")
            self._shapes(written, group)

    def _boxes(self, parent: Element, groups: Mapping[str, Sequence[Element]]) -> None:
        found = {group.get("id"): group for group in groups["node"]}
        for box in self._scene.boxes:
            group = found.get(f"box{box.id}")
            if group is None:
                continue
            written = SubElement(parent, "g", {"id": f"{self._key}-{box.id}"})
            written.set("class", _box_class(box))
            written.set("data-box", str(box.id))
            written.set("role", "button")
            written.set("tabindex", "0")
            written.set("aria-label", _box_label(box))
            SubElement(written, "title").text = box.hint or box.title
            self._shapes(written, group)

    def _shapes(self, parent: Element, group: Element) -> None:
        for shape in group.iter():
            tag = shape.tag.removeprefix(_SVG)
            if tag in _SHAPES:
                self._shape(SubElement(parent, tag), shape, _SHAPES[tag])

    def _shape(self, written: Element, shape: Element, names: Sequence[str]) -> None:
        for name in names:
            value = shape.get(name) or ""
            if _NUMBERS.fullmatch(value):
                written.set(name, value)
        classes = [*self._paints(shape)]
        if written.tag == "text":
            classes += _fonts(shape)
            written.text = "".join(shape.itertext())
            if shape.get("text-anchor") in {"middle", "end"}:
                written.set("text-anchor", shape.get("text-anchor") or "")
        elif (shape.get("stroke-width") or "1") != "1":
            classes.append("thick")
        if classes:
            written.set("class", " ".join(classes))

    def _paints(self, shape: Element) -> Iterator[str]:
        for prefix, name in (("f", "fill"), ("s", "stroke")):
            value = (shape.get(name) or "").lower()
            if value in NAMES:
                self.colours.add(NAMES[value])
                yield f"{prefix}-{NAMES[value]}"
            elif name == "fill" and value in {"none", "transparent"}:
                yield "f-none"


def _fonts(shape: Element) -> Iterator[str]:
    if "ourier" in (shape.get("font-family") or ""):
        yield "mono"
    if shape.get("font-weight") == "bold":
        yield "bold"


def _groups(found: Element) -> Mapping[str, Sequence[Element]]:
    """Return the groups of Graphviz's SVG by class: cluster, node, edge."""
    groups: defaultdict[str, list[Element]] = defaultdict(list)
    for group in found.iter(f"{_SVG}g"):
        groups[group.get("class") or ""].append(group)
    return groups


def _shift(found: Element) -> str:
    transform = next((g.get("transform") for g in found.iter(f"{_SVG}g")), None) or ""
    moved = re.search(r"translate\(([\d. -]+)\)", transform)
    return moved.group() if moved else "translate(0 0)"


def _matched(arrows: Sequence[Arrow], groups: Sequence[Element]) -> Iterator[tuple[int, Element]]:
    """Yield the number of each arrow with what Graphviz drew for it.

    Ends are told by the title, parallel arrows by the number of the id.
    """
    drawn: defaultdict[str, list[Element]] = defaultdict(list)
    for group in sorted(groups, key=_number):
        drawn[group.findtext(f"{_SVG}title") or ""].append(group)
    waiting = {ends: iter(groups) for ends, groups in drawn.items()}
    for number, arrow in enumerate(arrows):
        alike = waiting.get(f"{arrow.tail}->{arrow.head}")
        found = next(alike, None) if alike else None
        if found is not None:
            yield number, found


def _number(group: Element) -> int:
    return int(re.sub(r"\D", "", group.get("id") or "") or 0)


def _description(scene: Scene) -> str:
    cuts = sum(box.kind is Kind.CUT or bool(box.cuts) for box in scene.boxes)
    return (
        f"{len(scene.boxes):,} boxes and {len(scene.arrows):,} arrows in the direction of the"
        f" forward pass; {cuts:,} boxes hold cuts. Tab goes from box to box, Enter shows details."
    )


def _box_class(box: Box) -> str:
    words = ["box", str(box.kind), *(["root"] if box.roots else [])]
    return " ".join([*words, f"is-{box.status}"] if box.status else words)


def _box_label(box: Box) -> str:
    """Return what a screen reader says of a box."""
    verdict = box.status.replace("_", " ") if box.status else ""
    cuts = [f"cut inside: {line}" for line in box.cuts]
    times = f"{box.times:,} times" if box.times > 1 else ""
    parts = (str(box.kind), box.title, times, *box.lines, verdict, box.passes, *cuts)
    return printable(", ".join(filter(None, parts)))


# -- from arrows back to edges ---------------------------------------------------------------------


def _originals(graph: nx.MultiDiGraph, scene: Scene) -> dict[int, int]:
    """Return for each box that stands for no node the busy box that it repeats."""
    owners = {node: box.id for box in scene.boxes for node in box.nodes}
    copies = [box for box in scene.boxes if not box.nodes]
    if not copies:
        return {}
    heads = defaultdict(set)
    for arrow in scene.arrows:
        heads[arrow.tail].add(arrow.head)
    followers = {
        box.id: {owners[head] for node in box.nodes for head in graph[node] if head in owners}
        for box in scene.boxes
        if box.kind in {Kind.LEAF, Kind.INPUT}
    }
    found = {}
    for copy in copies:
        alike = (
            box.id
            for box in scene.boxes
            if box.nodes
            and _likeness(box) == _likeness(copy)
            and heads[copy.id] <= followers.get(box.id, set())
        )
        original = next(alike, None)
        if original is not None:
            found[copy.id] = original
    return found


def _likeness(box: Box) -> object:
    return box.kind, box.status, box.hint, box.roots


def _edges_of_arrows(
    graph: nx.MultiDiGraph, scene: Scene, originals: Mapping[int, int]
) -> Iterator[tuple[Edge, ...]]:
    """Yield the edges that each arrow stands for."""
    owners = {node: box.id for box in scene.boxes for node in box.nodes}
    between: defaultdict[tuple[int, int], list[Edge]] = defaultdict(list)
    for tail, head, key in graph.edges(keys=True):
        if tail in owners and head in owners:
            between[owners[tail], owners[head]].append((tail, head, key))
    single = {box.id for box in scene.boxes if len(box.nodes) == 1}
    for arrow in scene.arrows:
        tail = originals.get(arrow.tail, arrow.tail)
        exact = tail in single and arrow.head in single
        edges = (edge for edge in between[tail, arrow.head] if _is_drawn(graph, edge))
        yield tuple(edge for edge in edges if _is_of(graph.edges[edge], arrow, exact=exact))


def _is_drawn(graph: nx.MultiDiGraph, edge: Edge) -> bool:
    return carries_data(graph.edges[edge]) or bool(graph.nodes[edge[0]]["cut"])


def _is_of(facts: Mapping[str, Any], arrow: Arrow, *, exact: bool) -> bool:
    """Whether an edge between the ends of an arrow is one that the arrow stands for."""
    if arrow.label and arrow.label != shorten(facts["tensor"] or "", 24):
        return False
    if exact:
        return tuple(facts["reached"]) == arrow.reached
    return bool(facts["reached"]) == bool(arrow.reached)
