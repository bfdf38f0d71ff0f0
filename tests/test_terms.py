"""Sides of one step: which pass, and which term of a loss, reached which leaf."""

# Torch gives no types to `backward` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from programs import leaf
from torch import Tensor, nn

import gradtrace

Leaves = dict[str, Tensor]
Terms = Mapping[str, Tensor]


def _leaves() -> Leaves:
    return {name: leaf(1, 2, 3) for name in "abc"}


def _terms(w: Leaves) -> dict[str, Tensor]:
    fit = (w["a"] * w["b"]).square().mean()
    penalty = w["c"].abs().sum()
    beside = (w["a"].detach() - w["c"]).square().sum()
    return {"fit": fit, "penalty": penalty, "beside": beside}


# How people add up terms; each takes the three above and returns the loss.
SUMS: dict[str, Callable[[Terms], Tensor]] = {
    "plus": lambda t: t["fit"] + t["penalty"] + t["beside"],
    "weighted": lambda t: t["fit"] + 0.1 * t["penalty"] - t["beside"] / 3,
    "mean": lambda t: (t["fit"] + t["penalty"] + t["beside"]) / 3,
    "negated": lambda t: -(t["fit"] - (t["penalty"] + t["beside"])),
    "sum()": lambda t: sum(t.values(), torch.zeros(())),
    "stacked": lambda t: torch.stack([*t.values()]).sum(),
    "stacked mean": lambda t: torch.stack([*t.values()]).mean() * 2,
    "converted": lambda t: (t["fit"] + t["penalty"]).double() + t["beside"],
    "in place": lambda t: t["fit"].clone().add_(t["penalty"]).add_(t["beside"]),
    "shifted": lambda t: (t["fit"] + t["penalty"] + t["beside"] + 1) * 2,
    "torch.add": lambda t: torch.add(t["fit"], torch.add(t["penalty"], t["beside"], alpha=2)),
}


def _what_each_reaches(terms: Terms, w: Leaves) -> set[tuple[str, ...]]:
    """Return the leaves that autograd gives a gradient to from each term alone."""
    return {
        tuple(
            name
            for name, each in w.items()
            if torch.autograd.grad(term, each, retain_graph=True, allow_unused=True)[0] is not None
        )
        for term in terms.values()
    }


@pytest.mark.parametrize("name", SUMS)
def test_terms_reach_what_autograd_reaches_from_them(name: str) -> None:
    """Each addend of a loss is a term, with the leaves that torch.autograd.grad gives it."""
    w = _leaves()
    with gradtrace.record(names=w) as trace:
        terms = _terms(w)
        SUMS[name](terms).backward()
    right = _what_each_reaches(_terms(w), w)
    found = trace.terms()
    assert len(found) == 3
    assert {term.leaves for term in found} == right


def test_terms_are_named_with_their_lines() -> None:
    """A term has the name of its variable, or its text, and the line that made it."""
    x, y = leaf(1), leaf(2)
    with gradtrace.record() as trace:
        fit = (x * y).sum()
        loss = fit + 0.5 * y.square().sum()
        loss.backward()
    first, second = trace.terms("loss")
    assert (first.name, first.leaves) == ("fit", ("x", "y"))
    assert (second.name, second.leaves) == ("0.5 * y.square().sum()", ("y",))
    assert first.location is not None
    assert second.location is not None
    assert second.location.line == first.location.line + 1


def test_a_residual_connection_is_no_sum_of_terms() -> None:
    """What is added up inside a model, or over a batch, is one term: the loss itself."""
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with gradtrace.record(model) as trace:
        loss = (x + model(x)).square().mean()
        loss.backward()
    assert [term.name for term in trace.terms()] == ["loss"]
    assert "Terms" not in trace.summary()


def test_several_roots_are_terms() -> None:
    """`torch.autograd.backward` of several tensors adds them up."""
    x, y = leaf(1), leaf(2)
    with gradtrace.record() as trace:
        first, second = x.sum(), (x * y).sum()
        torch.autograd.backward([first, second])
    assert [(term.name, term.leaves) for term in trace.terms()] == [
        ("first", ("x",)),
        ("second", ("x", "y")),
    ]


def test_a_term_that_reaches_nothing_is_no_way_of_the_gradient() -> None:
    """A detached addend gets no gradient, and is left out of what was reached."""
    x, y = leaf(1), leaf(2)
    with gradtrace.record() as trace:
        loss = x.sum() + y.sum().detach()
        loss.backward()
    assert [term.leaves for term in trace.terms()] == [("x",)]


def test_the_summary_has_a_table_of_terms() -> None:
    """The table says which term reached which leaf, and what only one of them did."""
    w = _leaves()
    with gradtrace.record(names=w) as trace:
        fit, penalty, beside = _terms(w).values()
        loss = fit + penalty + beside
        loss.backward()
    table = trace.summary().split("Terms of loss, pass 0\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[:2] for line in table[:3]] == [
        ["1", "fit"],
        ["2", "penalty"],
        ["3", "beside"],
    ]
    assert [line.split() for line in table[3:]] == [
        ["reached", "1", "2", "3"],
        ["a,", "b", "x", "-", "-", "only", "fit"],
        ["c", "-", "x", "x"],
    ]


def _gan() -> tuple[gradtrace.Trace, dict[str, Any]]:
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    with gradtrace.record({"generator": generator, "critic": critic}) as trace:
        fake = generator(torch.randn(4, 2))
        critic_loss = critic(fake.detach()).mean()
        critic_loss.backward()
        generator_loss = -critic(fake).mean()
        generator_loss.backward()
    return trace, {"critic_loss": critic_loss, "generator_loss": generator_loss}


def test_which_leaves_a_pass_trained() -> None:
    """A pass is meant by its index, its record, its root or the root's name."""
    trace, roots = _gan()
    critic = ["critic.weight", "critic.bias"]
    everything = ["generator.weight", "generator.bias", *critic]
    for meant in (0, trace.backward_passes[0], "critic_loss", roots["critic_loss"]):
        assert [each.name for each in trace.trained_by(meant)] == critic
    for meant in (1, "generator_loss", roots["generator_loss"]):
        assert sorted(each.name for each in trace.trained_by(meant)) == sorted(everything)


def test_which_passes_reached_a_leaf() -> None:
    """The reverse: each leaf's passes."""
    trace, _ = _gan()
    assert [done.roots for done in trace.passes_reaching("generator.weight")] == [
        ("generator_loss",)
    ]
    assert [done.index for done in trace.passes_reaching("critic.bias")] == [0, 1]


@pytest.mark.parametrize("wrong", [2, -1, "loss", None, 1.5])
def test_a_pass_that_is_not_there(wrong: object) -> None:
    """What names no pass is an error that lists the passes."""
    trace, _ = _gan()
    with pytest.raises(gradtrace.GradtraceError):
        trace.trained_by(wrong)


def test_no_pass_at_all() -> None:
    """Without a backward pass the error says so."""
    with gradtrace.record() as trace:
        leaf(1) * 2
    with pytest.raises(gradtrace.UnknownNameError, match="none was recorded"):
        trace.terms()
