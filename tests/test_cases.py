"""Programs with known answers: one for every status and every kind of cut, as people write them.

The oracle is autograd: what `.grad` shows afterwards has to agree with each status.
"""

# Torch gives no types to `backward`, `apply` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import importlib.util
import pathlib
import warnings
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from programs import (
    FROZEN,
    NO_BACKWARD,
    NONFINITE,
    REACHED,
    UNKNOWN,
    UNUSED,
    ZERO,
    Ran,
    Want,
    cut,
    expect,
    gradient_of,
    leaf,
    reached,
    want,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.utils.checkpoint import checkpoint

from gradtrace import record

# -- detach ----------------------------------------------------------------------------------------


@expect(w=cut(detach="h.detach()"), b=REACHED)
def test_detach_of_a_result() -> Ran:
    """A detached result cuts what it was made from."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        (h.detach() * b).sum().backward()
    return trace, locals()


@expect(w=cut(detach="w.detach()"), b=REACHED)
def test_detach_of_the_leaf_itself() -> Ran:
    """A detached leaf is cut on that line."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        loss = (w.detach() * b).sum()
        loss.backward()
    return trace, locals()


@expect(w=cut(detach="h.detach()"))
def test_only_the_detach_nearest_to_the_leaf_is_a_cut() -> Ran:
    """A second detach on the same way cuts nothing."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        once = h.detach()
        twice = (once + 1).detach()
        (twice * b).sum().backward()
    return trace, locals()


@expect(w=cut(detach=("first.detach()", "second.detach()")))
def test_two_ways_are_cut_at_two_places() -> Ran:
    """Each way has its own cut."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        first = w * 2
        second = w * 3
        loss = (first.detach() * b).sum()
        loss = loss + (second.detach() * b).sum()
        loss.backward()
    return trace, locals()


@expect(w=cut(detach="torch.detach(h)"))
def test_detach_as_a_function() -> Ran:
    """`torch.detach(h)` is a detach as `h.detach()` is."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w.exp()
        (torch.detach(h) * b).sum().backward()
    return trace, locals()


@expect(w=cut(detach_="h.detach_()"), b=REACHED)
def test_detach_in_place_before_the_use() -> Ran:
    """`detach_()` before the only use cuts it."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        h.detach_()
        (h * b).sum().backward()
    return trace, locals()


@expect(w=reached(detach_="h.detach_()"), b=REACHED)
def test_detach_in_place_between_two_uses() -> Ran:
    """What was used before `detach_()` still learns; what is used behind it does not."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        early = (h + b).sum()
        h.detach_()
        late = (h * b).sum()
        (early + late).backward()
    return trace, locals()


@expect(w=REACHED, h=REACHED)
def test_a_detach_that_is_only_logged() -> Ran:
    """A detached value that never flows into a root is no cut."""
    w = leaf(1, 2)
    log: list[Any] = []
    with record() as trace:
        h = w * 2
        loss = h.sum()
        log.append(loss.detach())
        log.append(h.detach().mean().cpu().numpy())
        loss.backward()
    return trace, locals()


@expect(w=reached(detach="(torch.round(w) - w).detach()"))
def test_rounding_with_a_straight_through_gradient() -> Ran:
    """The way through the rounding is cut at the detach, the direct one is not."""
    w = leaf(0.3, 1.8)
    with record() as trace:
        y = w + (torch.round(w) - w).detach()
        y.pow(2).sum().backward()
    return trace, locals()


# -- .data -----------------------------------------------------------------------------------------


@expect(w=cut(data="h.data"), b=REACHED)
def test_data_of_a_result() -> Ran:
    """Reading `.data` cuts."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        loss = (h.data * b).sum()
        loss.backward()
    return trace, locals()


@expect(w=cut(data="w.data"), b=REACHED)
def test_data_of_a_leaf_then_clone() -> Ran:
    """A clone of `.data` is cut at the `.data`."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        start = w.data.clone()
        (start * b).sum().backward()
    return trace, locals()


@expect(w=cut(data="h.data.copy_(w)"), b=REACHED)
def test_writing_a_leaf_through_data_of_a_result() -> Ran:
    """What is written through `.data` reaches the tensor's readers without its history."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b * 2
        h.data.copy_(w)
        h.sum().backward()
    return trace, locals()


@expect(w=cut(data="h.data[0] = w[1]"), b=REACHED)
def test_writing_an_element_through_data() -> Ran:
    """Assigning to an element of `.data` cuts the value that is assigned."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b * 2
        h.data[0] = w[1]
        h.sum().backward()
    return trace, locals()


@expect(w=cut(data="h.data = w * 3"), b=REACHED)
def test_setting_data_of_a_result() -> Ran:
    """`h.data = ...` takes the values and leaves their history behind."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b * 2
        h.data = w * 3
        (h * h).sum().backward()
    return trace, locals()


@expect(w=REACHED, target=FROZEN)
def test_soft_update_of_a_target_through_data() -> Ran:
    """A moving average through `.data` after the step is no cut of what is reached."""
    w = leaf(1, 2)
    target = torch.zeros(2)
    with record() as trace:
        (w * target).sum().backward()
        (w + target - target).pow(2).sum().backward()
        target.data.copy_(0.9 * target.data + 0.1 * w.data)
    return trace, locals()


@expect(w=cut(data="w.data"), p=REACHED)
def test_a_leaf_that_only_starts_another_one() -> Ran:
    """A leaf that only initialises another one's values has no other way: this is its cut."""
    w = leaf(1, 2)
    p = nn.Parameter(torch.zeros(2))
    with record() as trace:
        p.data.copy_(w.data)
        p.pow(2).sum().backward()
    return trace, locals()


# -- no_grad and inference_mode --------------------------------------------------------------------


@expect(w=cut(no_grad="w * 2"), b=REACHED)
def test_no_grad_block() -> Ran:
    """The op in the block is named, not the block."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        with torch.no_grad():
            h = w * 2
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(no_grad="w.exp()"), b=REACHED)
def test_no_grad_decorator() -> Ran:
    """A decorated function's op is named at its own line."""
    w, b = leaf(1, 2), leaf(3, 4)

    @torch.no_grad()
    def features(x: Tensor) -> Tensor:
        return w.exp() * x

    with record() as trace:
        (features(torch.ones(2)) * b).sum().backward()
    return trace, locals()


@expect(w=cut(no_grad="torch.stack([w, w])"), b=REACHED)
def test_grad_mode_switched_off_for_a_while() -> Ran:
    """`set_grad_enabled(False)` is no_grad, too."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        torch.set_grad_enabled(False)
        h = torch.stack([w, w])
        torch.set_grad_enabled(True)
        (h * b).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_enable_grad_inside_no_grad() -> Ran:
    """What runs under `enable_grad` inside `no_grad` is not cut."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        with torch.no_grad():
            with torch.enable_grad():
                h = w * 2
            shown = h.mean()
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(no_grad="w + 1"))
def test_only_the_first_op_of_a_no_grad_block_is_a_cut() -> Ran:
    """Behind the first op under no_grad nothing requires grad any more."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        with torch.no_grad():
            h = w + 1
            h = h * 2
            h = h.relu()
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(no_grad="w[0]"), b=REACHED)
def test_a_write_into_a_result_under_no_grad() -> Ran:
    """A value that is written into a result under no_grad is cut there."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b * 2
        with torch.no_grad():
            h[0] = w[0]
        h.sum().backward()
    return trace, locals()


@expect(w=cut(inference_mode="w * 2"), b=REACHED)
def test_inference_mode_then_clone() -> Ran:
    """A clone of an inference tensor silences the error and stays cut."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        with torch.inference_mode():
            h = w * 2
        (h.clone() * b).sum().backward()
    return trace, locals()


@expect(w=cut(inference_mode="w.sin()"), b=REACHED)
def test_inference_mode_decorator() -> Ran:
    """A decorated function's first op with the leaf is named."""
    w, b = leaf(1, 2), leaf(3, 4)

    @torch.inference_mode()
    def embed() -> Tensor:
        return w.sin().exp()

    with record() as trace:
        (embed() + b).sum().backward()
    return trace, locals()


# -- copies ----------------------------------------------------------------------------------------


@expect(w=cut(copy="torch.tensor(h)"), b=REACHED)
def test_torch_tensor_of_a_tensor() -> Ran:
    """`torch.tensor(h)` copies values only."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        (torch.tensor(h) * b).sum().backward()
    return trace, locals()


@expect(w=cut(copy="torch.tensor([c, -s])"), b=REACHED)
def test_torch_tensor_of_scalars() -> Ran:
    """A list of scalar tensors makes a tensor without history."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        c, s = w[0].cos(), w[1].sin()
        (torch.tensor([c, -s]) * b).sum().backward()
    return trace, locals()


