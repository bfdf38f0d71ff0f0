"""Regimes: inside each way of running torch the bits stay the same and the verdicts are right.

A program returns its tensors by name. It is run twice as it is and once recorded, all that can be
seen of the runs is compared bit for bit, and the verdict on each tensor is held against what is
expected of it and against its `.grad`.
"""

# Signatures of handlers and hooks are torch's, and all programs take the log.
# ruff: noqa: ARG001
# Torch gives no types to much of what is tried here.
# mypy: disable-error-code="no-untyped-call, no-any-return, union-attr, attr-defined, arg-type"
# mypy: disable-error-code="operator, index, misc, override, call-overload"

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import importlib.util
import inspect
import io
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import oracle
import programs
import pytest
import torch
from oracle import Log, Noise
from programs import (
    FROZEN,
    NONFINITE,
    REACHED,
    UNUSED,
    ZERO,
    Want,
    cut,
    gradient_of,
    leaf,
    reached,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.nn.utils import parametrizations, prune
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function_unary,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import gradtrace

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

Tensors = Mapping[str, Any]
Program = Callable[[Log], Tensors]


def check(
    program: Program,
    wanted: Mapping[str, Want],
    *,
    grads: bool = True,
    recording: Callable[[], Any] = gradtrace.record,
) -> gradtrace.Trace:
    """Fail unless a program runs as ever under a recording, and all verdicts on it are right.

    Args:
        program: Returns its tensors by name.
        wanted: What is right, by name; a name that ends in "*" stands for all that begin so. What
            is not named here is held against its `.grad` alone.
        grads: Whether `.grad` at the end shows what arrived at the leaves.
        recording: Makes the context.
    """
    kept: dict[str, Any] = {}

    def keeping(log: Log) -> Tensors:
        kept.clear()
        kept.update(program(log))
        return kept

    seen = oracle.check_transparent(keeping, recording)
    assert seen.error is None, seen.raised
    assert seen.trace is not None
    wrong = []
    for name, tensor in kept.items():
        right = wanted.get(name) or next(
            (each for key, each in wanted.items() if key[-1] == "*" and name.startswith(key[:-1])),
            None,
        )
        if right is not None:
            found = programs.faults(program, seen.trace, tensor, right, grads=grads)
            wrong += [f"{name}: {text}" for text in found]
        elif tensor.is_leaf:
            wrong += oracle.verdict_faults({name: tensor}, seen.trace)
    assert not wrong, "\n".join([*wrong, "", seen.trace.summary()])
    assert set(map(str.strip, wanted)) <= {"*", *kept} | {k for k in wanted if k[-1] == "*"}
    return seen.trace


def regime(*, grads: bool = True, **wanted: Want) -> Callable[[Program], Callable[[], None]]:
    """Make a test of a program: it runs as ever, and these verdicts on its tensors are right."""

    def decorate(program: Program) -> Callable[[], None]:
        def test() -> None:
            check(program, wanted, grads=grads)

        test.__name__, test.__doc__ = program.__name__, program.__doc__
        return test

    return decorate


def parameters(model: nn.Module) -> dict[str, Any]:
    """Return a model's parameters by name."""
    return dict(model.named_parameters())


def mlp() -> nn.Sequential:
    """Return a small model."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


# -- compiled code ---------------------------------------------------------------------------------


def compiled_loss(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a loss in which one leaf is cut, and one has a cut beside a way."""
    hidden = (x @ w).sin()
    factor = (c * 2).detach()
    return (hidden * hidden.detach()).mean() + (F.gelu(hidden + b) * factor).sum()


COMPILED = {
    "w": reached(detach="hidden.detach()"),
    "b": REACHED,
    "c": cut(detach="(c * 2).detach()"),
}


@pytest.fixture(params=["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def counter(request: pytest.FixtureRequest) -> Any:
    """Count what a backend of torch.compile is given and how often that is run."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    return CompileCounterWithBackend(request.param)


def _leaves() -> dict[str, Tensor]:
    return {
        "w": torch.randn(4, 4, requires_grad=True),
        "b": torch.randn(4, requires_grad=True),
        "c": torch.randn(4, requires_grad=True),
    }


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _compiled_step(function: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    leaves = _leaves()
    loss = function(torch.randn(2, 4), **leaves)
    loss.backward()
    return loss.detach(), leaves


def _same_step(one: tuple[Tensor, Tensors], other: tuple[Tensor, Tensors]) -> None:
    assert _close(one[0], other[0])
    for name, tensor in one[1].items():
        right = other[1][name].grad
        assert (tensor.grad is None) is (right is None)
        assert right is None or _close(tensor.grad, right)


def _wrong(trace: gradtrace.Trace, leaves: Tensors, wanted: Mapping[str, Want]) -> list[str]:
    return [
        text
        for name, right in wanted.items()
        for text in programs.faults(compiled_loss, trace, leaves[name], right, grads=True)
    ]


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # in inductor
def test_compiled_before(counter: Any) -> None:
    """What was compiled before is seen into while recorded, and runs compiled again behind."""
    function = torch.compile(compiled_loss, backend=counter)
    before = _compiled_step(function)
    assert counter.frame_count == 1
    with gradtrace.record() as trace:
        recorded = _compiled_step(function)
    assert not _wrong(trace, recorded[1], COMPILED)
    _same_step(recorded, _compiled_step(compiled_loss))
    _same_step(before, _compiled_step(function))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # in inductor
def test_compiled_inside(counter: Any) -> None:
    """What is compiled inside is seen into, and is compiled when it runs behind the block."""
    with gradtrace.record() as trace:
        function = torch.compile(compiled_loss, backend=counter)
        recorded = _compiled_step(function)
    assert not _wrong(trace, recorded[1], COMPILED)
    assert counter.frame_count == 0
    _same_step(recorded, _compiled_step(function))
    assert counter.frame_count == 1


STANCES = ["default", "fail_on_recompile", "eager_on_recompile", "force_eager"]


@pytest.mark.parametrize("stance", STANCES)
@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_stances_that_forbid_eager(stance: str, place: str, fullgraph: bool) -> None:
    """Whatever stance the program has chosen, a compiled function is seen into and never traced."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    function = torch.compile(compiled_loss, backend=counter, fullgraph=fullgraph)
    _compiled_step(function)
    chosen = torch.compiler.set_stance(stance) if place == "outside" else contextlib.nullcontext()
    with chosen, gradtrace.record() as trace:
        context = torch.compiler.set_stance(stance)
        with context if place == "inside" else contextlib.nullcontext():
            recorded = _compiled_step(function)
    assert not _wrong(trace, recorded[1], COMPILED)
    _same_step(recorded, _compiled_step(compiled_loss))
    torch.compiler.set_stance("default")
    _compiled_step(function)
    assert counter.frame_count == 1


def test_a_stance_that_is_chosen_inside_stays_on() -> None:
    """A stance that is set inside the block and not put back is on behind it."""
    from torch._dynamo import eval_frame

    try:
        with gradtrace.record():
            torch.compiler.set_stance("eager_on_recompile")
            with gradtrace.record(), torch.compiler.set_stance("fail_on_recompile"):
                pass
        assert eval_frame._stance.stance == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")
    assert eval_frame._stance.stance == "default"


_FIRST_COMPILED = """
    import sys, warnings
    warnings.simplefilter("error")
    import torch
    from torch import compile, nn
    import gradtrace

    assert "torch._dynamo" not in sys.modules

    def loss(w, b):
        hidden = w.sin()
        return (hidden * b.detach()).sum()

    def compiled(how):
        if how == "imported name":
            return compile(loss, backend="eager")
        if how == "attribute":
            return torch.compile(loss, backend="eager")
        if how == "decorator":
            return compile(backend="eager")(loss)
        if how == "optimize":
            from torch import _dynamo
            return _dynamo.optimize("eager")(loss)
        class Loss(nn.Module):
            def forward(self, w, b):
                return loss(w, b)
        module = Loss()
        module.compile(backend="eager")
        return module

    w, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    plain, other = w.detach().requires_grad_(), b.detach().requires_grad_()
    loss(plain, other).backward()
    with gradtrace.record() as trace:
        function = compiled(sys.argv[1])
        value = function(w, b)
        value.backward()
    assert torch.equal(value, loss(plain, other)) and torch.equal(w.grad, plain.grad)
    assert [str(trace.explain(x).status) for x in (w, b)] == ["reached", "cut"], trace.summary()
    seen = [op.op for op in trace.ops if op.location.function == "loss"]
    assert seen == ["sin", "detach", "mul", "sum"], trace.ops
    assert not trace.graph.graph["troubles"]
    assert not [each for each in sys.meta_path if "gradtrace" in type(each).__module__]
    from torch._dynamo import eval_frame
    assert eval_frame._stance.stance == "default"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    function(w, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["imported name", "attribute", "decorator", "optimize", "module"])
def test_compiling_for_the_first_time_in_a_process(how: str) -> None:
    """Where dynamo is loaded only inside the recording, by whatever name, nothing is traced."""
    _in_a_process(_FIRST_COMPILED, how)


def test_compiling_an_imported_name_for_the_first_time() -> None:
    """A `compile` imported by name before dynamo was loaded is no way round the recording."""
    _in_a_process(_FIRST_COMPILED, "imported name")


def _in_a_process(code: str, *arguments: str) -> str:
    root = pathlib.Path(gradtrace.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _branch(x: Tensor, y: Tensor) -> Tensor:
    return (x * y.detach()).sin()


def _other_branch(x: Tensor, y: Tensor) -> Tensor:
    return (x * y.detach()).cos()


@regime(x=REACHED, c=REACHED, d=UNUSED)  # y: zeros, or cut in torch 2.6
def test_conditional_operator(log: Log) -> Tensors:
    """`torch.cond` is one op; what its branches met by closure is an input of it."""
    x, y, c, d = leaf(1, 2), leaf(3, 4), leaf(5, 6), leaf(7, 8)
    one = torch.cond(torch.tensor(True), _branch, _other_branch, (x, y))
    other = torch.cond(torch.tensor(False), lambda a: a.sin(), lambda a: (a * c).cos(), (x,))
    (one + other).sum().backward()
    return {"x": x, "y": y, "c": c, "d": d}


def test_the_conditional_operator_is_one_op() -> None:
    """The graph shows one op by the name that the program called, at the line that did."""
    x = leaf(1, 2)
    with gradtrace.record() as trace:
        torch.cond(
            torch.tensor(True), lambda a: a.sin() * 2, lambda a: a.cos(), (x,)
        ).sum().backward()
    ops = {op.op: op for op in trace.ops if op.location and op.location.file == __file__}
    assert set(ops) == {"cond", "sum"}
    assert (len(trace.leaves), len(trace.backward_passes)) == (1, 1)  # nothing of the tracing


@pytest.mark.skipif(TORCH <= (2, 6), reason="scan has no derivative there")
@regime(xs=REACHED, factor=REACHED, init=REACHED)
def test_scans_and_maps(log: Log) -> Tensors:
    """`scan` and `map` are one op each, whose gradients are seen at the edges."""
    from torch._higher_order_ops.map import map as mapped
    from torch._higher_order_ops.scan import scan

    xs, factor, init = leaf(1, 2, 3), leaf(2), leaf(1)
    carry, ys = scan(lambda c, x: (c + x, c * x), init, xs.reshape(3, 1))
    doubled = mapped(lambda x, f: x * f, xs.reshape(3, 1), factor)
    (carry.sum() + ys.sum() + doubled.sum()).backward()
    return {"xs": xs, "factor": factor, "init": init}


# -- scripted and traced code ----------------------------------------------------------------------


def scriptable(x: Tensor, y: Tensor) -> Tensor:
    """Return something that TorchScript can make, and that gives one of its inputs no gradient."""
    return (x * y.detach()).sin()


class Scriptable(nn.Module):
    """A module that detaches one of its two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(2))
        self.stopped = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by both."""
        return x * self.used * self.stopped.detach()


@functools.cache
def _scripted(how: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are deprecated
        if how == "script":
            return torch.jit.script(scriptable), torch.jit.script(Scriptable())
        example = torch.ones(2), torch.ones(2)
        return torch.jit.trace(scriptable, example), torch.jit.trace(Scriptable(), example[:1])


@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript(how: str) -> None:
    """What is scripted or traced is one op; gradients are seen at its edges."""

    def program(log: Log) -> Tensors:
        function, module = _scripted(how)
        for parameter in module.parameters():
            parameter.grad = None
        x, y, z = leaf(1, 2), leaf(3, 4), leaf(5, 6)
        hidden = function(x * 2, y)
        (module(hidden + z).sum()).backward()
        return {"x": x, "y": y, "z": z, **parameters(module)}

    stopped = {
        "y": cut(no_gradient="function(x * 2, y)"),
        "stopped": cut(no_gradient="module(hidden + z)"),
    }
    trace = check(program, {"x": REACHED, "z": REACHED, "used": REACHED, **stopped})
    assert [op.op for op in trace.ops if op.op in ("sin", "mul", "add", "sum")] == [
        "mul",
        "add",
        "sum",
    ]


# -- function transforms ---------------------------------------------------------------------------


@regime(x=REACHED, y=cut(detach="y.detach()"), z=UNUSED)
def test_functional_gradient(log: Log) -> Tensors:
    """`torch.func.grad` inside a loss: a second derivative arrives, a detach inside is a cut."""
    x, y, z = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    gradient = torch.func.grad(lambda a: (a.sin() * y.detach()).sum())(x)
    log(gradient.detach())
    gradient.sum().backward()
    return {"x": x, "y": y, "z": z}


@regime(x=REACHED, w=REACHED, b=cut(detach="b.detach()"))
def test_vmap_over_what_is_captured(log: Log) -> Tensors:
    """`vmap` reaches what it maps over and what it met by closure."""
    x, w, b = torch.randn(3, 2, requires_grad=True), leaf(1, 2), leaf(3, 4)
    torch.func.vmap(lambda row: row * (w * b.detach()))(x).sin().sum().backward()
    return {"x": x, "w": w, "b": b}


@regime(x=REACHED, t=REACHED)
def test_functional_jvp(log: Log) -> Tensors:
    """`jvp` in a loss reaches the point and the direction."""
    x, t = leaf(1, 2), leaf(3, 4)
    _, moved = torch.func.jvp(lambda a: a.sin(), (x,), (t,))
    moved.sum().backward()
    return {"x": x, "t": t}


@regime(x=REACHED, v=REACHED, c=REACHED)
def test_functional_vjp(log: Log) -> Tensors:
    """`vjp` in a loss reaches the point, the vector, and what was met by closure."""
    x, v, c = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    out, pull = torch.func.vjp(lambda a: (a * c).sin(), x)
    (pull(v)[0].sum() + out.sum()).backward()
    return {"x": x, "v": v, "c": c}


@regime(x=REACHED, c=REACHED, d=cut(no_grad="d * 2"))
def test_functional_hessian(log: Log) -> Tensors:
    """`hessian` in a loss gives a third derivative."""
    x, c, d = leaf(1, 2), leaf(5, 6), leaf(1, 1)
    with torch.no_grad():
        factor = d * 2
    matrix = torch.func.hessian(lambda a: (a.pow(4) * c * factor).sum())(x)
    matrix.sum().backward()
    return {"x": x, "c": c, "d": d}


@regime(**{"a.*": REACHED, "b.*": UNUSED})
def test_functional_call(log: Log) -> Tensors:
    """`functional_call` reaches the parameters it was given, and its own are unused."""
    own, given = nn.Linear(2, 2), nn.Linear(2, 2)
    out = torch.func.functional_call(own, dict(given.named_parameters()), (torch.ones(1, 2),))
    out.square().sum().backward()
    a = {f"a.{name}": each for name, each in given.named_parameters()}
    return a | {f"b.{name}": each for name, each in own.named_parameters()}


@regime(w=REACHED, frozen=FROZEN)
def test_per_sample_gradients(log: Log) -> Tensors:
    """`vmap(grad(...))`, whose result is no backward pass of its own, feeds an ordinary loss."""
    w, frozen = torch.randn(3, requires_grad=True), torch.ones(3)
    xs = torch.randn(4, 3)
    each = torch.func.vmap(
        torch.func.grad(lambda v, x: ((v * x).sum() ** 2) * frozen.sum()), (None, 0)
    )
    (each(w, xs).norm() + w.sum()).backward()
    return {"w": w, "frozen": frozen}


@regime(x=reached(detach="torch.func.grad(lambda a: a.sin().sum())(x).detach()"))
def test_a_functional_gradient_that_is_detached(log: Log) -> Tensors:
    """A gradient by `torch.func` that is detached leaves the other way as it is."""
    x = leaf(1, 2)
    step = torch.func.grad(lambda a: a.sin().sum())(x).detach()
    (x * step).sum().backward()
    return {"x": x}


# -- checkpointing ---------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A block that draws random numbers and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.idle = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, factor: Tensor | None = None) -> Tensor:
        """Multiply, drop some, and add."""
        hidden = F.dropout(self.linear(x), 0.5) * self.scale
        return hidden if factor is None else hidden * factor


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool, preserve: bool) -> None:
    """Both kinds of checkpointing reach what their blocks own, and keep the random state or not."""

    def program(log: Log) -> Tensors:
        model, x, factor = Noisy(), torch.randn(3, 4, requires_grad=True), leaf(1, 2, 3, 4)
        kwargs = {} if reentrant else {"factor": factor}
        out = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=preserve, **kwargs)
        log(torch.rand(2))
        out.square().sum().backward()
        return {"x": x, "factor": factor, **parameters(model)}

    factor = UNUSED if reentrant else REACHED
    check(
        program,
        {"x": REACHED, "factor": factor, "idle": UNUSED, "linear*": REACHED, "scale": REACHED},
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@regime(**{"linear*": cut(no_grad="checkpoint(model, x, use_reentrant=True)"), "head*": REACHED})
def test_reentrant_checkpoint_of_data_alone(log: Log) -> Tensors:
    """Re-entrant checkpointing of data cuts what its block owns, and the line is named."""
    model, head, x = Noisy(), nn.Linear(4, 1), torch.randn(3, 4)
    hidden = checkpoint(model, x, use_reentrant=True)
    head(hidden).sum().backward()
    heads = {f"head.{name}": each for name, each in head.named_parameters()}
    return {"x": x, **parameters(model), **heads}


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_nested_checkpoints(outer: bool, inner: bool) -> None:
    """Checkpoints in checkpoints, of whatever kind, reach everything that autograd reaches."""

    def program(log: Log) -> Tensors:
        first, second, x = Noisy(), Noisy(), torch.randn(3, 4, requires_grad=True)

        def both(x: Tensor) -> Tensor:
            return checkpoint(second, first(x).tanh(), use_reentrant=inner)

        checkpoint(both, x, use_reentrant=outer).square().sum().backward()
        seconds = {f"second.{name}": each for name, each in second.named_parameters()}
        return {"x": x, **{f"first.{n}": p for n, p in first.named_parameters()}, **seconds}

    used = {
        f"{which}.{what}": REACHED for which in ("first", "second") for what in ("linear*", "scale")
    }
    check(program, {"x": REACHED, "first.idle": UNUSED, "second.idle": UNUSED, **used})


def test_a_leaf_in_a_pass_and_in_the_pass_inside() -> None:
    """A gradient that arrives in a pass inside a pass counts once, and each with its own norm."""
    w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with gradtrace.record() as trace:
        out = checkpoint(lambda a: a * w * 3, x, use_reentrant=True) + w * 4
        out.sum().backward()
    norms = sorted((each.backward_pass, each.norm) for each in trace.explain(w).gradients)
    assert [(index, round(norm / 2**0.5, 3)) for index, norm in norms] == [(0, 4.0), (1, 3.0)]


@regime(
    **{
        "linear*": REACHED,
        "scale": cut(detach="hidden.detach()"),
        "x": reached(detach="hidden.detach()"),
    }
)
def test_a_detach_inside_a_checkpoint(log: Log) -> Tensors:
    """A detach inside a block is a cut of what lies before it."""
    model, x = Noisy(), torch.randn(3, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        hidden = x * model.scale
        return model.linear(hidden.detach()) + x

    checkpoint(block, x, use_reentrant=False).square().sum().backward()
    return {"x": x, **parameters(model)}


# -- gradients of gradients, hooks -----------------------------------------------------------------


@regime(w=REACHED, x=REACHED)
def test_double_backward_through_a_penalty(log: Log) -> Tensors:
    """A penalty on a gradient reaches everything that the gradient depends on."""
    w, x = leaf(1, 2), leaf(3, 4)
    (gradient,) = torch.autograd.grad((w * x).sin().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return {"w": w, "x": x}


@regime(
    grads=False,
    w=REACHED,
    x=REACHED,
    z=cut(
        not_requested=(
            "torch.autograd.grad((w * x * z).sin().sum(), x, create_graph=True)",
            "penalty.backward(inputs=[w])",
        )
    ),
)
def test_double_backward_for_some(log: Log) -> Tensors:
    """What neither pass was asked for is cut; what one of them was asked for is reached."""
    w, x, z = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    (gradient,) = torch.autograd.grad((w * x * z).sin().sum(), x, create_graph=True)
    penalty = gradient.square().sum()
    penalty.backward(inputs=[w])
    return {"w": w, "x": x, "z": z}


@regime(w=ZERO, x=REACHED, y=NONFINITE, z=REACHED)
def test_hooks_that_change_gradients(log: Log) -> Tensors:
    """A status is that of the gradient that arrived, behind all hooks on the way."""
    w, x, y, z = leaf(1, 2), leaf(3, 4), leaf(5, 6), leaf(7, 8)
    w.register_hook(torch.zeros_like)
    x.register_hook(lambda gradient: gradient * 2)
    y.register_hook(lambda gradient: gradient / 0)
    hidden = (w * x * y).sin()
    hidden.register_hook(log)
    zeroed = z * 3
    zeroed.register_hook(lambda gradient: gradient * 0 + 1)
    (hidden + zeroed * 0).sum().backward()
    return {"w": w, "x": x, "y": y, "z": z}


@regime(w=ZERO, x=REACHED, v=ZERO)
def test_hooks_on_results_and_nodes_that_zero(log: Log) -> Tensors:
    """Gradients that a hook on a result, or a node's prehook, makes zero arrive as zeros."""
    w, x, v = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    hidden, other = w * 2, v * 2
    hidden.register_hook(torch.zeros_like)
    other.grad_fn.register_prehook(lambda gradients: (torch.zeros_like(gradients[0]),))
    (hidden + other + x).sum().backward()
    return {"w": w, "x": x, "v": v}


@regime(grads=False, w=REACHED)
def test_a_hook_that_clears_behind_the_arrival(log: Log) -> Tensors:
    """An optimizer in a post-accumulate hook takes the gradient away; it did arrive."""
    w = leaf(1, 2)

    def step(parameter: Tensor) -> None:
        log(parameter.grad)
        with torch.no_grad():
            parameter -= 0.1 * gradient_of(parameter)
        parameter.grad = None

    w.register_post_accumulate_grad_hook(step)
    (w * 3).sum().backward()
    return {"w": w}


@regime(**{"0*": ZERO, "2*": REACHED})
def test_module_hooks_that_zero(log: Log) -> Tensors:
    """A full backward hook that zeroes what it passes on."""
    model = mlp()
    model[1].register_full_backward_hook(lambda module, into, out: (torch.zeros_like(into[0]),))
    model(torch.randn(2, 4)).square().sum().backward()
    return parameters(model)


# -- mixed precision -------------------------------------------------------------------------------


@regime(**{"0*": REACHED, "2*": REACHED})
def test_autocast(log: Log) -> Tensors:
    """Under autocast everything is reached, also what is cast once and used twice."""
    model = mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(2, 4)) + model(torch.randn(2, 4))
    out.float().square().sum().backward()
    return parameters(model)


@regime(**{"0*": NONFINITE, "2*": NONFINITE})
def test_a_scaled_step_that_overflows(log: Log) -> Tensors:
    """Where scaled gradients overflow the step is skipped, and the verdict is nonfinite."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = copy.deepcopy(model.state_dict())
    loss = model(torch.full((2, 4), 1e3)).square().sum() * 1e3
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    log(before, model.state_dict(), scaler.get_scale())
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    return parameters(model)


@regime(**{"0*": REACHED, "2*": REACHED})
def test_a_scaled_step(log: Log) -> Tensors:
    """Scaling, unscaling and clipping leave a step that is right and seen."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 4)).square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    log(model)
    return parameters(model)


# -- layers that are special -----------------------------------------------------------------------


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, enforce_sorted: bool) -> None:
    """Packed sequences through two directions and layers: all is reached, lengths are data."""

    def program(log: Log) -> Tensors:
        net = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5)
        x = torch.randn(2, 5, 3, requires_grad=True)
        h = torch.randn(4, 2, 4, requires_grad=True)
        lengths = torch.tensor([5, 3])
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=enforce_sorted
        )
        state = (h, torch.zeros(4, 2, 4)) if kind is nn.LSTM else h
        out, _ = net(packed, state)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        padded.square().sum().backward()
        return {"x": x, "h": h, **parameters(net)}

    check(program, {"*": REACHED})


