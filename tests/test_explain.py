"""Explanations: what happened, where, and what to do, for every status and every kind of cut."""

# Torch gives no types to `backward`, `apply` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import test_cases  # noqa: F401  # its programs are used here, too
import torch
from programs import PROGRAMS, Program, leaf, run
from torch import Tensor, nn

import gradtrace

# What an explanation has to say to the reader: a word of what happened, and one of what to do.
_WORDS = {
    "detach": ("history", "tensor itself"),
    "detach_": ("history", "x.detach()"),
    "data": (".data", "tensor itself"),
    "no_grad": ("no_grad", "out of the no_grad block"),
    "inference_mode": ("inference_mode", "outside"),
    "copy": ("new tensor", "torch.stack"),
    "escape": ("left torch", "Keep the value a tensor"),
    "non_differentiable": ("derivative", "softmax"),
    "no_gradient": ("no gradient", "backward"),
    "not_requested": ("asked for", "inputs"),
    "not_required": ("requires_grad", "before"),
    "first_order": ("create_graph=False", "create_graph=True"),
}


@functools.cache
def _explanations() -> list[tuple[Program, gradtrace.Explanation]]:
    found = []
    for program in PROGRAMS:
        trace, _ = run(program)
        found += [(program, trace.explain(each.name)) for each in trace.leaves]
    return found


def test_every_kind_of_cut_says_what_happened_and_what_to_do() -> None:
    """The text names each cut's line and expression, what happened there, and a remedy."""
    seen = set()
    for program, explanation in _explanations():
        text = " ".join(str(explanation).split())
        for cut in explanation.cuts:
            seen.add(str(cut.kind))
            assert cut.location is None or f":{cut.location.line}" in text, program.__name__
            assert " ".join((cut.source or "").split()) in text, program.__name__
            words = ("use_reentrant=False",) if cut.op == "checkpoint" else _WORDS[cut.kind]
            for word in words:
                assert word in text, (program.__name__, cut.kind, word)
    assert seen == set(gradtrace.CutKind) == set(_WORDS)


def test_every_status_is_met_and_named_first() -> None:
    """The first line names the tensor and its status, for every status that there is."""
    seen = set()
    for _, explanation in _explanations():
        seen.add(explanation.status)
        first = str(explanation).splitlines()[0]
        assert first.startswith(explanation.name)
        assert f" is {explanation.status}: " in first
    assert seen == set(gradtrace.Status) - {"frozen"} or seen == set(gradtrace.Status)


def test_hints_are_part_of_the_text() -> None:
    """What stands in `hints` is what a person reads."""
    for _, explanation in _explanations():
        text = " ".join(str(explanation).split())
        for hint in explanation.hints:
            assert " ".join(hint.split()) in text


def test_no_line_is_too_long_to_read() -> None:
    """Texts are wrapped at 100 columns, but for what can't be broken."""
    for _, explanation in _explanations():
        for line in str(explanation).splitlines():
            assert len(line) <= 100 or line.lstrip().startswith(("cut:", "way:", "arrived")), line


# -- results ---------------------------------------------------------------------------------------


def test_a_converted_tensor_is_no_leaf() -> None:
    """The classic: `.to()` behind `requires_grad=True` makes a result, whose .grad stays None."""
    with gradtrace.record() as trace:
        x = torch.randn(3, requires_grad=True).to(torch.float64)
        x.pow(2).sum().backward()
    explanation = trace.explain(x)
    assert (explanation.leaf, explanation.status) == (False, "reached")
    text = " ".join(str(explanation).split())
    assert "Not a leaf" in text
    assert "`to` made it" in text
    assert "Its .grad stays None unless retain_grad() was called" in text
    assert len(explanation.made_from) == 1
    assert explanation.made_from[0] in text
    assert "create it with its final device and dtype" in text


