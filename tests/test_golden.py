"""Golden flows: a small stored file says which gradient goes where; a change fails."""

# Torch gives no types to `backward`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import test_cases  # noqa: F401  # its programs are tried here too
import torch
from programs import PROGRAMS, Program, leaf, run
from torch import nn

import gradtrace
from gradtrace import _settings


def _step(*, cut: bool = False, scale: float = 1.0) -> gradtrace.Trace:
    model = nn.ModuleDict({"encoder": nn.Linear(3, 4), "decoder": nn.Linear(4, 3)})
    with gradtrace.record(model) as trace:
        x = torch.randn(2, 3) * scale
        hidden = model["encoder"](x)
        loss = model["decoder"](hidden.detach() if cut else hidden).square().mean()
        loss.backward()
    return trace


def test_a_flow_is_stored_and_found_again(tmp_path: pathlib.Path) -> None:
    """What was written matches; other values, seeds and lines match as well."""
    path = tmp_path / "flow" / "step.json"
    _step().assert_matches(path, update=True)
    _step().assert_matches(path)
    _step(scale=100).assert_matches(path)


def test_the_file_has_one_fact_a_line(tmp_path: pathlib.Path) -> None:
    """It is sorted, small, and free of lines and norms, so that a review shows what changed."""
    path = tmp_path / "step.json"
    _step(cut=True).assert_matches(path, update=True)
    assert path.read_text() == (
        '{\n"format": "gradtrace flow",\n"version": 1,\n"facts": [\n'
        '"leaf decoder.bias: reached in pass 0",\n'
        '"leaf decoder.weight: reached in pass 0",\n'
        '"leaf encoder.bias: cut",\n'
        '"leaf encoder.bias: cut by detach",\n'
        '"leaf encoder.weight: cut",\n'
        '"leaf encoder.weight: cut by detach",\n'
        '"pass 0: backward from loss",\n'
        '"way decoder -> the top level",\n'
        '"way encoder -> the top level //"\n'
        "]\n}\n"
    )
    facts = json.loads(path.read_text())["facts"]
    assert facts == sorted(facts)


def test_a_change_fails_and_says_what_and_how_to_accept_it(tmp_path: pathlib.Path) -> None:
    """The message has the lost and the gained facts, an explanation, and the way to update."""
    path = tmp_path / "step.json"
    _step().assert_matches(path, update=True)
    with pytest.raises(AssertionError) as caught:
        _step(cut=True).assert_matches(path)
    text = str(caught.value)
    assert "  - leaf encoder.weight: reached in pass 0\n" in text
    assert "  + leaf encoder.weight: cut by detach\n" in text
    assert "--gradtrace-update" in text
    assert "hidden.detach()" in text
    _step(cut=True).assert_matches(path, update=True)
    with pytest.raises(AssertionError, match=r"- leaf encoder\.weight: cut by detach"):
        _step().assert_matches(path)


def test_a_missing_file_fails_with_how_to_make_it(tmp_path: pathlib.Path) -> None:
    """There is nothing to compare with: never a pass, and nothing is written."""
    path = tmp_path / "none.json"
    with pytest.raises(AssertionError, match=r"no golden flow at .*--gradtrace-update"):
        _step().assert_matches(path)
    assert not path.exists()


def test_without_a_backward_pass_nothing_is_written(tmp_path: pathlib.Path) -> None:
    """A recording in which no backward ran is no golden flow."""
    with gradtrace.record() as trace:
        leaf(1) * 2
    with pytest.raises(AssertionError, match="no backward pass"):
        trace.assert_matches(tmp_path / "none.json", update=True)
    assert not (tmp_path / "none.json").exists()


OTHER_FILES = (
    "",
    "[]",
    "{}",
    '{"format": "gradtrace"}',
    '{"format": "gradtrace flow", "version": 2}',
    '{"format": "gradtrace flow", "version": 1, "facts": [3]}',
    "\udcff",
)


@pytest.mark.parametrize("text", OTHER_FILES)
def test_another_file_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    """A file that is no golden flow is an error that says why, and is left as it was."""
    path = tmp_path / "other.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(gradtrace.FileFormatError, match=r"golden flow|facts|version"):
        _step().assert_matches(path)
    assert path.read_bytes() == text.encode(errors="surrogateescape")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_matches_itself(program: Program, tmp_path: pathlib.Path) -> None:
    """Any program's second run has the flow of its first."""
    trace = run(program)[0]
    if not trace.backward_passes:
        pytest.skip("a golden flow needs a backward pass")
    trace.assert_matches(tmp_path / "flow.json", update=True)
    run(program)[0].assert_matches(tmp_path / "flow.json")


def test_the_plugins_settings(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """Relative paths start from pytest's root folder, and its option writes."""
    monkeypatch.setattr(_settings, "folder", tmp_path)
    monkeypatch.setattr(_settings, "update_golden", True)
    _step().assert_matches("flow/step.json")
    assert (tmp_path / "flow" / "step.json").exists()
    monkeypatch.setattr(_settings, "update_golden", False)
    _step().assert_matches("flow/step.json")
