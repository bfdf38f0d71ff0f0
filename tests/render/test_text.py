"""The summary for the terminal."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import pytest

from gradtrace._records import CutKind, Status
from gradtrace._render import summary
from gradtrace._render.wording import columns, passes_phrase, passes_text, place, printable, shorten

from .graphs import TUTORIAL, Sketch, check_gold, hostile, stack_of_layers


@pytest.mark.parametrize("program", TUTORIAL, ids=lambda program: program.__name__)
def test_the_tutorial_s_programs(program: Callable[[], Sketch]) -> None:
    """The summaries of the tutorial stay as they are."""
    sketch = program()
    check_gold(f"{program.__name__}.txt", summary(sketch.graph, sketch) + "\n")


def test_an_empty_trace_has_counts_only() -> None:
    """Nothing recorded is said in one line."""
    sketch = Sketch()
    assert summary(sketch.graph, sketch) == "0 leaves, 0 ops, 0 backward passes, 0 cuts"


def test_ops_on_ways_to_a_root_are_told_from_others() -> None:
    """An optimizer's step does not swell the count of what backward could go through."""
    sketch = Sketch()
    weight = sketch.leaf("w")
    sketch.op("exp", weight)
    assert summary(sketch.graph, sketch).startswith("1 leaf, 1 op, ")
    sketch.backward(sketch.op("sum", sketch.op("sin", weight)))
    assert "1 leaf, 2 ops on ways to a root, 1 other, " in summary(sketch.graph, sketch)


def section(text: str, title: str) -> list[str]:
    """Return the lines below one title of a summary."""
    blocks = (block.splitlines() for block in text.split("\n\n"))
    return next(block[1:] for block in blocks if block[0] == title)


def test_what_needs_attention_comes_first() -> None:
    """Cut, unused, nonfinite and zero leaves stand before those that are well."""
    sketch = Sketch()
    for status in Status:
        sketch.leaf(status.value, status)
    first = [line.split()[0] for line in section(summary(sketch.graph, sketch), "Leaves")[1:5]]
    assert first == ["cut", "unused", "nonfinite", "zero"]


def test_the_last_norm_is_shown() -> None:
    """Of several gradients the last one's norm is in the row; NaN shows."""
    sketch = Sketch()
    leaf = sketch.leaf("w", Status.NONFINITE)
    sketch.gradient(leaf, 1.0)
    sketch.gradient(leaf, float("nan"), backward_pass=1)
    assert section(summary(sketch.graph, sketch), "Leaves")[1].split() == [
        "nonfinite",
        "w",
        "[1]",
        "nan",
    ]


def test_many_leaves_are_counted_by_module() -> None:
    """A large model is one screen, in which every leaf is counted."""
    sketch = stack_of_layers(100, cut=3)
    rows = section(summary(sketch.graph, sketch), "Leaves")[1:]
    assert len(rows) <= 30
    assert rows[0].split()[:4] == ["cut", "encoder.layers.3.attention.*", "2", "leaves"]
    assert sum(int(row.split()[2]) for row in rows) == 400


def test_a_row_for_several_leaves_is_a_pattern_that_fits_them() -> None:
    """Adapters' names are alike at their ends too: what they share there is no path."""
    sketch = Sketch()
    names = [
        f"{layer}.attention.{to}.lora_{which}.default.weight"
        for layer in range(20)
        for to in ("q_proj", "v_proj")
        for which in "AB"
    ]
    for name in names:
        sketch.leaf(name)
    rows = section(summary(sketch.graph, sketch), "Leaves")[1:]
    patterns = [row.split()[1] for row in rows]
    assert patterns[0] == "0.attention.*"
    assert all(sum(fnmatch.fnmatch(name, pattern) for name in names) == 4 for pattern in patterns)