def test_a_tensor_that_was_converted_before_the_block() -> None:
    """The classic, done before the recording: it is still told that a conversion made it."""
    x = torch.randn(3, requires_grad=True).to(torch.float64)
    with gradtrace.record() as trace:
        x.pow(2).sum().backward()
    explanation = trace.explain(x)
    text = " ".join(str(explanation).split())
    assert (explanation.leaf, explanation.status) == (False, "reached")
    assert "Its .grad stays None unless retain_grad() was called" in text
    assert "create it with its final device and dtype" in text


def test_a_result_names_the_leaves_that_it_was_made_from() -> None:
    """`made_from` gives the leaves, nearest first."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        h = (w * 2).exp() + b
        h.sum().backward()
    explanation = trace.explain(h)
    assert explanation.made_from == ("b", "w")
    assert not explanation.leaf
    assert trace.explain(w).made_from == ()


def test_the_second_result_of_an_op_is_called_by_its_own_name() -> None:
    """Of an op with several results each is explained under its own name and shape."""
    w = leaf(1, 2, 3)
    with gradtrace.record() as trace:
        first, second = w.split([1, 2])
        (first * 2).sum().backward()
    assert str(trace.explain(first)).startswith("first [1] is reached")
    assert str(trace.explain(second)).startswith("second [2] is unused")
    assert str(trace.explain("second")) == str(trace.explain(second))


# -- unused, frozen --------------------------------------------------------------------------------


def test_unused_says_whether_anything_took_it() -> None:
    """A leaf that nothing took is told apart from one whose result is dropped."""
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1), "left": nn.Linear(2, 1)})
    with gradtrace.record(net) as trace:
        net["idle"](torch.ones(2))
        loss = net["used"](torch.ones(2)).sum()
        loss.backward()
    assert "No op in the recording took it" in str(trace.explain("left.weight"))
    text = str(trace.explain("idle.weight"))
    assert "No op in the recording took it" not in text
    assert "loss" in text


def test_frozen_says_what_to_do() -> None:
    """A frozen tensor is told to require grad before the forward pass."""
    net = nn.Linear(2, 1)
    net.weight.requires_grad_(False)
    with gradtrace.record(net) as trace:
        net(torch.ones(2)).sum().backward()
    explanation = trace.explain("weight")
    assert explanation.status == "frozen"
    assert "requires_grad_()" in str(explanation)
    assert explanation.cuts == ()


# -- gradients -------------------------------------------------------------------------------------


def _cleared_by_setting_none(net: nn.Module) -> None:
    net.zero_grad()


def _cleared_by_zeros(net: nn.Module) -> None:
    net.zero_grad(set_to_none=False)


def _cleared_by_an_optimizer(net: nn.Module) -> None:
    torch.optim.SGD(net.parameters(), 0.1).zero_grad()


def _zeroed_by_an_optimizer(net: nn.Module) -> None:
    torch.optim.SGD(net.parameters(), 0.1).zero_grad(set_to_none=False)


def _cleared_by_hand(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = None


def _zeroed_by_hand(net: nn.Module) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()


@pytest.mark.parametrize(
    "clear",
    [
        _cleared_by_setting_none,
        _cleared_by_zeros,
        _cleared_by_an_optimizer,
        _zeroed_by_an_optimizer,
        _cleared_by_hand,
        _zeroed_by_hand,
    ],
)
def test_a_cleared_gradient_says_where(clear: Callable[[nn.Module], None]) -> None:
    """A gradient that arrived and was cleared did arrive; the text says where it was cleared."""
    net = nn.Linear(2, 1)
    with gradtrace.record(net) as trace:
        net(torch.ones(2)).sum().backward()
        clear(net)
    explanation = trace.explain("weight")
    assert explanation.status == "reached"
    (gradient,) = explanation.gradients
    assert gradient.cleared is not None
    lines, first = inspect.getsourcelines(clear)
    assert first < gradient.cleared.line < first + len(lines)
    assert re.search(rf"cleared at \S*test_explain.py:{gradient.cleared.line}\b", str(explanation))


def test_a_gradient_that_stays_is_not_cleared() -> None:
    """Clearing before the pass is no clearing of what the pass brings."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with gradtrace.record(net) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(2)).sum().backward()
            optimizer.step()
    first, second = trace.explain("weight").gradients
    assert first.cleared is not None
    assert second.cleared is None


