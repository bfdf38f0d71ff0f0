"""DOT: gold files, escaping, and looks that everybody can see."""

from __future__ import annotations

import re
from collections.abc import Callable

import networkx as nx
import pytest

from gradtrace._render import dot, to_dot
from gradtrace._render.palette import THEMES
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


def test_a_cut_has_a_sign() -> None:
    """A cut is marked by a sign and its own shape, not by colour alone."""
    (line,) = (row for row in to_dot_of_tutorial().splitlines() if "shape=octagon" in row)
    assert "// detach" in line
    assert "train.py:4" in line


@pytest.mark.parametrize("theme", THEMES)
def test_each_sample_of_the_legend_is_drawn_like_what_it_explains(theme: str) -> None:
    """A sample has the colours of its boxes, the lines of its arrows, and a text."""
    colours = THEMES[theme]
    writer = dot._Writer(build_scene(nx.MultiDiGraph(passes=()), Sketch()), colours)
    for sample in Sample:
        swatch = writer.sample(sample)
        assert dot._LEGEND[sample] in swatch
        if sample in dot._STROKES:
            assert swatch.count(colours.arrows[sample]) in {1, 5}  # a line, or five dashes
        elif sample is not Sample.PASSES:
            is_root = sample is Sample.ROOT
            look = colours.root if is_root else colours.kinds[Kind(sample.value)]
            assert f'COLOR="{look.line}"' in swatch
            assert f'BGCOLOR="{look.fill}"' in swatch


def test_direction_theme_and_background() -> None:
    """What is asked of looks changes nothing else."""
    sketch = detach_then_use_again()
    plain = to_dot(sketch.graph, sketch)
    assert "rankdir=TB" in plain
    assert to_dot(sketch.graph, sketch, direction="LR") == plain.replace("=TB", "=LR")
    see_through = to_dot(sketch.graph, sketch, transparent=True)
    assert see_through == plain.replace('bgcolor="#ffffff"', "bgcolor=transparent")
    dark = to_dot(sketch.graph, sketch, theme="dark")
    assert f'bgcolor="{THEMES["dark"].paper}"' in dark
    assert re.sub("#[0-9a-f]{6}", "", dark) == re.sub("#[0-9a-f]{6}", "", plain)


def test_an_arrow_to_a_repeat_above_moves_nothing_down() -> None:
    """It counts for no rank, or the first of a run would stand below the last."""
    sketch = stack_of_layers(12)
    lines = to_dot(sketch.graph, sketch, limit=60).splitlines()
    back = [line for line in lines if "constraint=false" in line]
    assert back
    for line in back:
        tail, head = re.findall(r"\d+", line)[:2]
        assert int(tail) > int(head)


def to_dot_of_tutorial() -> str:
    """Return the drawing of the program with one cut."""
    sketch = detach_then_use_again()
    return to_dot(sketch.graph, sketch)
