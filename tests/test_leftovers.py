"""Leftovers: what a recording keeps alive while it runs, and what is there when it has ended.

Nothing in torch or Python is other than before, nothing of ours is alive once the trace is dropped,
and a program's tensors, exceptions and models die exactly when they do without a recording.
"""

# Programs do on purpose what types forbid, and torch's `backward` has none.
# mypy: disable-error-code="no-untyped-call, attr-defined, index, operator, union-attr"

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import linecache
import sys
import threading
import tracemalloc
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Log, Program, check_transparent, no_collections
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.utils.checkpoint import checkpoint

import gradtrace
from gradtrace import _source
from gradtrace._observe import norms

# Reading all of torch's attributes, and tracing, is deprecated here and there.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Cube(Function):
    """A custom Function that saves what it made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Multiply thrice."""
        square = x * x
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Multiply by what was saved."""
        (square,) = ctx.saved_tensors
        return gradients[0] * square * 3


def leaf(*shape: int) -> Tensor:
    """Return a leaf."""
    return torch.randn(*(shape or (3,)), requires_grad=True)


def block(x: Tensor) -> Tensor:
    """Be what is checkpointed."""
    return x.tanh() * 2


# -- nothing is changed ----------------------------------------------------------------------------


def everything(log: Log) -> Any:
    """Do a little of all that a recording replaces something for."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    x = leaf(2, 3)
    for reentrant in (False, True):
        optimizer.zero_grad()
        hidden: Any = checkpoint(block, Cube.apply(x), use_reentrant=reentrant)
        model(hidden).sum().backward()
        optimizer.step()
    copied = copy.deepcopy(model)
    (gradient,) = torch.autograd.grad(copied(x).pow(2).sum(), x, create_graph=True)
    gradient.sum().backward()
    torch.compile(block, backend="eager")(x).sum().backward()
    torch.jit.trace(block, (torch.ones(3),))(x).sum().backward()
    F.gumbel_softmax(x, hard=True)
    nn.MultiheadAttention(4, 2)(*[leaf(2, 2, 4)] * 3)[0].sum().backward()
    with contextlib.suppress(RuntimeError):
        x.detach().sum().backward()
    log(x, gradient)
    return model


def state() -> dict[Any, Any]:
    """Return what is in torch's modules and classes, and what Python calls back."""
    found: dict[Any, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "functorch") and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[name, key] = _mark(value)
                if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                    owner = f"{value.__module__}.{value.__qualname__}"
                    found.update({(owner, k): _mark(v) for k, v in list(vars(value).items())})
    del found["torch.utils.hooks.RemovableHandle", "next_id"]  # counts all hooks there ever were
    found["callbacks"] = [id(each) for each in gc.callbacks], atexit._ncallbacks()
    found["tracing"] = sys.gettrace(), sys.getprofile(), threading.gettrace()
    found["hooks"] = sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook
    found["imports"] = list(map(id, sys.meta_path)), list(sys.path), len(sys.path_hooks)
    found["warnings"] = list(warnings.filters)
    found["limits"] = sys.getrecursionlimit(), sys.getswitchinterval()
    found["threads"] = threading.active_count()
    found["lines"] = set(linecache.cache)
    found["grad mode"] = torch.is_grad_enabled(), torch._C._is_torch_function_enabled()
    found["modes"] = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return found


def _mark(value: object) -> tuple[int, int]:
    return id(value), len(value) if isinstance(value, (dict, list, set)) else 0


def test_nothing_is_changed() -> None:
    """No attribute of torch's modules and classes, and no callback of Python's, is another one."""
    log = Log()
    for _ in range(2):  # what is loaded and made at the first use is there by now
        everything(log)
        with gradtrace.record(values="edges"):
            everything(log)
    before = state()
    everything(log)
    plain = state()
    with gradtrace.record(values="edges"):
        everything(log)
    after = state()
    moving = {key for key in plain if before.get(key) != plain[key]}  # changes without a recording
    changed = [k for k in after if k not in moving and after[k] != plain.get(k)]
    assert len(moving) < 20
    assert changed == []
    assert plain.keys() <= after.keys()


def test_marks_in_a_graph_that_lives_on_are_numbers() -> None:
    """What stays on the nodes of a graph is a number each, and no hook is heard any more."""
    x = leaf()
    with gradtrace.record():
        first, second = (Cube.apply(x) * 2).split(2)
        loss = first.sum() + second.sum()
        loss.backward(retain_graph=True)
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for key, mark in node.metadata.items():
            assert key.startswith("gradtrace.")
            assert all(type(n) is int for n in (mark.values() if type(mark) is dict else [mark]))
    assert len(seen) > 4
    called: list[str] = []
    sys.setprofile(lambda frame, *_: called.append(frame.f_globals.get("__name__", "")))
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    assert [name for name in called if name.startswith("gradtrace")] == []