@regime(**{"weight*": REACHED, "bias*": REACHED, "h": cut(detach="h.detach()"), "c": REACHED})
def test_an_lstm_whose_state_is_detached(log: Log) -> Tensors:
    """A state that is detached before the net is cut there."""
    net, h, c = nn.LSTM(3, 4), torch.randn(1, 2, 4, requires_grad=True), torch.randn(1, 2, 4)
    c.requires_grad_()
    out, _ = net(torch.randn(5, 2, 3), (h.detach(), c))
    out.sum().backward()
    return {"h": h, "c": c, **parameters(net)}


def _sdpa_backends() -> list[Any]:
    from torch.nn.attention import SDPBackend

    return [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize("backend", _sdpa_backends(), ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_backends(backend: Any, grouped: bool) -> None:
    """Each way of computing attention that a CPU has gives the same, and reaches all three."""
    from torch.nn.attention import sdpa_kernel

    if grouped and TORCH <= (2, 6):
        pytest.skip("no kernel takes fewer heads there")

    def program(log: Log) -> Tensors:
        q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
        if grouped:
            k, v = (each.detach()[:, :2].clone().requires_grad_() for each in (k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out.square().sum().backward()
        return {"q": q, "k": k, "v": v}

    check(program, {"*": REACHED})


@regime(q=REACHED, bias=REACHED, v=cut(detach="v.detach()"))
def test_attention_with_a_learned_bias(log: Log) -> Tensors:
    """A mask that is learned is reached."""
    q, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(2))
    bias = torch.randn(4, 4, requires_grad=True)
    F.scaled_dot_product_attention(q, q, v.detach(), attn_mask=bias).sum().backward()
    return {"q": q, "bias": bias, "v": v}


def test_the_fast_path_of_a_transformer() -> None:
    """In eval mode under no_grad a layer takes its fast path, as one op that is a cut."""

    def program(log: Log) -> Tensors:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        head = nn.Linear(8, 1)
        with torch.no_grad():
            hidden = layer(torch.randn(2, 3, 8))
        log(hidden)
        head(hidden).sum().backward()
        heads = {f"head.{name}": each for name, each in head.named_parameters()}
        return {**{f"layer.{n}": p for n, p in layer.named_parameters()}, **heads}

    trace = check(program, {"layer*": Want("cut", None), "head*": REACHED})
    assert {str(each.kind) for each in trace.cuts} == {"no_grad"}
    assert "_transformer_encoder_layer_fwd" in {op.op for op in trace.ops}


@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention(training: bool) -> None:
    """Multi-head attention in both modes reaches all that it owns."""

    def program(log: Log) -> Tensors:
        layer = nn.MultiheadAttention(8, 2, batch_first=True, bias=True).train(training)
        x = torch.randn(2, 3, 8, requires_grad=True)
        out, weights = layer(x, x, x)
        log(weights.detach())
        out.square().sum().backward()
        return {"x": x, **parameters(layer)}

    check(program, {"x": REACHED, "in_proj*": REACHED, "out_proj*": REACHED})


@regime(**{"parametrizations*": REACHED, "bias": REACHED})
def test_weight_norm(log: Log) -> Tensors:
    """Both parts of a normed weight are reached."""
    layer = parametrizations.weight_norm(nn.Linear(3, 2))
    layer(torch.randn(4, 3)).square().sum().backward()
    return parameters(layer)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@regime(weight_g=REACHED, weight_v=REACHED, bias=REACHED)
def test_old_weight_norm(log: Log) -> Tensors:
    """The older weight norm, which sets a plain attribute in a hook."""
    layer = nn.utils.weight_norm(nn.Linear(3, 2))
    layer(torch.randn(4, 3)).square().sum().backward()
    return parameters(layer)


@regime(**{"parametrizations*": Want("reached", None), "bias": REACHED})
def test_spectral_norm(log: Log) -> Tensors:
    """The original weight is reached; that the power iteration is not differentiated is told."""
    layer = parametrizations.spectral_norm(nn.Linear(3, 2))
    layer(torch.randn(4, 3)).square().sum().backward()
    return parameters(layer)


@regime(weight_orig=reached(no_grad=("layer(torch.randn(4, 3))",) * 2), bias=REACHED)
def test_old_spectral_norm(log: Log) -> Tensors:
    """The older spectral norm, which sets a plain attribute in a hook."""
    layer = nn.utils.spectral_norm(nn.Linear(3, 2))
    layer(torch.randn(4, 3)).square().sum().backward()
    return parameters(layer)


@regime(weight_orig=REACHED, bias_orig=ZERO)
def test_pruning(log: Log) -> Tensors:
    """A pruned parameter's original is reached through its mask; one wholly pruned gets zeros."""
    layer = nn.Linear(3, 2)
    prune.random_unstructured(layer, "weight", 0.5)
    prune.custom_from_mask(layer, "bias", torch.zeros(2))
    layer(torch.randn(4, 3)).square().sum().backward()
    return parameters(layer)


@regime(**{"*": REACHED})
def test_lazy_modules(log: Log) -> Tensors:
    """Parameters that are materialised inside the block are reached under their names."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    model(torch.randn(3, 5)).square().sum().backward()
    return parameters(model)


@regime(weight=REACHED, other=REACHED, idle=UNUSED)
def test_sparse_embeddings(log: Log) -> Tensors:
    """Sparse gradients arrive, also where one table is used twice."""
    table, bag, idle = (
        nn.Embedding(6, 2, sparse=True),
        nn.EmbeddingBag(6, 2, sparse=True),
        nn.Embedding(6, 2),
    )
    rows = table(torch.tensor([1, 2])) + table(torch.tensor([3, 3]))
    (rows.sum() + bag(torch.tensor([[0, 1]])).sum()).backward()
    return {"weight": table.weight, "other": bag.weight, "idle": idle.weight}


# -- tensors that are special ----------------------------------------------------------------------


@regime(z=REACHED, real=REACHED, angle=REACHED, stopped=cut(detach="stopped.conj().detach()"))
def test_complex_tensors(log: Log) -> Tensors:
    """Complex leaves, views as real, and polar coordinates are reached; conj of one is a view."""
    z = torch.randn(2, dtype=torch.cfloat, requires_grad=True)
    real = torch.randn(2, 2, requires_grad=True)
    stopped = torch.randn(2, dtype=torch.cfloat, requires_grad=True)
    angle = leaf(0.5, 1)
    made = torch.view_as_complex(real) * z.conj() + torch.polar(torch.ones(2), angle)
    (made * stopped.conj().detach()).abs().sum().backward()
    return {"z": z, "real": real, "angle": angle, "stopped": stopped}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors(layout: Any) -> None:
    """Tensors are reached through nested ones of both layouts."""

    def program(log: Log) -> Tensors:
        a, b = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        linear, stopped = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
        nested = torch.nested.as_nested_tensor([a, b, stopped.detach()], layout=layout)
        out = linear(nested)
        parts = out.unbind()
        (parts[0].sum() + parts[1].square().sum() + parts[2].sum()).backward()
        return {"a": a, "b": b, "stopped": stopped, **parameters(linear)}

    stopped = cut(detach="stopped.detach()")
    check(
        program,
        {"a": REACHED, "b": REACHED, "stopped": stopped, "weight": REACHED, "bias": REACHED},
    )


class Logged(Tensor):
    """A tensor whose class looks at every function that takes it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the name, and go on."""
        cls.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


@regime(x=REACHED, y=cut(detach="y.detach()"), p=REACHED)
def test_a_subclass_with_its_own_functions(log: Log) -> Tensors:
    """A subclass's handler is called as often as ever, and what it wraps has its verdict."""
    Logged.seen.clear()
    x, y, p = leaf(1, 2), leaf(3, 4), nn.Parameter(torch.ones(2).as_subclass(Logged))
    out = (x.as_subclass(Logged) * y.detach()).sin() + p * 2
    out.sum().backward()
    log(Logged.seen)
    return {"x": x, "y": y, "p": p}


class Wrapper(Tensor):
    """A tensor that holds another one, whose ops pass by its own dispatch."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> Wrapper:
        """Make one of the same shape around a tensor."""
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, requires_grad=requires_grad
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Unwrap, call, and wrap again."""
        plain = tree_map_only(Wrapper, lambda each: each.held, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*plain[0], **plain[1]))


def test_a_subclass_with_its_own_dispatch() -> None:
    """Leaves of a wrapper class get the verdicts that their `.grad` shows."""
    kept: list[Wrapper] = []

    def program(log: Log) -> Any:
        kept[:] = [Wrapper(torch.ones(2) + at, requires_grad=True) for at in range(3)]
        x, y, _ = kept
        ((x * 2).sin() * y.detach()).sum().backward()
        log(x.grad.held)
        return x.grad.held

    trace = oracle.check_transparent(program).trace
    assert trace is not None
    assert [str(trace.explain(each).status) for each in kept] == ["reached", "cut", "unused"]
    assert [str(each.kind) for each in trace.explain(kept[1]).cuts] == ["detach"]


@regime(grads=False, x=REACHED, y=cut(detach="y.detach()"))
def test_meta_tensors(log: Log) -> Tensors:
    """Tensors without values are followed all the same."""
    x, y = (torch.ones(2, device="meta", requires_grad=True) for _ in range(2))
    (x * y.detach()).sum().backward()
    return {"x": x, "y": y}


@pytest.mark.parametrize("place", ["inside", "around"])
def test_fake_tensors(place: str) -> None:
    """Tensors that only know their shapes are followed all the same."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step(trace: gradtrace.Trace | None = None) -> list[Tensor]:
        x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
        model = mlp()
        ((x * y.detach()).sum() + model(torch.randn(2, 4)).sum()).backward()
        return [x, y, *model.parameters()]

    with contextlib.ExitStack() as stack:
        if place == "around":
            stack.enter_context(FakeTensorMode())
        trace = stack.enter_context(gradtrace.record())
        if place == "inside":
            stack.enter_context(FakeTensorMode())
        x, y, *rest = step()
    assert not trace.graph.graph["troubles"]
    assert (x.grad is not None, y.grad is None) == (True, True)
    assert [str(trace.explain(each).status) for each in (x, y)] == ["reached", "cut"]
    assert {str(trace.explain(each).status) for each in rest} == {"reached"}


# -- other modes and observers ---------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Notes every op below autograd."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the name, and go on."""
        self._log(str(func))
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    """Notes every function."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the name, and go on."""
        self._log(getattr(func, "__name__", ""))
        return func(*args, **kwargs or {})


def _anomalies(log: Log) -> Any:
    return torch.autograd.detect_anomaly(check_nan=False)


def _flops(log: Log) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    @contextlib.contextmanager
    def counting() -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        log(counter.get_total_flops())

    return counting()


def _debugging(log: Log) -> Any:
    from torch.utils._debug_mode import DebugMode

    @contextlib.contextmanager
    def debugging() -> Iterator[None]:
        with DebugMode() as mode:
            yield
        log(mode.debug_string())

    return debugging()


def _profiling(log: Log) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, acc_events=True)


MODES: dict[str, Callable[[Log], Any]] = {
    "device": lambda log: torch.device("cpu"),
    "debug": _debugging,
    "flops": _flops,
    "profiler": _profiling,
    "anomaly": _anomalies,
    "dispatch": Ops,
    "function": Functions,
    "emit": lambda log: torch.autograd.profiler.record_function("part"),
    "deterministic": lambda log: torch.random.fork_rng(),
    "saved on cpu": lambda log: torch.autograd.graph.save_on_cpu(),
    "multithreading off": lambda log: torch.autograd.set_multithreading_enabled(False),
}
if importlib.util.find_spec("torch.utils._debug_mode") is None:
    del MODES["debug"]  # torch 2.6


FUNCTION_MODES = {"device", "function", "debug"}  # left in the order of our own stack


def _mixed_step(log: Log) -> dict[str, Any]:
    model, stopped = mlp(), leaf(1, 2)
    out = model(torch.randn(3, 4)) * stopped.detach()
    F.gumbel_softmax(out, hard=True).square().sum().backward()
    return {"stopped": stopped, **parameters(model)}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *itertools.product(MODES, ["inside", "around"]),
        *itertools.product(sorted(MODES.keys() - FUNCTION_MODES), ["ends inside", "begins inside"]),
    ],
)
def test_modes_active_at_the_same_time(name: str, place: str) -> None:
    """What else observes sees the same, and the verdicts are the same, whoever came first."""
    traces: list[Any] = []
    kept: dict[str, Any] = {}

    def program(log: Log, *, recorded: bool) -> Tensors:
        recording = gradtrace.record() if recorded else contextlib.nullcontext()
        mode = MODES[name](log)
        ours_first = place in ("inside", "begins inside")
        first, second = (recording, mode) if ours_first else (mode, recording)
        with contextlib.ExitStack() as left_last, contextlib.ExitStack() as left_first:
            stacks = [left_last, left_first]
            if place in ("begins inside", "ends inside"):
                stacks.reverse()
            entered = [
                s.enter_context(each) for s, each in zip(stacks, (first, second), strict=True)
            ]
            kept.clear()
            kept.update(_mixed_step(log))
        traces[:] = [each for each in entered if isinstance(each, gradtrace.Trace)]
        return kept

    oracle.run(functools.partial(program, recorded=False))  # what is done once for a process
    plain = oracle.run(functools.partial(program, recorded=False))
    recorded = oracle.run(functools.partial(program, recorded=True))
    found = oracle.differences(plain, recorded)
    assert not found, "\n".join(found)
    (trace,) = traces
    assert not trace.graph.graph["troubles"]
    assert not oracle.verdict_faults(kept, trace)
    assert [str(each.kind) for each in trace.explain(kept["stopped"]).cuts] == ["detach"]
    inside = {str(each.kind) for each in trace.explain(kept["0.weight"]).cuts}  # gumbel_softmax
    opaque = name == "function" and place == "around"  # the mode there would miss the function
    assert inside == (set() if opaque else {"detach", "non_differentiable"})


