"""DOT: gold files, escaping, and looks that everybody can see."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from gradtrace._records import Status
from gradtrace._render import dot, to_dot
from gradtrace._render.scene import Kind, Sample, build_scene

from .graphs import TUTORIAL, Sketch, check_gold, detach_then_use_again, hostile, stack_of_layers


@pytest.mark.parametrize("program", TUTORIAL, ids=lambda program: program.__name__)
def test_the_tutorial_s_programs(program: Callable[[], Sketch]) -> None:
    """The drawings of the tutorial stay as they are."""
    sketch = program()
    check_gold(f"{program.__name__}.dot", to_dot(sketch.graph, sketch))


def test_ids_are_integers() -> None:
    """No name of the program is an id, so none can be taken for syntax."""
    text = to_dot(hostile().graph, hostile())
    assert set(re.findall(r"^(\S+) (?:->|\[)", text, re.MULTILINE)) - {"node", "edge"} == {
        str(box.id) for box in build_scene(hostile().graph, hostile()).boxes
    }


def test_colours_have_six_digits() -> None:
    """Three digits are black to Graphviz 2.43."""
    for sketch in (detach_then_use_again(), stack_of_layers(12, cut=1)):
        colours = re.findall(r'"#([0-9a-fA-F]*)"', to_dot(sketch.graph, sketch))
        assert colours
        assert {len(colour) for colour in colours} == {6}


LOOKS = [*dot._LOOKS.values(), *dot._LEAVES.values(), dot._ROOT]


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look.shape} {look.fill}")
def test_text_has_contrast(look: dot.Look) -> None:
    """All text in boxes has the contrast that WCAG 2 asks of small text, 4.5 to 1."""
    assert contrast(look.ink, look.fill) >= 4.5
    assert contrast(look.grey, look.fill) >= 4.5


@pytest.mark.parametrize("ink", [dot._PAPER_GREY, dot._CUT_INK, dot._REACHED])
def test_text_on_paper_has_contrast(ink: str) -> None:
    """Legend, notes, frames and the cuts of a module can be read as well."""
    for paper in ("#ffffff", dot._FRAME_FILL, dot._LOOKS[Kind.GROUP].fill):
        assert contrast(ink, paper) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the ratio of relative luminances. Source: WCAG 2.2, success criterion 1.4.3."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb". Source: WCAG 2.2, glossary."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_kinds_differ_without_colour() -> None:
    """Printed in black and white, kinds differ in shape, and verdicts in their signs."""
    shapes = [(look.shape, look.style) for look in dot._LOOKS.values()]
    assert len(set(shapes)) == len(Kind)
    assert len(set(dot._SIGNS.values())) == len(Status)


def test_a_cut_has_a_sign() -> None:
    """A cut is marked by a sign and its own shape, not by colour alone."""
    (line,) = (row for row in to_dot_of_tutorial().splitlines() if "shape=octagon" in row)
    assert "// detach" in line
    assert "train.py:4" in line


def test_each_sample_of_the_legend_is_drawn_like_what_it_explains() -> None:
    """A sample has the colours of its boxes, the lines of its arrows, and a text."""
    for sample in Sample:
        swatch = dot._sample(sample)
        assert dot._LEGEND[sample] in swatch
        if sample in dot._STROKES:
            assert swatch.count(dot._STROKES[sample].colour) in {1, 5}  # a line, or five dashes
        elif sample is not Sample.PASSES:
            look = dot._ROOT if sample is Sample.ROOT else dot._LOOKS[Kind(sample.value)]
            assert f'COLOR="{look.line}"' in swatch
            assert f'BGCOLOR="{look.fill}"' in swatch


def to_dot_of_tutorial() -> str:
    """Return the drawing of the program with one cut."""
    sketch = detach_then_use_again()
    return to_dot(sketch.graph, sketch)