def test_long_names_in_a_list_still_tell_leaves_apart() -> None:
    """Of what a cut blocks fewer names are shown where they are long, and each is told apart."""
    sketch = Sketch()
    names = [f"model.encoder.layers.{at}.self_attn.q_proj.lora_A.weight" for at in range(9)]
    cut = sketch.op("detach", sketch.leaf(names[0], Status.CUT), at=7, source="h.detach()")
    sketch.cut(cut, CutKind.DETACH, *names)
    last = section(summary(sketch.graph, sketch), "Cuts")[-1].strip()
    assert last == "blocks …der.layers.0.self_attn.q_proj.lora_A.weight and 8 more"


def test_cuts_of_one_line_are_one_entry() -> None:
    """A line that cuts in every step is named once, with how often and what it blocks."""
    sketch = Sketch()
    leaf = sketch.leaf("w", Status.CUT)
    for _ in range(50):
        cut = sketch.op("detach", leaf, at=7, source="h.detach()")
        sketch.cut(cut, CutKind.DETACH, "w")
    assert section(summary(sketch.graph, sketch), "Cuts") == [
        "  detach × 50  train.py:7  h.detach()",
        "               blocks w",
    ]


def test_passes_started_alike_are_one_row() -> None:
    """A thousand steps of training are one row."""
    sketch = Sketch()
    root = sketch.op("sum", sketch.leaf("w"), name="loss")
    for _ in range(1_000):
        sketch.backward(root, at=9)
    assert section(summary(sketch.graph, sketch), "Backward passes") == [
        "  0–999  backward from loss  train.py:9"
    ]


@pytest.mark.parametrize(
    "sketch", [hostile(), stack_of_layers(40, cut=1)], ids=["hostile", "stack"]
)
def test_lines_fit_the_terminal(sketch: Sketch) -> None:
    """No line is wider than 100 columns, and none has a control character."""
    for line in summary(sketch.graph, sketch).splitlines():
        assert columns(line) <= 100
        assert line.isprintable()


def test_columns_are_aligned_for_wide_characters() -> None:
    """A Chinese name takes two columns a character."""
    sketch = Sketch()
    sketch.leaf("权重", shape=(3,))
    sketch.leaf("w", shape=(3,))
    rows = section(summary(sketch.graph, sketch), "Leaves")
    assert len({columns(row[: row.index("[3]")]) for row in rows[1:]}) == 1


@pytest.mark.parametrize(
    ("passes", "total", "text"),
    [
        ((0, 1), 2, "all"),
        ((1,), 2, "1"),
        ((0, 1, 2, 5), 9, "0–2, 5"),
        (tuple(range(0, 60, 2)), 99, "30 of 99"),
    ],
)
def test_passes_are_named_shortly(passes: tuple[int, ...], total: int, text: str) -> None:
    """Runs are joined, and what is too long is counted."""
    assert passes_text(passes, total) == text


@pytest.mark.parametrize(
    ("passes", "total", "text"),
    [
        ((0, 1), 2, "all passes"),
        ((1,), 2, "pass 1"),
        ((0, 1, 5), 9, "passes 0–1, 5"),
        (tuple(range(0, 60, 2)), 99, "30 of 99 passes"),
    ],
)
def test_passes_have_their_noun(passes: tuple[int, ...], total: int, text: str) -> None:
    """One pass, several, or all of them."""
    assert passes_phrase(passes, total) == text


def test_places_have_no_folders() -> None:
    """A place is the file's own name and the line, on every system."""
    assert place("/home/me/train.py", 4) == place("C:\\me\\train.py", 4) == "train.py:4"
    assert place(None, None) == ""


def test_shortened_text_fits() -> None:
    """A long text ends in dots and keeps to its width; line breaks become spaces."""
    assert shorten("a\n  b", 10) == "a b"
    assert shorten("x" * 20, 10) == "x" * 9 + "…"
    assert columns(shorten("权" * 20, 10)) <= 10
    assert printable("a\x07\u2028") == "a\\x07"