# -- processes, threads, coroutines ----------------------------------------------------------------


def _loaded_step(log: Log, method: str) -> Tensors:
    model = mlp()
    loader = torch.utils.data.DataLoader(
        Noise(), batch_size=4, num_workers=2, multiprocessing_context=method
    )
    for batch in loader:
        log(batch)
        model(batch).square().sum().backward()
    return parameters(model)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_by_fork() -> None:
    """Workers that are forked give the same data, and leave the recording alone."""
    check(lambda log: _loaded_step(log, "fork"), {"*": REACHED})


@pytest.mark.long
def test_workers_by_spawn() -> None:
    """Workers that are spawned give the same data."""
    check(lambda log: _loaded_step(log, "spawn"), {"*": REACHED})


def _train_shared(rank: int, model: nn.Module) -> None:
    assert not torch._C._len_torch_function_stack()
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.long
def test_training_in_spawned_processes() -> None:
    """A shared model that another process trains meanwhile comes out the same."""

    def program(log: Log) -> Tensors:
        model = mlp()
        model.share_memory()
        torch.multiprocessing.spawn(_train_shared, args=(model,), nprocs=1)
        log(model)
        model(torch.randn(3, 4)).square().sum().backward()
        log([p.is_shared() for p in model.parameters()])
        return parameters(model)

    check(program, {"*": REACHED})


