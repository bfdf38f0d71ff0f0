"""Oracles: what torch itself says, taken without a look at gradtrace's code.

`run` runs a program with or without a recording and freezes all that can be seen of the run into
plain values, which `differences` compares bit for bit. `leftovers` says what stayed behind.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradtrace

# -- what a recording replaces ---------------------------------------------------------------------


def replaceable() -> dict[str, Any]:
    """Return what stands now in each place of torch that a recording writes to."""
    return {
        "engine": torch.autograd.Variable.__dict__["_execution_engine"],
        "Function.apply": torch.autograd.Function.__dict__["apply"],
        "code of Function.apply": getattr(torch.autograd.Function.apply, "__code__", None),
        "Module.__call__": nn.Module.__dict__["__call__"],
        "Tensor.__init__": torch.Tensor.__dict__.get("__init__"),
        "Parameter.__deepcopy__": nn.Parameter.__dict__["__deepcopy__"],
        "ScriptFunction.__call__": torch._C.ScriptFunction.__dict__["__call__"],
        "ScriptMethod.__call__": torch._C.ScriptMethod.__dict__["__call__"],
        "type(Variable).__call__": type(torch.autograd.Variable).__dict__.get("__call__"),
        "torch.compile": torch.__dict__["compile"],
        "sys.meta_path": [each for each in sys.meta_path if "gradtrace" in type(each).__module__],
        "_set_stance": _stance_setter(),
    }


def leftovers(before: dict[str, Any]) -> list[str]:
    """Return in words what is still on, given what `replaceable` returned before the recording."""
    found = [name for name, now in replaceable().items() if now != before[name]]
    if torch._C._len_torch_function_stack():
        found.append("a torch function mode")
    if not torch.is_grad_enabled():
        found.append("grad mode off")
    if _stance() != "default":
        found.append(f"compile stance {_stance()!r}")
    patches = sys.modules.get("gradtrace._observe.patches")
    if patches is not None and patches._thread.observers:
        found.append("an observer")
    return found


def _stance_setter() -> Any:
    """Return what sets the compile stance, which is the same before dynamo was loaded."""
    if "torch._dynamo" not in sys.modules:
        return "eval_frame's"
    from torch._dynamo import decorators, eval_frame

    own = decorators.__dict__["_set_stance"] is eval_frame._set_stance
    return "eval_frame's" if own else "somebody's"


def _stance() -> str:
    if "torch._dynamo" not in sys.modules:
        return "default"
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


# -- what autograd says ----------------------------------------------------------------------------


def status_of_grad(gradients: Iterable[Tensor | None]) -> str | None:
    """Return the status of a leaf at which these arrived, or None where none of them is defined."""
    given = [each for each in gradients if each is not None]
    dense = [each if each.layout is torch.strided else each.to_dense() for each in given]
    if not dense:
        return None
    if not all(bool(each.isfinite().all()) for each in dense):
        return "nonfinite"
    return "reached" if any(bool((each != 0).any()) for each in dense) else "zero"


def verdict_faults(leaves: Mapping[str, Tensor], trace: gradtrace.Trace) -> list[str]:
    """Hold the status of leaves against their `.grad`, where nothing cleared it."""
    faults = []
    for name, leaf in leaves.items():
        status = str(trace.explain(leaf).status)
        right = status_of_grad([leaf.grad])
        if right is None and status in ("cut", "unused", "no_backward", "frozen"):
            continue
        if status != right:
            faults.append(f"{name}: {status}, but autograd says {right or 'no gradient'}")
    return faults


_UNKNOWN_TO_NUMPY = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

# -- everything that can be seen of a run ----------------------------------------------------------


def freeze(value: Any) -> Any:
    """Return plain values that are equal exactly if two results are so bit for bit."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunction():
            return _frozen_tensor(value)
    if isinstance(value, nn.Module):
        return (
            type(value).__name__,
            freeze(dict(value.named_parameters())),
            freeze(dict(value.named_buffers())),
        )
    if isinstance(value, Mapping):
        return {freeze(key): freeze(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(freeze, value)]
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (int, str, bytes, complex, type)):
        return value
    return type(value).__name__


def _frozen_tensor(tensor: Tensor) -> tuple[Any, ...]:
    grad_fn = type(tensor.grad_fn).__name__
    shape = () if tensor.is_nested else tuple(tensor.shape)
    strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()
    facts = (type(tensor).__name__, tensor.dtype, str(tensor.device), tensor.layout, shape, strides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `.grad` of what is no leaf
        gradient = tensor.grad
    grad = None if gradient is None else _frozen_tensor(gradient)
    hooks = len(tensor._backward_hooks or ())
    return *facts, tensor.requires_grad, tensor.is_leaf, grad_fn, hooks, grad, _bits(tensor)


def _bits(tensor: Tensor) -> Any:
    plain = tensor.detach()
    if tensor.is_meta or not _is_plain(plain):
        return None
    if plain.is_nested:
        return [_bits(each) for each in plain.unbind()]
    if plain.is_sparse:
        plain = plain.coalesce()
        return _bits(plain.indices()), _bits(plain.values())
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.dtype in _UNKNOWN_TO_NUMPY:
        plain = plain.to(_UNKNOWN_TO_NUMPY[plain.dtype])
    return plain.numpy(force=True).tobytes()


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) or hasattr(tensor, "_offsets")


