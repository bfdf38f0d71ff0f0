"""Comparing traces: nothing where the flow of gradients is the same, and each change where not."""

# Torch gives no types to `backward`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import test_cases  # noqa: F401  # its programs are tried here too
import torch
from programs import PROGRAMS, Program, leaf, run
from torch import Tensor, nn

import gradtrace
from gradtrace import Status


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_flows_as_before(program: Program, tmp_path: pathlib.Path) -> None:
    """Two runs of one program are no difference, also through a file."""
    first, second = run(program)[0], run(program)[0]
    difference = first.diff(gradtrace.load(second.save(tmp_path / "second.json")))
    assert not difference, str(difference)
    assert str(difference) == "The flow of gradients is the same."


def test_programs_are_told_apart() -> None:
    """Hardly any two of the programs have the same flow."""
    traces = [run(program)[0] for program in PROGRAMS[:25]]
    same = sum(not one.diff(other) for one in traces for other in traces if one is not other)
    assert same <= 4


class _Model(nn.Module):
    def __init__(self, *, cut: bool = False, where: str = "encoder") -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.decoder = nn.Linear(4, 3)
        self.cut = cut
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        result: Tensor = self.decoder(hidden.detach() if self.cut else hidden)
        return result


def _step(model: nn.Module, steps: int = 1) -> gradtrace.Trace:
    with gradtrace.record(model) as trace:
        for _ in range(steps):
            loss = model(torch.randn(2, 3)).square().mean()
            loss.backward()
    return trace


def test_a_lost_gradient_is_told_per_leaf() -> None:
    """A detach: statuses before and after, the cut gained, the ways lost and gained."""
    difference = _step(_Model()).diff(_step(_Model(cut=True)))
    assert [leaf.name for leaf in difference.leaves] == ["encoder.weight", "encoder.bias"]
    weight = difference.leaves[0]
    assert (weight.before, weight.after) == (Status.REACHED, Status.CUT)
    assert [(cut.kind, cut.source) for cut in weight.cuts_gained] == [("detach", "hidden.detach()")]
    assert weight.cuts_lost == ()
    assert weight.paths_lost == ("linear in encoder -> linear in decoder -> square -> mean",)
    assert weight.paths_gained == (
        "linear in encoder -> detach // -> linear in decoder -> square -> mean",
    )
    assert (len(weight.norms_before), weight.norms_after) == (1, ())
    text = str(difference)
    assert text.splitlines()[0] == "The flow of gradients differs: 2 leaves reached -> cut."
    assert "encoder.weight, encoder.bias: reached -> cut" in text
    assert "+ cut: detach at" in text


def test_the_other_way_round() -> None:
    """What was gained one way is lost the other."""
    cut, whole = _step(_Model(cut=True)), _step(_Model())
    forth, back = whole.diff(cut), cut.diff(whole)
    for one, other in zip(forth.leaves, back.leaves, strict=True):
        assert (one.before, one.after) == (other.after, other.before)
        assert one.paths_lost == other.paths_gained
        assert one.cuts_gained == other.cuts_lost


def test_norms_are_shown_and_not_compared() -> None:
    """Another seed changes every norm and not the flow; both norms are there to read."""
    torch.manual_seed(0)
    first = _step(_Model())
    torch.manual_seed(1)
    second = _step(_Model())
    difference = first.diff(second)
    assert not difference
    before, after = difference.norms["encoder.weight"]
    assert len(before) == len(after) == 1
    assert before != after


def _run_text(text: str, moved: int) -> gradtrace.Trace:
    space: dict[str, Any] = {"gradtrace": gradtrace, "leaf": leaf, "torch": torch, "nn": nn}
    exec(compile("\n" * moved + text, f"moved_{moved}.py", "exec"), space)
    trace: gradtrace.Trace = space["trace"]
    return trace