def _in_thread(work: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_backward_in_another_thread() -> None:
    """A pass that another thread starts is not observed: nothing is claimed that it would belie."""

    def program(log: Log) -> Tensors:
        model, idle = mlp(), leaf(1, 2)
        loss = model(torch.randn(3, 4)).square().sum() + (idle * 0).detach().sum()
        _in_thread(loss.backward)
        return {**parameters(model), "idle": idle}

    trace = check(program, {"idle": Want("unknown", None), "*": REACHED})
    assert [done.observed for done in trace.backward_passes] == [False]


@regime(w=REACHED, x=Want("unknown", None))
def test_forward_in_another_thread(log: Log) -> Tensors:
    """What another thread computed is met by its graph; leaves on no edge of it stay unknown."""
    w, x = leaf(1, 2), leaf(3, 4)
    hidden = _in_thread(lambda: (w * x.detach()) ** 2)
    hidden.sum().backward()
    return {"w": w, "x": x}


def _parallel_apply(modules: list[nn.Module], inputs: list[Tensor]) -> list[Tensor]:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: pair[0](pair[1]), zip(modules, inputs, strict=True)))


@regime(**{"*": REACHED})
def test_a_pool_of_threads_inside(log: Log) -> Tensors:
    """Replicas that run in threads are reached by a pass of the recording's own thread."""
    model = mlp()
    outs = _parallel_apply([model, model], [torch.randn(2, 4), torch.randn(3, 4)])
    torch.cat(outs).square().sum().backward()
    return parameters(model)