# -- nothing is alive ------------------------------------------------------------------------------


def alive() -> Counter[str]:
    """Return how many objects of gradtrace's classes there are."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(k.__name__ for k in kinds if str(k.__module__).startswith("gradtrace"))


def test_nothing_of_ours_is_alive() -> None:
    """When a trace is dropped, and another one is the latest, no object of it is left."""

    def record() -> None:
        with contextlib.suppress(ZeroDivisionError), gradtrace.record(values="edges") as trace:
            everything(Log())
            raise ZeroDivisionError
        str(trace)
        trace.to_dot()
        for each in trace.leaves:
            trace.explain(each.name)

    def empty() -> None:
        with gradtrace.record():
            pass

    record()
    empty()
    before = alive()
    for _ in range(3):
        record()
    empty()
    assert alive() == before


# -- all dies when it does without a recording -----------------------------------------------------


def transparent(program: Program) -> Callable[[], None]:
    """Make a test of a program: it runs under recordings of all kinds as it does without."""

    def test() -> None:
        for values in ("leaves", "edges", "none"):
            check_transparent(program, functools.partial(gradtrace.record, values=values))

    test.__name__, test.__doc__ = program.__name__, program.__doc__
    return test


def _written(x: Tensor) -> Tensor:
    made = x * 2
    made.add_(1)
    made[0] = 3
    return made


def _aliased(x: Tensor) -> Tensor:
    made = x * 2
    made.data.mul_(3)
    return made.data


@torch.no_grad()
def _ungraded(x: Tensor) -> Tensor:
    return x * 2


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x * 2,
    "detached": lambda x: (x * 2).detach(),
    "view": lambda x: (x * 2)[1:].view(-1),
    "in place": _written,
    "data": _aliased,
    "no_grad": _ungraded,
    "function": Cube.apply,
    "checkpoint": lambda x: checkpoint(block, x, use_reentrant=False),
    "re-entrant checkpoint": lambda x: checkpoint(block, x, use_reentrant=True),
    "inside torch": lambda x: F.gumbel_softmax(x, hard=True),
    "from a list": lambda x: torch.stack([x, x * 2]),
    "copied": lambda x: torch.tensor((x * 2).tolist()),
    "parameter": lambda x: nn.Parameter(x * 2),
    "module": lambda x: nn.Linear(3, 3)(x),  # noqa: PLW0108  # one that dies
    "numpy": lambda x: torch.from_numpy((x * 2).detach().numpy()),
    "gradient": lambda x: torch.autograd.grad((x * 2).sum(), x)[0],
    "with a graph": lambda x: torch.autograd.grad((x * x).sum(), x, create_graph=True)[0],
    "vmap": lambda x: torch.func.vmap(torch.sin)(x * 2),
    "out": lambda x: torch.sin(x.detach(), out=torch.empty(3)),
    "double": lambda x: x.double().float(),
}


@pytest.mark.parametrize("kind", MADE)
def test_results_die_when_they_are_dropped(kind: str) -> None:
    """A result of any kind, and what it was made from, is freed by the `del` that frees it."""

    @transparent
    def program(log: Log) -> Any:
        x = leaf()
        made = MADE[kind](x)
        log.watch(made=made, storage=made.untyped_storage(), x=x)
        log.living("made")
        further = made + 1
        log.watch(further=further)
        del made
        log.living("dropped")
        if further.requires_grad:
            further.sum().backward()
        del further
        log.living("further")
        del x
        log.living("leaf")

    program()


@transparent
def test_gradients_die_when_they_are_cleared(log: Log) -> Any:
    """`zero_grad`, `.grad = None` and a dropped leaf free gradients at once."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(3):
        loss = model(torch.randn(2, 3)).sum()
        loss.backward()
        log.watch(**{f"loss{at}": loss, f"grad{at}": model[0].weight.grad})
        log.living("backward")
        optimizer.step()
        if at == 1:
            model[0].weight.grad = None
        log.living("stepped")
        optimizer.zero_grad()
        log.living("cleared")
    loss.detach_()
    log.living("detached")