@expect(w=cut(copy="torch.as_tensor([w[0], w[1] * 2])"), b=REACHED)
def test_as_tensor_of_a_list() -> Ran:
    """`as_tensor` of a list copies values only."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = torch.as_tensor([w[0], w[1] * 2])
        (h * b).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_as_tensor_of_a_tensor_is_the_tensor() -> Ran:
    """`as_tensor` of a tensor is the tensor itself: nothing is cut."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = torch.as_tensor(w * 2)
        (h * torch.as_tensor(b)).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_as_tensor_that_converts_keeps_the_history() -> Ran:
    """`as_tensor` with another dtype converts, with a gradient."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = torch.as_tensor(w * 2, dtype=torch.float64)
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(copy="torch.Tensor([w[0], w[1]])"), b=REACHED)
def test_the_tensor_class_of_a_list() -> Ran:
    """`torch.Tensor([...])` copies values only."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = torch.Tensor([w[0], w[1]])
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(escape=("torch.FloatTensor([w[0], w[1]])",) * 2), b=REACHED)
def test_a_legacy_tensor_class_of_a_list() -> Ran:
    """`torch.FloatTensor([...])` reads each element as a number, and these leave torch."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = torch.FloatTensor([w[0], w[1]])
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(copy="nn.Parameter(h)"), fresh=REACHED)
def test_a_parameter_made_from_a_result() -> Ran:
    """`nn.Parameter(h)` is a new leaf: what it was made from gets nothing."""
    w = leaf(1, 2)
    with record() as trace:
        h = w * 2
        fresh = nn.Parameter(h)
        fresh.pow(2).sum().backward()
    return trace, locals()


@expect(w=cut(copy="torch.autograd.Variable(h, requires_grad=True)"), fresh=REACHED)
def test_a_variable_made_from_a_result() -> Ran:
    """`Variable(h, requires_grad=True)` is a new leaf."""
    w = leaf(1, 2)
    with record() as trace:
        h = w * 2
        fresh = torch.autograd.Variable(h, requires_grad=True)
        fresh.pow(2).sum().backward()
    return trace, locals()


@expect(w=cut(copy="Variable(torch.stack([w[0], w[1]]))"), b=REACHED)
def test_a_plain_variable_is_without_history() -> Ran:
    """`Variable(h)` leaves the history behind as `detach` does."""
    from torch.autograd import Variable

    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = Variable(torch.stack([w[0], w[1]]))
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(copy="copy.deepcopy(w)"), twin=REACHED)
def test_deepcopy_of_a_leaf() -> Ran:
    """A deep copy of a leaf is another leaf."""
    w = leaf(1, 2)
    with record() as trace:
        twin = copy.deepcopy(w)
        twin.pow(2).sum().backward()
    return trace, locals()


@expect(old=cut(copy="copy.deepcopy(net)"), new=REACHED)
def test_deepcopy_of_a_model() -> Ran:
    """A copied model learns; the one that it was copied from does not."""
    net = nn.Linear(2, 1)
    with record() as trace:
        twin = copy.deepcopy(net)
        twin(torch.ones(2)).sum().backward()
    return trace, {"old": net.weight, "new": twin.weight}


@expect(w=cut(copy="b.new_tensor(w)"), b=REACHED)
def test_new_tensor_of_a_leaf() -> Ran:
    """`new_tensor` copies values only; of its owner it reads the dtype."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b.new_tensor(w)
        (h * b).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=UNUSED)
def test_shapes_and_likes_carry_no_data() -> Ran:
    """An op that reads a shape or a dtype only is no way for data."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * torch.ones_like(b) + torch.zeros(b.shape) + b.new_ones(2)
        h = h.expand_as(b).type_as(b) + torch.zeros(b.size(0), dtype=b.dtype, device=b.device)
        h.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_a_clone_is_no_cut() -> Ran:
    """`clone`, `contiguous`, `to`, `view` and their like pass gradients on."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w.clone().contiguous().view(2, 1).t().to(torch.float64).float().squeeze(0)
        (h * b.clone(memory_format=torch.preserve_format).reshape(-1)).sum().backward()
    return trace, locals()


# -- escapes ---------------------------------------------------------------------------------------


@expect(w=cut(escape="w.item()"), b=REACHED)
def test_item_as_a_factor() -> Ran:
    """A factor that was taken by `item()` is a number."""
    w, b = leaf(2), leaf(3, 4)
    with record() as trace:
        (b * w.item()).sum().backward()
    return trace, locals()


@expect(w=cut(escape="float(w * 2)"), b=REACHED)
def test_float_of_a_result() -> Ran:
    """`float(...)` takes the value out."""
    w, b = leaf(2), leaf(3, 4)
    with record() as trace:
        (b * float(w * 2)).sum().backward()
    return trace, locals()


@expect(w=cut(escape="int(w)"), b=REACHED)
def test_int_as_an_index() -> Ran:
    """`int(...)` takes the value out, here as an index."""
    w, b = leaf(1), leaf(3, 4)
    with record() as trace:
        b[int(w)].backward()
    return trace, locals()


@expect(w=cut(escape="bool(w)"), b=REACHED)
def test_bool_in_a_condition() -> Ran:
    """`bool(...)` decides which way is taken, and passes no gradient."""
    w, b = leaf(1), leaf(3, 4)
    with record() as trace:
        loss = b.sum() if bool(w) else b.mean()
        loss.backward()
    return trace, locals()


@expect(w=cut(escape="w.tolist()"), b=REACHED)
def test_tolist() -> Ran:
    """`tolist()` takes all values out."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        first, second = w.tolist()
        (b * first + second).sum().backward()
    return trace, locals()


@expect(w=cut(detach="w.detach()"), b=REACHED)
def test_a_round_trip_through_numpy() -> Ran:
    """Of detach and numpy the detach lies nearer to the leaf."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        array = w.detach().numpy() * 2
        (torch.from_numpy(array) * b).sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_an_escape_beside_another_way_is_no_cut() -> Ran:
    """What is logged is no cut of a tensor that has another way to the root."""
    w = leaf(1, 2)
    with record() as trace:
        loss = w.pow(2).sum()
        shown = f"{loss.item():.3f} {float(w.mean())} {w.detach().numpy()} {w.tolist()}"
        loss.backward()
    return trace, locals() | {"shown": shown}


@expect(w=cut(detach="w.detach()"), b=REACHED)
def test_an_escape_beside_a_cut_is_no_cut() -> Ran:
    """An escape is not named where another way to the root is cut."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        shown = w.mean().item()
        (w.detach() * b).sum().backward()
    return trace, locals()


@expect(w=UNUSED, b=REACHED)
def test_a_metric_that_is_never_read() -> Ran:
    """What is computed and dropped is unused."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        metric = (w * b).mean()
        b.sum().backward()
    return trace, locals()


@expect(w=UNUSED, b=REACHED)
def test_a_leaf_that_nothing_took() -> Ran:
    """A leaf that no op took is unused."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        b.sum().backward()
    return trace, locals()


# -- ops without a derivative ----------------------------------------------------------------------


@expect(w=cut(non_differentiable="h.argmax()"), b=REACHED)
def test_argmax_as_an_index() -> Ran:
    """An index from argmax carries no gradient."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        b[h.argmax()].backward()
    return trace, locals()


@expect(w=cut(non_differentiable="w > 0.5"), b=REACHED)
def test_a_comparison_as_a_mask() -> Ran:
    """A mask from a comparison carries no gradient."""
    w, b = leaf(1, 0), leaf(3, 4)
    with record() as trace:
        mask = (w > 0.5).float()
        (b * mask).sum().backward()
    return trace, locals()


@expect(w=cut(non_differentiable="torch.ge(w, 0.5)"), b=REACHED)
def test_a_comparison_as_a_function() -> Ran:
    """`torch.ge` is the comparison `>=`."""
    w, b = leaf(1, 0), leaf(3, 4)
    with record() as trace:
        torch.where(torch.ge(w, 0.5), b, -b).sum().backward()
    return trace, locals()


@expect(w=cut(non_differentiable="w > 0"), b=REACHED)
def test_a_comparison_in_a_condition() -> Ran:
    """In `if w > 0` the comparison lies nearer to the leaf than the bool that is taken of it."""
    w, b = leaf(1), leaf(3, 4)
    with record() as trace:
        loss = b.sum() if w > 0 else b.mean()
        loss.backward()
    return trace, locals()


@expect(w=cut(non_differentiable="w.long()"), b=REACHED)
def test_long_as_an_index() -> Ran:
    """A cast to integers ends the gradient."""
    w, b = leaf(1, 0), leaf(3, 4)
    with record() as trace:
        b[w.long()].sum().backward()
    return trace, locals()


@expect(w=cut(non_differentiable="w.to(torch.int32)"), b=REACHED)
def test_a_cast_to_integers_by_to() -> Ran:
    """`to(torch.int32)` ends the gradient as `int()` does."""
    w, b = leaf(1, 0), leaf(3, 4)
    with record() as trace:
        (w.to(torch.int32) * b).sum().backward()
    return trace, locals()


@expect(w=cut(non_differentiable="w.type(torch.uint8)"), b=REACHED)
def test_a_cast_by_type() -> Ran:
    """`type(torch.uint8)` converts, and ends the gradient."""
    w, b = leaf(1, 0), leaf(3, 4)
    with record() as trace:
        (w.type(torch.uint8) * b).sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_a_cast_by_type_to_floats() -> Ran:
    """`type(torch.float64)` converts, with a gradient."""
    w = leaf(1, 0)
    with record() as trace:
        h = w.type(torch.float64)
        h.pow(2).sum().backward()
    return trace, locals()


@expect(w=ZERO, b=REACHED)
def test_round_passes_zeros() -> Ran:
    """Rounding has a derivative, which is zero."""
    w, b = leaf(1.4, 0.2), leaf(3, 4)
    with record() as trace:
        (w.round() * b).sum().backward()
    return trace, locals()


@expect(w=ZERO, b=REACHED)
def test_sign_passes_zeros() -> Ran:
    """The sign has a derivative, which is zero."""
    w, b = leaf(1.4, -0.2), leaf(3, 4)
    with record() as trace:
        (torch.sign(w) * b).sum().backward()
    return trace, locals()


@expect(w=ZERO, b=REACHED)
def test_a_saturated_clamp_passes_zeros() -> Ran:
    """A clamp outside its bounds passes zeros."""
    w, b = leaf(14, 20), leaf(3, 4)
    with record() as trace:
        (w.clamp(0, 1) * b).sum().backward()
    return trace, locals()