def test_hogwild() -> None:
    """Threads that train one model each see to their own recordings; the main one to its own."""
    model = nn.Linear(4, 2)  # its backward reads no weight, which another thread may write to
    traces: list[gradtrace.Trace] = []

    def train() -> None:
        with gradtrace.record(model) as trace:
            for _ in range(5):
                model(torch.ones(1, 4)).sum().backward()
                torch.optim.SGD(model.parameters(), lr=1e-3).step()
        traces.append(trace)

    with gradtrace.record(model) as own:
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        model(torch.ones(1, 4)).sum().backward()
        for thread in threads:
            thread.join()
    assert len(traces) == 3
    for trace in (own, *traces):
        assert not trace.graph.graph["troubles"]
        seen = [each.backward_pass for each in trace.gradients if each.leaf == "weight"]
        assert len(seen) == len(set(seen))  # no pass of another thread counts as one's own
        assert {str(each.status) for each in trace.leaves} == {"reached"}


def test_a_coroutine_between_others() -> None:
    """Ops of other coroutines, run while one that records waits, are recorded like its own."""

    async def other(x: Tensor, turns: int) -> None:
        for _ in range(turns):
            (x * 2).sum().backward()
            await asyncio.sleep(0)

    async def recording(w: Tensor, b: Tensor) -> gradtrace.Trace:
        with gradtrace.record() as trace:
            loss = (w * b.detach()).sum()
            await asyncio.sleep(0)
            loss.backward()
            await asyncio.sleep(0)
        return trace

    async def main(w: Tensor, b: Tensor, x: Tensor) -> gradtrace.Trace:
        return (await asyncio.gather(recording(w, b), other(x, 4)))[0]

    w, b, x = leaf(1, 2), leaf(3, 4), leaf(5, 6)
    trace = asyncio.run(main(w, b, x))
    assert not oracle.verdict_faults({"w": w, "b": b, "x": x}, trace)
    assert [str(cut.kind) for cut in trace.explain(b).cuts] == ["detach"]
    assert torch.equal(gradient_of(x), torch.full((2,), 8.0))


