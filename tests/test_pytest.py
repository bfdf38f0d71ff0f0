"""The pytest plugin, tried in pytest runs of their own."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gradtrace

_ROOT = Path(gradtrace.__file__).parents[1]
_INSTALLED = any(
    entry.name == "gradtrace" for entry in importlib.metadata.entry_points(group="pytest11")
)
_MODEL = """
import pytest
import torch
from torch import nn

@pytest.fixture
def model():
    return nn.ModuleDict({"encoder": nn.Linear(3, 4), "decoder": nn.Linear(4, 1)})

def loss_of(model, cut):
    hidden = model["encoder"](torch.ones(2, 3))
    return model["decoder"](hidden.detach() if cut else hidden).sum()
"""


def run(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on one file in a folder, in a process of its own."""
    (folder / "test_it.py").write_text(_MODEL + body)
    plugin = () if _INSTALLED else ("-p", "gradtrace._pytest")
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-W", "error", *plugin, *options]
    environment = {"PYTHONPATH": str(_ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment
    )


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line without the time."""
    return done.stdout.strip().splitlines()[-1].partition(" in ")[0]


def files_in(folder: Path) -> list[str]:
    """Return the names of all files below a folder, with the last folder."""
    return sorted(f"{file.parent.name[:-9]}/{file.name}" for file in folder.rglob("trace*.*"))


CACHE = Path(".pytest_cache", "d", "gradtrace")


def test_a_test_with_the_fixture_passes(tmp_path: Path) -> None:
    """The fixture is the module; a test that passes leaves no file."""
    body = """
def test_flows(gradtrace, model):
    with gradtrace.record(model) as trace:
        loss_of(model, cut=True).backward()
    trace.assert_cut("encoder.*", by="detach")
    trace.assert_reached("decoder.*")
    assert gradtrace.last_trace() is trace
"""
    done = run(tmp_path, body)
    assert outcome(done) == "1 passed", done.stdout
    assert not files_in(tmp_path)


def test_a_failed_test_shows_and_writes_its_traces(tmp_path: Path) -> None:
    """The report has each trace's summary and its files, which can be loaded."""
    body = """
def test_flows(gradtrace, model):
    with gradtrace.record(model):
        loss_of(model, cut=False).backward()
    import gradtrace as module
    with module.record(model) as trace:
        loss_of(model, cut=True).backward()
    trace.assert_reached("encoder.*")
"""
    done = run(tmp_path, body)
    assert outcome(done) == "1 failed"
    assert "no gradient reached encoder.weight, encoder.bias" in done.stdout
    report = done.stdout.partition("- gradtrace -")[2]
    assert "trace 1 of 2" in report
    assert "trace 2 of 2" in report
    assert report.count("Backward passes") == 2
    names = ["trace-2.json", "trace-2.png", "trace.json", "trace.png"]
    assert files_in(tmp_path / CACHE) == [f"test_it.py-test_flows/{name}" for name in names]
    written = next((tmp_path / CACHE).rglob("trace-2.json"))
    assert str(written) in report
    gradtrace.load(written).assert_cut("encoder.weight", by="detach")


def test_a_plain_assert_explains_itself(tmp_path: Path) -> None:
    """`assert trace.reached(...)` shows why, also over several lines, and negated."""
    body = """
def test_plain(gradtrace, model):
    with gradtrace.record(model) as trace:
        loss_of(model, cut=True).backward()
    assert trace.reached(
        "decoder.weight",
        "encoder.weight",
    )

def test_negated(gradtrace, model):
    with gradtrace.record(model) as trace:
        loss_of(model, cut=True).backward()
    assert not trace.reached(model["decoder"])

def test_other(gradtrace, model):
    with gradtrace.record(model) as trace:
        loss_of(model, cut=True).backward()
    found = trace.reached("encoder.weight")
    def check():
        assert 1 == 2
    check()
"""
    done = run(tmp_path, body)
    assert outcome(done) == "3 failed"
    plain, negated, other = (part.split("- gradtrace -")[0] for part in _reports(done.stdout))
    assert "no gradient reached encoder.weight (1 of 2)" in plain
    assert "cut: .detach() at" in plain
    assert "a gradient reached decoder.weight, decoder.bias" in negated
    assert "gradient reached" not in other


def _reports(output: str) -> list[str]:
    """Return the reports of three failed tests."""
    parts = output.split("____ test_")
    return parts[1:4]


def test_a_recording_left_open_is_an_error(tmp_path: Path) -> None:
    """It is told at teardown, ended, and the next test starts clean."""
    body = """
kept = []

def test_leaves(gradtrace):
    kept.append(gradtrace.record())
    kept[0].__enter__()

def test_next(gradtrace, model):
    assert torch.overrides._get_current_function_mode() is None
    with gradtrace.record(model) as trace:
        loss_of(model, cut=False).backward()
    trace.assert_all_reached()
"""
    done = run(tmp_path, body)
    assert outcome(done) == "2 passed, 1 error"
    assert "1 recording was not ended by the test" in done.stdout


def test_marked_tests(tmp_path: Path) -> None:
    """The marker records the body and asserts; several add up; a class can have it."""
    body = """
@pytest.mark.gradtrace(reached=["decoder.*"], cut="encoder.*", only_cuts=["hidden.detach()"])
def test_holds(model):
    loss_of(model, cut=True).backward()

@pytest.mark.gradtrace(reached=["encoder.*"])
def test_fails(model):
    loss_of(model, cut=True).backward()

@pytest.mark.gradtrace(all_reached=True)
class TestAll:
    def test_holds(self, model):
        loss_of(model, cut=False).backward()

    @pytest.mark.gradtrace(not_reached=["encoder.weight"])
    def test_fails(self, model):
        loss_of(model, cut=False).backward()

@pytest.mark.gradtrace(but=["encoder.*"], values="edges")
def test_but(model):
    loss_of(model, cut=True).backward()
    import gradtrace
    assert gradtrace.last_trace().graph.graph["values"] == "edges"

@pytest.mark.gradtrace(reached=["encoder.*"])
def test_raises(model):
    loss_of(model, cut=False).backward()
    raise ValueError("its own")

@pytest.mark.gradtrace(reached=["encodr.*"])
def test_misspelt(model):
    loss_of(model, cut=False).backward()

@pytest.mark.gradtrace(reached=["encoder.*"])
def test_no_backward(model):
    loss_of(model, cut=False)
"""
    done = run(tmp_path, body, "-p", "no:cacheprovider", "--gradtrace-dir", "out")
    assert outcome(done) == "5 failed, 3 passed", done.stdout
    assert "a gradient reached encoder.weight" in done.stdout
    assert "ValueError: its own" in done.stdout
    assert "no leaf's name matches 'encodr.*'" in done.stdout
    assert "no backward pass was started" in done.stdout
    assert "_pytest.py" not in done.stdout, "no lines of the plugin in a report"
    assert len(files_in(tmp_path / "out")) == 10


def test_a_marker_that_asks_for_something_unknown(tmp_path: Path) -> None:
    """A misspelt keyword fails, and says what there is."""
    body = """
@pytest.mark.gradtrace(reachd=["encoder.*"])
def test_it(model):
    loss_of(model, cut=False).backward()

@pytest.mark.gradtrace("encoder.*")
def test_positional(model):
    loss_of(model, cut=False).backward()
"""
    done = run(tmp_path, body, "--strict-markers")
    assert outcome(done) == "2 failed"
    assert "the marker gradtrace doesn't take reachd=. It takes reached=, " in done.stdout
    assert "doesn't take 'encoder.*'" in done.stdout


def test_unittest_style(tmp_path: Path) -> None:
    """Methods of a TestCase can be marked, and use the fixture through a fixture of their own."""
    body = """
import unittest

class TestIt(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def trace_with(self, gradtrace, model):
        self.gradtrace, self.model = gradtrace, model

    def test_fixture(self):
        with self.gradtrace.record(self.model) as trace:
            loss_of(self.model, cut=True).backward()
        assert trace.reached("encoder.weight")

    @pytest.mark.gradtrace(reached=["model.*"])
    def test_marker(self):
        w = torch.ones(2, requires_grad=True)
        self.assertTrue(False)

    @pytest.mark.gradtrace(reached=["w"])
    def test_holds(self):
        w = torch.ones(2, requires_grad=True)
        w.sum().backward()
"""
    done = run(tmp_path, body)
    assert outcome(done) == "2 failed, 1 passed", done.stdout
    assert "no gradient reached encoder.weight" in done.stdout
    assert "False is not true" in done.stdout
    assert "no leaf's name" not in done.stdout


def test_golden_flows(tmp_path: Path) -> None:
    """A missing file fails, `--gradtrace-update` writes it, and then it is compared."""
    body = """
@pytest.mark.gradtrace(matches="flow/step.json")
def test_it(model):
    import os
    loss_of(model, cut="CUT" in os.environ).backward()
"""
    assert outcome(run(tmp_path, body)) == "1 failed"
    assert outcome(run(tmp_path, body, "--gradtrace-update")) == "1 passed"
    stored = json.loads((tmp_path / "flow" / "step.json").read_text())
    assert "leaf encoder.weight: reached in pass 0" in stored["facts"]
    assert outcome(run(tmp_path, body)) == "1 passed"
    done = run(tmp_path, body.replace('"CUT" in os.environ', "True"))
    assert outcome(done) == "1 failed"
    assert "+ leaf encoder.weight: cut by detach" in done.stdout


def test_failures_inside_fixtures(tmp_path: Path) -> None:
    """What a fixture recorded is shown where the fixture fails, before the test or after it."""
    body = """
@pytest.fixture
def trace(gradtrace, model):
    with gradtrace.record(model) as trace:
        loss_of(model, cut=True).backward()
    assert trace.reached("encoder.weight")
    return trace

@pytest.fixture
def checked(gradtrace, model):
    with gradtrace.record(model) as trace:
        yield
    trace.assert_all_reached()

def test_before(trace):
    pass

def test_after(checked, model):
    loss_of(model, cut=True).backward()
"""
    done = run(tmp_path, body)
    assert outcome(done) == "1 passed, 2 errors", done.stdout
    assert done.stdout.count("- gradtrace -") == 2
    assert done.stdout.count("encoder.weight [4 × 3] is cut") == 2


def test_old_runs_are_forgotten(tmp_path: Path) -> None:
    """As with tmp_path, the files of the last runs stay."""
    body = """
def test_it(gradtrace, model):
    with gradtrace.record(model) as trace:
        loss_of(model, cut=True).backward()
    trace.assert_reached("encoder.*")
"""
    option = ("-o", "tmp_path_retention_count=2")
    for count in (1, 2, 2):
        run(tmp_path, body, *option)
        assert len(list((tmp_path / CACHE).iterdir())) == count


def test_with_xdist(tmp_path: Path) -> None:
    """Workers send their sections home, and write into one folder."""
    pytest.importorskip("xdist")
    body = """
@pytest.mark.parametrize("number", range(4))
def test_it(gradtrace, model, number):
    with gradtrace.record(model) as trace:
        loss_of(model, cut=number % 2).backward()
    trace.assert_reached("encoder.*")
"""
    done = run(tmp_path, body, "-n", "2")
    assert outcome(done) == "2 failed, 2 passed", done.stdout
    assert done.stdout.count("- gradtrace -") == 2
    assert len(list((tmp_path / CACHE).iterdir())) == 1
    assert len(files_in(tmp_path / CACHE)) == 4


def test_the_plugin_loads_nothing(tmp_path: Path) -> None:
    """A run that doesn't use it imports neither torch nor networkx for it."""
    (tmp_path / "test_it.py").write_text("")
    body = """
import sys

def test_it():
    assert "torch" not in sys.modules
    assert "networkx" not in sys.modules
"""
    plugin = () if _INSTALLED else ("-p", "gradtrace._pytest")
    (tmp_path / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", *plugin]
    environment = {"PYTHONPATH": str(_ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert outcome(done) == "1 passed", done.stdout


@pytest.mark.skipif(not _INSTALLED, reason="the entry point is there in an installed package only")
def test_the_plugin_can_be_turned_off(tmp_path: Path) -> None:
    """`-p no:gradtrace` takes fixture, marker and options away."""
    body = """
def test_it(gradtrace):
    pass
"""
    done = run(tmp_path, body, "-p", "no:gradtrace")
    assert outcome(done) == "1 error"
    assert "fixture 'gradtrace' not found" in done.stdout
