"""SVG and PNG through a layout program: parsed and asked, and what happens without one."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import sys
import sysconfig
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gradtrace._errors import ExportError, LayoutError
from gradtrace._render import SUFFIXES, layout, render, to_dot

from .graphs import HOSTILE, Sketch, detach_then_use_again, hostile, recurrent, stack_of_layers

SVG = "{http://www.w3.org/2000/svg}"
no_windows = pytest.mark.skipif(os.name == "nt", reason="the stand-in program is a shell script")


def picture(sketch: Sketch) -> ElementTree.Element:
    """Return the parsed SVG of a sketch."""
    return ElementTree.fromstring(render(sketch.graph, sketch, ".svg"))


def texts(svg: ElementTree.Element) -> set[str]:
    """Return all lines of text in a picture."""
    found = ("".join(text.itertext()) for text in svg.iter(f"{SVG}text"))
    return {text.replace("\u00a0", " ").strip() for text in found}


def edges(svg: ElementTree.Element) -> dict[str, bool]:
    """Return by "tail->head" whether an arrow is solid."""
    found = {}
    for group in svg.iter(f"{SVG}g"):
        if group.get("class") == "edge":
            title, path = group.find(f"{SVG}title"), next(group.iter(f"{SVG}path"))
            assert title is not None
            found[str(title.text)] = path.get("stroke-dasharray") is None
    return found


def test_dashed_and_solid_edges() -> None:
    """In the tutorial's last program only the way through the detach is dashed."""
    x, y, z, k, detach, product, root = range(7)
    assert edges(picture(detach_then_use_again())) == {
        f"{x}->{k}": True,
        f"{y}->{k}": True,
        f"{k}->{detach}": False,
        f"{k}->{root}": True,
        f"{detach}->{product}": False,
        f"{z}->{product}": True,
        f"{product}->{root}": True,
    }


def test_the_picture_says_what_it_shows() -> None:
    """Names, verdicts, the cut with its line, and the legend are there to read."""
    found = texts(picture(detach_then_use_again()))
    assert {
        "X",
        "● reached",
        "// detach",
        "train.py:4",
        "K.detach()",
        "backward starts here",
    } <= found
    assert "cut: the gradient stops here" in found


def test_hostile_text_is_shown_as_it_is() -> None:
    """Names and sources appear letter by letter, and none of them becomes markup."""
    svg = picture(hostile())
    assert set(HOSTILE) - {"多层感知机.权重"} <= texts(svg)
    assert any("权重" in text for text in texts(svg))
    assert {element.tag for element in svg.iter()} <= {
        SVG + tag
        for tag in ("svg", "g", "a", "title", "text", "path", "polygon", "polyline", "ellipse")
    }
    tooltips = {value for element in svg.iter() for key, value in element.items() if "title" in key}
    assert 'C:\\Node "b"\\<t>.py:2 in step: "\\<script>"' in tooltips


def test_invisible_characters_are_written_as_escapes() -> None:
    """A control character or a change of reading direction can't hide in a picture."""
    sketch = Sketch()
    sketch.backward(sketch.op("exp", sketch.leaf("a\x00\x1b[31m\u202eb\ud800\n c")))
    assert "a\\x00\\x1b[31m\\u202eb\\ud800 c" in texts(picture(sketch))