def test_recordings_of_two_tasks_that_end_out_of_order() -> None:
    """Two tasks that record end in the order in which they began, and each saw its own."""

    async def task(w: Tensor, started: asyncio.Event, wait: asyncio.Event) -> gradtrace.Trace:
        with gradtrace.record() as trace:
            (w * 2).sum().backward()
            started.set()
            await wait.wait()
            (w * 3).sum().backward()
        return trace

    async def main() -> list[gradtrace.Trace]:
        first, second = asyncio.Event(), asyncio.Event()
        release = asyncio.Event()
        one = asyncio.create_task(task(w, first, second))
        await first.wait()
        two = asyncio.create_task(task(v, second, release))
        traces = [await one]
        release.set()
        return [*traces, await two]

    w, v = leaf(1, 2), leaf(3, 4)
    one, two = asyncio.run(main())
    assert one.explain(w).status == two.explain(v).status == "reached"
    assert len(two.explain(v).gradients) == 2
    assert not one.graph.graph["troubles"] + two.graph.graph["troubles"]


@regime(w=REACHED, b=cut(detach=("b.detach()", "b.detach()")))
def test_generators_that_wait(log: Log) -> Tensors:
    """A generator that is suspended inside no_grad leaves the mode as it would."""

    def batches() -> Iterator[Tensor]:
        for factor in (1.0, 2.0):
            yield (w * factor) * b.detach()

    w, b = leaf(1, 2), leaf(3, 4)
    waiting = batches()
    first = next(waiting)
    (first.sum() + next(waiting).sum()).backward()
    return {"w": w, "b": b}


