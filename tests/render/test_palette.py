"""Colours by numbers: contrast of text, and statuses told apart with each colour blindness."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from gradtrace._records import Status
from gradtrace._render import dot
from gradtrace._render.palette import SIGNS, THEMES, Colours, Theme
from gradtrace._render.scene import Kind, Sample

Array = NDArray[np.float64]

# Linear RGB as it is seen with full protanopia, deuteranopia and tritanopia. Source: Machado,
# Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", table 1, severity 1.0.
SIGHT = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Linear RGB to CIE XYZ, white point D65. Source: IEC 61966-2-1.
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
FAR = 15.0  # CIE 1976; 2.3 is just noticeable side by side, 10 at a glance
themes = pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))


def linear(colour: str) -> Array:
    """Return the linear parts of "#rrggbb". Source: WCAG 2.2, relative luminance."""
    parts = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(parts: Array) -> Array:
    """Return CIE 1976 L*a*b* of linear RGB."""
    relative = XYZ @ parts.clip(0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(
        relative > (6 / 29) ** 3, np.cbrt(relative), relative / (3 * (6 / 29) ** 2) + 4 / 29
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, sight: str) -> float:
    """Return how far apart two colours look."""
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in (one, other)]
    return float(np.linalg.norm(seen[0] - seen[1]))


def contrast(one: str, other: str) -> float:
    """Return the ratio of relative luminances. Source: WCAG 2.2, success criterion 1.4.3."""
    lighter, darker = sorted((float(XYZ[1] @ linear(c)) for c in (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_the_measures() -> None:
    """Black on white has contrast 21; white is L = 100; red and green lose most of their gap."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert lab(linear("#ffffff")) == pytest.approx([100, 0, 0], abs=0.02)
    red, green = "#c04040", "#508040"
    assert distance(red, green, "deuteranopia") < distance(red, green, "usual") / 3


@themes
@pytest.mark.parametrize("sight", SIGHT)
def test_statuses_can_be_told_apart_by_everybody(theme: Theme, sight: str) -> None:
    """The fills of any two statuses look clearly different."""
    for one, other in combinations(Status, 2):
        fills = theme.statuses[one].fill, theme.statuses[other].fill
        assert distance(*fills, sight) >= FAR, (one, other)


@themes
@pytest.mark.parametrize("sight", SIGHT)
def test_reached_and_cut_are_far_apart(theme: Theme, sight: str) -> None:
    """The two verdicts that matter most differ most, and a cut differs from ops and from roots."""
    reached, cut = theme.statuses[Status.REACHED].fill, theme.statuses[Status.CUT].fill
    assert distance(reached, cut, sight) >= 25
    for calm in (theme.kinds[Kind.OP].fill, theme.root.fill, reached):
        assert distance(theme.kinds[Kind.CUT].fill, calm, sight) >= 25


def boxes(theme: Theme) -> Iterator[Colours]:
    """Yield the colours of all boxes."""
    yield from theme.kinds.values()
    yield from theme.statuses.values()
    yield theme.root


@themes
def test_text_has_contrast(theme: Theme) -> None:
    """All text in boxes has the contrast that WCAG 2 asks of small text, 4.5 to 1."""
    for colours in boxes(theme):
        assert contrast(colours.ink, colours.fill) >= 4.5, colours
        assert contrast(colours.grey, colours.fill) >= 4.5, colours


@themes
def test_text_on_paper_has_contrast(theme: Theme) -> None:
    """Legend, notes, names of frames and the cuts of a module can be read as well."""
    for paper in (theme.paper, theme.frame_fill):
        assert contrast(theme.ink, paper) >= 4.5
        assert contrast(theme.grey, paper) >= 4.5
    assert contrast(theme.cut_ink, theme.kinds[Kind.GROUP].fill) >= 4.5


@themes
def test_lines_have_contrast(theme: Theme) -> None:
    """Arrows and borders have the 3 to 1 that WCAG asks of graphics; plain ones 1.5."""
    for paper in (theme.paper, theme.frame_fill):
        for sample in (Sample.REACHED, Sample.NOT_REACHED):
            assert contrast(theme.arrows[sample], paper) >= 3
        assert contrast(theme.arrows[Sample.PLAIN], paper) >= 1.5
        for colours in boxes(theme):
            seen = max(contrast(colours.line, paper), contrast(colours.fill, paper))
            assert seen >= 3, colours


@themes
def test_every_colour_has_six_digits(theme: Theme) -> None:
    """Three digits are black to Graphviz 2.43."""
    flat = [*theme.arrows.values(), theme.paper, theme.ink, theme.grey, theme.cut_ink]
    flat += [theme.frame_fill, theme.frame_line]
    for colours in boxes(theme):
        flat += [colours.fill, colours.ink, colours.grey, colours.line]
    assert all(len(colour) == 7 and colour.startswith("#") for colour in flat)


@themes
def test_every_kind_and_status_has_colours(theme: Theme) -> None:
    """No trace asks for a colour that is not there."""
    assert set(theme.kinds) == set(Kind)
    assert set(theme.statuses) == set(Status)
    assert set(theme.arrows) == set(dot._STROKES)


def test_nothing_is_said_by_colour_alone() -> None:
    """In black and white kinds differ in shape, verdicts in signs, arrows in their lines."""
    assert len(set(dot._SHAPES.values())) == len(Kind)
    assert len(set(SIGNS.values())) == len(Status)
    reached, not_reached, plain = (
        dot._STROKES[sample] for sample in (Sample.REACHED, Sample.NOT_REACHED, Sample.PLAIN)
    )
    assert not reached.dashed
    assert not_reached.dashed
    assert plain.dashed
    assert plain.width < not_reached.width * 0.6
