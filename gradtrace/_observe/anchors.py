"""Keeps deep graphs from overflowing the C stack when they are freed.

# NOTE [ Deep graphs ]
Since torch 2.13 an autograd node keeps its Python wrapper, once anybody asked for it, and a graph
of such nodes is freed by recursion: some 30,000 in a row overflow the C stack and kill the process
(in 2.6, and where nobody asks for wrappers, the graph is freed by a loop). Observing makes
wrappers. So in long recordings every 997th wrapper is held: freeing a graph then stops there, and
goes on when the wrapper is let go, which is soon after nothing else holds its node. 997 is a prime,
so that no loop in the program has the same ops held, and others never.
"""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Any, Final

import torch

EVERY: Final = 997
BEGIN: Final = 4_000  # shorter graphs are no danger, and nothing is held of them
_OURS: Final = 2  # references to a wrapper that only a list of ours holds, as getrefcount counts


def _keeps_wrappers() -> bool:
    """Whether this torch's nodes keep their Python wrappers."""
    with torch.enable_grad():
        result = torch.ones((), requires_grad=True) * 1
    grad_fn = result.grad_fn
    return sys.getrefcount(grad_fn) > _OURS


class Anchors:
    """The wrappers that are held, until nothing else holds their nodes."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._needed: bool | None = None
        self._releasing = False

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, grad_fn: Any) -> None:
        """Hold a node's wrapper, where this torch needs it."""
        if self._needed is None:
            self._needed = _keeps_wrappers()
        if self._needed:
            self._held.append(grad_fn)

    def release(self) -> None:
        """Let go of the nodes that nothing else holds; each may be what held the next."""
        if self._releasing:  # freeing a node can set off a garbage collection, which comes here
            return
        self._releasing = True
        try:
            while self._release_free():
                pass
        finally:
            self._releasing = False

    def _release_free(self) -> bool:
        """Let go of what is free by now, the latest first; return whether anything was."""
        held, before = self._held, len(self._held)
        for at in range(before - 1, -1, -1):
            if sys.getrefcount(held[at]) == _OURS:
                del held[at]
        return len(held) < before

    def outlive(self) -> None:
        """Hand over what graphs that outlive the recording need, until they are freed."""
        self.release()
        if self._held:
            _outliving.extend(self)

    def extend(self, other: Anchors) -> None:
        """Take what others held, and let it go at the garbage collections to come."""
        self._held += other._held
        other._held.clear()
        if _release_outliving not in gc.callbacks:
            gc.callbacks.append(_release_outliving)

    def leak(self) -> None:
        """Never let go: when the interpreter ends, a graph may be freed after its anchors."""
        import ctypes

        for grad_fn in self._held:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(grad_fn))


_outliving = Anchors()
atexit.register(_outliving.leak)


def _release_outliving(phase: str, _: object) -> None:
    """Do at a garbage collection what a recording does while it runs."""
    if phase == "stop":
        _outliving.release()
        if not _outliving and _release_outliving in gc.callbacks:
            gc.callbacks.remove(_release_outliving)