@expect(w=cut(non_differentiable="w.argmax()"), b=REACHED)
def test_one_hot_of_argmax() -> Ran:
    """Of argmax and one_hot the argmax lies nearer to the leaf."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        (F.one_hot(w.argmax(), 2) * b).sum().backward()
    return trace, locals()


@expect(w=cut(non_differentiable="w.topk(2)"), b=REACHED)
def test_the_indices_of_topk() -> Ran:
    """Of topk only the values have a gradient."""
    w, b = leaf(1, 3, 2), leaf(3, 4, 5)
    with record() as trace:
        best, where = w.topk(2)
        b[where].sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_the_values_of_topk() -> Ran:
    """The values of topk pass a gradient on."""
    w, b = leaf(1, 3, 2), leaf(3, 4)
    with record() as trace:
        (w.topk(2).values * b).sum().backward()
    return trace, locals()


@expect(w=reached(non_differentiable="w.sort()"), b=REACHED)
def test_values_and_indices_of_sort() -> Ran:
    """Values and indices of one sort are a way that is reached and one that is cut."""
    w, b = leaf(1, 3, 2), leaf(3, 4, 5)
    with record() as trace:
        values, order = w.sort()
        (values * b[order]).sum().backward()
    return trace, locals()


@expect(logits=reached(non_differentiable="choice.sample()"))
def test_policy_gradient() -> Ran:
    """A sampled action is cut; its log-probability is reached."""
    logits = leaf(0.1, 0.5, 0.2)
    with record() as trace:
        choice = torch.distributions.Categorical(logits=logits)
        action = choice.sample()
        loss = -choice.log_prob(action) * 3.0
        loss.backward()
    return trace, locals()


@expect(mean=cut(no_grad="normal.sample()"), b=REACHED)
def test_sampling_without_reparametrisation() -> Ran:
    """`sample()` of a normal distribution runs under no_grad inside torch."""
    mean, b = leaf(0.1, 0.5), leaf(1, 2)
    with record() as trace:
        normal = torch.distributions.Normal(mean, 1.0)
        (normal.sample() * b).sum().backward()
    return trace, locals()


@expect(mean=REACHED, b=REACHED)
def test_sampling_with_reparametrisation() -> Ran:
    """`rsample()` passes gradients on."""
    mean, b = leaf(0.1, 0.5), leaf(1, 2)
    with record() as trace:
        normal = torch.distributions.Normal(mean, 1.0)
        (normal.rsample() * b).sum().backward()
    return trace, locals()


@expect(w=REACHED, cell=REACHED)
def test_packed_sequences() -> Ran:
    """The lengths that a packed sequence carries come from the lengths, not from the values."""
    w, net = leaf(1, 2), nn.LSTM(2, 3, batch_first=True)
    cell = net.weight_hh_l0
    with record() as trace:
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.ones(2, 3, 2) * w, torch.tensor([3, 2]), batch_first=True
        )
        out, lengths = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
        (out.sum(1) / lengths[:, None]).sum().backward()
    return trace, locals()


@expect(w=cut(detach="h.detach()"), b=REACHED)
def test_a_write_beside_a_data_that_was_read() -> Ran:
    """Reading `.data` makes no later write to the tensor itself a cut."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        assert h.data.shape == h.shape
        h.add_(w)
        (h.detach() * b).sum().backward()
    return trace, locals()


# -- one memory, several tensors -------------------------------------------------------------------


@expect(w=cut(detach="h.add_(w)"), b=reached(detach=("h.detach()", "h.add_(w)")))
def test_a_write_that_a_detached_twin_sees() -> Ran:
    """What is written into a tensor reaches its detached twin without its history."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b * 2
        twin = h.detach()
        h.add_(w)
        (twin * b).sum().backward()
    return trace, locals()


@expect(w=cut(data="h.add_(w)"), b=reached(data=("h.data", "h.add_(w)")))
def test_a_write_that_a_data_twin_sees() -> Ran:
    """A twin made by `.data` sees the write, though no version counter tells."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b * 2
        twin = h.data
        h.add_(w)
        (twin * b).sum().backward()
    return trace, locals()


@expect(w=cut(detach="twin.add_(w)"), b=REACHED)
def test_a_write_into_a_detached_twin() -> Ran:
    """What is written into a detached twin reaches the tensor without its history."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = b * 2
        twin = h.detach()
        twin.add_(w)
        (h * 3).sum().backward()
    return trace, locals()


@expect(w=cut(data="h.data"), b=REACHED)
def test_a_data_twin_that_is_changed_itself() -> Ran:
    """What a `.data` holds when it is written to stays a way of its own."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        twin = h.data
        twin.sigmoid_()
        (twin * b).sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_a_detached_twin_that_scales_its_tensor() -> Ran:
    """A tensor that is scaled through its detached twin keeps its history, and no way is cut."""
    w = leaf(1, 2)
    with record() as trace:
        h = w * 2
        h.detach().mul_(0.5)
        h.sum().backward()
    return trace, locals()


@expect(w=reached(non_differentiable="h > 0.9"))
def test_a_mask_of_a_result_that_was_changed_under_no_grad() -> Ran:
    """A write under no_grad takes nothing from what its target is to later ops."""
    w = leaf(1, 2)
    with record() as trace:
        h = w * 2
        with torch.no_grad():
            h.sigmoid_()
        h.masked_fill(h > 0.9, 0.25).sum().backward()
    return trace, locals()


@expect(w=cut(detach=("h.detach()", "h.mul_(2)")), b=REACHED)
def test_a_detached_twin_whose_value_leaves_torch() -> Ran:
    """Where a value leaves torch by a detached twin, that parts them is what is named."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        twin = h.detach()
        h.mul_(2)
        (b * twin.sum().item()).sum().backward()
    return trace, locals()


@expect(w=cut(detach="h.detach()"), b=cut(detach="h.detach()"))
def test_what_stays_around_a_view_that_is_filled() -> Ran:
    """A view that is filled leaves the rest of its base as it was."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        h[0].copy_(b[0])
        (h.detach() * torch.ones(2, requires_grad=True)).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_a_view_that_was_changed_under_no_grad() -> Ran:
    """A view whose grad_fn autograd makes anew is known again."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        row = (w * b).view(2, 1).t()
        with torch.no_grad():
            row.mul_(1.5)
        row.sum().backward()
    return trace, locals()


@expect(w=cut(data="p.data.copy_(w)"), p=REACHED)
def test_a_leaf_that_initialises_another_through_data() -> Ran:
    """`p.data.copy_(w)` is the cut of a leaf that has no other way."""
    w, p = leaf(1, 2), nn.Parameter(torch.zeros(2))
    with record() as trace:
        p.data.copy_(w)
        p.pow(2).sum().backward()
    return trace, locals()


@expect(w=cut(no_grad="row.copy_(w)"), p=REACHED)
def test_a_view_of_a_leaf_that_is_filled_under_no_grad() -> Ran:
    """Writing into a view of a leaf under no_grad starts the leaf anew, as into itself."""
    w, p = leaf(1, 2), nn.Parameter(torch.zeros(2, 2))
    with record() as trace:
        row = p[0]
        with torch.no_grad():
            row.copy_(w)
        p.pow(2).sum().backward()
    return trace, locals()


@expect(w=reached(no_grad="x.copy_(h)"))
def test_data_that_was_no_leaf_any_more() -> Ran:
    """Data that an op made require grad is no leaf, and a write under no_grad is a cut there."""
    w, x = leaf(1, 2), torch.ones(2)
    with record() as trace:
        h = w * 2
        x.mul_(h)
        with torch.no_grad():
            x.copy_(h)
        x.sum().backward()
    return trace, locals()


# -- custom Functions ------------------------------------------------------------------------------


class _Scale(torch.autograd.Function):
    """x * factor, for which backward gives no gradient to the factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


@expect(x=REACHED, factor=cut(no_gradient="_Scale.apply(x, factor)"))
def test_a_function_that_returns_none() -> Ran:
    """A backward function that returns None for an input stops there."""
    x, factor = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        _Scale.apply(x, factor).sum().backward()
    return trace, locals()


_scale = _Scale.apply


@pytest.mark.skipif(
    not hasattr(torch.autograd.Function.apply, "__func__"),
    reason="a C method in torch 2.14: the line inside forward is named",
)
@expect(x=REACHED, factor=cut(no_gradient="_scale(x, factor)"), y=REACHED)
def test_a_function_bound_before_the_recording() -> Ran:
    """The tutorials' `cube = Cube.apply`, at the top of a module, is the same op."""
    x, factor = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        y = _scale(x, factor)
        y.sum().backward()
    return trace, locals()


@expect(x=REACHED, factor=cut(no_gradient="x * factor"), y=REACHED)
def test_a_function_that_is_not_seen() -> Ran:
    """What ran inside a Function cuts nothing, also where nobody sees that it is one (2.14)."""

    class Scale(_Scale):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
            ctx.save_for_backward(factor)
            return x * factor

    x, factor = leaf(1, 2), leaf(3, 4)
    unseen = super(torch.autograd.Function, Scale).apply  # a C method
    with record() as trace:
        y = unseen(x, factor)
        y.sum().backward()
    return trace, locals()


@expect(x=REACHED, w=cut(no_gradient="_Scale.apply(x, factor)"))
def test_a_function_that_returns_none_for_a_result() -> Ran:
    """The cut lies at the Function, not at the op behind which it stands."""
    x, w = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        factor = w.exp()
        _Scale.apply(x, factor).sum().backward()
    return trace, locals()


class _PlusClosed(torch.autograd.Function):
    """x plus whatever stands in `hidden`, which autograd never sees."""

    hidden: Tensor

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * _PlusClosed.hidden

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@expect(x=REACHED, w=cut(no_gradient="_PlusClosed.apply(x)"))
def test_a_tensor_that_a_function_met_by_closure() -> Ran:
    """What a Function uses without taking it as an argument gets no gradient from it."""
    x, w = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        _PlusClosed.hidden = w * 2
        _PlusClosed.apply(x).sum().backward()
    del _PlusClosed.hidden
    return trace, locals()


class _Pair(NamedTuple):
    weight: Tensor
    bias: Tensor


class _Affine(torch.autograd.Function):
    """x * weight + bias, whose weight and bias come in a tuple."""

    @staticmethod
    def forward(_: Any, x: Tensor, pair: _Pair) -> Tensor:
        return x * pair.weight + pair.bias

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient, None


@expect(
    x=REACHED,
    w=cut(no_gradient="_Affine.apply(x, _Pair(w, b))"),
    b=cut(no_gradient="_Affine.apply(x, _Pair(w, b))"),
)
def test_tensors_in_a_tuple_for_a_function() -> Ran:
    """A Function sees no tensors in containers."""
    x, w, b = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    with record() as trace:
        _Affine.apply(x, _Pair(w, b)).sum().backward()
    return trace, locals()