def size(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG in pixels."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_png() -> None:
    """A small picture is drawn at twice the size of a screen's points."""
    sketch = detach_then_use_again()
    width, height = size(render(sketch.graph, sketch, ".png"))
    assert 400 < width < 2_000
    assert 400 < height < 2_000


def test_a_long_picture_is_scaled_to_what_viewers_open() -> None:
    """The resolution falls before a side gets too long."""
    sketch = recurrent(16)
    assert max(size(render(sketch.graph, sketch, ".png", full=True))) <= 4_100


def test_a_wide_picture_is_drawn_coarser_unless_a_detail_is_asked_for() -> None:
    """Where the text could not be read within 4,000 pixels, more is folded."""
    sketch = Sketch()
    leaves = [sketch.leaf(f"a_rather_long_name_of_a_leaf_{at}") for at in range(36)]
    sketch.backward(sketch.op("stack", *(sketch.op("exp", leaf, at=3) for leaf in leaves)))
    assert max(size(render(sketch.graph, sketch, ".png"))) <= 4_000
    assert max(size(render(sketch.graph, sketch, ".png", limit=80))) > 4_100
    assert "exp × 36" in texts(picture(sketch))


@pytest.mark.parametrize(
    ("points", "dpi"), [(72, 144), (72 * 40, 100), (72 * 100, 60), (72 * 1_000, 16)]
)
def test_resolution(points: int, dpi: float) -> None:
    """Up to 4,000 pixels are drawn at 144 dpi; then it falls, but stays readable up to 16,000."""
    assert layout._dpi(f'<svg width="10pt" height="{points}.00pt"'.encode()) == dpi


@pytest.mark.parametrize(
    "sketch", [recurrent(2_000), stack_of_layers(60, cut=7)], ids=["rnn", "stack"]
)
def test_large_traces_are_quick(sketch: Sketch) -> None:
    """Thousands of ops are a picture within five seconds."""
    start = sum(os.times()[:4])  # of this process and its children: others use the machine too
    render(sketch.graph, sketch, ".svg")
    assert sum(os.times()[:4]) - start < 5


def test_the_program_is_found_without_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that isn't activated has its scripts beside the interpreter."""
    monkeypatch.setenv("PATH", "")
    assert Path(layout.find_program()).stem == "graphviz-pure"


def test_the_program_is_found_by_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever pip put the script, the package's own list of files tells."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: None)
    monkeypatch.setattr(sys, "executable", "")
    assert Path(layout.find_program()).stem == "graphviz-pure"


def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every layout program."""
    monkeypatch.setattr(shutil, "which", lambda _: None)


def test_no_program_is_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any program the error says what to install."""
    without_programs(monkeypatch)
    with pytest.raises(LayoutError, match="pip install graphviz-pure"):
        layout.find_program()


def test_pdf_without_graphviz_is_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be written here names what can."""
    without_programs(monkeypatch)
    sketch = detach_then_use_again()
    with pytest.raises(ExportError, match=r"\.svg and \.png only"):
        render(sketch.graph, sketch, ".pdf")


@pytest.mark.skipif(shutil.which("dot") is None, reason="only Graphviz writes PDF")
def test_pdf() -> None:
    """Where Graphviz is installed, it writes PDF."""
    sketch = detach_then_use_again()
    assert render(sketch.graph, sketch, ".pdf").startswith(b"%PDF")


def test_an_unknown_suffix_names_the_known() -> None:
    """An error lists all suffixes."""
    sketch = detach_then_use_again()
    with pytest.raises(ExportError) as caught:
        render(sketch.graph, sketch, ".bmp")
    assert all(suffix in str(caught.value) for suffix in SUFFIXES)


OPTIONS = "full, depth, only, passes, gradient_graph_only, limit, direction, theme, transparent"
BAD_OPTIONS: list[dict[str, object]] = [
    {"foo": 1},
    {"suffix": ".svg"},
    {"depth": "x"},
    {"depth": -1},
    {"depth": True},
    {"limit": "a"},
    {"limit": 0},
    {"only": 3},
    {"passes": []},
    {"passes": 1},
    {"passes": [True]},
    {"direction": "up"},
    {"theme": "blue"},
    {"transparent": 1},
    {"gradient_graph_only": None},
    {"full": "yes"},
    {"timeout": "soon"},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_an_option_that_does_not_fit_names_what_does(options: dict[str, Any]) -> None:
    """The error has what was given, what would have fitted, and the names of all options."""
    sketch = detach_then_use_again()
    ((name, value),) = options.items()
    with pytest.raises(ExportError) as caught:
        render(sketch.graph, sketch, ".svg", **options)
    assert f"{name}={value!r}" in str(caught.value)
    assert f"The options are {OPTIONS}, timeout" in str(caught.value)
    with pytest.raises(ExportError, match=rf"The options are {OPTIONS}[.;]"):
        to_dot(sketch.graph, sketch, **options)


def test_the_same_trace_gives_the_same_bytes() -> None:
    """A picture can be kept under version control."""
    sketch = stack_of_layers(3, cut=1)
    for suffix in (".dot", ".svg", ".png"):
        first, second = (render(sketch.graph, sketch, suffix) for _ in range(2))
        assert first == second


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program in the place of dot."""
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@no_windows
def test_a_failing_program_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program complained about is in the error."""
    stand_in(tmp_path, monkeypatch, "cat > /dev/null; echo 'no such font' >&2; exit 3")
    sketch = detach_then_use_again()
    with pytest.raises(LayoutError, match="code 3 and said: 'no such font'"):
        render(sketch.graph, sketch, ".svg")


@no_windows
def test_a_slow_layout_is_replaced_by_a_coarser_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture that comes instead says why it is coarser."""
    # The first call hangs, the second prints the DOT that it was given.
    called = tmp_path / "called"
    script = f"if [ -e {called} ]; then exec cat; fi; touch {called}; exec sleep 60"
    stand_in(tmp_path, monkeypatch, script)
    sketch = stack_of_layers(12)
    coarse = render(sketch.graph, sketch, ".svg", full=True, timeout=1).decode()
    assert "Drawn coarser than asked: for the finer picture dot took more than 1 s." in coarse
    assert "1–11 × 11" in coarse


@no_windows
def test_a_program_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two time limits the error says what to do, and no process stays behind."""
    pid = tmp_path / "pid"
    stand_in(tmp_path, monkeypatch, f"echo $$ > {pid}; exec sleep 60")
    sketch = detach_then_use_again()
    with pytest.raises(LayoutError, match=r"took more than 0\.5 s to lay out even[\s\S]*only="):
        render(sketch.graph, sketch, ".svg", timeout=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
