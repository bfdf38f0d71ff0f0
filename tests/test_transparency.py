"""Transparency: a program runs under `record()` bit for bit as it does without.

Values, gradients, random state, exceptions, warnings, what is kept alive and what other observers
saw are compared. No place in any of the programs may have gone unobserved.
"""

# Signatures of handlers are torch's, and all programs take the log.
# ruff: noqa: ARG001, ARG004
# Programs do on purpose what types forbid, and look into what torch gives no types to.
# mypy: disable-error-code="no-untyped-call, no-any-return, union-attr, attr-defined, arg-type"
# mypy: disable-error-code="operator, index, list-item, call-arg, call-overload, override, misc"

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from oracle import Log, Noise, Program, check_transparent, differences, no_collections, run
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gradtrace


def transparent(program: Program) -> Callable[[], None]:
    """Make a test of a program: it runs under a recording as it does without."""

    def test() -> None:
        check_transparent(program)

    test.__name__, test.__doc__ = program.__name__, program.__doc__
    return test


def mlp(*between: nn.Module) -> nn.Sequential:
    """Return a small model."""
    return nn.Sequential(nn.Linear(4, 8), *between, nn.ReLU(inplace=True), nn.Linear(8, 2))


def train(log: Log, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Train on random data, and write down every loss."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        log(loss)
        optimizer.step()


# -- training --------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd one by one": functools.partial(torch.optim.SGD, lr=0.1, foreach=False),
    "adam": functools.partial(torch.optim.Adam, amsgrad=True),
    "adamw foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, fused=True),
    "adam differentiable off, capturable off": functools.partial(torch.optim.Adam, foreach=False),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True),
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name: str) -> None:
    """Every optimizer makes the same steps from the same losses."""

    def program(log: Log) -> Any:
        model = mlp()
        optimizer = OPTIMIZERS[name](model.parameters())
        train(log, model, optimizer)
        return model, optimizer.state_dict()

    check_transparent(program)


@transparent
def test_conv_batchnorm_dropout(log: Log) -> Any:
    """Running statistics and the dropped units are the same."""
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout2d(0.3)
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(27, 2))
    for _ in range(2):
        F.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.tensor([0, 1, 1, 0])).backward()
    model.eval()
    log(model(torch.randn(1, 1, 8, 8)))
    return model


@transparent
def test_recurrent_nets(log: Log) -> Any:
    """LSTM, GRU and RNN, packed sequences and dropout included."""
    models = [kind(4, 3, num_layers=2, dropout=0.2) for kind in (nn.LSTM, nn.GRU, nn.RNN)]
    for model in models:
        output, _ = model(torch.randn(5, 2, 4))
        output.sum().backward()
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
        output, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0])
        output.square().sum().backward()
        log(output)
    cell = nn.LSTMCell(4, 3)
    cell(torch.randn(2, 4))[0].sum().backward()
    return *models, cell


@transparent
def test_attention(log: Log) -> Any:
    """Attention with and without weights, masks and dropout, in training and in eval."""
    model = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    mask = torch.ones(5, 5).triu(1).bool()
    for train_mode in (True, False):
        model.train(train_mode)
        output, weights = model(x, x, x, attn_mask=mask)
        log(output, weights)
        output.sum().backward()
        model(x, x, x, need_weights=False)[0].square().sum().backward()
    with torch.no_grad():
        log(model(x, x, x))
    F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    return model, x


@transparent
def test_transformer(log: Log) -> Any:
    """A transformer encoder in training, in eval, and on its fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for _ in range(2):
        model(x, src_key_padding_mask=padding).sum().backward()
    model.eval()
    log(model(x))
    with torch.no_grad():
        log(model(x), model(x, src_key_padding_mask=padding))
    with torch.inference_mode():
        log(model(x))
    whole = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    whole(x, x).sum().backward()
    return model, whole


@transparent
def test_lbfgs(log: Log) -> Any:
    """A closure that the optimizer calls many times."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    x = torch.randn(5, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        log(loss)
        return loss

    optimizer.step(closure)
    return model


@transparent
def test_schedulers_clipping_and_averages(log: Log) -> Any:
    """Gradient clipping, a learning-rate schedule and moving averages of the weights."""
    model = mlp(nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(5, 4)).square().sum().backward()
        log(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        ema.update_parameters(model)
    torch.optim.swa_utils.update_bn([torch.randn(5, 4)], ema)
    return model, ema


@transparent
def test_default_dtype(log: Log) -> Any:
    """A changed default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        model = mlp()
        train(log, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return model
    finally:
        torch.set_default_dtype(torch.float32)


@transparent
def test_autocast_and_scaler(log: Log) -> Any:
    """Mixed precision: the cache of casts, and a scaler that looks for infinities."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for power in (1, 1, 300):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(5, 4)) + model(torch.randn(5, 4))
            loss = output.square().mean() * 2.0**power
        log(output, loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        log(scaler.get_scale())
    return model


@transparent
def test_embedding_and_sparse_gradients(log: Log) -> Any:
    """Sparse gradients, a sparse optimizer, bags."""
    model = nn.Embedding(10, 4, sparse=True, max_norm=1.0)
    bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam([*model.parameters(), *bag.parameters()])
    index = torch.tensor([[1, 2, 2], [0, 9, 1]])
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(index).square().sum() + bag(index).square().sum()
        loss.backward()
        log(loss, model.weight.grad)
        optimizer.step()
    dense = torch.randn(3, 3, requires_grad=True)
    torch.sparse.mm(torch.eye(3).to_sparse(), dense).sum().backward()
    values = torch.ones(2, requires_grad=True)
    made = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), values, (2, 2))
    torch.sparse.sum(made.coalesce()).backward()
    return model, bag, dense, values


@transparent
def test_losses(log: Log) -> Any:
    """The losses of torch.nn, one of which warns."""
    x = torch.rand(4, 3, requires_grad=True)
    y, classes = torch.rand(4, 3), torch.tensor([0, 2, 1, 1])
    losses = [
        F.mse_loss(x, y[:1]),  # warns: sizes differ
        F.l1_loss(x, y),
        F.smooth_l1_loss(x, y),
        F.huber_loss(x, y),
        F.nll_loss(F.log_softmax(x), classes),  # warns: no dimension given
        F.binary_cross_entropy(x, y),
        F.binary_cross_entropy_with_logits(x, y),
        F.kl_div(x, y),  # warns: a mean over all
        F.cosine_embedding_loss(x, y, torch.ones(4)),
        F.triplet_margin_loss(x, y, y + 1),
        F.multi_margin_loss(x, classes),
        F.gaussian_nll_loss(x, y, y + 1),
        F.poisson_nll_loss(x, y),
        F.ctc_loss(
            x.log_softmax(1)[:, None], torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1])
        ),
    ]
    log(losses)
    torch.stack(losses).sum().backward()
    return x