class _Doubled(torch.autograd.Function):
    """Doubles its argument in place, which autograd refuses for a view of a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@expect(w=REACHED)
def test_a_function_that_raises_behind_its_write() -> Ran:
    """What a Function wrote to before it raised is still what it was made by."""
    w = leaf(1, 2)
    with record() as trace:
        row = w[:1]
        if torch.__version__ >= "2.7":  # 2.6 lets it pass, and raises in backward
            with pytest.raises(RuntimeError, match="view of a leaf"):
                _Doubled.apply(row)
        row.sum().backward()
    assert "_Doubled.apply" not in {trace.graph.nodes[n]["op"] for n in trace.paths(w)[0]}
    return trace, locals()


@expect(w=REACHED)
def test_a_function_that_writes_into_a_frozen_leaf() -> Ran:
    """A leaf that a Function starts anew while it is frozen stays this leaf."""
    w = leaf(1, 2)
    with record() as trace:
        w.sum().backward()
        w.requires_grad_(False)
        _Doubled.apply(w)
    return trace, locals()


class _SplitUp(torch.autograd.Function):
    """The sum, and the largest element's position marked non-differentiable as a float."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        where = x.argmax().float()
        ctx.mark_non_differentiable(where)
        return x * 2, where

    @staticmethod
    def backward(_: Any, gradient: Tensor, of_where: Tensor) -> Tensor:  # noqa: ARG004
        return gradient * 2


@expect(x=cut(no_gradient="_SplitUp.apply(x)"), b=REACHED)
def test_an_output_marked_non_differentiable() -> Ran:
    """An output that is marked non-differentiable gives its input no gradient."""
    x, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        doubled, where = _SplitUp.apply(x)
        (where * b).sum().backward()
    return trace, locals()


@expect(x=REACHED)
def test_the_other_output_of_such_a_function() -> Ran:
    """The output that is not marked passes a gradient on."""
    x = leaf(1, 2)
    with record() as trace:
        doubled, where = _SplitUp.apply(x)
        doubled.sum().backward()
    return trace, locals()


# -- not requested ---------------------------------------------------------------------------------


@expect(w=cut(not_requested="loss.backward(inputs=[b])"), b=REACHED)
def test_backward_for_some_inputs() -> Ran:
    """`backward(inputs=...)` goes to those inputs only, and the line that says so is named."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        loss = (w * b).sum()
        loss.backward(inputs=[b])
    return trace, locals()


@expect(w=cut(not_requested="torch.autograd.grad(loss, b)"), b=REACHED, grads=False)
def test_grad_for_one_input() -> Ran:
    """`torch.autograd.grad` goes to what it is asked for."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        loss = ((w * 2) * b).sum()
        torch.autograd.grad(loss, b)
    return trace, locals()


@expect(w=cut(not_requested="torch.autograd.grad(loss, h)"), h=REACHED, grads=False)
def test_grad_for_a_result() -> Ran:
    """A gradient that is asked for a result goes no further."""
    w = leaf(1, 2)
    with record() as trace:
        h = w * 2
        loss = h.pow(2).sum()
        torch.autograd.grad(loss, h)
    return trace, locals()


@expect(w=REACHED, b=REACHED, grads=False)
def test_grad_for_all_inputs() -> Ran:
    """What was asked for and was returned is reached, though `.grad` stays None."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        first, second = torch.autograd.grad((w * b).sum(), [w, b])
    return trace, locals()


@expect(w=REACHED, grads=False)
def test_grad_for_one_input_twice() -> Ran:
    """A leaf that is asked for twice gets one gradient."""
    w = leaf(1, 2)
    with record() as trace:
        torch.autograd.grad((w * 2).sum(), [w, w])
    assert len(trace.gradients) == 1
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_several_roots_at_once() -> Ran:
    """`torch.autograd.backward` starts from all its roots."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        torch.autograd.backward([w.sum(), (b * 2).sum()])
    return trace, locals()


@expect(w=REACHED, b=REACHED, grads=False)
def test_gradient_edges_as_roots_and_inputs() -> Ran:
    """Roots and inputs may be given as gradient edges."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        loss = (w * b).sum()
        edge = torch.autograd.graph.get_gradient_edge(loss)
        wanted = torch.autograd.graph.get_gradient_edge(w)
        inputs: Any = (wanted, b)
        torch.autograd.grad((edge,), inputs, grad_outputs=(torch.ones(()),))
    return trace, locals()


@expect(x=REACHED, y=REACHED)
def test_a_root_that_is_no_scalar() -> Ran:
    """A root may have a gradient of its own given."""
    x, y = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        (x * y).backward(gradient=torch.tensor([1.0, 0.5]))
    return trace, locals()


@expect(x=REACHED)
def test_a_leaf_as_root() -> Ran:
    """A leaf may be a root itself."""
    x = leaf(1)
    with record() as trace:
        x.backward()
    return trace, locals()


# -- not required ----------------------------------------------------------------------------------


@expect(w=cut(not_required="w * 2"), b=REACHED)
def test_requires_grad_after_the_use() -> Ran:
    """`requires_grad_()` that comes after the use comes too late."""
    w, b = torch.tensor([1.0, 2.0]), leaf(3, 4)
    with record() as trace:
        h = w * 2
        w.requires_grad_()
        (h * b).sum().backward()
    return trace, locals()


@expect(w=cut(not_required="F.linear(x, w)"), b=REACHED)
def test_frozen_while_it_was_used() -> Ran:
    """A parameter that is frozen for the forward pass and thawed afterwards gets nothing."""
    w, b, x = nn.Parameter(torch.ones(2, 2)), leaf(3, 4), torch.ones(2)
    with record() as trace:
        w.requires_grad = False
        h = F.linear(x, w)
        w.requires_grad = True
        (h * b).sum().backward()
    return trace, locals()


@expect(w=reached(not_required="w * 2"), b=REACHED)
def test_frozen_for_one_of_two_uses() -> Ran:
    """One use while frozen and one while not: reached, and cut at the first."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        w.requires_grad_(False)
        first = w * 2
        w.requires_grad_(True)
        second = w * 3
        (first * b + second).sum().backward()
    return trace, locals()


@expect(w=FROZEN, b=REACHED)
def test_a_frozen_tensor() -> Ran:
    """What does not require grad is frozen."""
    w, b = torch.ones(2), leaf(3, 4)
    with record() as trace:
        (w * b).sum().backward()
    return trace, locals()


@expect(frozen=FROZEN, head=REACHED)
def test_a_frozen_backbone() -> Ran:
    """A frozen backbone is frozen, and the head learns."""
    backbone, head = nn.Linear(3, 4), nn.Linear(4, 1)
    backbone.requires_grad_(False)
    with record() as trace:
        head(backbone(torch.ones(2, 3)).relu()).sum().backward()
    return trace, {"frozen": backbone.weight, "head": head.weight}


@expect(w=FROZEN)
def test_thawed_and_frozen_again() -> Ran:
    """Data that required a gradient for a while only is frozen."""
    w, b = torch.tensor([1.0, 2.0]), leaf(3, 4)
    with record() as trace:
        w.requires_grad_()
        h = w * b
        w.requires_grad_(False)
        h.detach()
    return trace, locals()


@expect(w=REACHED, b=REACHED, grads=False)
def test_a_frozen_leaf_that_is_initialised() -> Ran:
    """Writing into a leaf while it is frozen starts it anew, and it stays this leaf."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        loss = (w + b).sum()
        w.requires_grad_(False)
        w[0] = 0.25
        w.requires_grad_()
        loss.backward()
    return trace, locals()


# -- gradients as data -----------------------------------------------------------------------------


@expect(
    w=reached(first_order="torch.autograd.grad((w * v).pow(2).sum(), w)"),
    b=REACHED,
    grads=False,
)
def test_a_first_order_gradient_in_a_later_loss() -> Ran:
    """A gradient taken without create_graph is a constant to the later loss."""
    w, v, b = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    with record() as trace:
        (g,) = torch.autograd.grad((w * v).pow(2).sum(), w)
        (g.pow(2) * b).sum().backward()
    return trace, locals()


@expect(w=reached(first_order="loss.backward()"), b=REACHED)
def test_a_penalty_on_grad_attributes() -> Ran:
    """A loss on `.grad` drops the second order at the backward that filled it."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        loss = w.pow(2).sum()
        loss.backward()
        penalty = (gradient_of(w).pow(2) * b).sum()
        penalty.backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED, grads=False)
