"""Scene -> DOT. All text is escaped here: names and sources come from the traced program.

Node ids are integers, since pydot and DOT both take some names for syntax. Labels are HTML-like,
which gives small grey print for what is secondary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import Any

import pydot

from gradtrace._records import Status
from gradtrace._render.scene import Arrow, Box, Frame, Kind, Sample, Scene, arrow_sample
from gradtrace._render.wording import name_text, printable

# Graphviz measures "Helvetica" and "Courier" by built-in tables, and every renderer has a font
# for them. The signs below are in the fonts of graphviz-pure; most others (scissors, ticks) are
# not.
_SANS = "Helvetica"
_MONO = "Courier"
_SMALL = 9
_SIGNS: Mapping[Status, str] = {
    Status.REACHED: "●",
    Status.ZERO: "○",
    Status.NONFINITE: "▲",
    Status.CUT: "//",
    Status.UNUSED: "□",
    Status.FROZEN: "■",
    Status.NO_BACKWARD: "–",
    Status.UNKNOWN: "?",
}
_CUT_SIGN = "//"
_BOX_SIGNS: Mapping[Kind, str] = {Kind.CUT: _CUT_SIGN, Kind.ESCAPE: "→"}


@dataclass(frozen=True, slots=True)
class Look:
    """Shape and colours of a box; the hues are those of Okabe and Ito, darkened for text.

    Attributes:
        shape: One of Graphviz's.
        fill: Background.
        ink: The title.
        grey: Secondary text.
        line: Border.
        style: Added to "filled".
    """

    shape: str
    fill: str
    ink: str
    grey: str
    line: str
    style: str = "solid"


def _leaf(fill: str, grey: str) -> Look:
    return Look("box", fill, "#1f2933", grey, grey, "rounded")


_LOOKS: Mapping[Kind, Look] = {
    Kind.LEAF: _leaf("#eef1f4", "#52606d"),
    Kind.INPUT: Look("underline", "#ffffff", "#3e4c59", "#616e7c", "#9aa5b1"),
    Kind.OP: Look("box", "#ffffff", "#1f2933", "#616e7c", "#616e7c"),
    Kind.CUT: Look("octagon", "#b34700", "#ffffff", "#ffffff", "#8a3600"),
    Kind.ESCAPE: Look("cds", "#fbe6d8", "#8a3600", "#8a3600", "#8a3600"),
    Kind.GROUP: Look("box3d", "#f5f7fa", "#1f2933", "#52606d", "#52606d"),
}
_ROOT = Look("box", "#0b3c5d", "#ffffff", "#ffffff", "#0b3c5d")
_LEAVES: Mapping[Status, Look] = {
    Status.REACHED: _leaf("#e2f3ec", "#005a43"),
    Status.ZERO: _leaf("#fdf3d0", "#6b5200"),
    Status.NONFINITE: _leaf("#f8e6f0", "#86285f"),
    Status.CUT: _leaf("#fbe6d8", "#8a3600"),
    Status.FROZEN: _leaf("#e3f1fa", "#1b567d"),
}
_CUT_INK = "#8a3600"
_REACHED = "#1f2933"
_PAPER_GREY = "#52606d"
_FRAME_LINE = "#b8c2cc"
_FRAME_FILL = "#fafbfc"

_LEGEND: Mapping[Sample, str] = {
    Sample.LEAF: "leaf: a tensor that wants a gradient",
    Sample.INPUT: "data that needs no gradient",
    Sample.OP: "op",
    Sample.GROUP: "several nodes in one box",
    Sample.CUT: "cut: the gradient stops here",
    Sample.ESCAPE: "the value left torch here",
    Sample.ROOT: "root: backward starts here",
    Sample.REACHED: "reached by backward",
    Sample.NOT_REACHED: "not reached by backward",
    Sample.PLAIN: "data or frozen: no gradient is due",
    Sample.PASSES: "backward passes that reached it",
}
_LEGEND_COLUMNS = 3
_SWATCH = 37  # points; five dashes and the gaps between them
_DASH = 5


@dataclass(frozen=True, slots=True)
class Stroke:
    """How an arrow is drawn.

    Attributes:
        colour: Of line and head.
        width: Of the line, in points.
        dashed: Whether it is dashed.
        head: Size of the head, 1 being Graphviz's own.
    """

    colour: str
    width: float
    dashed: bool
    head: float


_STROKES: Mapping[Sample, Stroke] = {
    Sample.REACHED: Stroke(_REACHED, 1.6, dashed=False, head=0.65),
    Sample.NOT_REACHED: Stroke("#616e7c", 1.4, dashed=True, head=0.65),
    Sample.PLAIN: Stroke("#a8b3be", 0.8, dashed=True, head=0.5),
}


def scene_to_dot(scene: Scene) -> str:
    """Return a scene in the DOT language."""
    graph = pydot.Dot("gradtrace", graph_type="digraph", **_GRAPH, label=_caption(scene))
    graph.set_node_defaults(**_NODE)
    graph.set_edge_defaults(**_EDGE)
    boxes = {box.id: box for box in scene.boxes}
    _fill(graph, scene.frame, boxes, count())
    for arrow in scene.arrows:
        graph.add_edge(_edge(arrow))
    return str(graph.to_string())


_GRAPH = {
    "bgcolor": "#ffffff",
    "fontname": _SANS,
    "fontsize": "9",
    "labelloc": "b",
    "labeljust": "l",
    "newrank": "true",  # a module that is called again stands lower, not its frame's inputs higher
    "nodesep": "0.3",
    "nslimit": "2",  # one op with 90 uses takes 5 s without, 0.5 s with it
    "pad": "0.25",
    "rankdir": "TB",
    "ranksep": "0.4",
    "tooltip": '" "',
}
_NODE = {"fontname": _SANS, "fontsize": "11", "height": "0.3", "width": "0.5"}
_MARGIN = '"0.14,0.07"'
_MARGINS = {"octagon": '"0.02,0.02"', "underline": '"0.08,0.03"', "cds": '"0.14,0.13"'}
_EDGE = {
    "arrowsize": "0.65",
    "fontname": _SANS,
    "fontsize": str(_SMALL),
    "fontcolor": _PAPER_GREY,
}


def _fill(
    target: pydot.Graph, frame: Frame, boxes: Mapping[int, Box], numbers: Iterator[int]
) -> None:
    """Add the boxes of a frame, and the frames inside it with theirs."""
    for box in frame.boxes:
        target.add_node(_node(boxes[box]))
    for inside in frame.frames:
        cluster = pydot.Subgraph(f"cluster_{next(numbers)}", **_cluster(inside))
        _fill(cluster, inside, boxes, numbers)
        target.add_subgraph(cluster)


def _cluster(frame: Frame) -> dict[str, Any]:
    return {
        "label": _html([_text(name_text(frame.path), _SMALL, _PAPER_GREY)]),
        "labelloc": "t",
        "style": '"rounded,filled"',
        "fillcolor": _FRAME_FILL,
        "color": _FRAME_LINE,
        "margin": "10",
        "tooltip": _tooltip(printable(frame.path)),
    }


def _node(box: Box) -> pydot.Node:
    look = _look(box)
    stands_out = box.roots or box.cuts or box.kind is Kind.CUT or box.status is Status.CUT
    return pydot.Node(
        str(box.id),
        id=f"box{box.id}",
        label=_html(_label(box, look)),
        shape=look.shape,
        style=f'"filled,{look.style}"',
        fillcolor=look.fill,
        color=_CUT_INK if box.cuts else look.line,
        penwidth="1.8" if stands_out else "1",
        peripheries="2" if box.roots else "1",
        margin=_MARGINS.get(look.shape, _MARGIN),
        tooltip=_tooltip(box.hint or box.title),
    )


def _look(box: Box) -> Look:
    if box.status is not None:
        return _LEAVES.get(box.status, _LOOKS[Kind.LEAF])
    return _ROOT if box.roots and box.kind is Kind.OP else _LOOKS[box.kind]


def _label(box: Box, look: Look) -> Iterator[str]:
    """Yield the lines of a box: title, facts, verdict, cuts inside."""
    sign = f"{_BOX_SIGNS[box.kind]} " if box.kind in _BOX_SIGNS else ""
    plain = box.kind in {Kind.INPUT, Kind.OP} and not box.roots
    yield _text(sign + box.title, 11, look.ink, bold=not plain)
    font = _MONO if box.kind in {Kind.CUT, Kind.ESCAPE} else _SANS
    for line in box.lines:
        yield _text(line, _SMALL, look.grey, font=font)
    if box.status is not None:
        verdict = f"{_SIGNS[box.status]} {box.status.replace('_', ' ')}"
        yield _text(verdict, _SMALL, look.grey, bold=True)
    if box.passes:
        yield _text(box.passes, _SMALL, look.grey)
    for line in box.cuts:
        yield _text(f"{_CUT_SIGN} {line}", _SMALL, _CUT_INK, bold=True)


def _edge(arrow: Arrow) -> pydot.Edge:
    # Graphviz centres a label on its arrow, so spaces keep the text beside it.
    texts = [f"\u00a0\u00a0{text}\u00a0" for text in (arrow.label, arrow.passes) if text]
    shown = _html(_text(text, 8, _PAPER_GREY) for text in texts)
    label: dict[str, Any] = {"label": shown} if texts else {}
    stroke = _STROKES[arrow_sample(arrow)]
    return pydot.Edge(
        str(arrow.tail),
        str(arrow.head),
        style="dashed" if stroke.dashed else "solid",
        color=stroke.colour,
        penwidth=f"{stroke.width:g}",
        arrowsize=f"{stroke.head:g}",
        **label,
    )


# The legend


def _caption(scene: Scene) -> str:
    """Return legend and notes as the label of the graph, where they disturb no layout."""
    rows = [f'<TD HEIGHT="6" COLSPAN="{2 * _LEGEND_COLUMNS}"></TD>']
    rows += _legend_rows([_sample(sample) for sample in scene.legend])
    rows += [_note(note) for note in scene.notes]
    body = "".join(f"<TR>{row}</TR>" for row in rows)
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="3" CELLPADDING="2">{body}</TABLE>>'


def _legend_rows(cells: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(cells), _LEGEND_COLUMNS):
        yield "".join(cells[start : start + _LEGEND_COLUMNS])


def _note(note: str) -> str:
    text = _text(printable(note), _SMALL, _PAPER_GREY)
    return f'<TD ALIGN="LEFT" COLSPAN="{2 * _LEGEND_COLUMNS}">{text}</TD>'


def _sample(sample: Sample) -> str:
    text = _text(_LEGEND[sample] + "\u00a0" * 4, _SMALL, _PAPER_GREY)
    return f'{_swatch(sample)}<TD ALIGN="LEFT">{text}</TD>'


def _swatch(sample: Sample) -> str:
    if sample in _STROKES:
        return f"<TD>{_line(_STROKES[sample])}</TD>"
    if sample is Sample.PASSES:
        return f"<TD>{_text('0, 1', 8, _PAPER_GREY)}</TD>"
    look = _ROOT if sample is Sample.ROOT else _LOOKS[Kind(sample.value)]
    text = _text(_SAMPLE_TEXTS.get(sample, " "), 8, look.ink)
    border = f'COLOR="{look.line}" {_BORDERS[sample]}'
    inner = f'<TD {border} BGCOLOR="{look.fill}" WIDTH="{_SWATCH}">{text}</TD>'
    if sample not in _AROUND:
        return inner
    return f'<TD {_AROUND[sample]} COLOR="{look.line}" CELLPADDING="2">{_table(inner)}</TD>'


_SAMPLE_TEXTS: Mapping[Sample, str] = {
    Sample.INPUT: "x",
    Sample.CUT: _BOX_SIGNS[Kind.CUT],
    Sample.ESCAPE: _BOX_SIGNS[Kind.ESCAPE],
}
# What comes closest to each shape among the borders of a table's cells.
_BORDERS: Mapping[Sample, str] = {
    Sample.LEAF: 'BORDER="1" STYLE="rounded"',
    Sample.INPUT: 'BORDER="1" SIDES="B"',
    Sample.OP: 'BORDER="1"',
    Sample.CUT: 'BORDER="1" STYLE="rounded"',
    Sample.ESCAPE: 'BORDER="1"',
    Sample.GROUP: 'BORDER="1"',
    Sample.ROOT: 'BORDER="1"',
}
_AROUND: Mapping[Sample, str] = {
    Sample.GROUP: 'BORDER="1" SIDES="TR"',
    Sample.ROOT: 'BORDER="1"',
}


def _line(stroke: Stroke) -> str:
    """Return a line of coloured cells, as long as the other samples are wide."""
    widths = [_DASH, 3] * 4 + [_DASH] if stroke.dashed else [_SWATCH]
    colours = (f'BGCOLOR="{stroke.colour}"', "")
    height = round(stroke.width)
    return _table(
        "".join(
            f'<TD {colours[number % 2]} FIXEDSIZE="TRUE" WIDTH="{width}" HEIGHT="{height}"></TD>'
            for number, width in enumerate(widths)
        )
    )


def _table(row: str) -> str:
    return (
        f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"><TR>{row}</TR></TABLE>'
    )


# Escaping


def _html(lines: Iterable[str]) -> str:
    return f"<{'<BR/>'.join(lines)}>"


def _text(text: str, size: int, colour: str, *, bold: bool = False, font: str = _SANS) -> str:
    """Return a text for an HTML-like label, in which a backslash begins an escape as well."""
    inner = escape(text).replace("\\", "\\\\") or " "
    inner = f"<B>{inner}</B>" if bold else inner
    return f'<FONT FACE="{font}" POINT-SIZE="{size}" COLOR="{colour}">{inner}</FONT>'


def _tooltip(text: str) -> str:
    """Return a quoted text; Graphviz reads the escapes of a tooltip twice."""
    text = escape(text, quote=False).replace("\\", "\\" * 4).replace('"', '\\"')
    return f'"{text}"'