def test_many_gradients_are_counted() -> None:
    """Only some arrivals are written out; the others are counted."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        for _ in range(10):
            (w * 2).sum().backward()
    assert len(trace.explain(w).gradients) == 10
    assert str(trace.explain(w)).count("arrived in pass") < 10
    assert "more" in str(trace.explain(w))


# -- where zeros and NaNs arose --------------------------------------------------------------------


def _zeros() -> gradtrace.Trace:
    w, b = leaf(1.5, -2), leaf(3, 4)
    with gradtrace.record(values="edges") as trace:
        h = w.exp()
        s = torch.sign(h)
        (s * b).sum().backward()
    return trace


def test_the_op_in_whose_backward_zeros_arose() -> None:
    """With `values="edges"` the op whose derivative is zero is named with its line."""
    explanation = _zeros().explain("w")
    assert explanation.status == "zero"
    line = _zeros.__code__.co_firstlineno + 4
    assert explanation.origin is not None
    assert explanation.origin.startswith("sign at ")
    assert f"test_explain.py:{line}" in explanation.origin
    assert explanation.origin in " ".join(str(explanation).split())


def test_the_op_in_whose_backward_a_nan_arose() -> None:
    """With `values="edges"` the op whose derivative is not finite is named with its line."""
    w = leaf(0, 1)
    with gradtrace.record(values="edges") as trace:
        root = w.sqrt()
        y = root * 2 + 1
        y.sum().backward()
    explanation = trace.explain(w)
    assert explanation.status == "nonfinite"
    assert (explanation.origin or "").startswith("sqrt at ")


def test_the_op_that_made_a_nan_of_zero_times_infinity() -> None:
    """In the branch that `where` did not choose it is the division that makes the NaN."""
    w = leaf(0, 1)
    with gradtrace.record(values="edges") as trace:
        ratio = torch.ones(2) / w
        safe = torch.where(torch.tensor([False, True]), ratio, torch.zeros(2))
        safe.sum().backward()
    explanation = trace.explain(w)
    assert explanation.status == "nonfinite"
    assert (explanation.origin or "").startswith(("div at ", "__rtruediv__ at ", "true_divide at "))


def test_without_edges_the_text_says_how_to_ask() -> None:
    """Where norms on edges were not kept the text says how to ask for them."""
    w, b = leaf(1, 2), leaf(0, 0)
    with gradtrace.record() as trace:
        (w * b).sum().backward()
    explanation = trace.explain(w)
    assert explanation.origin is None
    assert 'record(values="edges")' in str(explanation)


def test_a_zero_weight_makes_the_zeros() -> None:
    """A factor that is zero is named as the op in whose backward the zeros arose."""
    w, b = leaf(1, 2), leaf(0, 0)
    with gradtrace.record(values="edges") as trace:
        y = w.sin() * b
        y.sum().backward()
    assert (trace.explain(w).origin or "").startswith("mul at ")


# -- unknown ---------------------------------------------------------------------------------------


def test_unknown_says_through_what() -> None:
    """Where backward raised on the way, the text gives the pass and its error."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        h = w.exp()
        loss = h.pow(2).sum()
        h.add_(1)
        with pytest.raises(RuntimeError):
            loss.backward()
    explanation = trace.explain(w)
    assert explanation.status == "unknown"
    assert "pass 0 raised RuntimeError" in " ".join(str(explanation).split())


# -- one cut in words ------------------------------------------------------------------------------


def test_the_way_through_a_cut_is_written_out() -> None:
    """The text shows the way from the tensor over the cut to the root."""
    X, Y, Z = leaf(1), leaf(2), leaf(3)  # noqa: N806
    with gradtrace.record() as trace:
        K = X + Y  # noqa: N806
        L = K.detach() * Z  # noqa: N806
        L.backward()
    assert "way: X -> add (K) -> detach // -> mul (L)" in str(trace.explain("X"))
    assert trace.explain(Z).status == "reached"