@transparent
def test_random_draws(log: Log) -> Any:
    """Every way to draw, also those that torch's Python functions draw by."""
    logits = torch.randn(4, 3, requires_grad=True)
    draws = [
        F.gumbel_softmax(logits),
        F.gumbel_softmax(logits, hard=True),
        F.dropout(logits, 0.3),
        F.alpha_dropout(logits, 0.3, training=True),
        F.feature_alpha_dropout(logits, 0.3, training=True),
        F.rrelu(logits, training=True),
        torch.distributions.Normal(logits, 1.0).rsample(),
        torch.distributions.Dirichlet(logits.exp()).rsample(),
        torch.distributions.Gamma(logits.exp(), 1.0).rsample(),
        torch.distributions.RelaxedOneHotCategorical(torch.tensor(1.0), logits=logits).rsample(),
        torch.bernoulli(logits.sigmoid()),
        torch.normal(logits, 1.0),
    ]
    log(torch.multinomial(logits.softmax(1), 2), torch.randperm(5), torch.rand_like(logits))
    generator = torch.Generator().manual_seed(3)
    log(torch.randn(3, generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        log(torch.rand(2))
    torch.stack([draw.sum() for draw in draws]).sum().backward()
    return draws, logits


# -- backward in all its ways ----------------------------------------------------------------------


def twice(x: Tensor) -> Tensor:
    """Return what a block computes."""
    return (x.sin() * F.dropout(x, 0.5)).cos()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_checkpoint(reentrant: bool, needs_grad: bool) -> None:
    """Checkpointing of both kinds, also inside itself, recomputes the same and as often."""

    def program(log: Log) -> Any:
        model, weight = mlp(nn.Dropout()), torch.ones(4, requires_grad=True)

        def block(x: Tensor) -> Tensor:
            log("block", x)
            return twice(x) * weight

        def nested(x: Tensor) -> Tensor:
            return checkpoint(block, block(x), use_reentrant=reentrant)

        x = torch.randn(3, 4, requires_grad=needs_grad)
        output = checkpoint(nested, x, use_reentrant=reentrant)
        output = checkpoint(model, output, use_reentrant=reentrant)
        if output.requires_grad:
            output.sum().backward()
        return model, weight, x

    check_transparent(program)


@transparent
def test_checkpoint_sequential_and_selective(log: Log) -> Any:
    """Checkpointing by segments, with early stop off, and with a policy."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint_sequential,
        create_selective_checkpoint_contexts,
        set_checkpoint_early_stop,
    )

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x = torch.randn(3, 4, requires_grad=True)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    with set_checkpoint_early_stop(False):
        checkpoint(twice, x, use_reentrant=False).sum().backward()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        log(str(op))
        saved = op == torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(twice, x, use_reentrant=False, context_fn=contexts).sum().backward()
    return model, x


@transparent
def test_double_backward(log: Log) -> Any:
    """Gradients of gradients, by `create_graph` and by `torch.autograd.functional`."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    log(gradient, penalty)
    penalty.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x).sum().backward(create_graph=True)
    log(torch.autograd.functional.hessian(lambda y: model(y).sum(), x))
    log(torch.autograd.functional.jacobian(model, x, vectorize=True))
    log(torch.autograd.functional.vhp(lambda y: model(y).sum(), x, x))
    return [p.grad.detach() for p in model.parameters() if p.grad is not None]


@transparent
def test_grad_with_unused_and_batched(log: Log) -> Any:
    """`torch.autograd.grad` in all its forms: unused inputs, zeros for them, batches, edges."""
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = x.sin()
    log(torch.autograd.grad(out.sum(), [x, y], allow_unused=True, retain_graph=True))
    log(torch.autograd.grad(out.sum(), [x, y], materialize_grads=True, retain_graph=True))
    log(torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True, retain_graph=True))
    log(torch.autograd.grad([out.sum(), out.prod()], [x, out], retain_graph=True))
    edge = torch.autograd.graph.get_gradient_edge(out)
    log(torch.autograd.grad(edge, x, torch.ones(3), retain_graph=True))
    torch.autograd.backward([out, out.sum()], [torch.ones(3), None], inputs=[x])
    return x, y


