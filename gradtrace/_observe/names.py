"""Names of leaves and modules: dotted paths of parameters, and variables that hold a tensor.

Parameters are named by their path from the outermost module that is called; how such paths are kept
until they are worded is told in `_tape.py`, NOTE [ Paths and their roots ].
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from gradtrace._observe.sites import is_stand_in
from gradtrace._source import Category, category
from gradtrace._tape import rooted_prefix


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a frame's local variables, leaving nothing of them alive.

    Before Python 3.13 `f_locals` leaves a snapshot in the frame that holds every local until the
    function returns. It is emptied again. The dictionary that `locals()` returned is the same one:
    a function that may hold it is not looked into.
    """
    is_snapshot = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_snapshot and "locals" in frame.f_code.co_names:
        return {}
    snapshot = frame.f_locals
    found = dict(snapshot)
    if is_snapshot and sys.getrefcount(snapshot) <= 3 and sys.gettrace() is None:
        snapshot.clear()
    return found


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of code outside torch, innermost first."""
    while frame is not None:
        if category(frame.f_code) is not Category.TORCH and not is_stand_in(frame):
            yield frame
        frame = frame.f_back


def _uncompiled(path: str) -> str:
    """Leave out what torch.compile puts into a module's path."""
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod")


class Names:
    """What is called how in one recording. Holds weak references only."""

    def __init__(
        self, entered_by: object, roots: list[str], on_name: Callable[[Tensor, str], None]
    ) -> None:
        self._entered_by = entered_by  # code object of the function that entered record()
        self._on_name = on_name
        self._tensors: dict[int, tuple[weakref.ref[Tensor], str, bool]] = {}
        self._modules: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._taken: set[str] = set()
        self.has_news = False  # whether a module came that may own leaves met before it
        self.roots = roots

    # -- registering -----------------------------------------------------------------------------

    def add_tensor(self, tensor: Tensor, name: str) -> None:
        """Name a tensor, unless it has a name."""
        if self._tensor(tensor) is None:
            had_gradient = tensor.is_leaf and tensor.grad is not None
            self._tensors[id(tensor)] = (weakref.ref(tensor), name, had_gradient)
            self._on_name(tensor, name)

    def add_model(self, model: nn.Module, prefix: str) -> None:
        """Name everything in a module by its path, behind a prefix that is empty or ends so."""
        self.has_news = True
        for path, module in model.named_modules():
            if self._module(module) is None:
                self._modules[id(module)] = (
                    weakref.ref(module),
                    (prefix + _uncompiled(path)).rstrip("."),
                )
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        for path, tensor in tensors:
            self.add_tensor(tensor, prefix + _uncompiled(path))

    def _add_root(self, model: nn.Module, name: str) -> None:
        if name in self._taken:
            name = next(n for i in itertools.count(2) if (n := f"{name}#{i}") not in self._taken)
        self._taken.add(name)
        self.add_model(model, rooted_prefix(len(self.roots)))
        self.roots.append(name)

    # -- asking ----------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor) -> str | None:
        ref, name, _ = self._tensors.get(id(tensor), (None, "", False))
        return name if ref is not None and ref() is tensor else None

    def _module(self, module: nn.Module) -> str | None:
        ref, path = self._modules.get(id(module), (None, ""))
        return path if ref is not None and ref() is module else None

    def of_module(self, module: nn.Module, frame: FrameType | None, outer: str) -> str:
        """Return the path of a module that is being called from a frame, inside `outer`."""
        path = self._module(module)
        if path is None:
            if outer:
                path = f"{outer}.{type(module).__name__}"
                self._modules[id(module)] = (weakref.ref(module), path)
            else:
                self._add_root(*self._outermost(module, frame))
                path = self._module(module) or ""
        return path

    def _outermost(self, module: nn.Module, frame: FrameType | None) -> tuple[nn.Module, str]:
        """Return the module that owns this one in the calling frame, or itself, and its name."""
        caller = next(user_frames(frame), None)
        variables = {} if caller is None else locals_of(caller)
        for name, value in variables.items():
            if value is module and name != "self":
                return module, name
        for name, value in variables.items():
            if isinstance(value, nn.Module) and any(part is module for part in value.modules()):
                return value, type(value).__name__ if name == "self" else name
        return module, type(module).__name__

    def of_leaf(self, tensor: Tensor) -> str | None:
        """Return a leaf's name: a path, or the outermost variable that holds it, or None."""
        name = self._tensor(tensor)
        if name is not None:
            return name
        frames = self._frames_inside(sys._getframe(1))
        found = None
        for frame in frames:
            variables = locals_of(frame)
            held = next((n for n, value in variables.items() if value is tensor), None)
            found = found if held is None else held
            self._notice_owner(tensor, variables)
        name = self._tensor(tensor)
        return found if name is None else name

    def _frames_inside(self, frame: FrameType | None) -> Iterator[FrameType]:
        """Yield the frames from here to the one that entered record()."""
        for outer in user_frames(frame):
            yield outer
            if outer.f_code is self._entered_by:
                return

    def _notice_owner(self, tensor: Tensor, variables: Mapping[str, Any]) -> None:
        """Name a parameter that is used outside any call of its module."""
        if not isinstance(tensor, nn.Parameter):
            return
        for name, value in variables.items():
            is_new = isinstance(value, nn.Module) and self._module(value) is None
            if is_new and any(part is tensor for part in value.parameters()):
                self._add_root(value, type(value).__name__ if name == "self" else name)
                return

    def tensors(self) -> Iterator[tuple[Tensor, str, bool]]:
        """Yield the named tensors that live, their names, and whether they had a `.grad` then."""
        for ref, name, had_gradient in list(self._tensors.values()):
            tensor = ref()
            if tensor is not None:
                yield tensor, name, had_gradient