@transparent
def test_a_model_dies_inside_the_block(log: Log) -> Any:
    """A model that is dropped is freed, with its parameters, buffers and optimizer's state."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]["exp_avg"]
    log.watch(model=model, weight=model[0].weight, mean=model[1].running_mean, state=state)
    log.watch(grad=model[0].weight.grad, optimizer=optimizer)
    del state, optimizer
    log.living("optimizer")
    del model
    log.living("model")


@transparent
def test_exceptions_die_with_what_their_frames_held(log: Log) -> Any:
    """An exception that was handled frees the locals of all frames that it came through."""
    kept: list[BaseException] = []

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner = x * 2
            log.watch(inner=inner)
            raise ValueError("broken")

    class BreaksInBackward(Cube):
        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004  # torch's signature
            held = gradients[0] * 2
            log.watch(held=held)
            raise ValueError("broken")

    x = leaf()
    calls: list[Callable[[], Any]] = [
        lambda: nn.Sequential(nn.Identity(), Breaks())(x),
        lambda: BreaksInBackward.apply(x).sum().backward(),
        lambda: checkpoint(Breaks(), x, use_reentrant=False),
        lambda: checkpoint(Breaks(), x, use_reentrant=True),
        lambda: torch.func.vmap(Breaks())(x),
        lambda: x @ torch.ones(7),
        lambda: x.detach().sum().backward(),
    ]
    for call in calls:
        try:
            outer = x * 3
            log.watch(outer=outer)
            call()
        except (ValueError, RuntimeError) as error:
            log.watch(error=error)
            kept.append(error)
        del outer
        log.living("kept")
        kept.clear()
        log.living("handled")


@transparent
def test_hooks_and_contexts_die(log: Log) -> Any:
    """Closures of hooks, contexts of Functions and generators go with what holds them."""
    x = leaf()
    hidden = x * 2

    class Held:
        pass

    def hooked(held: Held) -> Callable[[Tensor], None]:
        return lambda gradient: log(held is not None)

    one, two = Held(), Held()
    log.watch(one=one, two=two)
    hidden.register_hook(hooked(one))
    handle = x.register_hook(hooked(two))
    del one, two
    log.living("hooked")
    hidden.sum().backward()
    log.living("backward")
    del hidden
    log.living("hidden")
    handle.remove()
    log.living("removed")
    return x


# -- a thousand recordings -------------------------------------------------------------------------


def recordings(number: int) -> None:
    """Record small training steps, read their traces, and raise in some."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for at in range(number):
        with contextlib.suppress(ZeroDivisionError), gradtrace.record(values="edges") as trace:
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3)).square().mean() + Cube.apply(leaf()).sum()
            loss.backward()
            optimizer.step()
            if at % 3 == 0:
                raise ZeroDivisionError
        trace.explain(model[0].weight)
        if at % 5 == 0:
            trace.summary()
            trace.to_dot()


def objects_after(number: int) -> int:
    """Return how many objects there are after so many recordings."""
    recordings(number)
    gc.collect()
    return len(gc.get_objects())


def test_many_recordings_leave_memory_flat() -> None:
    """Recordings whose traces are read and dropped leave no object, and no memory that grows."""
    with no_collections():
        before = objects_after(20)
        tracemalloc.start()
        try:
            recordings(5)
            gc.collect()
            memory = tracemalloc.get_traced_memory()[0]
            recordings(50)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - memory
        finally:
            tracemalloc.stop()
        assert len(gc.get_objects()) - before < 40
        assert grown < 60_000


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.long
def test_a_thousand_recordings_leave_memory_flat() -> None:
    """So do a thousand, and the process does not grow."""
    objects, memory = objects_after(400), resident()
    assert objects_after(1_000) - objects < 100
    assert resident() - memory < 16 << 20  # a leak of a trace each time would be some 60 MB


def record_made_functions(number: int, file: str) -> None:
    """Record functions, modules and code that are made on the run, each new."""
    for at in range(number):
        scope: dict[str, Any] = {}
        text = f"def made(w):\n    y = (w * {at}).detach() * w\n    return y.sum()\n"
        exec(compile(text, file.format(at), "exec"), scope)
        kind = type("Made", (nn.Module,), {"forward": lambda self, x: x * 2})
        w = leaf()
        with gradtrace.record() as trace:
            scope["made"](kind()(w)).backward()
        trace.explain(w)
        trace.to_dot()


def caches() -> dict[str, int]:
    """Return the sizes of the containers and caches in gradtrace's modules."""
    found = {}
    for name, module in sys.modules.items():
        for key, value in vars(module).items() if name.split(".")[0] == "gradtrace" else ():
            if type(value) in (dict, list, set) and not key.startswith("__"):
                found[f"{name}.{key}"] = len(value)
            elif hasattr(value, "cache_info"):
                found[f"{name}.{key}"] = value.cache_info().currsize
    return found


def test_functions_that_are_made_on_the_run_leave_nothing() -> None:
    """No cache grows with code objects: each goes with its code."""
    record_made_functions(20, "<made>")
    gc.collect()
    before, objects = caches(), len(gc.get_objects())
    record_made_functions(50, "<made>")
    gc.collect()
    assert caches() == before
    assert len(gc.get_objects()) - objects < 20