class Log:
    """What a program writes down while it runs, and which of its tensors still live."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._watched: list[tuple[str, weakref.ref[Any]]] = []

    def __call__(self, *what: Any) -> None:
        """Write something down."""
        self.events.append(freeze(what))

    def watch(self, **things: Any) -> None:
        """Look from now on whether these are still alive. Nothing is kept."""
        self._watched += [(name, weakref.ref(thing)) for name, thing in things.items()]

    def living(self, when: str = "") -> None:
        """Write down what of the watched things is alive now."""
        self.events.append((when, [name for name, ref in self._watched if ref() is not None]))


Program = Callable[[Log], Any]


@dataclass
class Seen:
    """All that can be seen of one run of a program."""

    result: Any = None
    error: tuple[str, str] | None = None
    events: list[Any] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    random: Any = None
    behind: list[str] = field(default_factory=list)
    troubles: tuple[str, ...] = ()
    trace: gradtrace.Trace | None = None
    raised: str = ""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from coming, until the block ends."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def run(
    program: Program, recording: Callable[[], AbstractContextManager[Any]] | None = None
) -> Seen:
    """Run a program from a fixed seed.

    Args:
        program: Takes the log; what it returns is frozen.
        recording: Makes the context to run it in, or None for a plain run.
    """
    _seed()
    seen, log, before = Seen(), Log(), replaceable()
    with no_collections():  # what only the collector frees counts as kept alive
        with warnings.catch_warnings(record=True) as caught, _warning_always():
            _run(program, recording, seen, log)
        seen.warnings = [(each.category.__name__, str(each.message)) for each in caught]
    seen.events = log.events
    seen.random = _random_state()
    seen.behind = leftovers(before)
    if seen.trace is not None:
        seen.troubles = seen.trace.graph.graph["troubles"]
    return seen


def _run(
    program: Program,
    recording: Callable[[], AbstractContextManager[Any]] | None,
    seen: Seen,
    log: Log,
) -> None:
    context = contextlib.nullcontext() if recording is None else recording()
    result = None
    try:
        with context as seen.trace:
            result = program(log)
    except BaseException as error:
        seen.error = (type(error).__name__, _without_addresses(str(error)))
        seen.raised = "".join(traceback.format_exception(error))
        del error
    log.living("after")
    seen.result = freeze(result)


def _without_addresses(text: str) -> str:
    return " ".join(word for word in text.split(" ") if "0x" not in word)


@contextlib.contextmanager
def _warning_always() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    warnings.simplefilter("always")
    try:
        yield
    finally:
        torch.set_warn_always(before)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` asks every device


def _random_state() -> Any:
    return random.getstate(), freeze(list(np.random.get_state())), freeze(torch.get_rng_state())


def differences(plain: Seen, recorded: Seen) -> list[str]:
    """Return in words where a recorded run was not the plain one, nothing left behind included."""
    parts = ("error", "events", "warnings", "result", "random")
    found = [
        f"{part}{path}"
        for part in parts
        for path in itertools.islice(_apart(getattr(plain, part), getattr(recorded, part)), 5)
    ]
    found += [f"left behind: {each}" for each in recorded.behind]
    found += [f"not observed: {each}" for each in recorded.troubles]
    return found


def _apart(plain: Any, recorded: Any) -> Iterator[str]:
    """Yield where two frozen values differ, as a path and both sides."""
    if plain == recorded:
        return
    if type(plain) is type(recorded) and isinstance(plain, (list, tuple)):
        if len(plain) != len(recorded):
            yield f": {len(recorded)} things instead of {len(plain)}"
        for at, (one, other) in enumerate(zip(plain, recorded, strict=False)):
            yield from (f"[{at}]{path}" for path in _apart(one, other))
    elif isinstance(plain, dict) and isinstance(recorded, dict) and plain.keys() == recorded.keys():
        for key in plain:
            yield from (f"[{key!r}]{path}" for path in _apart(plain[key], recorded[key]))
    else:
        yield f": {str(recorded)[:1500]!r} instead of {str(plain)[:1500]!r}"


def check_transparent(program: Program, recording: Callable[[], Any] = gradtrace.record) -> Seen:
    """Fail unless a program runs under a recording as it does without; return the recorded run."""
    run(program)  # what torch does once for a process is done by now
    plain = run(program)
    recorded = run(program, recording)
    found = differences(plain, recorded)
    if found and recorded.error != plain.error:
        found.append(recorded.raised)
    assert not found, "\n".join(found)
    return recorded


class Noise(torch.utils.data.Dataset[Tensor]):
    """Random data made in a worker process, with gradients taken there."""

    def __len__(self) -> int:
        """Return how much there is."""
        return 8

    def __getitem__(self, index: int) -> Tensor:
        """Return a gradient that was taken in the worker."""
        x = torch.randn(4, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.sin().sum(), x)
        return gradient + index
