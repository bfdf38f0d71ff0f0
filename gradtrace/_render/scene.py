"""What is drawn: boxes, arrows and frames. A scene knows no format; `dot.py` gives it its looks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from typing import Any

import networkx as nx

from gradtrace._records import Status
from gradtrace._render.grouping import Form, Group, Grouping, group
from gradtrace._render.repeats import Repeats
from gradtrace._render.selection import Analysis, View, ancestors, parent, select
from gradtrace._render.wording import (
    columns,
    many,
    name_text,
    node_hint,
    node_place,
    pass_count,
    passes_phrase,
    passes_text,
    place,
    printable,
    shape_text,
    shorten,
)

LIMIT = 80  # boxes in which a person still finds the way
USES = 20  # arrows out of one box: dot takes seconds for 100 and minutes for 200
_USES_OF_A_COPY = 10
_PLACES_SHOWN = 3
_STEPS_SHOWN = 5
_NAMES_SHOWN = 3
_CODE_WIDTH = 36
_OP_WIDTH = 34
_RESULT_WIDTH = 28  # a variable's name before its op


class Kind(StrEnum):
    """What a box stands for."""

    LEAF = "leaf"
    INPUT = "input"
    OP = "op"
    CUT = "cut"
    ESCAPE = "escape"
    GROUP = "group"


class Sample(StrEnum):
    """An entry of the legend."""

    LEAF = "leaf"
    INPUT = "input"
    OP = "op"
    GROUP = "group"
    CUT = "cut"
    ESCAPE = "escape"
    ROOT = "root"
    REACHED = "reached"
    NOT_REACHED = "not reached"
    PLAIN = "plain"
    PASSES = "passes"


@dataclass(frozen=True, slots=True)
class Box:
    """A node of the picture: one node of the graph, or several that were grouped.

    Attributes:
        id: Unique in the scene: the number of the first node that it stands for.
        kind: What it stands for; a cut op is a CUT, nodes of several kinds are a GROUP.
        title: Name of the tensor, op or module.
        lines: Further facts, each on a line.
        cuts: A line for each place inside a module at which a gradient stops.
        verdicts: Statuses of the leaves counted here, each with their number. Every drawn leaf
            is counted in exactly one box.
        status: The verdict to show: of a leaf, of leaves of one status, or of a copied leaf.
        roots: Backward passes that start here.
        passes: In words the passes that reached a leaf, or that all solid arrows of the box agree
            on; "" in a trace of fewer than two.
        times: How many modules that are alike are drawn as the one around it; its title and lines
            are those of one. 1 for a collapsed module, which counts what is in all of them.
        frame: Dotted path of the module around it, "" outside any.
        module: Dotted path of the module that is collapsed into it, "" for other boxes.
        nodes: Nodes of the graph that it stands for; none for a copy.
        hint: What is known of its place in the program.
    """

    id: int
    kind: Kind
    title: str
    lines: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    verdicts: tuple[tuple[Status, int], ...] = ()
    status: Status | None = None
    roots: tuple[int, ...] = ()
    passes: str = ""
    times: int = 1
    frame: str = ""
    module: str = ""
    nodes: tuple[int, ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Arrow:
    """Tensors on their way from one box to another.

    Attributes:
        tail: Box that made them.
        head: Box that took them.
        reached: Passes in which a gradient came back along it; solid where there are some.
        plain: Whether it is dashed because no leaf that wants a gradient flows into it.
        label: Name of the tensor, "" where it has none or its box says it already.
        back: Whether it leads to a repeat of something drawn above: the next of a run of modules,
            the next step of a loop.
        passes: The same passes in words, "" in a trace of fewer than two, and where a box at
            either end says it for all its arrows.
    """

    tail: int
    head: int
    reached: tuple[int, ...]
    plain: bool = False
    back: bool = False
    label: str = ""
    passes: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """A module around boxes and modules.

    Attributes:
        path: Dotted path, as in `Box.frame`.
        title: What to call it inside the frame around; of modules that are alike their numbers
            and how many they are.
        boxes: Boxes that lie in it and in no frame inside it.
        frames: Modules inside it.
    """

    path: str
    title: str
    boxes: tuple[int, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """All that a picture shows.

    Attributes:
        boxes: In order of creation of what they stand for, copies last.
        arrows: In order of creation of what they start from.
        frame: The outermost frame, "", which is not drawn itself.
        legend: Samples of what occurs.
        notes: Sentences on what is left out, collapsed or not known.
    """

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    frame: Frame
    legend: tuple[Sample, ...]
    notes: tuple[str, ...]


def build_scene(
    graph: nx.MultiDiGraph,
    analysis: Analysis,
    *,
    full: bool = False,
    depth: int | None = None,
    only: str | None = None,
    gradient_graph_only: bool = False,
    limit: int = LIMIT,
    notes: Iterable[str] = (),
) -> Scene:
    """Return what a picture of one graph shows.

    Args:
        graph: The whole graph.
        analysis: Of the same graph.
        full: Draw every node in a box of its own.
        depth: Levels of modules to draw open; None for as many as fit.
        only: Name of a tensor: draw only its ways to the roots, and to what cuts them.
        gradient_graph_only: Leave out what no gradient can come to.
        limit: Number of boxes above which modules collapse and repeats fold.
        notes: Sentences to show before the scene's own.

    Raises:
        UnknownNameError: `only` names nothing in this graph.
    """
    view = select(graph, analysis, full=full, only=only, gradient_graph_only=gradient_graph_only)
    grouping = group(view, limit, full=full, depth=depth)
    boxes = tuple(_box(view, grouping, members) for members in grouping.groups)
    boxes, arrows = _copy_busy(view, boxes, tuple(_arrows(view, boxes)))
    boxes, arrows = _tell_passes(view, tuple(_unframed(boxes, grouping.repeats)), arrows)
    why = _why_left_out(only, gradient_graph_only)
    return Scene(
        boxes=boxes,
        arrows=arrows,
        frame=_frames(boxes, grouping.repeats),
        legend=tuple(_legend(boxes, arrows)),
        notes=(*notes, *_pass_notes(analysis), *_notes(view, grouping, why)),
    )


def _box(view: View, grouping: Grouping, members: Group) -> Box:
    frame = parent(members.path) if members.form is Form.MODULE else members.path
    if members.form is Form.MODULE:
        box = _module(view, grouping.repeats, members)
    elif members.form is Form.CHAIN:
        box = _chain(view, members.shown, frame)
    elif members.form is Form.SINGLE:
        box = _single(view, members.shown[0], frame)
    else:
        box = _several(view, members.shown, frame)
    verdicts = _verdicts(view, members.nodes)
    times = len(members.nodes) // len(members.shown) if members.form is not Form.MODULE else 1
    if times > 1 and not frame:  # data from outside that each of the modules takes
        box = replace(box, title=box.title + _times(times))
    return replace(
        box,
        verdicts=tuple((status, verdicts[status]) for status in Status if verdicts[status]),
        times=times,
        frame=frame,
        nodes=members.nodes,
    )


def _verdicts(view: View, nodes: Iterable[int]) -> Counter[Status]:
    return Counter(view.status[node] for node in nodes if node in view.status)


def _single(view: View, node: int, frame: str) -> Box:
    data = view.nodes[node]
    kind = _kind(data)
    lines = (*_facts(kind, data), _root_text(view, data["root_of"]))
    return Box(
        id=node,
        kind=kind,
        title=_title(data, frame),
        lines=tuple(filter(None, lines)),
        status=view.status.get(node),
        roots=data["root_of"],
        hint=node_hint(data) or printable(data["name"] or ""),
    )


def _root_text(view: View, passes: Sequence[int]) -> str:
    if not passes or pass_count(view.graph) == 1:
        return "backward starts here" if passes else ""
    numbers = passes_text(passes, 0)
    return f"pass {numbers} starts here" if len(passes) == 1 else f"passes {numbers} start here"


def _kind(data: Mapping[str, Any]) -> Kind:
    """Return CUT for whatever stops a gradient, except for an escape, which has its own sign."""
    kind = Kind(data["kind"])
    return Kind.CUT if kind is Kind.OP and data["cut"] else kind


def _title(data: Mapping[str, Any], frame: str = "") -> str:
    """Return what a node is called; inside the frame of its module without the module's path."""
    if data["kind"] in {"leaf", "input"}:
        return name_text(data["name"] or "data", frame)
    if _kind(data) is Kind.CUT:
        return _cut_title(data)
    op = shorten(data["op"] or "op", _OP_WIDTH)
    return f"{shorten(data['name'], _RESULT_WIDTH)} = {op}" if data["name"] else op