def test_files_that_are_made_on_the_run_leave_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for each file, of which a notebook has one for each cell, is bounded."""
    monkeypatch.setattr(_source, "_MOST_FILES", 30)
    record_made_functions(50, "<cell {}>")
    assert len(_source._categories) <= 30
    most = _source._texts.cache_info().maxsize
    assert most is not None
    assert most <= 1_000


def test_a_code_object_is_freed() -> None:
    """Once the trace is dropped, nothing holds the code of a function that was recorded."""

    def record() -> weakref.ref[Any]:
        scope: dict[str, Any] = {}
        exec("def made(w):\n    return (w * 2).sum()", scope)
        w = leaf()
        with gradtrace.record() as trace:
            scope["made"](w).backward()
        str(trace.explain(w))
        trace.to_dot()
        return weakref.ref(scope["made"].__code__)

    code = record()
    with gradtrace.record():  # and is the latest trace from now on
        pass
    gc.collect()
    assert code() is None


# -- memory at its peak ----------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers one after another, checkpointed or not."""

    def __init__(self, kind: str, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        """Run the layers."""
        for layer in self.layers:
            if self.kind == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.kind == "re-entrant")
        return x


def mlp(kind: str) -> tuple[nn.Module, Tensor]:
    """Return an MLP, in which some gradients are all zero, and its input."""
    dead = nn.Linear(64, 64)
    nn.init.constant_(dead.bias, -1e6)
    linear = [nn.Linear(64, 64), nn.Linear(64, 64), dead, nn.Linear(64, 64)]
    parts = [nn.Sequential(each, nn.ReLU(), nn.Dropout(0.1)) for each in linear]
    return Layers(kind, *parts), torch.randn(32, 64)


def convolutions(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a convolutional net and its input."""

    def part(width: int) -> nn.Module:
        norm = nn.GroupNorm(2, 8)
        return nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), norm, nn.ReLU(inplace=True))

    return Layers(kind, part(4), part(8), part(8)), torch.randn(4, 4, 16, 16)


def transformer(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a transformer's encoder and its input."""
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)]
    return Layers(kind, *layers), torch.randn(4, 16, 32)


def peak_of(step: Callable[[], object]) -> tuple[int, int]:
    """Return the most bytes that were allocated for tensors at once, and how many stayed.

    What is smaller than any tensor of the models, as is a norm, is left out.
    """
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes() if abs(event.nbytes()) >= 128 else 0
        peak = max(peak, now)
    return peak, now


@pytest.mark.parametrize("kind", ["plain", "checkpoint", "re-entrant"])
@pytest.mark.parametrize("made", [mlp, convolutions, transformer])
def test_peak_memory_of_a_training_step(
    made: Callable[[str], tuple[nn.Module, Tensor]], kind: str
) -> None:
    """A training step holds not one tensor more at its peak than it does without a recording."""

    def step() -> None:
        torch.default_generator.manual_seed(1)
        x = data.clone().requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def recorded(values: str) -> Callable[[], None]:
        return gradtrace.record(values=values)(step)

    model, data = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step()
    recorded("edges")()
    plain = peak_of(step)
    assert plain[0] > 10_000
    for values in ("leaves", "edges", "none"):
        assert peak_of(recorded(values)) == plain, values


# -- norms -----------------------------------------------------------------------------------------

_NUMBERS = {
    "ordinary": 1.0,
    "tiny": 1e-30,
    "huge": 1e30,
    "denormal": 1e-42,
    "zero": 0.0,
    "infinite": float("inf"),
    "NaN": float("nan"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("scale", _NUMBERS)
def test_norms_in_pieces(scale: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that is taken in pieces is the norm, whatever the shape, the strides, the numbers."""
    monkeypatch.setattr(norms, "_PIECE", 50)
    for shape in ((7,), (70,), (3, 90), (90, 3), (5, 4, 30), ()):
        made = torch.randn(shape, dtype=dtype) * _NUMBERS[scale]
        held = made.clone()
        for values in (made, made.transpose(0, -1) if shape else made, made.expand(2, *shape)):
            exact = values.to(torch.complex128 if dtype.is_complex else torch.float64)
            right = torch.linalg.vector_norm(exact)
            found = torch.tensor(norms.norm_of(values), dtype=torch.float64)
            assert torch.allclose(found, right, rtol=1e-4, atol=0, equal_nan=True)
            if not dtype.is_complex:
                careful = norms._careful(values)
                assert torch.allclose(careful, right, rtol=1e-12, atol=0, equal_nan=True)
        assert torch.equal(made, held) or scale in ("NaN", "infinite")


@pytest.mark.parametrize("scale", _NUMBERS)
def test_norms_copy_no_gradient(scale: str) -> None:
    """The norm of a large gradient, whatever is in it, copies no more than a piece of it."""
    values = torch.full((3, 1 << 20), _NUMBERS[scale])
    peak, kept = peak_of(lambda: norms.norm_of(values))
    assert peak <= (0 if scale in ("ordinary", "zero") else 20 << 20)
    assert kept == 0