def test_a_second_order_gradient_in_a_later_loss() -> Ran:
    """With create_graph the way through the gradient is whole."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        (g,) = torch.autograd.grad(w.pow(3).sum(), w, create_graph=True)
        (g.pow(2) * b).sum().backward()
    return trace, locals()


@expect(
    w=Want("cut", None),
    x=reached(detach="g.detach()"),
    b=REACHED,
    grads=False,
)
def test_a_second_order_gradient_that_is_detached() -> Ran:
    """A gradient that could be differentiated again is a way, and a detach of it a cut."""
    w, x, b = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    with record() as trace:
        (g,) = torch.autograd.grad((w * x.pow(2)).sum(), x, create_graph=True)
        (g.detach() * b).sum().backward()
    assert {str(each.kind) for each in trace.explain(w).cuts} == {"not_requested", "detach"}
    return trace, locals()


@expect(theta=REACHED)
def test_maml_second_order() -> Ran:
    """Second-order MAML: no cut at all."""
    theta = leaf(1, 2)
    with record() as trace:
        inner = theta.pow(2).sum()
        (g,) = torch.autograd.grad(inner, theta, create_graph=True)
        adapted = theta - 0.1 * g
        adapted.pow(2).sum().backward()
    return trace, locals()


@expect(theta=reached(first_order="torch.autograd.grad(inner, theta)"))
def test_maml_first_order() -> Ran:
    """First-order MAML: reached, with the second order cut."""
    theta = leaf(1, 2)
    with record() as trace:
        inner = theta.pow(2).sum()
        (g,) = torch.autograd.grad(inner, theta)
        adapted = theta - 0.1 * g
        adapted.pow(2).sum().backward()
    return trace, locals()


@expect(critic=Want("reached", None), x=REACHED)
def test_gradient_penalty_on_the_input() -> Ran:
    """A gradient penalty reaches the critic through the double backward."""
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    x = leaf(1, 2)
    with record(net) as trace:
        score = net(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        ((slope.norm() - 1) ** 2 + score).backward()
    return trace, {"critic": net[0].weight, "x": x}


# -- checkpointing ---------------------------------------------------------------------------------


@expect(first=REACHED, second=REACHED, x=REACHED)
def test_reentrant_checkpointing() -> Ran:
    """Where an input requires grad, a backward inside the backward brings the gradients."""
    block, head, x = nn.Linear(2, 2), nn.Linear(2, 1), leaf(1, 2)
    with record() as trace:
        h = checkpoint(block, x, use_reentrant=True)
        head(h).sum().backward()
    return trace, {"first": block.weight, "second": head.weight, "x": x}


@expect(first=cut(no_grad="checkpoint(block, x, use_reentrant=True)"), second=REACHED)
def test_reentrant_checkpointing_of_data() -> Ran:
    """Where no input requires grad, what the block owns is cut at the line of the checkpoint."""
    block, head, x = nn.Linear(2, 2), nn.Linear(2, 1), torch.ones(2)
    with record() as trace:
        h = checkpoint(block, x, use_reentrant=True)
        head(h).sum().backward()
    return trace, {"first": block.weight, "second": head.weight}


@expect(first=REACHED, second=REACHED)
def test_checkpointing_without_reentrance() -> Ran:
    """Non-re-entrant checkpointing cuts nothing."""
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    head, x = nn.Linear(2, 1), torch.ones(2)
    with record() as trace:
        h = checkpoint(block, x, use_reentrant=False)
        head(h).sum().backward()
    return trace, {"first": block[0].weight, "second": head.weight}


# -- training loops --------------------------------------------------------------------------------


@expect(
    generator=reached(detach="fake.detach()"),
    critic=REACHED,
    grads=False,
)
def test_gan_steps() -> Ran:
    """The discriminator's step is meant to leave the generator alone."""
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    for_g = torch.optim.SGD(generator.parameters(), 0.1)
    for_d = torch.optim.Adam(critic.parameters(), 0.1)
    with record({"generator": generator, "critic": critic}) as trace:
        fake = generator(torch.randn(4, 2))
        loss_d = (
            F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(torch.randn(4, 3))).mean()
        )
        for_d.zero_grad()
        loss_d.backward()
        for_d.step()
        loss_g = F.softplus(-critic(fake)).mean()
        for_g.zero_grad()
        loss_g.backward()
        for_g.step()
    return trace, {"generator": generator.weight, "critic": critic.weight}


@expect(
    codebook=reached(
        detach=("(q - z).detach()", "codebook(index).detach()"),
        non_differentiable="distance.argmin(1)",
    ),
    encoder=reached(
        detach=("(q - z).detach()", "z.detach()"), non_differentiable="distance.argmin(1)"
    ),
    decoder=REACHED,
)
def test_vq_vae() -> Ran:
    """Every stop-gradient of a VQ-VAE is named for the part that it keeps out."""
    encoder, codebook, decoder = nn.Linear(3, 2), nn.Embedding(4, 2), nn.Linear(2, 3)
    x = torch.randn(5, 3)
    with record() as trace:
        z = encoder(x)
        distance = torch.cdist(z, codebook.weight)
        index = distance.argmin(1)
        q = codebook(index)
        through = z + (q - z).detach()
        loss = F.mse_loss(decoder(through), x)
        loss = loss + F.mse_loss(q, z.detach())
        loss = loss + F.mse_loss(z, codebook(index).detach())
        loss.backward()
    weights = {"codebook": codebook.weight, "encoder": encoder.weight, "decoder": decoder.weight}
    return trace, weights


@expect(online=REACHED, predictor=REACHED, target=cut(no_grad="target(x)"), grads=False)
def test_byol() -> Ran:
    """The target's parameters require grad and run under no_grad; the average comes later."""
    online, predictor = nn.Linear(3, 2), nn.Linear(2, 2)
    target = copy.deepcopy(online)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.1)
    x = torch.randn(4, 3)
    with record({"online": online, "predictor": predictor, "target": target}) as trace:
        p = predictor(online(x))
        with torch.no_grad():
            z = target(x)
        loss = 2 - 2 * F.cosine_similarity(p, z).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return trace, {"online": online.weight, "predictor": predictor.weight, "target": target.weight}


@expect(cell=reached(detach=("h.detach()", "h.detach()")), out=REACHED)
def test_truncated_backpropagation_with_detach() -> Ran:
    """Each chunk's backward stays inside the chunk."""
    cell, out = nn.RNNCell(2, 3), nn.Linear(3, 1)
    with record() as trace:
        h = torch.zeros(1, 3)
        for _ in range(3):
            h = h.detach()
            for _ in range(2):
                h = cell(torch.randn(1, 2), h)
            out(h).sum().backward()
    return trace, {"cell": cell.weight_hh, "out": out.weight}


@expect(cell=reached(detach_=("h.detach_()", "h.detach_()")), out=REACHED)
def test_truncated_backpropagation_with_detach_in_place() -> Ran:
    """The state that is detached in place between the chunks is the cut."""
    cell, out = nn.RNNCell(2, 3), nn.Linear(3, 1)
    with record() as trace:
        h = torch.zeros(1, 3)
        for _ in range(3):
            for _ in range(2):
                h = cell(torch.randn(1, 2), h)
            out(h).sum().backward()
            h.detach_()
    return trace, {"cell": cell.weight_hh, "out": out.weight}


@expect(q=REACHED, target=FROZEN, grads=False)
def test_deep_q_learning_with_soft_updates() -> Ran:
    """A frozen target network that follows through `.data` is frozen, and the online one learns."""
    q = nn.Linear(3, 2)
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.SGD(q.parameters(), 0.1)
    with record() as trace:
        for _ in range(2):
            seen, then = torch.randn(4, 3), torch.randn(4, 3)
            goal = target(then).max(1).values * 0.9
            loss = F.mse_loss(q(seen).gather(1, torch.zeros(4, 1, dtype=torch.long))[:, 0], goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                slow.data.copy_(0.95 * slow.data + 0.05 * fast.data)
    return trace, {"q": q.weight, "target": target.weight}


@expect(trunk=REACHED, used=REACHED, idle=UNUSED)
def test_an_unused_head() -> Ran:
    """A head whose output the loss does not use is unused."""
    trunk, used, idle = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 1)
    with record() as trace:
        h = trunk(torch.ones(2))
        outputs = {"used": used(h), "idle": idle(h)}
        outputs["used"].sum().backward()
    return trace, {"trunk": trunk.weight, "used": used.weight, "idle": idle.weight}


@expect(net=REACHED, grads=False)
def test_gradients_that_zero_grad_cleared() -> Ran:
    """A gradient that arrived and was cleared did arrive."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with record(net) as trace:
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trace, {"net": net.weight}


@expect(w=REACHED, grads=False)
def test_a_gradient_of_grad_that_is_not_cleared() -> Ran:
    """What `torch.autograd.grad` returned stands in no `.grad`, and is not cleared with it."""
    w = leaf(1, 2)
    with record() as trace:
        torch.autograd.grad((w * 2).sum(), w)
        w.sum().backward()
        w.grad = None
    assert [each.cleared is not None for each in trace.gradients] == [False, True]
    return trace, locals()


@expect(w=REACHED)
def test_several_passes_over_one_graph() -> Ran:
    """With retain_graph one graph serves two passes."""
    w = leaf(1, 2)
    with record() as trace:
        loss = w.pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_accumulation_over_micro_batches() -> Ran:
    """Each micro-batch brings its gradient."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        for scale in (1.0, 2.0, 3.0):
            ((w * scale + b).pow(2).sum() / 3).backward()
    return trace, locals()


@expect(tied=REACHED)
def test_shared_parameters() -> Ran:
    """A parameter that two layers share is one leaf."""
    embed, out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    out.weight = embed.weight
    with record() as trace:
        out(embed(torch.tensor([0, 2]))).sum().backward()
    return trace, {"tied": embed.weight}


@expect(recurrent=REACHED, hidden=REACHED)
def test_an_lstm() -> Ran:
    """Every weight of an LSTM is reached."""
    net = nn.LSTM(2, 3, num_layers=2, batch_first=True)
    with record(net) as trace:
        out, _ = net(torch.randn(1, 4, 2))
        out[:, -1].sum().backward()
    return trace, {"recurrent": net.weight_hh_l0, "hidden": net.weight_ih_l1}


@expect(query=REACHED, out=REACHED)
def test_attention() -> Ran:
    """Every weight of an attention layer is reached."""
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    with record(net) as trace:
        x = torch.randn(1, 3, 4)
        net(x, x, x)[0].pow(2).sum().backward()
    return trace, {"query": net.in_proj_weight, "out": net.out_proj.weight}


# -- errors ----------------------------------------------------------------------------------------


@expect(w=cut(detach="w.detach()"))
def test_a_root_that_does_not_require_grad() -> Ran:
    """An attempt that raises still names its root."""
    w = leaf(1, 2)
    with record() as trace:
        loss = w.detach().sum()
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()
    return trace, locals()


@expect(w=REACHED)
def test_a_second_backward_through_a_freed_graph() -> Ran:
    """What the first pass brought stays true when the second one raises."""
    w = leaf(1, 2)
    with record() as trace:
        loss = w.pow(2).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    return trace, locals()


@expect(w=UNKNOWN)
def test_an_error_before_the_gradient_arrived() -> Ran:
    """Where backward raised on the way, nobody knows."""
    w = leaf(1, 2)
    with record() as trace:
        h = w.exp()
        loss = h.pow(2).sum()
        h.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
    return trace, locals()


@expect(w=UNKNOWN, b=REACHED)
def test_an_error_behind_one_of_two_leaves() -> Ran:
    """A pass that raises may have served some leaves already."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(_: Any, __: Tensor) -> Tensor:
            raise ValueError("broken")

    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = Broken.apply(w)
        for _ in range(3):
            h = h * 2
        loss = (h + b).sum()
        with pytest.raises(ValueError, match="broken"):
            loss.backward()
    return trace, locals()


@expect(w=Want("unknown", None), b=REACHED)
def test_an_error_beside_a_cut() -> Ran:
    """A cut does not say where the other way stopped, which an error broke off."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w.exp()
        loss = (h.pow(2) * b.exp()).sum() + (w.detach() * b).sum()
        h.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
    return trace, locals()