def _raising(*calls: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return what each call raises, in its words."""
    raised = []
    for call in calls:
        with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is what is compared
            call()
        raised.append((caught.type.__name__, str(caught.value)))
    return raised


@transparent
def test_errors_of_autograd(log: Log) -> Any:
    """What autograd refuses, it refuses in the same words."""
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    loss, saved = x.exp().sum(), x.exp()
    loss.backward()
    log(
        _raising(
            loss.backward,
            x.exp().backward,
            torch.ones(1).backward,
            lambda: torch.autograd.grad(y.sum(), x),
            lambda: torch.autograd.grad(x.sum(), torch.ones(3)),
            lambda: x.sum().backward(torch.ones(3)),
            lambda: x.sum().backward(inputs=[]),
            lambda: x.add_(1),
            lambda: x.view(3)[0].mul_(2),
            lambda: x.unbind()[0].add_(1),
            lambda: x.detach_().requires_grad_("no"),
            lambda: x[:2].numpy(force=False) if x.requires_grad else y.numpy(),
            lambda: torch.ones(2, dtype=torch.long).requires_grad_(),
            lambda: y.grad_fn.nothing,
            lambda: y + "a",
            lambda: y @ torch.ones(4),
            lambda: nn.Linear(2, 2)(y),
            lambda: F.cross_entropy(y, torch.tensor([9])),
            lambda: copy.deepcopy(y * 2),
            lambda: nn.Parameter(torch.ones(2, dtype=torch.long)),
            lambda: bool(y),
            lambda: y.sin().add_(1).exp().mul_(2).sum().backward(),
        )
    )
    saved.add_(1)
    log(_raising(lambda: y.sum().backward("a"), saved.sum().backward))
    return x, y


@transparent
def test_hooks(log: Log) -> Any:
    """Hooks of every kind fire as often, in the same order, and change gradients as they did."""
    model = mlp()
    x = torch.randn(3, 4, requires_grad=True)
    first, last = model[0], model[-1]
    first.register_forward_pre_hook(lambda module, args: log("forward pre", args))
    first.register_forward_hook(lambda module, args, output: output * 2)
    last.register_full_backward_hook(lambda module, inputs, outputs: log("full", inputs, outputs))
    last.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    last.weight.register_hook(lambda gradient: gradient * 0)
    last.bias.register_post_accumulate_grad_hook(lambda leaf: log("post", leaf.grad))
    hidden = first(x)
    hidden.register_hook(lambda gradient: log("tensor", gradient))
    hidden.grad_fn.register_hook(lambda inputs, outputs: log("node", inputs, outputs))
    hidden.grad_fn.register_prehook(lambda outputs: (outputs[0] + 1,))
    hidden.retain_grad()
    several = torch.autograd.graph.register_multi_grad_hook(
        [x, first.bias], lambda gradients: log("multi", gradients)
    )
    output = last(model[1](hidden.clone()))
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    several.remove()
    return model, x, hidden


@transparent
def test_global_module_hooks(log: Log) -> Any:
    """Hooks on all modules at once, and calls that they want to happen always."""
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: log(type(module).__name__, output)
    )
    try:
        model = mlp()
        model.register_forward_hook(lambda *_: log("always"), always_call=True)
        model(torch.randn(2, 4)).sum().backward()
        log(_raising(lambda: model(torch.randn(2, 5))))
        return model
    finally:
        handle.remove()


class _OwnError(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _OwnError("from a hook")


@transparent
def test_hooks_that_raise(log: Log) -> Any:
    """An exception in a hook comes out as it was, and the next pass runs."""
    model = mlp()
    x = torch.randn(3, 4)
    for put_on in (
        model[0].weight.register_hook,
        model[0].bias.register_post_accumulate_grad_hook,
        model[-1].register_full_backward_hook,
        model[0].register_forward_hook,
    ):
        handle = put_on(_fail)
        log(_raising(lambda: model(x).sum().backward()))
        handle.remove()
    model(x).sum().backward()
    return model


@transparent
def test_anomaly_mode(log: Log) -> Any:
    """Anomaly mode finds the NaN, with the same error and the same number of warnings."""
    x = torch.zeros(3, requires_grad=True)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        log(_raising(lambda: (x.sqrt() * 0).sum().backward()))
        x.exp().sum().backward()
    log([str(each.message).partition("Traceback")[0] for each in caught])  # ours stands in those
    return x


# -- in place --------------------------------------------------------------------------------------


@transparent
def test_in_place(log: Log) -> Any:
    """Writes into views and their bases, and through them, with the same version counters."""
    x = torch.randn(4, 3, requires_grad=True)
    base = x * 2
    row, part = base[0], base.view(-1)[3:6]
    row.mul_(3)
    part.add_(row)
    base[1:3, 1] = x[0, 0]
    base.t().clamp_(max=1)
    log(base._version, row._version, row)
    out = torch.zeros(4, 3)
    torch.add(out, 1, out=out)
    base.index_add_(0, torch.tensor([0, 1]), x[:2]).masked_fill_(base > 0.5, 0.1)
    F.relu_(base)
    (base.sum() + row.sum()).backward()
    y = torch.ones(3)
    y.data.add_(1)
    with torch.no_grad():
        x.sub_(x.grad)
    y.requires_grad_()
    (y * x.detach()).sum().backward()
    y.data = torch.zeros(3)
    y.grad.zero_()
    return x, y, base, out


@transparent
def test_numpy_and_lists(log: Log) -> Any:
    """Values that leave torch, and memory that is shared with NumPy."""
    x = torch.randn(3, requires_grad=True)
    array = x.detach().numpy()
    array[0] = 5.0
    log(
        array,
        x.tolist(),
        float(x[0]),
        int(x[1]),
        bool(x[2] > 0),
        x[0].item(),
        f"{x[0]:.3f}",
        repr(x),
    )
    log(np.asarray(x.detach()), np.sum(x.detach()), len(x), list(map(float, x)), x[0] in x)
    y = torch.from_numpy(array) * x
    y.sum().backward()
    log(
        torch.tensor(x.detach()),
        torch.as_tensor([x[0], x[1]]),
        torch.utils.dlpack.from_dlpack(x.detach()),
    )
    return x, y


# -- custom Functions ------------------------------------------------------------------------------


class _Double(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class _SetUp(Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.argmax()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class _Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _Undefined(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x, y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        _Undefined.log([gradient is None for gradient in gradients])
        first, second, _ = gradients
        return first if second is None else second, None

    log: Any = None


class _Inner(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            output = inside.sin().sum()
            (ctx.gradient,) = torch.autograd.grad(output, inside)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.gradient * gradient


class _Wrong(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient


@transparent
def test_custom_functions(log: Log) -> Any:
    """Custom Functions with all that their contexts can be told."""
    _Undefined.log = log
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    sine, index = _SetUp.apply(x)
    log(sine, index)
    first, second, third = _Undefined.apply(x, y)
    log(first, second, third)
    second.sum().backward()
    (_Undefined.apply(x, y)[0].sum() + _Double.apply(sine, 3.0).sum()).backward()
    dirty = x * 1
    log(_Dirty.apply(dirty) is dirty, dirty._version)
    dirty.sum().backward()
    log(_raising(lambda: _Dirty.apply(x), lambda: _Wrong.apply(x).sum().backward()))
    (gradient,) = torch.autograd.grad(
        _Dirty.apply(x * 1).sum() + x.exp().sum(), x, create_graph=True
    )
    log(_raising(gradient.sum().backward))
    _Inner.apply(x).backward()
    _Undefined.log = None
    return x, y


# -- torch.func ------------------------------------------------------------------------------------


@transparent
def test_function_transforms(log: Log) -> Any:
    """grad, vmap, jvp, jacobians and functional_call, in one another and beside autograd."""
    from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    x, weight = torch.randn(3), torch.randn(3, requires_grad=True)

    def loss(y: Tensor, w: Tensor) -> Tensor:
        return (y.sin() * w).square().sum()

    log(grad(loss)(x, weight), grad(grad(lambda y: y.sin().sum() ** 2))(torch.tensor(0.3)))
    batch = torch.randn(4, 3)
    log(vmap(grad(loss), in_dims=(0, None))(batch, weight))
    log(vmap(F.dropout, randomness="different")(batch), vmap(F.dropout, randomness="same")(batch))
    log(jvp(torch.sin, (x,), (x,)), jacrev(torch.sin)(x), jacfwd(torch.sin)(x))
    log(hessian(loss)(x, weight.detach()))
    output, pull = vjp(loss, x, weight)
    log(output, pull(torch.ones(())))
    vmap(lambda y: loss(y, weight))(batch).sum().backward()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def of(values: Any, y: Tensor) -> Tensor:
        return functional_call(model, values, (y,)).square().sum()

    log(grad(of)(values, batch), vmap(grad(of), (None, 0))(values, batch))
    faster = {name: p * 1.5 for name, p in model.named_parameters()}
    functional_call(model, faster, (batch,)).sum().backward()
    log(_raising(lambda: vmap(lambda y: y.item())(x), lambda: grad(torch.sin)(x)))
    return weight, model


@transparent
def test_forward_mode(log: Log) -> Any:
    """Dual numbers."""
    from torch.autograd import forward_ad

    x = torch.randn(3, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        output = dual.sin() * 2
        log(*forward_ad.unpack_dual(output))
        output.sum().backward()
    return x


# -- compiled, scripted, traced --------------------------------------------------------------------


def scriptable(x: Tensor, y: Tensor) -> Tensor:
    """Return something that TorchScript computes."""
    if bool(x.sum() > 0):
        return x * y
    return x + y


def traceable(x: Tensor) -> Tensor:
    """Return something that can be traced."""
    return F.softmax(F.relu(x) * 2, dim=0) + x.detach().sin() + F.dropout(x, 0.5, False)


def _listing(graph: Any) -> list[tuple[str, list[int], list[str]]]:
    """Return a graph's nodes; names of values, which are made from variables, are left out."""
    numbers = {value.debugName(): at for at, value in enumerate(graph.inputs())}
    listed = []
    for node in graph.nodes():
        inputs = [
            numbers[value.debugName()] for value in node.inputs() if value.debugName() in numbers
        ]
        numbers.update({value.debugName(): len(numbers) for value in node.outputs()})
        kinds = [value.type().kind() for value in node.outputs()]
        listed.append((node.kind(), inputs, kinds))
    return listed


@transparent
def test_script_and_trace(log: Log) -> Any:
    """Scripted and traced code, also where it is made inside: same graph, no further warning."""
    x = torch.randn(3, requires_grad=True)
    scripted = torch.jit.script(scriptable)
    for _ in range(3):
        log(scripted(x, x * 2))
        scripted(x, x).sum().backward()
    traced = torch.jit.trace(traceable, torch.ones(3))
    log(_listing(traced.graph), traced(x))
    traced(x).sum().backward()
    model = mlp()
    module = torch.jit.trace(model, torch.ones(1, 4))
    log(_listing(module.graph), _listing(module.inlined_graph))
    module(torch.randn(2, 4)).sum().backward()
    again = torch.jit.script(model)
    again(torch.randn(2, 4)).sum().backward()
    log(_listing(again.graph))
    other = torch.jit.script(nn.LSTM(4, 3))
    other(torch.randn(2, 2, 4))[0].sum().backward()
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    log(torch.jit.load(buffer)(torch.ones(2, 4)))
    log(torch.jit.trace(lambda y: y * float(y.sum()), torch.ones(2))(torch.zeros(2)))  # warns
    return x, model


@transparent
def test_exported_and_symbolically_traced(log: Log) -> Any:
    """torch.fx and make_fx see the same graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model = mlp()
    graph = torch.fx.symbolic_trace(model)
    log(graph.code, str(graph.graph))
    graph(torch.randn(2, 4)).sum().backward()
    log(make_fx(traceable)(torch.ones(3)).code)
    log(make_fx(torch.func.grad(lambda x: traceable(x).sum()))(torch.ones(3)).code)
    return model


@pytest.mark.skipif(torch.__version__ < "2.7", reason="can't export inside a recording there")
@transparent
def test_export(log: Log) -> Any:
    """torch.export writes the same program down."""
    model = mlp()
    program = torch.export.export(model, (torch.ones(2, 4),))
    log(program.graph_module.code)
    return program.module()(torch.ones(2, 4))


class Counting:
    """A backend of torch.compile that counts what it compiles."""

    def __init__(self, backend: str) -> None:
        from torch._dynamo import lookup_backend

        self.compiled = 0
        self.runs = 0
        self._backend = lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile one graph."""
        self.compiled += 1
        compiled = self._backend(graph, inputs)

        def runs(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return runs


def compiled_loss(x: Tensor, w: Tensor) -> Tensor:
    """Return a loss whose intermediates have another shape than itself."""
    hidden = (x @ w).sin()
    return (hidden * hidden.detach()).mean() + F.gelu(hidden).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before(backend: str) -> None:
    """A function compiled before gives the same inside, and is compiled still afterwards."""
    torch._dynamo.reset()
    count = Counting(backend)
    function = torch.compile(compiled_loss, backend=count)

    def program(log: Log) -> Any:
        w = torch.randn(4, 4, requires_grad=True)
        loss = function(torch.randn(2, 4), w)
        loss.backward()
        return loss.detach(), w

    check_transparent(program)
    before = count.compiled, count.runs
    assert before[0] == 1
    run(program)
    assert (count.compiled, count.runs) == (1, before[1] + 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_inside(backend: str) -> None:
    """A function or a module that is compiled inside gives the same, and is compiled afterwards."""
    made: list[Any] = []

    def program(log: Log) -> Any:
        torch._dynamo.reset()
        count = Counting(backend)
        function, model = torch.compile(compiled_loss, backend=count), mlp()
        compiled = torch.compile(model, backend=count)
        made[:] = [count, function, model, compiled]
        w = torch.randn(4, 4, requires_grad=True)
        for _ in range(2):
            loss = function(torch.randn(2, 4), w) + compiled(torch.randn(2, 4)).square().mean()
            loss.backward()
        return loss.detach(), w, model

    check_transparent(program)
    count, function, _, compiled = made
    assert count.compiled == 0
    loss = function(torch.randn(2, 4), torch.randn(4, 4)) + compiled(torch.randn(2, 4)).sum()
    loss.backward()
    assert count.compiled == 2


def test_compiled_by_many_recordings() -> None:
    """Recording again and again never makes a compiled function be compiled anew."""
    torch._dynamo.reset()
    count = Counting("eager")
    function = torch.compile(compiled_loss, backend=count)
    x, w = torch.randn(2, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(12):
        with gradtrace.record() as trace:
            function(x, w).backward()
        assert trace.reached(w)
        function(x, w)
    assert count.compiled == 1


# -- copies, files, workers ------------------------------------------------------------------------


@transparent
def test_copies_and_files(log: Log) -> Any:
    """A model that is recorded can be copied, pickled and saved, and the copies are clean."""
    model = mlp(nn.BatchNorm1d(8))
    loss = model(torch.randn(3, 4)).sum()
    copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    loss.backward()
    copies += [copy.deepcopy(model)]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies += [torch.load(buffer, weights_only=False)]
    log([(p._backward_hooks, p.grad) for each in copies for p in each.parameters()])
    for each in copies:
        each(torch.randn(3, 4)).sum().backward()
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "leaf": next(model.parameters())}, buffer)
    buffer.seek(0)
    state = torch.load(buffer)
    log(state, mlp(nn.BatchNorm1d(8)).load_state_dict(state["model"]))
    swapped = mlp(nn.BatchNorm1d(8))
    swapped.load_state_dict(state["model"], assign=True)
    swapped(torch.randn(3, 4)).sum().backward()
    log(swapped.double().to(torch.float32).half().float())
    leaf = torch.ones(3, requires_grad=True)
    copied = copy.deepcopy(leaf)
    (copied * leaf).sum().backward()
    return copies, leaf, copied


@transparent
def test_data_loader_with_forked_workers(log: Log) -> Any:
    """Workers made by fork yield the same data, and training goes on beside them."""
    model = mlp()
    loader = DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=2)
    for batch in loader:
        log(batch)
        model(batch).sum().backward()
    for (batch,) in DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2, shuffle=True):
        model(batch).sum().backward()
    return model


