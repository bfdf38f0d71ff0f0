"""Assertions on traces: they hold, or fail with a message that explains."""

# Torch gives no types to `backward`, `apply` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import pytest
import torch
from programs import leaf
from torch import Tensor, nn

import gradtrace


def _stopped() -> tuple[gradtrace.Trace, Tensor, Tensor, Tensor]:
    """Return a trace with a cut leaf, one that is reached with a cut, and one that is reached."""
    target, both, online = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    with gradtrace.record() as trace:
        with torch.no_grad():
            goal = target * 2
        ((online - goal) * both * both.detach()).sum().backward()
    return trace, target, both, online


def test_assertions_that_hold_return_nothing() -> None:
    """What holds passes silently, by tensor, name and pattern."""
    trace, target, both, _ = _stopped()
    trace.assert_reached(both, "online")
    trace.assert_not_reached(target)
    trace.assert_cut(target, by="no_grad")
    trace.assert_cut("target", by=gradtrace.CutKind.NO_GRAD, at="test_assertions.py")
    trace.assert_cut("targ*", at="target * 2")


def test_assert_reached_explains_what_was_not() -> None:
    """The message names what was not reached, why, and the line; not what was reached."""
    trace, target, both, online = _stopped()
    with pytest.raises(AssertionError) as caught:
        trace.assert_reached(both, target, online)
    text = str(caught.value)
    line = _stopped.__code__.co_firstlineno + 5
    assert text.splitlines()[0] == "no gradient reached target"
    assert f"test_assertions.py:{line}" in text
    assert "target * 2" in text
    assert "online [2] is" not in text


def test_assert_not_reached_explains_what_was() -> None:
    """The message shows the gradient that arrived."""
    trace, target, _, online = _stopped()
    with pytest.raises(AssertionError, match="a gradient reached online") as caught:
        trace.assert_not_reached(target, online)
    assert "arrived in pass 0" in str(caught.value)


def test_assert_cut_fails_for_another_kind() -> None:
    """A cut of another kind is not the one that was meant."""
    trace, target, _, _ = _stopped()
    with pytest.raises(AssertionError, match="not cut by detach: target"):
        trace.assert_cut(target, by="detach")


@pytest.mark.parametrize(
    "place", ["other.py", "test_assertions.py:1", "assertions.py", "online * 2"]
)
def test_assert_cut_fails_for_another_place(place: str) -> None:
    """A cut elsewhere is not the one that was meant."""
    trace, target, _, _ = _stopped()
    with pytest.raises(AssertionError, match="not cut at"):
        trace.assert_cut(target, at=place)


def test_assert_cut_takes_a_place_by_file_and_line() -> None:
    """`at` takes a file, with or without folders, and its line."""
    trace, target, _, _ = _stopped()
    line = _stopped.__code__.co_firstlineno + 5
    trace.assert_cut(target, at=f"test_assertions.py:{line}")
    trace.assert_cut(target, at=f"tests/test_assertions.py:{line}")
    trace.assert_cut(target, at=f"{__file__}:{line}")


def test_assert_cut_fails_for_what_is_reached_all_the_same() -> None:
    """A tensor that is reached along another way is not cut."""
    trace, _, both, _ = _stopped()
    assert [each.kind for each in trace.explain(both).cuts] == ["detach"]
    with pytest.raises(AssertionError, match="not cut by detach: both"):
        trace.assert_cut(both, by="detach")


def test_an_unknown_kind_is_no_failed_assertion() -> None:
    """A misspelt kind is an error of its own that gives the nearest, also where nothing is cut."""
    trace, target, _, _ = _stopped()
    with pytest.raises(gradtrace.GradtraceError, match="'no_grad'") as caught:
        trace.assert_cut(target, by="nograd")
    assert not isinstance(caught.value, AssertionError)


def test_zero_and_nonfinite_gradients_did_arrive() -> None:
    """Zeros and NaNs count as arrived."""
    w, b, n = leaf(1, 2), leaf(0, 0), leaf(0, 0)
    with gradtrace.record() as trace:
        (w * b + n.sqrt()).sum().backward()
    assert (trace.explain(w).status, trace.explain(n).status) == ("zero", "nonfinite")
    trace.assert_reached(w, n, b)
    with pytest.raises(AssertionError):
        trace.assert_not_reached(w)


def test_modules_and_patterns_ask_about_each_parameter() -> None:
    """All parameters of a module, and all leaves of a pattern, have to fit."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with gradtrace.record(net) as trace:
        net[1](net[0](torch.ones(2)).detach()).sum().backward()
    trace.assert_reached(net[1], "1.*")
    trace.assert_cut(net[0], "0.*", by="detach")
    with pytest.raises(AssertionError, match=r"no gradient reached 0\.weight, 0\.bias"):
        trace.assert_reached(net)
    with pytest.raises(AssertionError, match=r"a gradient reached 1\.weight, 1\.bias"):
        trace.assert_not_reached("*")


def test_without_a_backward_pass_nothing_can_be_asserted() -> None:
    """Where no backward ran every assertion fails and says so, that of not being reached too."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        (w.detach() * 2).sum()
    for assertion in (trace.assert_reached, trace.assert_not_reached, trace.assert_cut):
        with pytest.raises(AssertionError, match="no backward pass"):
            assertion(w)


def test_assertions_work_on_a_loaded_trace(tmp_path: object) -> None:
    """A loaded trace asserts by name as the live one did."""
    trace, *_ = _stopped()
    loaded = gradtrace.load(trace.save(f"{tmp_path}/trace.json"))
    loaded.assert_cut("target", by="no_grad", at="test_assertions.py")
    with pytest.raises(AssertionError, match="no gradient reached target"):
        loaded.assert_reached("target")
