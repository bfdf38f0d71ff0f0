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
    assert text.splitlines()[0] == "no gradient reached target (1 of 3)"
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


# -- lists of what is allowed ----------------------------------------------------------------------


def test_only_these_cuts() -> None:
    """A cut is allowed by its kind, its text, its place, or several of these at once."""
    trace, *_ = _stopped()
    line = _stopped.__code__.co_firstlineno + 5
    trace.assert_only_cuts(["no_grad", "detach"])
    trace.assert_only_cuts(["target * 2", "both.detach()"])
    trace.assert_only_cuts([("no_grad", f"test_assertions.py:{line}"), "detach"])
    trace.assert_only_cuts([gradtrace.CutKind.NO_GRAD, gradtrace.CutKind.DETACH])


def test_any_other_cut_fails() -> None:
    """Each cut that nothing allows is named with its line, its text and what it blocks."""
    trace, *_ = _stopped()
    with pytest.raises(AssertionError, match="1 of 2 cuts are not allowed") as caught:
        trace.assert_only_cuts(["detach"])
    assert "target * 2\n    blocks target" in str(caught.value)
    with pytest.raises(AssertionError, match="2 of 2 cuts are not allowed"):
        trace.assert_only_cuts([])


@pytest.mark.parametrize("allowed", ["copy", "other.py", "student(x)", ("detach", "target * 2")])
def test_what_allows_no_cut_fails(allowed: str | tuple[str, ...]) -> None:
    """A stop-gradient that disappeared, or is misspelt, never passes."""
    trace, *_ = _stopped()
    with pytest.raises(AssertionError, match="no cut fits"):
        trace.assert_only_cuts(["no_grad", "detach", allowed])


def test_all_reached() -> None:
    """All leaves, or all of a module, have to be reached, but for what is excepted or frozen."""
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 1), "c": nn.Linear(1, 1)})
    net["c"].requires_grad_(False)
    with gradtrace.record(net) as trace:
        net["c"](net["b"](net["a"](torch.ones(2)).detach())).sum().backward()
    trace.assert_all_reached(but=["a.*"])
    trace.assert_all_reached(net, but=["a.weight", "*.bias"])
    trace.assert_all_reached(net["b"])
    with pytest.raises(AssertionError, match=r"no gradient reached a\.weight \(1 of 3\)"):
        trace.assert_all_reached(net, but=["a.bias"])
    with pytest.raises(AssertionError, match=r"no gradient reached a\.weight, a\.bias"):
        trace.assert_all_reached()


def test_an_exception_that_matches_nothing() -> None:
    """A misspelt exception, and exceptions that leave nothing, are errors and no pass."""
    trace, *_ = _stopped()
    with pytest.raises(gradtrace.NoMatchError, match="`but`"):
        trace.assert_all_reached(but=["targt"])
    with pytest.raises(gradtrace.NoMatchError, match="nothing is left"):
        trace.assert_all_reached(but=["*"])


# -- norms -----------------------------------------------------------------------------------------


def test_gradients_of_a_norm() -> None:
    """A number, bounds, or anything that compares."""
    w = leaf(3, 4)
    with gradtrace.record() as trace:
        (w * w).sum().backward()
    trace.assert_gradient(w)
    trace.assert_gradient(w, norm=10)
    trace.assert_gradient("w", norm=(1, 10))
    trace.assert_gradient(w, norm=(None, 11))
    trace.assert_gradient(w, norm=(9, None), backward_pass=0)
    trace.assert_gradient(w, norm=pytest.approx(9.5, rel=0.1))
    for norm in (9.9, (11, None), (None, 9), pytest.approx(1)):
        with pytest.raises(AssertionError, match="no gradient of norm"):
            trace.assert_gradient(w, norm=norm)
    with pytest.raises(AssertionError, match="in pass 1"):
        trace.assert_gradient(w, norm=10, backward_pass=1)


def test_a_gradient_of_zeros_is_no_useful_one() -> None:
    """Without a norm a finite gradient other than zero is asked for."""
    w, b, n = leaf(1, 2), leaf(0, 0), leaf(0, 0)
    with gradtrace.record() as trace:
        (w * b + n.sqrt()).sum().backward()
    trace.assert_gradient(b)
    with pytest.raises(AssertionError, match="no finite gradient other than zero reached w, n"):
        trace.assert_gradient(w, b, n)


def test_a_long_list_of_failures_has_them_all() -> None:
    """The first are explained whole; each of the others has its verdict and its lines."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    with gradtrace.record(net) as trace:
        net[5](net[:5](torch.ones(2)).detach()).sum().backward()
    with pytest.raises(AssertionError) as caught:
        trace.assert_reached(net)
    text = str(caught.value)
    assert text.splitlines()[0].endswith("(10 of 12)")
    assert all(f"{at}.{part} [" in text for at in range(5) for part in ("weight", "bias"))
    assert text.count("  cut: .detach() at") == 10


def test_the_new_assertions_need_a_backward_pass() -> None:
    """They too fail where no backward ran."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        (w.detach() * 2).sum()
    for assertion in (
        lambda: trace.assert_only_cuts([]),
        trace.assert_all_reached,
        lambda: trace.assert_gradient(w),
    ):
        with pytest.raises(AssertionError, match="no backward pass"):
            assertion()


def test_few_names_are_listed_where_none_is_near() -> None:
    """A pattern that matches nothing gets the leaves that there are."""
    trace, *_ = _stopped()
    with pytest.raises(gradtrace.NoMatchError, match="The leaves are 'target', 'online', 'both'"):
        trace.assert_reached("encoder.*")