# -- tensors of other kinds ------------------------------------------------------------------------


class Logged(Tensor):
    """A tensor that logs each function called on it."""

    log: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.log is not None:
            cls.log(getattr(func, "__name__", str(func)), [kind.__name__ for kind in types])
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(Tensor):
    """A tensor subclass that does nothing of its own."""


class Duck:
    """No tensor, yet it has a say in torch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.__name__, len(args)


@transparent
def test_subclass_with_its_own_functions(log: Log) -> Any:
    """A subclass's handler is called for the same functions, in the same order."""
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3).as_subclass(Logged).requires_grad_()
    Logged.log = log
    try:
        out = F.gelu(y * x) + F.softmax(y, dim=0) + y[0]
        out[0] = 0.0
        log(
            out.shape,
            out.dim(),
            len(out),
            float(out[1]),
            F.gumbel_softmax(out, hard=True).sum() > 0,
        )
        model = nn.Linear(3, 2)
        loss = model(out).sum() + F.linear(out, model.weight).square().mean()
        loss.backward()
        y.grad.zero_()
        torch.autograd.grad((y * x).sum(), [x, y])
        y.data.mul_(2)
        y.detach().numpy()
        log(torch.add(Duck(), 1), F.softmax(Duck()), copy.deepcopy(y), y.tolist())
        with torch.no_grad():
            y.add_(1)
    finally:
        Logged.log = None
    plain = torch.randn(3).as_subclass(Plain).requires_grad_()
    (F.gelu(plain) * y).sum().backward()
    log(type(plain * 2), type(F.gumbel_softmax(plain, hard=True)), nn.Parameter(plain))
    return x, y, plain, model


class Wrapper(Tensor):
    """A tensor that holds another one and logs each operator called on it."""

    log: Any = None
    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Wrapper:
        """Wrap a tensor."""
        made: Wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=requires_grad
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.log is not None:
            cls.log(str(func))
        args, kwargs = tree_map_only(Wrapper, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*args, **kwargs))


