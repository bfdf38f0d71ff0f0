"""record(): puts the observers on, yields the Trace, takes everything off again."""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import networkx as nx
import torch
from torch import Tensor, nn

from gradtrace import _settings
from gradtrace._errors import NotATensorError, RecordingError
from gradtrace._flow import Spot
from gradtrace._graph import build
from gradtrace._observe import patches
from gradtrace._observe.recorder import Recorder
from gradtrace._tape import node_of, output_of
from gradtrace._trace import Trace, Unmet

P = ParamSpec("P")
R = TypeVar("R")
PathLike = str | os.PathLike[str]

_VALUES = ("leaves", "edges", "none")
_latest = threading.local()


class _Live:
    """A recording as its trace sees it: the graph so far, and which tensor is which."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def stamp(self) -> object:
        self._recorder.catch_up()
        return self._recorder.tape.stamp()

    def graph(self) -> nx.MultiDiGraph:
        return build(self._recorder.tape)

    def find(self, thing: object) -> list[Spot | Unmet] | None:
        with torch._C.DisableTorchFunction():
            if isinstance(thing, Tensor):
                return [self._node(thing, "this tensor")]
            if isinstance(thing, nn.Module):
                return [self._node(p, name) for name, p in thing.named_parameters()]
        return None

    def _node(self, tensor: Tensor, name: str) -> Spot | Unmet:
        value = self._recorder.identity.known(tensor)
        if value is None:
            return Unmet(name, tensor.requires_grad, tensor.is_leaf)
        return Spot(node_of(value), output_of(value))


class record(AbstractContextManager[Trace]):  # noqa: N801  # a verb, as users call it
    """Record what happens to gradients, as a context manager or a decorator.

    Args:
        model: An `nn.Module`, or a dict of them by name: names parameters and modules. Without it
            the outermost modules that are called name them.
        names: Names for tensors: {name: tensor}. Leaves not named otherwise take the name of the
            local variable that holds them.
        values: What is computed from gradients as they pass: "leaves" (norms of arriving
            gradients), "edges" (norms on every edge as well, so that an explanation can name the op
            in whose backward zeros or NaNs arose), "none".
        out: Path or paths to export to when the block ends, also when it raised.

    Raises:
        RecordingError: `values` is none of the three.
        NotATensorError: `model` holds something that is no module, or `names` no tensor.

    The recording belongs to the thread that enters it: other threads are not recorded, and can
    record for themselves. Recordings nest; each sees all that happens inside it. A recording ends
    with its block, or with this object where an interrupt kept it from that. A backward pass
    that starts after the block has ended is not seen. Compiled functions run eagerly in the block,
    since inside compiled code nothing can be seen, and are compiled again behind it; a compile
    stance that is chosen in the block holds behind it. `torch.cond` and its kin, which compile what
    they are given, are one op each.

    Example:
        >>> import torch, gradtrace
        >>> x = torch.ones(3, requires_grad=True)
        >>> with gradtrace.record() as trace:
        ...     loss = (x.detach() * x).sum()
        ...     loss.backward()
        >>> str(trace.explain(x).status)
        'reached'
        >>> [str(cut.kind) for cut in trace.explain(x).cuts]
        ['detach']
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        names: Mapping[str, Tensor] | None = None,
        values: str = "leaves",
        out: PathLike | Iterable[PathLike] | None = None,
    ) -> None:
        if values not in _VALUES:
            raise RecordingError(
                f"values={values!r} is not known. Choose one of {', '.join(map(repr, _VALUES))}."
            )
        self._models = _by_prefix(model)
        self._names = _checked_names(names)
        self._values = values
        self._out = [out] if isinstance(out, (str, os.PathLike)) else list(out or ())
        self._running: list[tuple[Recorder, Trace]] = []

    def __enter__(self) -> Trace:
        recorder = Recorder(self._values, sys._getframe(1).f_code)
        trace = Trace(_Live(recorder))
        recorder.guard = weakref.ref(self, lambda _: recorder.take_off())
        try:
            self._running.append((recorder, trace))
            _untraced(recorder.start)(self._models, self._names)
            _latest.trace = trace
            for notice in _settings.started:
                notice(trace)
        except BaseException:
            self._forget(recorder)
            raise
        return trace

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._running:
            raise RecordingError("this recording was not entered. Use it in a `with` statement.")
        recorder, trace = self._running[-1]
        try:
            _untraced(recorder.stop)(sys._getframe(1))
        finally:
            self._forget(recorder)
        self._export(trace, error)

    def _forget(self, recorder: Recorder) -> None:
        """Take off what is still on of a recording; see NOTE [ Interrupted anywhere ]."""
        recorder.take_off()
        self._running = [each for each in self._running if each[0] is not recorder]

    def _export(self, trace: Trace, error: BaseException | None) -> None:
        """Write the files asked for; what the block raised comes first, and is never replaced."""
        for path in self._out:
            try:
                trace.export(path)
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"gradtrace could not write {os.fspath(path)!r}: {failure}")

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Record every call of a function; `gradtrace.last_trace()` is the latest."""

        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._again():
                return function(*args, **kwargs)

        return recorded

    def _again(self) -> record:
        """Return another one like this, that goes when its call ends."""
        again = copy.copy(self)
        again._running = []
        return again


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keep dynamo out, where a compiled function records inside itself.

    It gives such a function up and has Python run it, but would go on to trace what that calls.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    disable: Callable[..., Callable[P, R]] = torch._dynamo.disable
    return disable(function)


def last_trace() -> Trace:
    """Return the latest trace of this thread, for `with gradtrace.record():` without `as`.

    Raises:
        RecordingError: Nothing was recorded in this thread.
    """
    trace: Trace | None = getattr(_latest, "trace", None)
    if trace is None:
        raise RecordingError(
            "nothing was recorded in this thread yet. Record with `with gradtrace.record():`; each"
            " thread has its own latest trace."
        )
    return trace


def open_recordings() -> int:
    """Return how many recordings of this thread run."""
    return len(patches.observers_here())


def end_recordings(but: int = 0) -> int:
    """End the recordings of this thread that nobody ended, the latest first.

    Args:
        but: How many, the first ones, go on.

    Returns:
        How many were ended.
    """
    left: list[Any] = patches.observers_here()[but:]
    for recorder in reversed(left):
        recorder.stop(None)
    return len(left)


def _by_prefix(model: Any) -> dict[str, nn.Module]:
    models = {"": model} if isinstance(model, nn.Module) else model
    if models is None:
        return {}
    if not isinstance(models, Mapping):
        raise NotATensorError(
            f"model is a {type(model).__name__}. Give an nn.Module, or a dict of them by name."
        )
    for name, each in models.items():
        if not isinstance(each, nn.Module):
            raise NotATensorError(
                f"model[{name!r}] is a {type(each).__name__}. Give an nn.Module for each name."
            )
    return {f"{name}." if name else "": each for name, each in models.items()}


def _checked_names(names: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    for name, each in (names or {}).items():
        if not isinstance(each, Tensor):
            raise NotATensorError(
                f"names[{name!r}] is a {type(each).__name__}. Give a tensor for each name."
            )
    return dict(names or {})


for _public in (record, last_trace):
    _public.__module__ = "gradtrace"