def test_a_cut_in_a_module_names_the_module() -> None:
    """A cut inside a module's forward names the module's path."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.inner(x)
            return h.detach()

    net = nn.Sequential(nn.Linear(2, 2), Block(), nn.Linear(2, 1))
    with gradtrace.record(net) as trace:
        net(torch.ones(2)).sum().backward()
    (cut,) = trace.explain("0.weight").cuts
    assert cut.module == "1"
    assert "in module 1" in str(trace.explain("0.weight"))


def test_checkpointing_has_a_hint_of_its_own() -> None:
    """A block that re-entrant checkpointing cut is told to pass use_reentrant=False."""
    block, head = nn.Linear(2, 2), nn.Linear(2, 1)
    with gradtrace.record({"block": block, "head": head}) as trace:
        with pytest.warns(UserWarning, match="None of the inputs"):
            h = torch.utils.checkpoint.checkpoint(block, torch.ones(2), use_reentrant=True)
        head(h).sum().backward()
    assert "use_reentrant=False" in str(trace.explain("block.weight"))


def test_what_leaves_a_checkpoint_sideways_has_a_hint_of_its_own() -> None:
    """A value that a hook or a list takes out of a block is told from a block that learns nothing.

    So is an auxiliary loss on recorded activations, which re-entrant checkpointing ruins silently.
    """
    x, w, kept = leaf(1, 2), leaf(3, 4), []

    def block(x: Tensor) -> Tensor:
        kept.append(x * w)
        return kept[-1].exp()

    with gradtrace.record() as trace:
        loss = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True).sum()
        (loss + kept[0].square().sum()).backward()
    found = trace.explain(w)
    assert [(cut.kind, cut.op) for cut in found.cuts] == [("no_grad", "checkpoint")]
    text = " ".join(str(found).split())
    assert "a hook, a list or an attribute" in text
    assert "none of its inputs requires grad" not in text


@pytest.mark.parametrize("pick", [lambda w: w.topk(2), lambda w: w.max(0), lambda w: w.sort()])
def test_indices_are_told_from_the_values_beside_them(pick: Callable[[Tensor], Any]) -> None:
    """Where an op gives values and indices, its values are not said to have no derivative."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        (b[pick(w)[1]] * w).sum().backward()
    text = str(trace.explain(w))
    assert ", its indices at " in text
    assert "are integers and have no derivative; the values beside them do" in " ".join(
        text.split()
    )


def test_explanations_are_values() -> None:
    """An explanation does not change when more is recorded, and holds no tensor."""
    w: Any = leaf(1, 2)
    with gradtrace.record() as trace:
        loss = (w * 2).sum()
        before = trace.explain(w)
        text = str(before)
        loss.backward()
    assert (before.status, str(before)) == ("no_backward", text)
    assert copy.deepcopy(before) == before


def test_what_could_not_be_observed_makes_no_verdict() -> None:
    """Where a call was missed, what seems unused is unknown, and the explanation says why."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        w * 2
        b.sum().backward()
    assert trace.explain(w).status == "unused"
    trace.graph.graph["troubles"] = ("odd_op: RuntimeError: no shape",)
    explanation = trace.explain(w)
    assert explanation.status == "unknown"
    assert "odd_op" in str(explanation)
    assert trace.explain(b).status == "reached"


def test_a_line_in_a_loop_is_told_once() -> None:
    """Cuts at one line, one after the other, are one entry with their number."""
    w = torch.ones(3, requires_grad=True)
    with gradtrace.record() as trace:
        total = torch.zeros(())
        for _ in range(3):
            total = total + (w.detach() * w).sum()
        total.backward()
    explanation = trace.explain(w)
    assert len(explanation.cuts) == 3
    assert str(explanation).count("  cut: .detach() × 3 at ") == 1
    assert str(explanation).count("  cut: ") == 1