@expect(w=UNKNOWN, b=REACHED)
def test_a_gradient_that_was_on_its_way_when_an_error_came() -> Ran:
    """What an op sent to a leaf is not there before the engine has put it there."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        spoiled = w.exp()
        loss = (w.expand(1, 2) * spoiled.sin() * b).sum()
        spoiled.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
    return trace, locals()


@expect(w=NO_BACKWARD)
def test_no_backward_at_all() -> Ran:
    """Without a pass nothing can be said."""
    w = leaf(1, 2)
    with record() as trace:
        (w * 2).detach().sum()
    return trace, locals()


@expect(w=NO_BACKWARD, grads=False)
def test_backward_behind_the_block() -> Ran:
    """A pass that starts behind the block is not seen."""
    w = leaf(1, 2)
    with record() as trace:
        loss = (w * 2).sum()
    loss.backward()
    return trace, locals()


# -- values ----------------------------------------------------------------------------------------


@expect(w=NONFINITE)
def test_the_square_root_of_zero() -> Ran:
    """A square root at zero brings an infinity."""
    w = leaf(0, 1)
    with record() as trace:
        w.sqrt().sum().backward()
    return trace, locals()


@expect(w=want("nonfinite", non_differentiable="w > 0"))
def test_where_around_a_division() -> Ran:
    """Zero times infinity is NaN in the branch that was not chosen."""
    w = leaf(0, 1)
    with record() as trace:
        torch.where(w > 0, 1 / w, w).sum().backward()
    return trace, {"w": w}


@expect(w=ZERO, b=REACHED)
def test_times_zero() -> Ran:
    """A factor of zero brings zeros."""
    w, b = leaf(1, 2), leaf(0, 0)
    with record() as trace:
        (w * b).sum().backward()
    return trace, locals()


@expect(w=REACHED, grads=False)
def test_zeros_in_one_pass_only() -> Ran:
    """Zeros in one pass and something in another make it reached."""
    w = leaf(1, 2)
    with record() as trace:
        (w * 0).sum().backward()
        w.grad = None
        w.sum().backward()
        w.grad = None
        (w * 0).sum().backward()
    return trace, locals()


# -- ops with several results ----------------------------------------------------------------------


@expect(w=REACHED, best=REACHED)
def test_the_values_of_max() -> Ran:
    """`max(dim)` passes a gradient through its values."""
    w = leaf(1, 3, 2)
    with record() as trace:
        best, where = w.max(dim=0)
        best.backward()
    return trace, locals()


@expect(w=REACHED, used=REACHED, idle=UNUSED)
def test_one_result_of_chunk() -> Ran:
    """A chunk that nothing takes is unused, its neighbour is reached."""
    w = leaf(1, 2, 3, 4)
    with record() as trace:
        used, idle = w.chunk(2)
        used.sum().backward()
    return trace, locals()


@expect(x=REACHED, y=ZERO)
def test_one_result_of_unbind() -> Ran:
    """What was stacked and not picked gets zeros."""
    x, y = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        rows = torch.stack([x, y]).unbind()
        rows[0].sum().backward()
    return trace, locals()


@expect(
    x=reached(detach="second.detach()"),
    first=REACHED,
    second=cut(detach="second.detach()"),
)
def test_two_results_of_split_with_different_fates() -> Ran:
    """Of two results of one op one may be cut."""
    x, y = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        first, second = (x * y).split(1)
        (first * second.detach()).sum().backward()
    return trace, locals()


@expect(m=REACHED)
def test_the_singular_values_only() -> Ran:
    """Only some of an op's results may be used."""
    m = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    with record() as trace:
        u, s, vh = torch.linalg.svd(m)
        s.sum().backward()
    return trace, locals()


# -- in-place ops and views ------------------------------------------------------------------------


@expect(w=REACHED, b=REACHED)
def test_an_element_assigned() -> Ran:
    """`x[0] = w` passes a gradient to w."""
    w, b = leaf(1), leaf(3, 4)
    with record() as trace:
        x = b * 1
        x[0] = w[0]
        x.sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_an_element_assigned_into_data() -> Ran:
    """`x[0] = w` makes data require grad."""
    w = leaf(1)
    with record() as trace:
        x = torch.zeros(3)
        x[0] = w[0]
        x[1] = 3.0
        (x * 2).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_a_column_added_to() -> Ran:
    """`x[:, 1] += w` passes a gradient to w and to x."""
    w, b = leaf(1, 2), torch.ones(2, 3, requires_grad=True)
    with record() as trace:
        x = b * 2
        x[:, 1] += w
        x.pow(2).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_a_write_through_a_view_of_a_view() -> Ran:
    """A write through a view's view reaches the base's readers."""
    w, b = leaf(1, 2), torch.ones(2, 3, requires_grad=True)
    with record() as trace:
        x = b * 2
        inner = x[0][1:]
        inner.copy_(w)
        x.pow(2).sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_a_write_through_a_view_of_data() -> Ran:
    """A write through a view of data makes the base require grad."""
    w = leaf(1, 2)
    with record() as trace:
        x = torch.zeros(2, 3)
        x.view(-1)[1:3].mul_(w).add_(w)
        x.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_masked_and_indexed_writes() -> Ran:
    """`masked_fill_`, `index_put_`, `index_add_`, `scatter_` and `relu_` pass gradients on."""
    w, b = leaf(1, 2), leaf(3, 4, 5)
    with record() as trace:
        x = b * 2
        x.masked_fill_(torch.tensor([True, False, False]), 0.0)
        x.index_put_((torch.tensor([1, 2]),), w)
        x.index_add_(0, torch.tensor([0, 1]), w)
        x.relu_()
        (x + b).sum().backward()
    return trace, locals()


@expect(w=ZERO, b=REACHED)
def test_a_result_that_is_overwritten_as_a_whole() -> Ran:
    """`copy_` over the whole tensor leaves zeros for what stood there."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        x = w * 2
        x.copy_(b)
        x.sum().backward()
    return trace, locals()


@expect(w=ZERO, b=REACHED)
def test_a_result_that_is_zeroed() -> Ran:
    """`zero_()` leaves zeros for what stood there."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        x = w * 2
        x.zero_()
        x += b
        x.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_a_buffer_filled_in_a_loop() -> Ran:
    """Rows that are written one after another are all reached."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        out = torch.empty(3, 2)
        for step in range(3):
            out[step] = w * step + b
        out.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_results_written_by_out() -> Ran:
    """Augmented assignment on a name and on an attribute are followed."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        total = torch.zeros(2)
        total += w
        total -= b
        total *= 2
        total.sum().backward()
    return trace, locals()


@expect(w=cut(no_grad="old.copy_(w)"), b=REACHED)
def test_state_kept_under_no_grad_in_a_buffer() -> Ran:
    """A buffer that is written under no_grad and read later cuts what was written."""
    w, b = leaf(1, 2), leaf(3, 4)
    old = torch.zeros(2)
    with record() as trace:
        with torch.no_grad():
            old.copy_(w)
        (old * b).sum().backward()
    return trace, locals()


# -- containers, scripts, transforms ---------------------------------------------------------------


@expect(w=REACHED, b=REACHED)
def test_leaves_in_containers() -> Ran:
    """Leaves inside lists, dicts and named tuples are leaves."""
    w, b = leaf(1, 2), leaf(3, 4)
    box = {"weights": [w], "pair": _Pair(w, b)}
    with record() as trace:
        parts: Any = box
        torch.cat([*parts["weights"], parts["pair"].bias]).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_a_scripted_function() -> Ran:
    """Scripted code is one op, and gradients pass through it."""
    w, b = leaf(1, 2), leaf(3, 4)
    script = torch.jit.script(_fused)
    with record() as trace:
        script(w, b).sum().backward()
    return trace, locals()


def _fused(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * y) + x


@expect(w=REACHED, b=REACHED)
def test_vmap() -> Ran:
    """Gradients pass through vmap."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        torch.func.vmap(lambda x, y: x * y + x.sin())(w, b).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_the_functional_gradient_in_a_loss() -> Ran:
    """`torch.func.grad` is differentiable again."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        slope = torch.func.grad(lambda x: (x.pow(3) * b).sum())(w)
        slope.pow(2).sum().backward()
    return trace, locals()


@expect(weight=UNUSED, fast=REACHED)
def test_functional_call_with_other_parameters() -> Ran:
    """With `functional_call` it is the given parameters that learn."""
    net = nn.Linear(2, 1)
    fast = {name: torch.ones_like(p, requires_grad=True) for name, p in net.named_parameters()}
    with record(net) as trace:
        torch.func.functional_call(net, fast, (torch.ones(2),)).sum().backward()
    return trace, {"weight": net.weight, "fast": fast["weight"]}


@expect(
    w=reached(
        detach="F.gumbel_softmax(w, hard=True)",
        non_differentiable="F.gumbel_softmax(w, hard=True)",
    )
)
def test_gumbel_softmax() -> Ran:
    """What is cut inside one of torch's own functions is named at the line that called it."""
    w = leaf(1, 2, 3)
    with record() as trace:
        pick = F.gumbel_softmax(w, hard=True)
        (pick * torch.arange(3.0)).sum().backward()
    return trace, locals()


# -- more of what people write ---------------------------------------------------------------------


@expect(x=reached(detach="h.detach()"), h=reached(detach="h.detach()"))
def test_a_result_times_its_own_detached_twin() -> Ran:
    """A detached twin beside the tensor itself in one op is a cut all the same."""
    x = leaf(1, 2)
    with record() as trace:
        h = x.sin()
        (h * h.detach()).sum().backward()
    return trace, locals()


@expect(x=reached(detach="x.detach()"))
def test_a_leaf_minus_its_own_detached_twin() -> Ran:
    """`x - x.detach()`, the straight-through trick on a leaf."""
    x = leaf(1, 2)
    with record() as trace:
        loss = (x - x.detach()).sum() + 3.0
        loss.backward()
    return trace, locals()