def _cut_title(data: Mapping[str, Any]) -> str:
    kind, op = data["cut"], data["op"]
    return str(kind) if op in {kind, None} else f"{kind}: {shorten(op, _OP_WIDTH)}"


def _facts(kind: Kind, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a box says below its title; an ordinary op says nothing more."""
    if kind in {Kind.LEAF, Kind.INPUT} and data["shape"] is not None:
        yield shape_text(data["shape"])
    if kind in {Kind.CUT, Kind.ESCAPE}:
        yield _blamed(data)
        yield shorten(data["source"] or data["name"] or "", _CODE_WIDTH)


def _blamed(data: Mapping[str, Any]) -> str:
    """Return the line to blame, and the user's own line where that one is a library's."""
    at = node_place(data)
    caller = place(data["called_from_file"], data["called_from_line"])
    return f"{at}, called from {caller}" if caller and caller != at else at


def _module(view: View, repeats: Repeats, members: Group) -> Box:
    leaves = _verdicts(view, members.nodes)
    ops = sum(view.nodes[node]["kind"] == "op" for node in members.nodes)
    facts = _count_leaves(leaves), many(ops, "op") if ops else ""
    return Box(
        id=members.nodes[0],
        kind=Kind.GROUP,
        title=_module_title(repeats, members.path, parent(members.path)),
        lines=tuple(filter(None, facts)),
        cuts=tuple(_cuts_inside(view, members.nodes)),
        module=members.path,
        hint=printable(members.path),
    )


def _module_title(repeats: Repeats, path: str, frame: str) -> str:
    """Return what a module is called in a frame; an item of a list never by its number alone."""
    inside = path.removeprefix(f"{frame}.") if frame else path
    if inside.isdecimal() and frame:
        inside = f"{frame.rpartition('.')[2]}.{inside}"
    shown = repeats.text(path).split(".")[-len(inside.split(".")) :]
    return name_text(".".join(shown)) + _times(repeats.times(path))


def _chain(view: View, nodes: Sequence[int], frame: str) -> Box:
    """Return one box for ops in a row, named by the result of the last."""
    ops = [shorten(view.nodes[node]["op"] or "op", _OP_WIDTH) for node in nodes]
    if len(ops) > _STEPS_SHOWN:
        ops[2:-1] = [f"… {len(ops) - 3} more …"]
    last = view.nodes[nodes[-1]]
    name = f"{shorten(last['name'], _RESULT_WIDTH)} = " if last["name"] else ""
    steps = [f"{ops[0]} →", *(f"{op} →" for op in ops[1:-1]), ops[-1]]
    title, *lines = _wrapped(steps, first=name)
    return Box(
        id=nodes[0],
        kind=Kind.OP,
        title=title,
        lines=tuple(lines),
        hint=node_hint(last) or frame,
    )


def _wrapped(words: Sequence[str], first: str) -> Iterator[str]:
    """Yield lines of words, each at most so wide as a box should be."""
    line = first
    for word in words:
        if line and line != first and columns(line) + columns(word) > _OP_WIDTH:
            yield line.rstrip()
            line = ""
        line += f"{word} "
    yield line.rstrip()


def _count_leaves(leaves: Counter[Status]) -> str:
    if not leaves:
        return ""
    total = many(leaves.total(), "parameter")
    if len(leaves) == 1:
        return f"{total} {next(iter(leaves))}"
    shares = ", ".join(f"{leaves[status]:,} {status}" for status in Status if leaves[status])
    return f"{total}: {shares}"


def _cuts_inside(view: View, nodes: Iterable[int]) -> Iterator[str]:
    """Yield a line for each place of a cut, the most frequent first, and a count of the rest."""
    cuts = (data for node in nodes if (data := view.nodes[node])["cut"])
    places = Counter(f"{data['cut']} {node_place(data)}".rstrip() for data in cuts)
    for text, times in places.most_common(_PLACES_SHOWN):
        yield text + _times(times)
    if len(places) > _PLACES_SHOWN:
        yield f"{len(places) - _PLACES_SHOWN:,} more"


def _several(view: View, nodes: Sequence[int], frame: str) -> Box:
    """Return one box for leaves that are alike, or for what one line of source did."""
    first = view.nodes[nodes[0]]
    kind = _kind(first)
    titles = list(dict.fromkeys(_repeat_title(view.nodes[node], frame) for node in nodes))
    roots = tuple(sorted(index for node in nodes for index in view.nodes[node]["root_of"]))
    lines = (*_repeat_lines(view, kind, nodes, titles), _root_text(view, roots))
    return Box(
        id=nodes[0],
        kind=Kind.GROUP if kind is Kind.OP and len(titles) > 1 else kind,
        title=_common_title(kind, titles, len(nodes)),
        lines=tuple(filter(None, lines)),
        status=view.status.get(nodes[0]),
        roots=roots,
        hint=node_hint(first),
    )


def _common_title(kind: Kind, titles: Sequence[str], number: int) -> str:
    if len(titles) == 1:
        return titles[0] + _times(number)
    named = ", ".join(titles)
    are_named = kind in {Kind.LEAF, Kind.INPUT} and len(titles) == number <= _NAMES_SHOWN
    return named if are_named and columns(named) <= _OP_WIDTH else many(number, *_NOUNS[kind])


_NOUNS: Mapping[Kind, tuple[str, str]] = {
    Kind.LEAF: ("leaf", "leaves"),
    Kind.INPUT: ("input", "inputs"),
    Kind.OP: ("op", "ops"),
    Kind.CUT: ("cut", "cuts"),
    Kind.ESCAPE: ("escape", "escapes"),
}


def _repeat_title(data: Mapping[str, Any], frame: str) -> str:
    """Return what repeats are called, whatever variable the result of each went to."""
    return _title({**data, "name": None} if data["op"] else data, frame)


def _repeat_lines(
    view: View, kind: Kind, nodes: Sequence[int], titles: Sequence[str]
) -> Iterator[str]:
    if kind in {Kind.LEAF, Kind.INPUT}:
        if "," not in (named := _common_title(kind, titles, len(nodes))):
            yield shorten(f"{titles[0]} … {titles[-1]}") if len(titles) > 1 else ""
        shapes = [view.nodes[node]["shape"] for node in nodes]
        different = list(dict.fromkeys(map(shape_text, filter(None, shapes))))
        if len(different) <= _NAMES_SHOWN and (len(different) == 1 or "," in named):
            yield shorten(", ".join(different))
        return
    ops = Counter(view.nodes[node]["op"] or "op" for node in nodes)
    if kind is Kind.OP and len(ops) > 1:
        yield shorten(", ".join(op + _times(times) for op, times in ops.most_common(4)))
    yield from _common_place(view, nodes)


def _common_place(view: View, nodes: Sequence[int]) -> Iterator[str]:
    """Yield place and text of the line that all nodes come from, or their function."""
    first = view.nodes[nodes[0]]
    if len({view.nodes[node]["line"] for node in nodes}) > 1:
        yield shorten(f"in {first['function']}") if first["function"] else ""
        return
    yield node_place(first)
    longest = max((view.nodes[node]["source"] or "" for node in nodes), key=len)
    yield shorten(longest)


def _times(number: int) -> str:
    return f" × {number:,}" if number > 1 else ""


def _arrows(view: View, boxes: Iterable[Box]) -> Iterator[Arrow]:
    """Yield one arrow for all edges between two boxes that are alike."""
    owner = {node: box for box in boxes for node in box.nodes}
    alike: defaultdict[tuple[int, int, object], list[Mapping[str, Any]]] = defaultdict(list)
    wanted: set[tuple[int, int, object]] = set()
    for tail, head, edge in view.edges:
        if owner[tail] is not owner[head]:
            key = _arrow_key(owner[tail], owner[head], edge)
            alike[key].append(edge)
            if edge["reached"] or tail in view.wanting:
                wanted.add(key)
    named = {box.id: _names(view, box) for box in boxes}
    for key, edges in alike.items():
        yield _arrow(*key[:2], edges, named[key[0]], plain=key not in wanted)


def _arrow_key(tail: Box, head: Box, edge: Mapping[str, Any]) -> tuple[int, int, object]:
    """Tell tensors and passes apart between two nodes; between groups only solid and dashed."""
    single = len(tail.nodes) == len(head.nodes) == 1
    detail = (edge["reached"], edge["tensor"]) if single else bool(edge["reached"])
    return tail.id, head.id, detail


def _names(view: View, box: Box) -> set[str | None]:
    return {nodes[node]["name"] for node in box.nodes for nodes in (view.nodes, view.graph.nodes)}


def _arrow(
    tail: int,
    head: int,
    edges: Sequence[Mapping[str, Any]],
    said: set[str | None],
    *,
    plain: bool,
) -> Arrow:
    reached = tuple(sorted({index for edge in edges for index in edge["reached"]}))
    names = {edge["tensor"] for edge in edges}
    name = names.pop() if len(names) == 1 else None
    return Arrow(
        tail=tail,
        head=head,
        reached=reached,
        plain=plain,
        back=tail > head,
        label=shorten(name, 24) if name and name not in said else "",
    )


def _copy_busy(
    view: View, boxes: tuple[Box, ...], arrows: tuple[Arrow, ...]
) -> tuple[tuple[Box, ...], tuple[Arrow, ...]]:
    """Draw a tensor that many ops take once for each few of them."""
    outgoing: defaultdict[int, list[Arrow]] = defaultdict(list)
    for arrow in arrows:
        outgoing[arrow.tail].append(arrow)
    frames = {box.id: box.frame for box in boxes}
    ids = count(max(view.graph, default=0) + 1)
    copies: list[Box] = []
    for box in boxes:
        if box.kind in {Kind.LEAF, Kind.INPUT} and len(outgoing[box.id]) > USES:
            kept, *others = _chunks(outgoing[box.id], _USES_OF_A_COPY)
            for moved, new in zip(others, ids, strict=False):
                kept += [replace(arrow, tail=new) for arrow in moved]
                copies.append(_copy(view, box, new, frames[moved[0].head]))
            outgoing[box.id] = kept
    return (*boxes, *copies), tuple(arrow for kept in outgoing.values() for arrow in kept)


def _chunks(arrows: Sequence[Arrow], size: int) -> Iterator[list[Arrow]]:
    return (list(arrows[start : start + size]) for start in range(0, len(arrows), size))


def _copy(view: View, box: Box, new: int, frame: str) -> Box:
    title = _title(view.nodes[box.nodes[0]], frame) if len(box.nodes) == 1 else box.title
    return replace(
        box, id=new, title=f"{title} (again)", lines=(), verdicts=(), nodes=(), frame=frame
    )


def _tell_passes(
    view: View, boxes: Sequence[Box], arrows: Sequence[Arrow]
) -> tuple[tuple[Box, ...], tuple[Arrow, ...]]:
    """Write pass numbers on boxes, and on those arrows of which neither end tells them."""
    total = pass_count(view.graph)
    if total < 2:
        return tuple(boxes), tuple(arrows)
    agreed = _agreed(arrows)
    said = {box.id: _arrived(view, box) or agreed.get(box.id, ()) for box in boxes}
    told = []
    for arrow in arrows:
        known = arrow.reached in (said[arrow.tail], said[arrow.head])
        told.append(replace(arrow, passes="" if known else passes_text(arrow.reached, total)))
    return tuple(_with_passes(box, said[box.id], total) for box in boxes), tuple(told)


def _agreed(arrows: Iterable[Arrow]) -> dict[int, tuple[int, ...]]:
    """Return the passes of each box all of whose solid arrows have the same."""
    found: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
    for arrow in arrows:
        if arrow.reached:
            found[arrow.tail].add(arrow.reached)
            found[arrow.head].add(arrow.reached)
    return {box: next(iter(passes)) for box, passes in found.items() if len(passes) == 1}


def _arrived(view: View, box: Box) -> tuple[int, ...]:
    """Return the passes in which gradients arrived at a leaf, or at leaves that are alike."""
    found = {view.nodes[node]["reached"] for node in box.nodes if box.kind is Kind.LEAF}
    return tuple(found.pop()) if len(found) == 1 else ()


def _with_passes(box: Box, passes: tuple[int, ...], total: int) -> Box:
    if not passes or passes == box.roots:  # "pass 0 starts here" says it
        return box
    return replace(box, passes=passes_phrase(passes, total))


def _unframed(boxes: Sequence[Box], repeats: Repeats) -> Iterator[Box]:
    """Take an op that is alone in a module, such as an activation, out of that module's frame.

    So are calls of the same op, where no leaf is with them.
    """
    inside: defaultdict[str, set[tuple[Kind, str]]] = defaultdict(set)
    for box in boxes:
        for path in ancestors(box.frame):
            inside[path].add((box.kind, box.title))
    for box in boxes:
        frame = box.frame
        if box.kind not in {Kind.LEAF, Kind.INPUT}:  # their titles leave the frame's path out
            kept = (path for path in ancestors(frame) if len(inside[path]) > 1)
            frame = next((path for path in ancestors(frame) if path in repeats.runs), "")
            frame = next((path for path in kept if path.startswith(frame)), frame)
        title = _module_title(repeats, box.module, frame) if box.module else box.title
        yield replace(box, title=title, frame=frame)


def _frames(boxes: Iterable[Box], repeats: Repeats) -> Frame:
    """Return the tree of frames; one that holds a single frame and no box is left out."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    children: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for box in boxes:
        members[box.frame].append(box.id)
        for path in ancestors(box.frame):
            children[parent(path)][path] = None
    return _frame("", "", members, children, repeats)


def _frame(
    path: str,
    around: str,
    members: Mapping[str, Sequence[int]],
    children: Mapping[str, Iterable[str]],
    repeats: Repeats,
) -> Frame:
    boxes, modules = tuple(members.get(path, ())), list(children.get(path, ()))
    if path and not boxes and len(modules) == 1 and repeats.times(path) == 1:
        return _frame(modules[0], around, members, children, repeats)
    inside = (_frame(module, path, members, children, repeats) for module in modules)
    return Frame(path, _module_title(repeats, path, around), boxes, tuple(inside))


def _legend(boxes: Iterable[Box], arrows: Iterable[Arrow]) -> Iterator[Sample]:
    found: set[str] = {box.kind for box in boxes}
    found |= {Sample.ROOT for box in boxes if box.roots}
    found |= {Sample.CUT for box in boxes if box.cuts}
    found |= {arrow_sample(arrow) for arrow in arrows}
    found |= {Sample.PASSES for arrow in arrows if arrow.passes}
    return (sample for sample in Sample if sample in found)


def arrow_sample(arrow: Arrow) -> Sample:
    """Return which entry of the legend an arrow is drawn like."""
    if arrow.reached:
        return Sample.REACHED
    return Sample.PLAIN if arrow.plain else Sample.NOT_REACHED


def _why_left_out(only: str | None, gradient_graph_only: bool) -> str:
    if only is not None:
        return f"they lie on no way from {shorten(only)} to a root"
    return "no gradient comes there" if gradient_graph_only else "they lead to no root"


def _notes(view: View, grouping: Grouping, why_left_out: str) -> Iterator[str]:
    """Yield what a reader would otherwise miss without a word."""
    by_form = {form: [g for g in grouping.groups if g.form is form] for form in Form}
    if by_form[Form.MODULE]:
        yield "Modules are collapsed into one box each; depth= or full=True opens them."
    if folded := sum(map(grouping.repeats.times, grouping.repeats.runs)):
        yield f"{folded:,} repeated modules that are alike are drawn as one of each run (× …)."
    if chains := sum(len(g.shown) for g in by_form[Form.CHAIN]):
        yield f"{chains:,} ops are drawn in rows (→); full=True draws each."
    if alike := sum(len(g.shown) for g in by_form[Form.ALIKE]):
        yield f"{alike:,} nodes are drawn together by line or name; full=True draws each."
    kinds = Counter(kind for node, kind in view.graph.nodes(data="kind") if node not in view.nodes)
    left_out = [many(kinds["op"], "op")] if kinds["op"] else []
    if kinds["leaf"] and why_left_out != _why_left_out(None, False):
        left_out.append(many(kinds["leaf"], "leaf", "leaves"))
    if left_out:
        yield f"{' and '.join(left_out)} not drawn: {why_left_out}."


def _pass_notes(analysis: Analysis) -> Iterator[str]:
    if not analysis.passes:
        yield "No backward pass was recorded, so no arrow is solid."
    total = len(analysis.passes)
    if unseen := [found.index for found in analysis.passes if not found.observed]:
        which = passes_text(unseen, total) if total > 1 else "the pass"
        yield f"Started outside torch's Python API, so its arrows were not seen: {which}."
    failed = [found for found in analysis.passes if found.error]
    for found in failed[:_PLACES_SHOWN]:
        yield f"Pass {found.index} raised {shorten(found.error or '', 80)}"
    if len(failed) > _PLACES_SHOWN:
        yield f"{len(failed) - _PLACES_SHOWN:,} more passes raised."