# -- copies and files ------------------------------------------------------------------------------


class _Copied:
    """Ways to copy a model, each of which gives one that is whole."""

    @staticmethod
    def pickled(model: nn.Module) -> Any:
        """Through pickle."""
        return pickle.loads(pickle.dumps(model))

    @staticmethod
    def saved(model: nn.Module) -> Any:
        """Through a file of torch's."""
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    @staticmethod
    def loaded(model: nn.Module) -> Any:
        """Through a state dictionary that is loaded with weights only."""
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        made = mlp()
        made.load_state_dict(torch.load(buffer, weights_only=True))
        return made


COPIES: list[Callable[[nn.Module], Any]] = [
    copy.deepcopy,
    _Copied.pickled,
    _Copied.saved,
    _Copied.loaded,
]


@pytest.mark.parametrize("copied", COPIES, ids=lambda each: each.__name__)
def test_copies_of_a_model_that_is_recorded(copied: Callable[[nn.Module], Any]) -> None:
    """A copy that is made before or after a pass is equal, clean, and has a verdict of its own."""
    made: list[nn.Module] = []

    def program(log: Log) -> Tensors:
        model = mlp()
        model(torch.randn(2, 4)).sum().backward()
        early = copied(model)
        model.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        late = copied(model)
        late.zero_grad()
        early.zero_grad()
        early(torch.randn(2, 4)).square().sum().backward()
        made[:] = [early, late]
        log(early, late, [vars(p) for p in late.parameters()])
        named = {"model": model, "early": early, "late": late}
        return {f"{k}.{name}": p for k, m in named.items() for name, p in m.named_parameters()}

    model = Want("reached", None)  # a deep copy that is trained is a cut
    trace = check(program, {"model*": model, "early*": REACHED, "late*": UNUSED})
    kinds = {str(each.kind) for each in trace.cuts}
    assert kinds == ({"copy"} if copied is copy.deepcopy else set())
    for parameter in (p for each in made for p in each.parameters()):
        assert parameter._post_accumulate_grad_hooks is None
        assert not parameter._backward_hooks


