"""Hazards: writes to what backward still needs, and calls that do nothing.

Torch is the judge: it raises, or the gradients are not those of the same program without the write.
"""

# Torch gives no types to `backward` and `apply`.
# mypy: disable-error-code="no-untyped-call, attr-defined"
# Programs are told apart by their names.
# ruff: noqa: D103

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradtrace
from gradtrace import Hazard, HazardKind

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this torch doesn't let anybody look at a kept tensor without unpacking it",
)

# A program takes a leaf, and whether to write; its backward is called by whoever runs it.
Program = Callable[[Tensor, bool], Tensor]


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = 2 * x * gradients[0]
        return result


def through_data(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y * y
    if write:
        y.data.add_(1)
    return z


def through_a_view_of_data(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y * y
    if write:
        y.data[1:].mul_(3)
    return z


def by_index_through_data(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y * y
    if write:
        y.data[0] = 7
    return z


def beside_what_is_needed(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y[1] * y[2]
    if write:
        y.data[0] = 7
    return z


def through_detach(x: Tensor, write: bool) -> Tensor:
    y = (x * 2).exp()
    if write:
        y.detach().mul_(2)
    return y.sum()


def into_a_leaf_under_no_grad(x: Tensor, write: bool) -> Tensor:
    z = x * x
    if write:
        with torch.no_grad():
            x.mul_(2)
    return z


def by_an_optimizer(x: Tensor, write: bool) -> Tensor:
    z = (x * x).sum()
    if write:
        x.grad = torch.ones_like(x)
        torch.optim.SGD([x], lr=0.1).step()
        x.grad = None
    return z


def of_a_functions_own(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = _Square.apply(y)
    if write:
        y.data.add_(1)
    assert isinstance(z, Tensor)
    return z


def of_a_functions_own_that_torch_sees(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = _Square.apply(y)
    if write:
        y.detach().add_(1)
    assert isinstance(z, Tensor)
    return z


def of_data_beside(x: Tensor, write: bool) -> Tensor:
    factor = torch.ones(3)
    z = x * factor
    if write:
        factor.add_(1)
    return z


def not_needed(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y + y
    if write:
        y.data.add_(1)
    return z


def written_before(x: Tensor, write: bool) -> Tensor:
    y = (x * 2).clone()
    if write:
        y.data.zero_()
        y.data.copy_(x.detach() * 2)
    return y * y


def new_memory(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y * y
    if write:
        y.data = torch.zeros(3)
    return z


def new_memory_that_is_needed_elsewhere(x: Tensor, write: bool) -> Tensor:
    factor = torch.ones(3)
    z = x * factor
    if write:
        y = x * 2
        y.data = factor
    return z


def out_of_place(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y * y
    if write:
        y = y.data.add(1)
    return z


def a_clone(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    z = y * y
    if write:
        y.clone().detach().add_(1)
    return z


def past_saved_tensor_hooks(x: Tensor, write: bool) -> Tensor:
    y = x * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        z = y * y
    if write:
        y.detach().add_(1)
    return z


def recomputed(x: Tensor, write: bool) -> Tensor:
    z: Tensor = checkpoint(lambda y: (y * y).exp(), x * 2, use_reentrant=False)
    if write:
        torch.ones(3).add_(1)
    return z


PROGRAMS: dict[Program, HazardKind | None] = {
    through_data: HazardKind.SILENT_WRITE,
    through_a_view_of_data: HazardKind.SILENT_WRITE,
    by_index_through_data: HazardKind.SILENT_WRITE,
    beside_what_is_needed: None,
    through_detach: HazardKind.WRITE,
    into_a_leaf_under_no_grad: HazardKind.WRITE,
    by_an_optimizer: HazardKind.WRITE,
    of_a_functions_own: HazardKind.SILENT_WRITE,
    of_a_functions_own_that_torch_sees: HazardKind.WRITE,
    of_data_beside: HazardKind.WRITE,
    not_needed: None,
    written_before: None,
    new_memory: HazardKind.SILENT_WRITE,
    new_memory_that_is_needed_elsewhere: None,
    out_of_place: None,
    a_clone: None,
    past_saved_tensor_hooks: HazardKind.SILENT_WRITE,
    recomputed: None,
}


def outcome(program: Program, write: bool) -> tuple[Tensor | None, list[Hazard]]:
    """Return the gradient, or None where torch raised, and the writes that were told."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with gradtrace.record() as trace:
        root = program(x, write)
        try:
            root.sum().backward()
        except RuntimeError:
            x.grad = None
    return x.grad, [each for each in trace.hazards if each.kind is not HazardKind.DROPPED]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_writes_to_what_backward_needs(program: Program) -> None:
    """A write is told where torch raises for it, or computes other gradients because of it."""
    right, none = outcome(program, write=False)
    gradient, found = outcome(program, write=True)
    assert not none
    kind = PROGRAMS[program]
    if gradient is None:
        assert kind is HazardKind.WRITE
    else:
        assert right is not None
        assert (kind is HazardKind.SILENT_WRITE) == (not torch.equal(gradient, right))
    assert {each.kind for each in found} == ({kind} if kind else set())


def test_a_hazard_names_both_lines() -> None:
    """A write names its own line, what it wrote to, and who needed that."""
    x = torch.ones(3, requires_grad=True)
    with gradtrace.record() as trace:
        y = x * 2
        z = y * y
        y.data.add_(1)
        z.sum().backward()
    (hazard,) = trace.hazards
    assert (hazard.op, hazard.source, hazard.tensor) == ("add_", "y.data.add_(1)", "y")
    assert hazard.needed_by is not None
    assert (hazard.needed_by.op, hazard.needed_by.source) == ("mul", "y * y")
    assert hazard.location is not None
    assert hazard.needed_by.location is not None
    assert hazard.location.line == hazard.needed_by.location.line + 1
    assert "the gradients are wrong" in str(hazard)
    assert str(hazard.location) in str(hazard)


def test_the_explanation_of_a_wrong_gradient_says_so() -> None:
    """Where torch computed a wrong gradient without a word, `explain` has the word."""
    x = torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    with gradtrace.record() as trace:
        y = x * 2
        z = y * y
        y.data.add_(1)
        (z + other).sum().backward()
    assert any("not to be trusted" in hint for hint in trace.explain(x).hints)
    assert not any("not to be trusted" in hint for hint in trace.explain(other).hints)


def test_a_gan_that_steps_too_early() -> None:
    """An optimizer's step between forward and backward is named with the line that needs it."""
    critic = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(critic.parameters())
    fake = torch.ones(2, 3, requires_grad=True)
    with gradtrace.record() as trace:
        score = critic(fake).sum()
        critic(fake.detach()).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            score.backward()
    (hazard,) = trace.hazards
    assert (hazard.kind, hazard.source, hazard.tensor) == ("write", "optimizer.step()", "weight")
    assert hazard.needed_by is not None
    assert hazard.needed_by.source == "critic(fake)"


def test_training_has_no_hazards() -> None:
    """Steps, running statistics, power iterations, moving averages: nothing of it is a hazard."""
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)),
        nn.BatchNorm1d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Linear(6, 2),
    )
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with gradtrace.record() as trace:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(5, 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(model)
    assert trace.hazards == ()


# -- calls that do nothing -------------------------------------------------------------------------


def test_dropped_results() -> None:
    """A call whose result nothing takes is named, once for its line; what has an effect is not."""
    x = torch.ones(3, requires_grad=True)
    w = torch.ones(3)
    out = torch.empty(3)
    with gradtrace.record() as trace:
        for _ in range(3):
            x.detach()
        (x * 2).float()  # float32 already: the same tensor
        x.double()
        torch.sigmoid(x)
        x + 1
        w.mul_(2)
        nn.init.zeros_(w)
        with torch.no_grad():
            torch.add(x, 1, out=out)
        kept = x.clone()
        print(x.sum().item(), [x.sum()][0] is None)  # noqa: T201
        nn.ReLU()(x)
        (kept * x).sum().backward()
    dropped = [(each.op, each.source) for each in trace.hazards]
    assert dropped == [
        ("detach", "x.detach()"),
        ("double", "x.double()"),
        ("sigmoid", "torch.sigmoid(x)"),
        ("add", "x + 1"),
    ]
    assert "nothing takes its result" in str(trace.hazards[0])


def test_what_a_library_drops_is_not_told() -> None:
    """Calls inside torch, whose lines nobody here can change, are nobody's hazard."""
    model = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 2, 4, requires_grad=True)
    with warnings.catch_warnings(), gradtrace.record() as trace:
        warnings.simplefilter("ignore")
        torch.autograd.gradcheck(lambda x: x.double().exp(), x.detach().double().requires_grad_())
        model(x, x, x)[0].sum().backward()
    assert trace.hazards == ()


def test_hazards_are_saved(tmp_path: pathlib.Path) -> None:
    """A loaded trace tells the same hazards, and the summary shows them."""
    x = torch.ones(3, requires_grad=True)
    with gradtrace.record() as trace:
        y = x * 2
        z = y * y
        y.data.add_(1)
        x.detach()
        z.sum().backward()
    loaded = gradtrace.load(trace.save(tmp_path / "trace.json"))
    assert loaded.hazards == trace.hazards
    assert len(loaded.hazards) == 2
    lines = loaded.summary().split("Hazards\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["silent_write", "overwrites", "dropped"]
