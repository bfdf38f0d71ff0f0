"""Themes -> the style sheet of a page: each colour is a variable that has a value by day and night.

A page's pictures are laid out in `MARKED`, a theme of which no two colours are alike, so that each
colour in Graphviz's SVG tells what it is the colour of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from gradtrace._records import Status
from gradtrace._render.dot import _STROKES
from gradtrace._render.palette import THEMES, Colours, Theme
from gradtrace._render.scene import Kind


def named_colours(theme: Theme) -> dict[str, str]:
    """Return the colours of a theme by the names of their variables."""
    looks = {"root": theme.root}
    looks |= {str(kind): look for kind, look in theme.kinds.items()}
    looks |= {f"is-{status}": look for status, look in theme.statuses.items()}
    named: dict[str, str] = {}
    for name, look in looks.items():
        named |= {f"{name}-fill": look.fill, f"{name}-ink": look.ink}
        named |= {f"{name}-grey": look.grey, f"{name}-line": look.line}
    for sample, colour in theme.arrows.items():
        named[f"stroke-{sample.replace(' ', '-')}"] = colour
    return named | {
        "paper": theme.paper,
        "panel": theme.frame_fill,
        "rule": theme.frame_line,
        "grey": theme.grey,
        "ink": theme.ink,
        "cut-text": theme.cut_ink,
    }


def _marked(marks: Mapping[str, str]) -> Theme:
    """Return a theme of marks, each in the place of the colour that it is named after."""
    return Theme(
        paper=marks["paper"],
        ink=marks["ink"],
        grey=marks["grey"],
        cut_ink=marks["cut-text"],
        frame_fill=marks["panel"],
        frame_line=marks["rule"],
        kinds={kind: _marked_look(marks, kind) for kind in Kind},
        root=_marked_look(marks, "root"),
        statuses={status: _marked_look(marks, f"is-{status}") for status in Status},
        arrows={name: marks[f"stroke-{name.replace(' ', '-')}"] for name in _STROKES},
    )


def _marked_look(marks: Mapping[str, str], name: str) -> Colours:
    fill, ink, grey, line = (marks[f"{name}-{part}"] for part in ("fill", "ink", "grey", "line"))
    return Colours(fill, ink, grey, line)


_MARKS: Final[Mapping[str, str]] = {
    name: f"#{number:06x}" for number, name in enumerate(named_colours(THEMES["light"]), 1)
}
MARKED: Final = _marked(_MARKS)
NAMES: Final[Mapping[str, str]] = {mark: name for name, mark in _MARKS.items()}


def colour_rules(drawn: Collection[str]) -> str:
    """Return the palette as a style sheet.

    Args:
        drawn: Names of the colours that pictures have, for which there are classes.
    """
    light, dark = (_variables(THEMES[name]) for name in ("light", "dark"))
    classes = "".join(
        f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}"
        for name in sorted(drawn)
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}{classes}{_strokes()}"
    )


def _variables(theme: Theme) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in named_colours(theme).items())


def _strokes() -> str:
    """Return how arrows are drawn, by class, so that the script can change them."""
    rules = ""
    for sample, stroke in _STROKES.items():
        name = sample.replace(" ", "-")
        dashes = "5 3" if stroke.dashed else "none"
        rules += (
            f".{name}{{--stroke:var(--stroke-{name})}}"
            f".{name}>path{{stroke-width:{stroke.width:g};stroke-dasharray:{dashes}}}"
        )
    return rules
