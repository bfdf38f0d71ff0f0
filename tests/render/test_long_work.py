"""What takes long: a warning before it, a line at a terminal while it runs, and Ctrl-C."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import gradtrace
from gradtrace._render import layout, render

from .graphs import Sketch, detach_then_use_again, recurrent
from .test_layout import no_windows, stand_in

ROOT = Path(__file__).parents[2]


@no_windows
def test_long_work_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes from the user's line and says what is large and what to pass instead."""
    stand_in(tmp_path, monkeypatch, "exec cat")
    sketch = recurrent(600)
    with pytest.warns(gradtrace.LongWorkWarning, match=r"boxes and [\d,]+ arrows") as caught:
        render(sketch.graph, sketch, ".svg", full=True)
    assert [warning.filename for warning in caught] == [__file__]
    text = str(caught[0].message)
    assert "only='name'" in text
    assert "timeout=60" in text
    assert issubclass(gradtrace.LongWorkWarning, UserWarning)


@no_windows
def test_what_is_quick_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a default picture of a large trace nor a full one of a small trace warns."""
    stand_in(tmp_path, monkeypatch, "exec cat")
    render(recurrent(600).graph, recurrent(600), ".svg")
    render(recurrent(20).graph, recurrent(20), ".svg", full=True)


def test_the_estimate_grows_faster_than_the_graph() -> None:
    """Twice the boxes and arrows take more than twice as long, as layout programs do."""
    times = [layout.seconds_for(boxes, boxes + boxes // 2) for boxes in (250, 500, 1_000, 2_000)]
    assert all(2 * less < more for less, more in itertools.pairwise(times))


PROGRAM = """
    import sys
    sys.path[:0] = {paths!r}
    from tests.render.graphs import detach_then_use_again
    from gradtrace import _files
    from gradtrace._render import render
    sketch = detach_then_use_again()
    try:
        _files.write_atomically({target!r}, render(sketch.graph, sketch, ".svg", full=True))
    except KeyboardInterrupt:
        print("interrupted")
"""


def program(target: Path) -> list[str]:
    """Return a command that draws into a file."""
    text = textwrap.dedent(PROGRAM).format(paths=[str(ROOT)], target=str(target))
    return [sys.executable, "-c", text]


def wait_for(path: Path) -> str:
    """Return what a file holds, as soon as it holds something."""
    end = time.monotonic() + 60
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < end
        time.sleep(0.02)
    return path.read_text()


@no_windows
def test_ctrl_c_stops_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt arrives in the program, the layout's process is gone, and there is no file."""
    pid, target = tmp_path / "pid", tmp_path / "out" / "step.svg"
    target.parent.mkdir()
    stand_in(tmp_path, monkeypatch, f"echo $$ > {pid}; exec sleep 60")
    child = subprocess.Popen(program(target), stdout=subprocess.PIPE, text=True)
    number = int(wait_for(pid))
    child.send_signal(signal.SIGINT)  # to this process alone, as a notebook's stop button does
    out, _ = child.communicate(timeout=30)
    assert out == "interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert list(target.parent.iterdir()) == []


SLOW = "sleep 2.5; exec cat"


@no_windows
def test_nothing_is_said_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A log gets no line that overwrites itself."""
    stand_in(tmp_path, monkeypatch, SLOW)
    sketch = detach_then_use_again()
    render(sketch.graph, sketch, ".svg")
    assert capfd.readouterr() == ("", "")


@no_windows
def test_a_terminal_is_told_that_it_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a second a line says what is drawn and for how long; at the end it is gone."""
    import pty

    stand_in(tmp_path, monkeypatch, SLOW)
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(program(tmp_path / "step.svg"), stderr=theirs, check=True)
        told = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert "laying out 7 boxes, 1 s (Ctrl-C stops it)" in told
    assert told.rpartition("\r")[2] == ""
    assert told.split("\r")[-2].strip() == ""
    assert (tmp_path / "step.svg").read_bytes()


@no_windows
def test_a_full_picture_has_no_time_limit_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for all gets all, however long it takes; `timeout` limits it all the same."""
    stand_in(tmp_path, monkeypatch, "sleep 1.5; exec cat")
    monkeypatch.setattr("gradtrace._render.TIMEOUT", 0.5)
    sketch: Sketch = detach_then_use_again()
    assert b"coarser" not in render(sketch.graph, sketch, ".svg", full=True)
    with pytest.raises(gradtrace.LayoutError):
        render(sketch.graph, sketch, ".svg", full=True, timeout=0.5)
    with pytest.raises(gradtrace.LayoutError):
        render(sketch.graph, sketch, ".svg")