@expect(x=reached(data="h.data"))
def test_a_result_divided_by_its_own_data() -> Ran:
    """`h / h.data`, as in weight normalisation by hand."""
    x = leaf(1, 2)
    with record() as trace:
        h = x.exp()
        (h / h.data).sum().backward()
    return trace, locals()


@expect(w=cut(detach="h.detach()"), z=REACHED)
def test_a_new_leaf_from_a_detached_result() -> Ran:
    """`h.detach().requires_grad_()` is a new leaf, which is reached; the old one is cut."""
    w = leaf(1, 2)
    with record() as trace:
        h = w * 2
        z = h.detach().requires_grad_()
        z.pow(2).sum().backward()
    return trace, locals()


@expect(w=reached(detach="h.detach()"), z=REACHED)
def test_the_chain_rule_by_hand() -> Ran:
    """A gradient that is handed over to an earlier part of the graph does arrive."""
    w = leaf(1, 2)
    with record() as trace:
        h = w * 2
        z = h.detach().requires_grad_()
        z.pow(2).sum().backward()
        h.backward(z.grad)
    return trace, locals()


@expect(w=cut(non_differentiable="w > 0"), b=REACHED)
def test_a_boolean_index() -> Ran:
    """A mask as an index carries no gradient."""
    w, b = leaf(1, -1), leaf(3, 4)
    with record() as trace:
        b[w > 0].sum().backward()
    return trace, locals()


@expect(big=REACHED, small=cut(non_differentiable="max(big, small)"))
def test_pythons_own_max() -> Ran:
    """Python's `max` compares, takes a bool, and returns one of the two."""
    small, big = leaf(1), leaf(2)
    with record() as trace:
        best = max(big, small)
        (best * 2).sum().backward()
    return trace, locals()


@expect(w=cut(copy="nn.Parameter(net.weight * 2)"), fresh=REACHED)
def test_a_parameter_replaced_by_a_new_one() -> Ran:
    """Replacing a parameter cuts the old one."""
    net = nn.Linear(2, 1)
    w = net.weight
    with record() as trace:
        net.weight = nn.Parameter(net.weight * 2)
        net(torch.ones(2)).sum().backward()
    return trace, {"w": w, "fresh": net.weight}


@expect(weight=REACHED, norm=REACHED, grads=False)
def test_a_whole_training_loop() -> Ran:
    """Evaluation under no_grad, logging, clipping, stepping and scheduling are no cuts."""
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    best = copy.deepcopy(net.state_dict())
    with record() as trace:
        for _ in range(3):
            net.train()
            optimizer.zero_grad()
            loss = F.mse_loss(net(torch.randn(4, 2)), torch.randn(4, 1))
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            net.eval()
            with torch.no_grad():
                shown = F.mse_loss(net(torch.randn(4, 2)), torch.randn(4, 1))
            plan.step(shown.item())
            best = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(best)
    return trace, {"weight": net[0].weight, "norm": net[1].weight}


@expect(weight=REACHED, grads=False)
def test_lbfgs_with_a_closure() -> Ran:
    """An optimizer that calls backward itself and writes the parameters in between."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    x, y = torch.randn(5, 2), torch.randn(5, 1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    with record() as trace:
        optimizer.step(closure)
    return trace, {"weight": net.weight}


@expect(w=REACHED, b=REACHED, grads=False)
def test_sgd_by_hand_under_no_grad() -> Ran:
    """Writing into leaves under no_grad starts them anew, and cuts nothing."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        for _ in range(3):
            loss = (w * b).pow(2).sum()
            loss.backward()
            with torch.no_grad():
                w -= 0.01 * gradient_of(w)
                b.sub_(gradient_of(b), alpha=0.01)
                gradient_of(w).zero_()
                gradient_of(b).zero_()
                w.clamp_(-1, 1)
                w[0] = 0.5
    return trace, locals()


@expect(w=REACHED, b=REACHED, grads=False)
def test_sgd_by_hand_through_data() -> Ran:
    """Writing into leaves through `.data` starts them anew, and cuts nothing."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        for _ in range(3):
            loss = (w * b).pow(2).sum()
            loss.backward()
            for each in (w, b):
                each.data -= 0.01 * gradient_of(each).data
                each.data = each.data.clamp(-1, 1)
                gradient_of(each).data.zero_()
    return trace, locals()


@expect(w=REACHED, grads=False)
def test_weights_initialised_and_loaded_in_the_block() -> Ran:
    """Initialisers, `to` and `load_state_dict` in the block cut nothing."""
    with record() as trace:
        net = nn.Linear(2, 1)
        nn.init.normal_(net.weight)
        net.to(torch.float64)
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
        net(torch.ones(2, dtype=torch.float64)).sum().backward()
    return trace, {"w": net.weight}


@expect(w=ZERO, b=REACHED)
def test_a_hook_that_zeroes_a_leafs_gradient() -> Ran:
    """What a user's hook makes of a gradient is what arrives."""
    w, b = leaf(1, 2), leaf(3, 4)
    w.register_hook(lambda gradient: gradient * 0)
    with record() as trace:
        (w * b).sum().backward()
    return trace, locals()


@expect(w=NONFINITE, b=REACHED)
def test_a_hook_on_a_result_that_spoils_its_gradient() -> Ran:
    """A hook on a result changes what arrives behind it."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        h.register_hook(lambda gradient: gradient * float("nan"))
        (h + b).sum().backward()
    return trace, locals()


@expect(table=REACHED)
def test_a_sparse_gradient() -> Ran:
    """A sparse gradient arrives as others do."""
    table = nn.Embedding(5, 2, sparse=True)
    with record() as trace:
        table(torch.tensor([1, 1, 3])).sum().backward()
    return trace, {"table": table.weight}


@expect(z=REACHED)
def test_a_complex_leaf() -> Ran:
    """A complex leaf has a gradient."""
    z = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    with record() as trace:
        (z * z.conj()).real.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_autocast() -> Ran:
    """Casts that autocast makes pass gradients on."""
    w, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    with record() as trace:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.linear(torch.ones(2, 3), w, b)
            h = F.linear(h, w)
        h.float().sum().backward()
    return trace, locals()


@expect(x=REACHED, y=REACHED)
def test_a_write_that_writes_nothing() -> Ran:
    """Dropout in place does nothing in evaluation, and so cuts nothing."""
    x = leaf(1, 2)
    with record() as trace:
        y = F.dropout(x * 2, training=False, inplace=True)
        y.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_residual_in_place() -> Ran:
    """`x += f(x)` passes both ways."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        x = w * 1.0
        x += (x * 2).clone() + b
        x.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED)