@transparent
def test_subclass_with_its_own_dispatch(log: Log) -> Any:
    """A wrapper's dispatch handler is called for the same operators, in the same order."""
    Wrapper.log = log
    try:
        x = Wrapper(torch.randn(3, 3), requires_grad=True)
        y = torch.randn(3, 3, requires_grad=True)
        out = (x @ y).sin()[1:].view(-1)
        out.add_(1)
        F.gelu(out).sum().backward()
        (x.detach() * x).sum().backward()
        x.grad.zero_()
        with torch.no_grad():
            x.add_(1)
        inner, outer = x.held, x.grad.held
        x.data.mul_(2)
        model = nn.Linear(3, 2)
        model.weight = nn.Parameter(Wrapper(torch.ones(2, 3)))
        model(torch.randn(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    finally:
        Wrapper.log = None
    return inner, outer, y, model.weight.held


class Ops(TorchDispatchMode):
    """A mode that logs every operator."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """A mode that logs every function."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log(getattr(func, "__name__", str(func)), [kind.__name__ for kind in types])
        return func(*args, **(kwargs or {}))


def step(log: Log) -> Any:
    """Make one step of everything that modes look at."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.GELU())
    attention = nn.MultiheadAttention(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(3, 4, requires_grad=True)
    output = attention(model(x), x, x)[0]
    loss = (
        F.cross_entropy(output, torch.tensor([0, 1, 2])) + F.gumbel_softmax(output, hard=True).sum()
    )
    loss = loss + F.mse_loss(output, output.detach()) + x.unflatten(1, (2, 2)).norm()
    loss = loss + torch.einsum("ij,kj->ik", x, x).mean() + sum(torch.split(x.view(-1), 4)).sum()
    loss.backward()
    (gradient,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    gradient.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    x.data.add_(1)
    return model, x, loss


@pytest.mark.parametrize("mode", [Ops, Functions])
@pytest.mark.parametrize("place", ["inside", "outside", "both"])
def test_other_modes(mode: Any, place: str) -> None:
    """Somebody else's mode, put on inside or outside the block, sees the same calls."""

    def inner(log: Log) -> Any:
        with mode(log) if place != "outside" else contextlib.nullcontext():
            return step(log)

    seen = []
    for recording in (None, None, gradtrace.record):
        outer = Log()

        def inside_mode(outer: Log = outer, recording: Any = recording) -> Any:
            stack = contextlib.ExitStack()
            if place != "inside":
                stack.enter_context(mode(outer))
            trace = stack.enter_context((recording or contextlib.nullcontext)())
            return contextlib.contextmanager(_closing)(stack, trace)

        each = run(inner, inside_mode)
        each.events += outer.events
        seen.append(each)
    assert len(seen[1].events) > 5
    assert differences(seen[1], seen[2]) == []


def _closing(stack: contextlib.ExitStack, trace: Any) -> Iterator[Any]:
    with stack:
        yield trace


@transparent
def test_modes_of_torch(log: Log) -> Any:
    """Device contexts, the FLOP counter and the profiler work as they do."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("cpu"):
        first = step(log)
    with torch.device("meta"):
        model = mlp()
        model(torch.randn(2, 4)).sum().backward()
        log(model[0].weight.device.type, model[0].weight.grad.device.type)
    with FlopCounterMode(display=False) as flops:
        second = step(log)
    log(flops.get_total_flops(), {k: len(v) for k, v in flops.get_flop_counts().items()})
    return first, second, model


def test_profiler() -> None:
    """The profiler sees the same operators as often, where no values are looked at."""

    def program(log: Log) -> Any:
        with torch.profiler.profile(record_shapes=True) as profile:
            result = step(log)
        counts = {each.key: each.count for each in profile.key_averages()}
        log({k: n for k, n in sorted(counts.items()) if k.startswith(("aten::", "autograd::"))})
        return result

    check_transparent(program, functools.partial(gradtrace.record, values="none"))


@transparent
def test_saved_tensor_hooks(log: Log) -> Any:
    """Hooks on saved tensors pack and unpack the same, and no more is saved."""
    from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

    model, x = mlp(), torch.randn(3, 4)

    def pack(tensor: Tensor) -> Tensor:
        log("pack", tensor.detach())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        log("unpack", tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, unpack):
        output = model(x).square().sum()
    output.backward()
    with save_on_cpu():
        model(x).sum().backward()
    return model


@transparent
def test_complex(log: Log) -> Any:
    """Complex numbers, conjugated and negated lazily."""
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    out = z.conj() * torch.fft.fft(z) + z.imag.neg() + torch.view_as_complex(torch.randn(4, 2))
    log(out.is_conj(), z.conj(), z.conj().imag)
    out.abs().sum().backward()
    torch.view_as_real(z).sum().backward()
    return z, out


@transparent
def test_nested_tensors(log: Log) -> Any:
    """Nested tensors, strided and jagged, with their gradients."""
    parts = [torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)]
    warnings.simplefilter("ignore")  # torch says once for a process that they are a prototype
    for layout in (torch.strided, torch.jagged):
        made = torch.nested.as_nested_tensor(parts, layout=layout)
        out = (made * 2).sin()
        log(out.is_nested, [each.shape for each in out.unbind()])
        torch.nested.to_padded_tensor(out, 0.0).sum().backward()
    leaf = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    torch.nested.to_padded_tensor(leaf * 3, 0.0).sum().backward()
    log(list(leaf.grad.unbind()))
    return parts


@transparent
def test_tensors_without_values(log: Log) -> Any:
    """Meta and fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.empty(3, 4, device="meta", requires_grad=True)
    F.gelu(x @ x.t()).sum().backward()
    log(x.grad)
    with FakeTensorMode() as mode:
        y = torch.randn(3, 4, requires_grad=True)
        model = mlp()
        model(y).sum().backward()
        log(type(y.grad), y.grad.shape, y)
        fake = mode.from_tensor(torch.ones(2))
        log((fake + 1).shape)
    return x


@transparent
def test_quantized_and_low_precision(log: Log) -> Any:
    """Quantised tensors, half and bfloat16."""
    x = torch.randn(4, requires_grad=True)
    log(torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127))
    torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).sum().backward()
    for dtype in (torch.half, torch.bfloat16):
        (x.to(dtype) * 2).sum().backward()
    return x


# -- modules that rewrite themselves ---------------------------------------------------------------


