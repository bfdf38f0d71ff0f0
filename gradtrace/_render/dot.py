"""Scene -> DOT. All text is escaped here: names and sources come from the traced program.

Node ids are integers, since pydot and DOT both take some names for syntax. Labels are HTML-like,
which gives small grey print for what is secondary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import Any, Final

import pydot

from gradtrace._records import Status
from gradtrace._render.palette import BOX_SIGNS, CUT_SIGN, SIGNS, THEMES, Colours, Theme
from gradtrace._render.scene import Arrow, Box, Frame, Kind, Sample, Scene, arrow_sample
from gradtrace._render.wording import printable

# Graphviz measures "Helvetica" and "Courier" by built-in tables, and every renderer has a font
# for them. The signs below are in the fonts of graphviz-pure; most others (scissors, ticks) are
# not.
_SANS = "Helvetica"
_MONO = "Courier"
_SMALL = 9
# Shapes and styles differ, so that kinds can be told apart without colours.
_SHAPES: Mapping[Kind, tuple[str, str]] = {
    Kind.LEAF: ("box", "filled,rounded"),
    Kind.INPUT: ("underline", "solid"),
    Kind.OP: ("box", "filled"),
    Kind.CUT: ("octagon", "filled"),
    Kind.ESCAPE: ("cds", "filled"),
    Kind.GROUP: ("box3d", "filled"),
}

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
    """How an arrow is drawn, but for its colour.

    Attributes:
        width: Of the line, in points.
        dashed: Whether it is dashed.
        head: Size of the head, 1 being Graphviz's own.
    """

    width: float
    dashed: bool
    head: float


_STROKES: Mapping[Sample, Stroke] = {
    Sample.REACHED: Stroke(1.6, dashed=False, head=0.65),
    Sample.NOT_REACHED: Stroke(1.4, dashed=True, head=0.65),
    Sample.PLAIN: Stroke(0.8, dashed=True, head=0.5),
}
DIRECTIONS: Final = ("TB", "LR")


_GRAPH = {
    "fontname": _SANS,
    "fontsize": "9",
    "labelloc": "b",
    "labeljust": "l",
    "newrank": "true",  # a module that is called again stands lower, not its frame's inputs higher
    "nodesep": "0.3",
    "nslimit": "2",  # one op with 90 uses takes 5 s without, 0.5 s with it
    "pad": "0.25",
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
}


def scene_to_dot(
    scene: Scene,
    *,
    direction: str = "TB",
    theme: str | Theme = "light",
    transparent: bool = False,
) -> str:
    """Return a scene in the DOT language.

    Args:
        scene: What to draw.
        direction: "TB" for data that flows from top to bottom, "LR" for left to right.
        theme: Name of one of `palette.THEMES`, or other colours.
        transparent: Leave the background out.
    """
    colours = THEMES[theme] if isinstance(theme, str) else theme
    return _Writer(scene, colours).write(direction, transparent=transparent)


class _Writer:
    """Writes one scene in the colours of one theme."""

    def __init__(self, scene: Scene, theme: Theme) -> None:
        self._scene = scene
        self._theme = theme
        self._boxes = {box.id: box for box in scene.boxes}
        self._numbers = count()

    def write(self, direction: str, *, transparent: bool) -> str:
        """Return the text."""
        paper = "transparent" if transparent else self._theme.paper
        looks = {"bgcolor": paper, "rankdir": direction}
        graph = pydot.Dot(
            "gradtrace", graph_type="digraph", label=self._caption(), **_GRAPH, **looks
        )
        graph.set_node_defaults(**_NODE)
        graph.set_edge_defaults(**_EDGE, fontcolor=self._theme.grey)
        self._fill(graph, self._scene.frame)
        for arrow in self._scene.arrows:
            graph.add_edge(self._edge(arrow))
        return str(graph.to_string())

    def _fill(self, target: pydot.Graph, frame: Frame) -> None:
        """Add the boxes of a frame, and the frames inside it with theirs."""
        for box in frame.boxes:
            target.add_node(self._node(self._boxes[box]))
        for inside in frame.frames:
            cluster = pydot.Subgraph(f"cluster_{next(self._numbers)}", **self._cluster(inside))
            self._fill(cluster, inside)
            target.add_subgraph(cluster)

    def _cluster(self, frame: Frame) -> dict[str, Any]:
        return {
            "label": _html([_text(frame.title, _SMALL, self._theme.grey)]),
            "labelloc": "t",
            "labeljust": "l",
            "style": '"rounded,filled"',
            "fillcolor": self._theme.frame_fill,
            "color": self._theme.frame_line,
            "margin": "10",
            "tooltip": _tooltip(printable(frame.path)),
        }

    def _node(self, box: Box) -> pydot.Node:
        colours = self._colours(box)
        shape, style = _shape(box)
        has_cut = box.cuts or any(status is Status.CUT for status, _ in box.verdicts)
        stands_out = box.roots or has_cut or box.kind is Kind.CUT
        return pydot.Node(
            str(box.id),
            id=f"box{box.id}",
            label=_html(self._label(box, colours)),
            shape=shape,
            style=f'"{style}"',
            fillcolor=colours.fill,
            color=self._theme.cut_ink if has_cut and not box.status else colours.line,
            penwidth="1.8" if stands_out else "1",
            peripheries="2" if box.roots else "1",
            margin=_MARGINS.get(shape, _MARGIN),
            tooltip=_tooltip(box.hint or box.title),
        )

    def _colours(self, box: Box) -> Colours:
        if box.status is not None:
            return self._theme.statuses[box.status]
        if box.roots and box.kind is Kind.OP:
            return self._theme.root
        return self._theme.kinds[box.kind]

    def _label(self, box: Box, colours: Colours) -> Iterator[str]:
        """Yield the lines of a box: title, facts, verdict, cuts inside."""
        sign = f"{BOX_SIGNS[box.kind]} " if box.kind in BOX_SIGNS else ""
        plain = box.kind in {Kind.INPUT, Kind.OP} and not box.roots
        yield _text(sign + box.title, 11, colours.ink, bold=not plain)
        font = _MONO if box.kind in {Kind.CUT, Kind.ESCAPE} else _SANS
        for line in box.lines:
            yield _text(line, _SMALL, colours.grey, font=font)
        if box.status is not None:
            yield _text(_verdict(box), _SMALL, colours.grey, bold=True)
        if box.passes:
            yield _text(box.passes, _SMALL, colours.grey)
        for line in box.cuts:
            yield _text(f"{CUT_SIGN} {line}", _SMALL, self._theme.cut_ink, bold=True)

    def _edge(self, arrow: Arrow) -> pydot.Edge:
        # Graphviz centres a label on its arrow, so spaces keep the text beside it.
        texts = [f"\u00a0\u00a0{text}\u00a0" for text in (arrow.label, arrow.passes) if text]
        shown = _html(_text(text, 8, self._theme.grey) for text in texts)
        extra: dict[str, Any] = {"label": shown} if texts else {}
        if arrow.back:
            extra["constraint"] = "false"  # the repeat that it leads to stands above
        stroke = _STROKES[arrow_sample(arrow)]
        return pydot.Edge(
            str(arrow.tail),
            str(arrow.head),
            style="dashed" if stroke.dashed else "solid",
            color=self._theme.arrows[arrow_sample(arrow)],
            penwidth=f"{stroke.width:g}",
            arrowsize=f"{stroke.head:g}",
            **extra,
        )

    # -- the legend ------------------------------------------------------------------------------

    def _caption(self) -> str:
        """Return legend and notes as the label of the graph, where they disturb no layout."""
        rows = [f'<TD HEIGHT="6" COLSPAN="{2 * _LEGEND_COLUMNS}"></TD>']
        rows += _legend_rows([self.sample(sample) for sample in self._scene.legend])
        rows += [self._note(note) for note in self._scene.notes]
        body = "".join(f"<TR>{row}</TR>" for row in rows)
        return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="3" CELLPADDING="2">{body}</TABLE>>'

    def _note(self, note: str) -> str:
        text = _text(printable(note), _SMALL, self._theme.grey)
        return f'<TD ALIGN="LEFT" COLSPAN="{2 * _LEGEND_COLUMNS}">{text}</TD>'

    def sample(self, sample: Sample) -> str:
        """Return an entry of the legend: what is drawn so, and what it means."""
        text = _text(_LEGEND[sample] + "\u00a0" * 4, _SMALL, self._theme.grey)
        return f'{self._swatch(sample)}<TD ALIGN="LEFT">{text}</TD>'

    def _swatch(self, sample: Sample) -> str:
        if sample in _STROKES:
            return f"<TD>{_line(_STROKES[sample], self._theme.arrows[sample])}</TD>"
        if sample is Sample.PASSES:
            return f"<TD>{_text('0, 1', 8, self._theme.grey)}</TD>"
        is_root = sample is Sample.ROOT
        look = self._theme.root if is_root else self._theme.kinds[Kind(sample.value)]
        text = _text(_SAMPLE_TEXTS.get(sample, " "), 8, look.ink)
        border = f'COLOR="{look.line}" {_BORDERS[sample]}'
        inner = f'<TD {border} BGCOLOR="{look.fill}" WIDTH="{_SWATCH}">{text}</TD>'
        if sample not in _AROUND:
            return inner
        return f'<TD {_AROUND[sample]} COLOR="{look.line}" CELLPADDING="2">{_table(inner)}</TD>'


def _shape(box: Box) -> tuple[str, str]:
    """Return shape and style; what has a verdict is round like a leaf."""
    return _SHAPES[Kind.LEAF if box.status is not None else box.kind]


def _verdict(box: Box) -> str:
    """Return sign and word, and how many repeats have it."""
    assert box.status is not None
    times = f" × {box.times:,}" if box.times > 1 else ""
    return f"{SIGNS[box.status]} {box.status.replace('_', ' ')}{times}"


def _legend_rows(cells: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(cells), _LEGEND_COLUMNS):
        yield "".join(cells[start : start + _LEGEND_COLUMNS])


_SAMPLE_TEXTS: Mapping[Sample, str] = {
    Sample.INPUT: "x",
    Sample.CUT: BOX_SIGNS[Kind.CUT],
    Sample.ESCAPE: BOX_SIGNS[Kind.ESCAPE],
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


def _line(stroke: Stroke, colour: str) -> str:
    """Return a line of coloured cells, as long as the other samples are wide."""
    widths = [_DASH, 3] * 4 + [_DASH] if stroke.dashed else [_SWATCH]
    colours = (f'BGCOLOR="{colour}"', "")
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