def test_no_trace_of_ours_in_a_pickle() -> None:
    """What is pickled or saved while recorded is byte for byte what it is without."""

    def bytes_of(model: nn.Module) -> tuple[bytes, bytes]:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        return pickle.dumps(model), buffer.getvalue()

    torch.manual_seed(0)
    model = mlp()
    model.register_forward_hook(_keeps_output)
    model[0].weight.register_post_accumulate_grad_hook(_keeps_parameter)
    model(torch.ones(2, 4)).sum().backward()
    plain = bytes_of(model)
    with gradtrace.record(model):
        model.zero_grad(set_to_none=False)
        model(torch.ones(2, 4)).sum().backward()
        recorded = bytes_of(model)
    assert b"gradtrace" not in recorded[0] + recorded[1]
    assert recorded[0] == plain[0]
    assert len(recorded[1]) == len(plain[1])


def _keeps_output(module: nn.Module, given: Any, output: Any) -> None:
    pass


def _keeps_parameter(parameter: Tensor) -> None:
    pass


# -- optimizers and averages -----------------------------------------------------------------------


def _optimizers() -> list[tuple[type[torch.optim.Optimizer], str]]:
    """Return every optimizer of torch with each way of stepping that it has."""
    kinds = [
        each
        for _, each in sorted(inspect.getmembers(torch.optim, inspect.isclass))
        if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    ]
    ways = [(kind, "default") for kind in kinds]
    for kind in kinds:
        takes = inspect.signature(kind).parameters
        ways += [(kind, way) for way in ("foreach", "fused", "maximize", "amsgrad") if way in takes]
    return ways


def _steps(log: Log, kind: Any, way: str) -> Tensors:
    sparse = issubclass(kind, torch.optim.SparseAdam)
    model: nn.Module = nn.Embedding(5, 2, sparse=True) if sparse else mlp()
    data = torch.tensor([0, 2, 2]) if sparse else torch.randn(3, 4)
    chosen = list(model.parameters())
    if kind.__name__ == "Muon":  # takes matrices only
        chosen = [each for each in chosen if each.dim() == 2]
    options = {} if way == "default" else {way: True}
    rate = 1e-5 if way == "maximize" else 0.01  # LBFGS climbs until no unit is left that learns
    optimizer = kind(chosen, **{"lr": rate, **options})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(data).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        log(optimizer.step(closure))
    log(optimizer.state_dict())
    return parameters(model)


@pytest.mark.parametrize(
    ("kind", "way"), _optimizers(), ids=lambda each: getattr(each, "__name__", each)
)
def test_every_optimizer(kind: Any, way: str) -> None:
    """Each optimizer makes the same steps in each of its ways, and writes are no cuts."""
    trace = check(lambda log: _steps(log, kind, way), {"*": REACHED})
    assert len(trace.backward_passes) >= 3


@pytest.mark.parametrize("zeroed", [True, False])
def test_cleared_gradients(zeroed: bool) -> None:
    """A gradient that the optimizer cleared afterwards did arrive."""

    def program(log: Log) -> Tensors:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=zeroed)
        log(model)
        return parameters(model)

    trace = check(program, {"*": REACHED}, grads=False)
    assert all(each.cleared is not None for each in trace.gradients)


@pytest.mark.parametrize("kind", ["swa", "ema", "lerp"])
def test_averaged_models(kind: str) -> None:
    """An average is written to under no_grad: the model is reached, and the average unused."""
    from torch.optim import swa_utils

    def program(log: Log) -> Tensors:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        functions: dict[str, Any] = {
            "swa": {},
            "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
            "lerp": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        }
        average = swa_utils.AveragedModel(model, **functions[kind])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().sum().backward()
            optimizer.step()
            average.update_parameters(model)
            scheduler.step()
        swa_utils.update_bn([torch.randn(4, 4), torch.randn(4, 4)], average)
        log(average, average(torch.randn(2, 4)).detach())
        named = {"model": model, "average": average}
        return {f"{k}.{name}": p for k, m in named.items() for name, p in m.named_parameters()}

    check(program, {"model*": REACHED, "average*": Want("unused", None)})


@regime()
def test_default_device(log: Log) -> Tensors:
    """A default device that is set inside gives the same verdicts."""
    torch.set_default_device("cpu")
    try:
        return _mixed_step(log)
    finally:
        torch.set_default_device(None)


# -- callables of others ---------------------------------------------------------------------------


class Unhashable:
    """A function of somebody's that others can override, and that no dictionary can hold."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, or have it done by whoever overrides this."""
        if has_torch_function_unary(x):  # imported by name: torch.overrides answers no
            return handle_torch_function(self, (x,), x)
        return x * self.factor


@regime(x=REACHED, factor=REACHED)
def test_callables_without_a_hash(log: Log) -> Tensors:
    """A callable that goes through torch's overrides may be unhashable."""
    x, factor = leaf(1, 2), leaf(3, 4)
    Unhashable(factor)(x).sum().backward()
    return {"x": x, "factor": factor}


class Hashable(Unhashable):
    """Such a function that a dictionary can hold."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # it is to have one again


@regime(x=REACHED, factor=REACHED)
def test_callables_made_for_one_call(log: Log) -> Tensors:
    """A callable that goes through torch's overrides is kept no longer than without a recording."""
    x, factor = leaf(1, 2), leaf(3, 4)
    function = Hashable(factor)
    log.watch(function=function)
    function(x).sum().backward()
    del function
    log.living("behind its call")
    return {"x": x, "factor": factor}