@transparent
def test_parametrized_modules(log: Log) -> Any:
    """Weight and spectral norms, old and new, pruning, parametrisations of one's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        models = [
            nn.utils.weight_norm(nn.Linear(4, 3)),
            nn.utils.spectral_norm(nn.Linear(4, 3)),
            parametrizations.weight_norm(nn.Linear(4, 3)),
            parametrizations.spectral_norm(nn.Linear(4, 3)),
            parametrizations.orthogonal(nn.Linear(4, 3)),
        ]
    pruned = nn.Linear(4, 3)
    prune.l1_unstructured(pruned, "weight", 0.5)
    prune.random_unstructured(pruned, "bias", 0.5)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    tied = nn.Linear(4, 4)
    parametrize.register_parametrization(tied, "weight", nn.Softplus())
    with parametrize.cached():
        (tied(tied(torch.randn(2, 4)))).sum().backward()
    models += [pruned, lazy]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
        model.eval()
        log(model(torch.randn(3, 4)))
    prune.remove(pruned, "weight")
    pruned(torch.randn(3, 4)).sum().backward()
    parametrize.remove_parametrizations(models[2], "weight")
    return models, tied


@transparent
def test_initialisers_and_vectors(log: Log) -> Any:
    """Initialisers, parameters as one vector, in-place changes of requires_grad."""
    layer = nn.Linear(4, 4)
    for initialise in (
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.zeros_,
    ):
        initialise(layer.weight)
        log(layer.weight)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector * 2, layer.parameters())
    layer.requires_grad_(False)
    layer.weight.requires_grad = True
    layer(torch.randn(2, 4)).sum().backward()
    layer.to_empty(device="cpu").zero_grad()
    layer.reset_parameters()
    return layer


# -- what is interrupted ---------------------------------------------------------------------------


class Interrupted(nn.Module):
    """A module whose forward is stopped from the keyboard."""

    def forward(self, x: Tensor) -> Tensor:
        """Be interrupted."""
        raise KeyboardInterrupt


class _Interrupt(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        if now:
            raise KeyboardInterrupt
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise KeyboardInterrupt


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class _InterruptedTensor(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sin:
            raise KeyboardInterrupt
        return super().__torch_function__(func, types, args, kwargs or {})


def _interrupted_hook() -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(_interrupt)
    (x * 2).sum().backward()


def _interrupted_checkpoint() -> None:
    calls: list[int] = []

    def block(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return x.sin()

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=True).sum().backward()


INTERRUPTIONS: dict[str, Callable[[], Any]] = {
    "module": lambda: nn.Sequential(nn.Linear(4, 4), Interrupted())(torch.randn(2, 4)),
    "function": lambda: _Interrupt.apply(torch.ones(3, requires_grad=True), True),
    "backward": lambda: _Interrupt.apply(torch.ones(3, requires_grad=True), False).sum().backward(),
    "hook": _interrupted_hook,
    "checkpoint": _interrupted_checkpoint,
    "subclass": lambda: torch.ones(3).as_subclass(_InterruptedTensor).sin(),
    "vmap": lambda: torch.func.vmap(_interrupt)(torch.ones(3)),
    "block": _interrupt,
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interruption(name: str) -> None:
    """Ctrl-C anywhere comes out as itself; everything is off, and the next recording works."""
    seen = check_transparent(lambda log: INTERRUPTIONS[name]())
    assert seen.error is not None
    w = torch.ones(3, requires_grad=True)
    with gradtrace.record() as trace:
        (w * 2).sum().backward()
    assert trace.reached(w)


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interruption_that_the_program_survives(name: str) -> None:
    """A program that catches the interrupt inside the block goes on, and is recorded on."""

    def program(log: Log) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            INTERRUPTIONS[name]()
        model = mlp()
        model(torch.randn(2, 4)).sum().backward()
        _Double.apply(model[0].weight, 2.0).sum().backward()
        return model

    seen = check_transparent(program)
    assert seen.trace is not None
    assert sum(op.op == "linear" for op in seen.trace.ops) >= 2
    assert [op.op for op in seen.trace.ops][-2:] == ["_Double.apply", "sum"]
    last = [each for each in seen.trace.leaves if each.name.endswith("bias")][-2:]
    assert {str(each.status) for each in last} == {"reached"}


# -- order, nesting, threads -----------------------------------------------------------------------


@transparent
def test_generators_that_wait_inside(log: Log) -> Any:
    """A generator that holds modes open across the block's end."""

    def batches() -> Iterator[Tensor]:
        with torch.no_grad():
            yield torch.randn(2, 4)
            yield torch.randn(2, 4)

    @torch.no_grad()
    def decorated() -> Iterator[Tensor]:
        yield torch.randn(2, 4)
        yield torch.randn(2, 4)

    model = mlp()
    for batch in decorated():
        model(batch).sum().backward()
    waiting = batches()
    log(next(waiting), torch.is_grad_enabled())
    waiting.close()
    return model


def test_modes_left_out_of_order() -> None:
    """A mode that was put on inside and is taken off behind the block survives it, and works."""
    log = Log()
    mode = Functions(log)
    w = torch.ones(3, requires_grad=True)
    with gradtrace.record() as trace:
        mode.__enter__()
        (w * 2).sum().backward()
    try:
        assert trace.reached(w)
        seen = len(log.events)
        w * 3
        assert len(log.events) == seen + 1
    finally:
        mode.__exit__(None, None, None)


def test_a_recording_in_a_generator() -> None:
    """A recording that a generator holds open ends with it, whatever the order."""

    def recorded() -> Iterator[gradtrace.Trace]:
        with gradtrace.record() as trace:
            yield trace

    first, second = recorded(), recorded()
    traces = [next(first), next(second)]
    w = torch.ones(3, requires_grad=True)
    (w * 2).sum().backward()
    first.close()
    (w * 3).sum().backward()
    second.close()
    assert [len(trace.backward_passes) for trace in traces] == [1, 2]


def test_recordings_inside_one_another() -> None:
    """The program runs the same under two recordings, and both see all of it."""

    @contextlib.contextmanager
    def both() -> Iterator[gradtrace.Trace]:
        with gradtrace.record() as outer, gradtrace.record() as inner:
            yield inner
        traces[:] = outer, inner

    traces: list[gradtrace.Trace] = []
    check_transparent(step, both)
    outer, inner = traces
    assert outer.graph.graph["troubles"] == ()
    assert len(outer.backward_passes) == len(inner.backward_passes) == 3
    assert [leaf.status for leaf in outer.leaves] == [leaf.status for leaf in inner.leaves]
    assert [op.op for op in outer.ops] == [op.op for op in inner.ops]


def _in_threads(work: Callable[[int], Any], number: int) -> list[Any]:
    results: list[Any] = [None] * number
    gate = threading.Barrier(number)

    def one(at: int) -> None:
        gate.wait()
        results[at] = work(at)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_recordings_in_threads() -> None:
    """Four threads that record at once each see their own program only, and compute the same."""

    def work(at: int, *, recorded: bool = True) -> Any:
        generator = torch.Generator().manual_seed(at)
        w = torch.randn(4, 4, generator=generator, requires_grad=True)
        with gradtrace.record() if recorded else contextlib.nullcontext() as trace:
            for _ in range(20):
                x = torch.randn(2, 4, generator=generator)
                F.gelu(_Double.apply(x @ w, 2.0)).sum().backward()
        return w.grad, trace, w

    plain = _in_threads(functools.partial(work, recorded=False), 4)
    for before, (gradient, trace, w) in zip(plain, _in_threads(work, 4), strict=True):
        assert torch.equal(before[0], gradient)
        assert trace.graph.graph["troubles"] == ()
        assert len(trace.backward_passes) == 20
        assert [str(leaf.status) for leaf in trace.leaves] == ["reached"]
        assert trace.reached(w)


def test_other_threads_are_left_alone() -> None:
    """A thread that does not record runs while another records, and is not seen."""
    with gradtrace.record() as trace:
        (result,) = _in_threads(lambda _: run(step), 1)
    assert result.error is None
    assert not trace.ops
    assert not trace.backward_passes


# -- what is kept alive ----------------------------------------------------------------------------


@transparent
def test_intermediates_are_freed(log: Log) -> Any:
    """What a program drops is freed at once, without the collector, graph and saved tensors too."""
    model, x = mlp(), torch.randn(3, 4)
    hidden = model[0](x)
    output = model[2](hidden.relu())
    log.watch(hidden=hidden, output=output, x=x)
    log.living("made")
    del hidden
    log.living("hidden")
    loss = output.square().sum()
    log.watch(loss=loss)
    del output
    log.living("output")
    loss.backward()
    log.living("backward")
    del loss, x
    log.living("loss")
    array = torch.randn(3)
    log.watch(array=array)
    del array
    log.living("data")
    made = [torch.randn(3, requires_grad=True) for _ in range(3)]
    log.watch(first=made[0], gradient=torch.autograd.grad(made[0].sum(), made[0])[0])
    made[1].sum().backward()
    log.watch(grad=made[1].grad)
    made[1].grad = None
    log.living("grad")
    made.clear()
    log.living("leaves")
    return model


