"""The colours of every format, in one table, and the signs that say the same without colour.

The fills of statuses can be told apart by people with each usual kind of colour blindness, and all
text has the contrast that WCAG asks for: tests/render/test_palette.py measures both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gradtrace._records import Status
from gradtrace._render.scene import Kind, Sample

SIGNS: Final[Mapping[Status, str]] = MappingProxyType(
    {
        Status.REACHED: "●",
        Status.ZERO: "○",
        Status.NONFINITE: "▲",
        Status.CUT: "//",
        Status.UNUSED: "□",
        Status.FROZEN: "■",
        Status.NO_BACKWARD: "–",
        Status.UNKNOWN: "?",
    }
)
CUT_SIGN: Final = SIGNS[Status.CUT]
BOX_SIGNS: Final[Mapping[Kind, str]] = MappingProxyType({Kind.CUT: CUT_SIGN, Kind.ESCAPE: "→"})


@dataclass(frozen=True, slots=True)
class Colours:
    """Of a box.

    Attributes:
        fill: Background.
        ink: The title.
        grey: Secondary text.
        line: Border.
    """

    fill: str
    ink: str
    grey: str
    line: str


@dataclass(frozen=True, slots=True)
class Theme:
    """All colours of a picture.

    Attributes:
        paper: The background.
        ink: Text on paper that has to be seen.
        grey: Other text on paper, and in frames.
        cut_ink: The places of cuts, on paper and in collapsed modules.
        frame_fill: Background of a module.
        frame_line: Its border.
        kinds: Boxes by what they stand for; a leaf's are those of its status where it has one.
        root: A box at which backward starts.
        statuses: Leaves.
        arrows: Lines and heads.
    """

    paper: str
    ink: str
    grey: str
    cut_ink: str
    frame_fill: str
    frame_line: str
    kinds: Mapping[Kind, Colours]
    root: Colours
    statuses: Mapping[Status, Colours]
    arrows: Mapping[Sample, str]


_LIGHT_INK: Final = "#16202a"
_LIGHT_GREY: Final = "#4b5865"
_LIGHT: Final = Theme(
    paper="#ffffff",
    ink=_LIGHT_INK,
    grey=_LIGHT_GREY,
    cut_ink="#8a3600",
    frame_fill="#f8f9fb",
    frame_line="#aab5c0",
    kinds={
        Kind.LEAF: Colours("#eef1f4", _LIGHT_INK, _LIGHT_GREY, _LIGHT_GREY),
        Kind.INPUT: Colours("#ffffff", "#3e4c59", "#5a6773", "#7b8894"),
        Kind.OP: Colours("#ffffff", _LIGHT_INK, "#5a6773", "#616e7c"),
        Kind.CUT: Colours("#b34700", "#ffffff", "#ffffff", "#7a3000"),
        Kind.ESCAPE: Colours("#fbe6d8", "#8a3600", "#8a3600", "#8a3600"),
        Kind.GROUP: Colours("#eef1f5", _LIGHT_INK, _LIGHT_GREY, _LIGHT_GREY),
    },
    root=Colours("#0b3c5d", "#ffffff", "#ffffff", "#0b3c5d"),
    statuses={
        Status.REACHED: Colours("#c2edc0", _LIGHT_INK, "#14532d", "#1c6b3a"),
        Status.ZERO: Colours("#ffdf8b", _LIGHT_INK, "#574200", "#7a5d00"),
        Status.NONFINITE: Colours("#c791c0", "#22091f", "#3a0d35", "#6d2164"),
        Status.CUT: Colours("#e89b63", "#2b1100", "#4a1d00", "#8a3600"),
        Status.UNUSED: Colours("#ffffff", _LIGHT_INK, _LIGHT_GREY, _LIGHT_GREY),
        Status.FROZEN: Colours("#9cd9ff", "#0b2233", "#0f3d5c", "#1b567d"),
        Status.NO_BACKWARD: Colours("#cccacf", _LIGHT_INK, "#38404a", "#52606d"),
        Status.UNKNOWN: Colours("#9ea1ed", "#12123a", "#191a55", "#3a3ca0"),
    },
    arrows={Sample.REACHED: _LIGHT_INK, Sample.NOT_REACHED: "#616e7c", Sample.PLAIN: "#98a4b0"},
)

_DARK_INK: Final = "#eef2f6"
_DARK_GREY: Final = "#b6c2ce"
_DARK: Final = Theme(
    paper="#12171d",
    ink=_DARK_INK,
    grey=_DARK_GREY,
    cut_ink="#ffb184",
    frame_fill="#181f27",
    frame_line="#4a5868",
    kinds={
        Kind.LEAF: Colours("#2a333d", _DARK_INK, _DARK_GREY, _DARK_GREY),
        Kind.INPUT: Colours("#12171d", "#d3dce5", _DARK_GREY, "#8291a1"),
        Kind.OP: Colours("#1b222b", _DARK_INK, _DARK_GREY, "#94a2b1"),
        Kind.CUT: Colours("#ff9d66", "#1f0c00", "#1f0c00", "#ffd0b0"),
        Kind.ESCAPE: Colours("#43210c", "#ffc9a3", "#ffc9a3", "#ffb184"),
        Kind.GROUP: Colours("#232c36", _DARK_INK, _DARK_GREY, _DARK_GREY),
    },
    root=Colours("#bfe0f7", "#062033", "#062033", "#bfe0f7"),
    statuses={
        Status.REACHED: Colours("#2a7a50", "#ffffff", "#e6f7ec", "#86d6a6"),
        Status.ZERO: Colours("#6d7033", "#ffffff", "#fbfbe3", "#d3d77f"),
        Status.NONFINITE: Colours("#72274d", "#ffffff", "#fbe4f0", "#e79cc4"),
        Status.CUT: Colours("#b30c00", "#ffffff", "#ffe9e3", "#ffb184"),
        Status.UNUSED: Colours("#1c2121", "#ffffff", _DARK_GREY, _DARK_GREY),
        Status.FROZEN: Colours("#073868", "#ffffff", "#d6e8fa", "#8cbdf0"),
        Status.NO_BACKWARD: Colours("#596c7f", "#ffffff", "#ffffff", "#c3cfdb"),
        Status.UNKNOWN: Colours("#63489e", "#ffffff", "#eee6ff", "#c4b0f2"),
    },
    arrows={Sample.REACHED: _DARK_INK, Sample.NOT_REACHED: "#9aa8b6", Sample.PLAIN: "#6d7b8a"},
)

THEMES: Final[Mapping[str, Theme]] = MappingProxyType({"light": _LIGHT, "dark": _DARK})