def test_einsum_and_friends() -> Ran:
    """Torch's Python functions pass gradients on and are no cuts."""
    w, b = torch.rand(2, 3, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    with record() as trace:
        h = torch.einsum("ij,jk->ik", w, b) + torch.tensordot(w, b, dims=1) + torch.norm(w)
        parts = [
            *torch.broadcast_tensors(h, w[0, 0]),
            *torch.split(h, 1),
            *torch.meshgrid(b[0], w[0], indexing="ij"),
        ]
        loss = (
            sum(part.sum() for part in parts) + F.pad(h, (1, 1)).sum() + torch.cdist(w, w + 1).sum()
        )
        loss = (
            loss
            + F.normalize(w).sum()
            + F.cosine_similarity(w, b.T).sum()
            + torch.block_diag(w, b).sum()
        )
        loss.backward()
    return trace, locals()


@expect(mu=REACHED, log_var=REACHED)
def test_a_variational_autoencoder() -> Ran:
    """Reparametrised sampling and the divergence from a standard normal are no cuts."""
    mu, log_var = leaf(0.1, 0.2), leaf(-0.1, 0.3)
    with record() as trace:
        q = torch.distributions.Normal(mu, (0.5 * log_var).exp())
        p = torch.distributions.Normal(0.0, 1.0)
        z = q.rsample()
        loss = (z - 1).pow(2).sum() + torch.distributions.kl_divergence(q, p).sum()
        loss.backward()
    return trace, locals()


@expect(w=REACHED)
def test_a_jacobian() -> Ran:
    """A Jacobian that is differentiable itself is no cut."""
    w = leaf(1, 2)
    with record() as trace:
        jacobian = torch.func.jacrev(lambda x: x.pow(3))(w)
        jacobian.sum().backward()
    return trace, locals()


@expect(w=reached(detach="torch.autograd.functional.jacobian(torch.exp, w)"))
def test_a_jacobian_without_create_graph() -> Ran:
    """`autograd.functional.jacobian` without create_graph detaches what it is given."""
    w = leaf(1, 2)
    with record() as trace:
        jacobian = torch.autograd.functional.jacobian(torch.exp, w)
        (jacobian.sum() * w.sum()).backward()
    return trace, locals()


class _Modern(torch.autograd.Function):
    """In the style with setup_context, with two results."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004  # by keyword
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return product * y + total, product * x + total


@expect(x=REACHED, y=REACHED)
def test_a_function_with_two_results() -> Ran:
    """One result of a Function with two is enough."""
    x, y = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        product, total = _Modern.apply(x, y)
        product.sum().backward()
    return trace, locals()


class _Blocked(torch.autograd.Function):
    """Gives None for everything: a gradient stop in a Function's clothes."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, __: Tensor) -> None:
        return None


class _Contiguous(torch.autograd.Function):
    """x * table, in a forward that asks for both in a form that they have already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return x.float().contiguous() * table.float().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


@expect(w=UNUSED, b=REACHED, table=Want("frozen"))
def test_data_that_a_function_only_passes_through() -> Ran:
    """What a Function gets back unchanged from an op inside is not made by that Function."""
    w, b, table = leaf(1, 2), leaf(3, 4), torch.ones(2)
    with record() as trace:
        _Contiguous.apply(w, table)
        (b * table).sum().backward()
    return trace, locals()


@expect(w=REACHED, b=REACHED, h=REACHED)
def test_a_result_that_a_function_only_passes_through() -> Ran:
    """So is what requires grad, which other ops take afterwards."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w.exp()
        _Contiguous.apply(h, torch.ones(2))
        (h * b).sum().backward()
    return trace, locals()


@expect(w=REACHED, inner=FROZEN)
def test_a_frozen_parameter_that_a_checkpoint_converts_in_vain() -> Ran:
    """A frozen parameter stays what it is where `.float()` in a checkpoint gives it back."""
    w, inner = leaf(1, 2), leaf(3, 4).requires_grad_(False)
    with record() as trace:
        checkpoint(lambda x: x * inner.float(), w, use_reentrant=True).sum().backward()
    return trace, locals()


@expect(w=REACHED, rows=REACHED)
def test_views_inside_a_checkpoint() -> Ran:
    """A view that is taken under no_grad inside a checkpoint is no leaf of its own."""
    w, rows = leaf(1, 2), torch.ones(2, 2, requires_grad=True)
    with record() as trace:
        h = w.exp()
        block = lambda x: x.view(1, 2) * rows[0] + x[None] * rows.T  # noqa: E731  # a short block
        checkpoint(block, h, use_reentrant=True).sum().backward()
    assert [each.name for each in trace.leaves] == ["w", "rows"], trace.leaves
    return trace, {"w": w, "rows": rows}


@expect(w=REACHED, table=cut(no_gradient="_Rows.apply(w)"))
def test_a_view_inside_a_function() -> Ran:
    """A view of what a Function met by closure is no leaf of its own either."""
    w, table = leaf(1, 2), torch.ones(2, 2, requires_grad=True)

    class _Rows(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x[None] * table[0]

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return gradient[0]

    with record() as trace:
        _Rows.apply(w).sum().backward()
    assert len(trace.leaves) == 2, trace.leaves
    return trace, {"w": w, "table": table}


@expect(w=cut(no_gradient="_Blocked.apply(h)"), b=REACHED, h=cut(no_gradient="_Blocked.apply(h)"))
def test_a_function_that_stops_everything() -> Ran:
    """Behind a Function that returns None nothing is reached, though torch runs the nodes there."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w.exp() * 2
        (_Blocked.apply(h) * b).sum().backward()
    return trace, locals()


@expect(w=REACHED, inner=REACHED)
def test_nested_checkpointing() -> Ran:
    """Checkpoints inside checkpoints bring every gradient."""
    a, b, w = nn.Linear(2, 2), nn.Linear(2, 2), leaf(1, 2)

    def outer(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(b, a(x).tanh(), use_reentrant=False)
        return result

    with record() as trace:
        checkpoint(outer, w, use_reentrant=False).sum().backward()
    return trace, {"w": w, "inner": b.weight}


@expect(
    w=reached(copy="torch.tensor([w.sum(), b.sum()])"),
    b=cut(copy="torch.tensor([w.sum(), b.sum()])"),
)
def test_a_loss_that_is_summed_as_numbers() -> Ran:
    """Losses gathered by `torch.tensor([...])` are cut; a way beside it is not."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        losses = torch.tensor([w.sum(), b.sum()])
        (losses.mean() * w).sum().backward()
    return trace, locals()


@expect(w=reached(detach="w.detach()"))
def test_a_leaf_in_two_recordings() -> Ran:
    """A second recording knows nothing of the first, and both tell the truth."""
    w = leaf(1, 2)
    with record() as first:
        h = w * 2
        h.sum().backward(retain_graph=True)
    assert first.explain(w).status == "reached"
    with record() as trace:
        (h * 3 + w.detach() * 0).sum().backward()
    return trace, locals()


@expect(w=UNUSED, b=REACHED)
def test_a_result_that_is_replaced_before_use() -> Ran:
    """A variable that is bound anew has nothing of its old value."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        h = w * 2
        h = b * 3
        h.sum().backward()
    return trace, locals()


@expect(w=UNUSED, b=REACHED)
def test_objects_that_take_each_others_place() -> Ran:
    """Tensors that die and are replaced at the same address are told apart."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        for _ in range(50):
            (w * 2).sum()
            (b * 2).sum().backward()
    return trace, locals()


@expect(net=cut(no_grad="net(x)"), head=REACHED)
def test_grad_mode_by_a_condition() -> Ran:
    """`set_grad_enabled(condition)` that is False is no_grad."""
    net, head, x = nn.Linear(2, 2), nn.Linear(2, 1), torch.ones(2)
    training = False
    with record() as trace:
        with torch.set_grad_enabled(training):
            h = net(x)
        head(h).sum().backward()
    return trace, {"net": net.weight, "head": head.weight}


@expect(w=REACHED, b=REACHED)
def test_long_chains() -> Ran:
    """Two thousand steps are followed."""
    w, b = leaf(1, 0.5), leaf(0.1, 0.2)
    with record() as trace:
        h = b * 1
        for _ in range(2000):
            h = h * 0.9 + w
        h.sum().backward()
    return trace, locals()


@expect(w=REACHED, b=ZERO)
def test_where_with_a_branch_that_is_never_taken() -> Ran:
    """The branch that `where` did not choose gets zeros."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        torch.where(torch.tensor([True, True]), w, b).sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_backward_with_its_own_gradient_as_data() -> Ran:
    """The gradient given to backward is no data path."""
    w, g = leaf(1, 2), leaf(1, 1)
    with record() as trace:
        (w * 2).backward(g * 2)
    assert trace.explain(g).status == "unused"
    return trace, {"w": w}


@expect(w=cut(detach="w.detach()"), b=REACHED)
def test_detach_then_write_into_its_memory() -> Ran:
    """What is written into a detached copy does not change the verdict on its source."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        d = w.detach().clone()
        d[0] = b[0]
        (d * 2).sum().backward()
    return trace, locals()


@expect(
    frozen_for_g=reached(not_required="critic(generator(noise))"), generator=REACHED, grads=False
)
def test_a_critic_that_is_frozen_in_the_generators_step() -> Ran:
    """A critic that is frozen for one of its two steps is reached in the other."""
    generator, critic, noise = nn.Linear(2, 3), nn.Linear(3, 1), torch.randn(4, 2)
    with record() as trace:
        critic.requires_grad_(False)
        critic(generator(noise)).sum().backward()
        critic.requires_grad_(True)
        critic(torch.randn(4, 3)).sum().backward()
    return trace, {"frozen_for_g": critic.weight, "generator": generator.weight}


@expect(w=reached(not_required="w * 3"), b=REACHED)
def test_frozen_behind_its_first_step() -> Ran:
    """A leaf that is frozen behind its first step is cut in the second one by that."""
    w, b = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        (w * b).sum().backward()
        w.requires_grad_(False)
        (w * 3 * b).sum().backward()
    return trace, locals()


@expect(w=reached(first_order="h.sum().backward()"))
def test_a_retained_gradient_in_a_later_loss() -> Ran:
    """The `.grad` of a result is a first-order gradient, too."""
    w = leaf(1, 2)
    with record() as trace:
        h = w.exp()
        h.retain_grad()
        h.sum().backward()
        (gradient_of(h) * w).sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_a_vector_jacobian_product_in_a_loss() -> Ran:
    """What `torch.func.vjp` gives passes gradients on."""
    w, x = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        pull_back: Any = torch.func.vjp(lambda a: a * w, x)[1]
        pull_back(torch.ones(2))[0].sum().backward()
    return trace, locals()


@expect(w=REACHED)
def test_a_jacobian_vector_product_in_a_loss() -> Ran:
    """What `torch.func.jvp` gives passes gradients on."""
    w, x = leaf(1, 2), leaf(3, 4)
    with record() as trace:
        tangent: Any = torch.func.jvp(lambda a: a * w, (x,), (torch.ones(2),))[1]
        tangent.sum().backward()
    return trace, locals()


@expect(w=want("cut", no_grad="p.copy_(w)"), p=REACHED)
def test_a_leaf_that_initialises_another_under_no_grad() -> Ran:
    """A leaf that only starts another one under no_grad is cut by that write."""
    w, p = leaf(1, 2), nn.Parameter(torch.zeros(2))
    with record() as trace:
        with torch.no_grad():
            p.copy_(w)
        p.sum().backward()
    return trace, locals()


@expect(logits=REACHED, old=FROZEN, grads=False)
def test_a_mean_teacher() -> Ran:
    """A teacher that follows by `AveragedModel` is no cut of the student."""
    student = nn.Linear(2, 2)
    teacher = torch.optim.swa_utils.AveragedModel(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), 0.01)
    with record() as trace:
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(student(torch.ones(1, 2)), teacher(torch.zeros(1, 2))).backward()
            optimizer.step()
            teacher.update_parameters(student)
    (old, *_) = teacher.parameters()
    return trace, {"logits": student.weight, "old": old}


@expect(w=REACHED, grads=False)
def test_sharpness_aware_minimisation() -> Ran:
    """Climbing and coming back under no_grad between two passes cuts nothing."""
    w = leaf(1, 2)
    with record() as trace:
        w.pow(2).sum().backward()
        with torch.no_grad():
            step = gradient_of(w) * 0.1
            w.add_(step)
        w.grad = None
        w.pow(2).sum().backward()
        with torch.no_grad():
            w.sub_(step)
    return trace, locals()


# -- the shared cases ------------------------------------------------------------------------------

_CASES = pathlib.Path(__file__).resolve().parents[2] / "shared" / "cases"
_FILES = sorted(f for f in _CASES.glob("*/*.py"))


def _module(path: pathlib.Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not _FILES, reason="the folder of shared cases lies beside the repository only")
@pytest.mark.parametrize("path", _FILES, ids=[f.stem for f in _FILES])
def test_shared_case(path: pathlib.Path) -> None:
    """Every case that people wrote down gets the verdicts that they wrote beside it."""
    judge = _module(_CASES / "run_cases.py", "run_cases")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = _module(path, f"case_{path.stem}")
        trace, tensors = case.run(record)
    wrong = [
        f"{name}: {text}"
        for name, want in case.EXPECT.items()
        for text in judge.wrong(trace, tensors[name], want)
    ]
    assert not wrong, "\n".join(wrong)