@transparent
def test_models_and_optimizers_are_freed(log: Log) -> Any:
    """A model that was trained and dropped inside the block is freed there."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    train(log, model, optimizer)
    copied = copy.deepcopy(model)
    copied(torch.randn(2, 4)).sum().backward()
    compiled = functools.partial(model)
    log.watch(model=model, weight=model[0].weight, copied=copied, other=copied[0].weight)
    del model, compiled, copied
    log.living("model")
    del optimizer
    log.living("optimizer")


@transparent
def test_contexts_of_functions_are_freed(log: Log) -> Any:
    """Neither a Function's context nor what it closes over stays."""

    class Keeps(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = x * 2
            log.watch(kept=ctx.kept)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            log.living("backward")
            return gradient * ctx.kept

    x = torch.randn(3, requires_grad=True)
    output = Keeps.apply(x)
    log.living("forward")
    output.sum().backward()
    del output
    log.living("end")
    y = checkpoint(twice, x, use_reentrant=False)
    log.watch(y=y)
    y.sum().backward()
    del y
    log.living("checkpoint")
    return x


@transparent
def test_locals_of_callers_are_freed(log: Log) -> Any:
    """Looking for names keeps no local variable of any frame alive."""

    def inner(weight: Tensor) -> Tensor:
        big = torch.randn(3, requires_grad=True)
        log.watch(big=big)
        result = (weight * big.detach()).sum()
        (big * 2).sum().backward()
        return result

    def outer() -> Tensor:
        weight = torch.ones(3, requires_grad=True)
        other = object.__new__(Duck)
        log.watch(weight=weight, other=other)
        result = inner(weight)
        log.living("inner")
        return result

    outer().backward()
    log.living("outer")
    local = torch.ones(3, requires_grad=True)
    log.watch(local=local)
    (local * 2).sum().backward()
    del local
    log.living("local")


@transparent
def test_exceptions_are_freed(log: Log) -> Any:
    """An exception that was handled keeps nothing."""
    x = torch.randn(3, requires_grad=True)
    for call in (
        (x * 2).backward,
        lambda: nn.Linear(2, 2)(x * 2),
        lambda: _Interrupt.apply(x * 2, True),
        lambda: F.softmax(x * 2, dim=7),
    ):
        try:
            call()
        except BaseException as error:
            log.watch(error=error)
        log.living("handled")


class Held:
    """What stands for one saved tensor."""

    now: ClassVar[weakref.WeakSet[Held]] = weakref.WeakSet()

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Held.now.add(self)


@transparent
def test_as_many_saved_tensors_live(log: Log) -> Any:
    """At no point more saved tensors live than without a recording."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(6)))
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        for _ in range(3):
            x = torch.randn(2, 4)
            for layer in model:
                x = layer(x)
                log(len(Held.now))
            model[0][0].weight.register_hook(lambda _: log(len(Held.now)))
            x.sum().backward()
            log(len(Held.now))
            model(torch.randn(2, 4))  # dropped with no backward
            log(len(Held.now))


def test_nothing_is_alive_after_the_block() -> None:
    """The trace holds no tensor, module, frame or graph, and there is nothing to be collected."""
    gc.collect()
    with no_collections():
        model, x = mlp(), torch.randn(2, 4, requires_grad=True)
        with gradtrace.record(model, names={"x": x}) as trace:
            loss = model(x).sum()
            loss.backward(retain_graph=True)
        kept = [weakref.ref(each) for each in (model, model[0], model[0].weight, x, loss)]
        assert trace.reached(x)
        del model, x, loss
        assert [ref() for ref in kept if ref() is not None] == []
        assert trace.reached("x")


def test_hooks_are_off_after_the_block() -> None:
    """Graphs and leaves that outlive the block carry no hook of ours."""
    w = torch.ones(3, requires_grad=True)
    with gradtrace.record():
        hidden = w * 2
        hidden.sum().backward(retain_graph=True)
        loss = (hidden * w).sum()
    assert not w._backward_hooks
    assert not w._post_accumulate_grad_hooks
    loss.backward()
    assert str(gradtrace.last_trace().explain(w).status) == "reached"
    assert len(gradtrace.last_trace().backward_passes) == 1


def test_failing_to_start_puts_nothing_on() -> None:
    """Where a recording can't be entered, all that it had put on comes off again."""
    with pytest.raises(gradtrace.GradtraceError):
        gradtrace.record(names={"x": "no tensor"})  # type: ignore[dict-item]  # that is the point


def test_the_harness_sees_differences() -> None:
    """The comparison itself notices another value, warning, draw, error and a thing kept alive."""
    kept: list[Any] = []
    calls = iter(range(4))

    def program(log: Log) -> Any:
        x = torch.ones(2)
        log.watch(x=x)
        if next(calls) % 2:
            kept.append(x)
            del x
            log.living("deleted")
            torch.rand(1)
            warnings.warn("only here", stacklevel=1)
            raise ValueError
        del x
        log.living("deleted")
        return 1

    found = differences(run(program), run(program))
    parts = {each.split("[")[0].split(":")[0] for each in found}
    assert parts == {"error", "events", "warnings", "result", "random"}


# -- further corners -------------------------------------------------------------------------------


@transparent
def test_checks_of_gradients(log: Log) -> Any:
    """Checks of gradients run, which perturb memory behind autograd's back."""
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    log(torch.autograd.gradcheck(torch.sin, x), torch.autograd.gradgradcheck(torch.exp, x))
    wrong = _raising(lambda: torch.autograd.gradcheck(lambda y: y.detach() * y, x))
    log(wrong[0][0])
    return x


@transparent
def test_inference_tensors(log: Log) -> Any:
    """Inference tensors can be used where torch allows it, and are refused where it does not."""
    w = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        x = torch.randn(3)
        y = w * x
        x.add_(1)
        with torch.inference_mode(False):
            z = (w * x.clone()).sum()
    log(y.is_inference(), _raising(lambda: w * x, lambda: x.add_(1), x.requires_grad_))
    z.backward()
    return w, x, y


@transparent
def test_masked_tensors(log: Log) -> Any:
    """MaskedTensor, which has both a function and a dispatch handler."""
    from torch.masked import masked_tensor

    warnings.simplefilter("ignore")
    x = torch.randn(4)
    made = masked_tensor(x, x > 0, requires_grad=True)
    out = (made * 2).sum()
    out.backward()
    log(made.grad.to_tensor(0.0), out.get_data())


@transparent
def test_other_layouts(log: Log) -> Any:
    """CSR, BSR, mkldnn, channels last, expanded and zero-size tensors."""
    warnings.simplefilter("ignore")
    x = torch.randn(4, 4, requires_grad=True)
    log(x.to_sparse_csr(), x.detach().to_sparse_bsr((2, 2)))
    (x.to_sparse_csr() @ torch.ones(4, 1)).sum().backward()
    x.to_mkldnn().to_dense().sum().backward()
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    F.conv2d(image, torch.ones(2, 3, 2, 2)).sum().backward()
    torch.ones(1, requires_grad=True).expand(5).sum().backward()
    empty = torch.zeros(0, 3, requires_grad=True)
    (empty * 2).sum().backward()
    return x, image, empty


@transparent
def test_conditional_operator(log: Log) -> Any:
    """torch.cond, which compiles what it is given, and its gradient."""
    x = torch.ones(3, requires_grad=True)
    out = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
    log(out.detach())
    out.sum().backward()
    return x


@transparent
def test_control_flow_operators(log: Log) -> Any:
    """The kin of torch.cond, which compile what they are given."""
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    log(while_loop(lambda i: i < 3, lambda i: (i + 1,), (torch.tensor(0),)))
    log(scan(lambda c, y: (c + y, c * y), torch.zeros(()), torch.arange(3.0)))
    log(associative_scan(torch.add, torch.arange(4.0), 0, combine_mode="generic"))


@transparent
def test_flex_attention(log: Log) -> Any:
    """flex_attention, which runs through dynamo even where it is not compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    warnings.simplefilter("ignore")
    q = torch.randn(1, 1, 16, 8, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="cpu")
    out = flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2, block_mask=mask)
    log(out.detach())
    out.sum().backward()
    return q


@torch.library.custom_op("gradtrace_tests::scaled", mutates_args=())
def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@_scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _set_up_scaled(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


_scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None), setup_context=_set_up_scaled
)


class _Vmapped(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


@transparent
def test_custom_operators(log: Log) -> Any:
    """Operators of torch.library, and Functions under vmap and grad."""
    x = torch.randn(3, requires_grad=True)
    _scaled(x, 2.0).sum().backward()
    torch.ops.aten.mul(x, x).sum().backward()
    log(torch.func.vmap(torch.func.grad(lambda y: _Vmapped.apply(y).sum()))(torch.randn(2, 3)))
    torch.func.vmap(_Vmapped.apply)(x).sum().backward()
    log(torch.func.functionalize(lambda y: y.clone().add_(1))(torch.ones(2)))
    return x


@transparent
def test_default_device(log: Log) -> Any:
    """A default device, which is a mode at the bottom of the stack, comes and goes inside."""
    torch.set_default_device("cpu")
    model = mlp()
    model(torch.randn(2, 4)).sum().backward()
    torch.set_default_device(None)
    model(torch.randn(2, 4)).sum().backward()
    return model


def test_default_device_across_the_border() -> None:
    """A default device set inside stays set behind, and one set before can be taken off inside."""
    w = torch.ones(3, requires_grad=True)
    try:
        with gradtrace.record() as trace:
            torch.set_default_device("meta")
            (w * 2).sum().backward()
        assert torch.ones(1).is_meta
        assert trace.reached(w)
        with gradtrace.record() as trace:
            torch.set_default_device(None)
            (w * 2).sum().backward()
        assert not torch.ones(1).is_meta
        assert trace.reached(w)
    finally:
        torch.set_default_device(None)


@transparent
def test_grad_mode_left_off(log: Log) -> Any:
    """Grad mode that the program turns off inside stays off behind, as without."""
    torch.set_grad_enabled(False)
    log(torch.is_grad_enabled())
    torch.set_grad_enabled(True)

    @torch.no_grad()
    def off(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(2, requires_grad=True)
    log(off(x).requires_grad, torch.is_grad_enabled())


@transparent
def test_dictionaries_of_locals(log: Log) -> Any:
    """A dictionary that `locals()` returned is not changed behind the program's back."""
    x = torch.ones(3, requires_grad=True)
    model = nn.Linear(3, 1)
    taken = locals()
    log(sorted(taken))
    later = model(x)
    log(sorted(taken))
    total = (torch.ones(3, requires_grad=True) * later).sum()
    total.backward()
    log(sorted(taken))

    def through(weight: Tensor) -> None:
        for name, value in locals().items():
            log(name, F.linear(value, torch.ones(2, 3)))

    through(torch.ones(3, requires_grad=True))


@transparent
def test_differentiable_optimizer(log: Log) -> Any:
    """An optimizer's step as a part of the graph."""
    w = torch.ones(3, requires_grad=True)
    inner = w.clone()
    inner.retain_grad()
    optimizer = torch.optim.SGD([inner], lr=0.1, differentiable=True)
    inner.square().sum().backward(create_graph=True, inputs=[inner])
    optimizer.step()
    inner.sum().backward()
    return w.detach(), w.grad.detach()


class _Initialised(Tensor):
    """A subclass with a constructor of its own."""

    def __new__(cls, data: Any, *args: Any, **kwargs: Any) -> _Initialised:
        return torch.as_tensor(data, dtype=torch.float32).as_subclass(cls)

    def __init__(self, data: Any, unit: str, *passed: Any) -> None:
        super().__init__(*passed)
        self.unit = unit


class _Renewed(Tensor):
    def __new__(cls, data: Any, unit: str) -> _Renewed:
        made = torch.as_tensor(data, dtype=torch.float32).as_subclass(cls)
        made.unit = unit
        return made


@transparent
def test_constructors_of_subclasses(log: Log) -> Any:
    """Constructors of tensor classes take and refuse the same arguments."""
    x = torch.ones(2, requires_grad=True)
    made = _Initialised(x * 2, "m"), _Renewed(x * 2, unit="s")
    log([each.unit for each in made])
    log(_raising(lambda: _Initialised(x, "m", 1), lambda: _Initialised(x), lambda: Plain(x, 1)))
    log(_raising(lambda: Tensor(2, bogus=1), lambda: nn.Parameter(3)))
    made[0].sum().backward()
    log(nn.Buffer(torch.ones(2)), torch.Tensor(2, 0), torch.FloatTensor([1.0, 2.0]))
    module = nn.Module()
    module.p, module.b = nn.Parameter(x.detach()), nn.Buffer(x.detach())
    log(dict(module.named_parameters()), dict(module.named_buffers()))
    log(_raising(lambda: setattr(module, "p", x), lambda: nn.Parameter(torch.ones(1, dtype=int))))
    return x


@transparent
def test_deep_modules(log: Log) -> Any:
    """Modules inside modules, a hundred deep, do not exhaust the stack."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(100):
        model = nn.Sequential(model)
    model(torch.ones(1, 2)).sum().backward()
    return list(model.parameters())


def test_places_of_warnings() -> None:
    """Warnings of torch are shown once for each line of the program, as without a recording."""

    def program() -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            warnings.simplefilter("default")
            x = torch.rand(4, 3, requires_grad=True)
            for _ in range(2):
                F.softmax(x)
                (x * 2).grad  # noqa: B018
            F.softmax(x)
            F.mse_loss(x, x[:1])
            F.mse_loss(x, x[:1])
        return [(each.filename, each.lineno) for each in caught]

    program()
    globals().pop("__warningregistry__", None)
    plain = program()
    globals().pop("__warningregistry__", None)
    with gradtrace.record():
        recorded = program()
    assert recorded == plain


def test_stances_of_the_user() -> None:
    """A compile stance that the user chose is on again behind the block."""
    count = Counting("eager")
    function = torch.compile(compiled_loss, backend=count)
    with torch.compiler.set_stance("eager_on_recompile"):
        with gradtrace.record():
            function(torch.ones(2, 4), torch.ones(4, 4, requires_grad=True)).backward()
        from torch._dynamo import eval_frame

        assert eval_frame._stance.stance == "eager_on_recompile"


@pytest.mark.skipif(torch.__version__ < "2.7", reason="dynamo traces through the mode there")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_recording_inside_compiled_code() -> None:
    """A compiled function that records inside itself gives the right value."""

    def function(w: Tensor) -> Tensor:
        with gradtrace.record() as trace:
            loss = (w * 2).sum()
            loss.backward()
        traces.append(trace)
        return loss

    traces: list[gradtrace.Trace] = []
    w = torch.ones(3, requires_grad=True)
    torch._dynamo.reset()
    assert torch.compile(function, backend="eager")(w).item() == 6.0
    assert torch.equal(w.grad, torch.full((3,), 2.0))
    assert traces[-1].reached(w)