def test_lines_that_moved_are_no_difference() -> None:
    """Neither lines nor files are compared, nor names of variables in between."""
    text = """
x, y = leaf(1), leaf(2)
with gradtrace.record() as trace:
    {0} = (x.detach() * y).sum()
    {0}.backward()
"""
    first = _run_text(text.format("loss"), 0)
    assert not first.diff(_run_text(text.format("loss"), 30))


class _Where(nn.Module):
    """Applies its ReLU in one of its two parts."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3))
        self.second = nn.Sequential(nn.Linear(3, 3))
        getattr(self, where).append(nn.Sequential(nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def test_an_op_that_moved_to_another_module_is_a_difference() -> None:
    """The op is named with both modules."""
    difference = _step(_Where("first")).diff(_step(_Where("second")))
    (moved,) = difference.ops
    assert (moved.op, moved.before, moved.after) == ("tanh", "first.1.0", "second.1.0")
    assert "~ op: tanh moved from first.1.0 to second.1.0" in str(difference)


def test_leaves_that_come_and_go() -> None:
    """A leaf of one trace only is new, or gone."""
    with gradtrace.record() as one:
        x = leaf(1)
        x.sum().backward()
    with gradtrace.record() as other:
        y = leaf(1)
        y.sum().backward()
    difference = one.diff(other)
    assert [(each.name, each.before, each.after) for each in difference.leaves] == [
        ("x", Status.REACHED, None),
        ("y", None, Status.REACHED),
    ]
    assert "x: gone, was reached" in str(difference)
    assert "y: new, reached" in str(difference)


def test_another_number_of_passes_is_a_difference() -> None:
    """A pass more is told, and that the leaves were reached in it."""
    difference = _step(_Model()).diff(_step(_Model(), steps=2))
    assert difference.passes_gained == ("backward from loss",)
    assert difference.leaves[0].arrivals_after == ("pass 0", "pass 1")


def test_another_term_is_a_difference() -> None:
    """A leaf that is reached by another term of the loss is reached otherwise."""

    def program(own: bool) -> gradtrace.Trace:
        x, y = leaf(1), leaf(2)
        with gradtrace.record() as trace:
            fit, penalty = (x * y).sum(), (y if own else x * y).square().sum()
            loss = fit + penalty
            loss.backward()
        return trace

    difference = program(True).diff(program(False))
    (x,) = [each for each in difference.leaves if each.name == "x"]
    assert (x.arrivals_before, x.arrivals_after) == (
        ("pass 0 by fit",),
        ("pass 0 by fit, penalty",),
    )


def test_large_models_are_compared_by_module() -> None:
    """Where ways are too many to list, the steps from module to module are compared."""

    def deep(cut: bool) -> gradtrace.Trace:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        model.requires_grad_(True)
        with gradtrace.record(model) as trace:
            x = torch.randn(3, 2, 8)
            for number, block in enumerate(model.layers):
                x = block(x.detach() if cut and number == 6 else x)
            x.square().mean().backward()
        return trace

    whole, cut = deep(False), deep(True)
    assert not whole.diff(deep(False))
    difference = whole.diff(cut)
    assert {each.name.split(".")[1] for each in difference.leaves} == set("012345")
    assert all(each.after is Status.CUT for each in difference.leaves)
    lost = {step for each in difference.leaves for step in each.paths_lost}
    assert any(step.startswith("layers.5") and "layers.6" in step for step in lost)
    assert len(str(difference)) < 20_000


@pytest.mark.parametrize("thing", [None, "before.json", 3])
def test_only_traces_can_be_compared(thing: Any) -> None:
    """Anything else is an error that says how to get a trace."""
    with pytest.raises(gradtrace.NotATraceError, match=r"gradtrace\.load"):
        _step(_Model()).diff(thing)


def test_traces_without_a_pass() -> None:
    """Two recordings of nothing are alike; one of something is not."""

    def empty() -> gradtrace.Trace:
        with gradtrace.record() as trace:
            pass
        return trace

    assert not empty().diff(empty())
    assert empty().diff(_step(_Model()))
