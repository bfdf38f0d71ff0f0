"""Writes to memory that a backward pass still needs.

# NOTE [ Overwritten memory ]
Autograd keeps tensors for the backward of an op, and a version counter tells it that one of them
was written to since: then backward raises. A tensor that came by `.data` shares the memory and not
the counter, so that such a write gives wrong gradients without a word. Here every write is noted by
the memory that it touched, and when a pass starts, what the nodes on its way have kept is held
against the writes that came after their ops. Kept tensors are looked at without unpacking them:
that would run the hooks of `saved_tensors_hooks`, and with them a checkpoint's recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gradtrace._observe.identity import storage_of
from gradtrace._observe.norms import unseen
from gradtrace._observe.sites import Sites

_PREFIX: Final = "_raw_saved_"
_RESULTS: Final = ("_raw_saved_result", "_raw_saved_output")


class Write(NamedTuple):
    """The latest write to one stretch of memory.

    Attributes:
        number: How long the tape was: ops with a smaller number came before.
        op: What wrote.
        where: Its line.
    """

    number: int
    op: str
    where: Sites


class Overwritten(NamedTuple):
    """One tensor that a node kept and that was written to before the node's backward ran.

    Attributes:
        write: What wrote.
        needed_by: The op whose backward needs the tensor.
        kept: The tensor, to be known by; not to be held.
        is_result: Whether it is the op's own result.
        silent: Whether torch doesn't notice.
    """

    write: Write
    needed_by: int
    kept: Tensor
    is_result: bool
    silent: bool


class Writes:
    """What was written where in one recording, by numbers only."""

    def __init__(self) -> None:
        self._latest = 0
        self._by_storage: dict[int, dict[tuple[int, int], Write]] = {}
        self._moved: dict[int, tuple[weakref.ref[Tensor], Write]] = {}
        self._kept_by: dict[str, tuple[str, ...]] = {}

    def note(self, tensor: Tensor, write: Write, *, index: Any = ...) -> None:
        """Note a write to a tensor, or to the part of it that an index selects."""
        storage = storage_of(tensor)
        if storage and not tensor._has_symbolic_sizes_strides:
            self._latest = write.number
            stretch = _extent(tensor) if index is ... else _extent_of_part(tensor, index)
            self._by_storage.setdefault(storage, {})[stretch] = write

    def note_move(self, tensor: Tensor, write: Write) -> None:
        """Note that a tensor has other memory from now on (`.data = ...`)."""
        self._latest = write.number
        self._moved[id(tensor)] = weakref.ref(tensor), write

    def overwritten(self, nodes: Sequence[Any], owners: Sequence[int]) -> Iterator[Overwritten]:
        """Yield what nodes of autograd's graph have kept and lost to a write.

        Args:
            nodes: The nodes of one pass.
            owners: For each the number of the op that it belongs to.
        """
        for grad_fn, owner in zip(nodes, owners, strict=True):
            if owner < self._latest:
                yield from self._lost(grad_fn, owner)

    def _lost(self, grad_fn: Any, owner: int) -> Iterator[Overwritten]:
        for name in self._names(grad_fn):
            try:
                kept = getattr(grad_fn, name)
            except RuntimeError:  # an earlier pass freed it; this one will raise
                continue
            for saved in kept if isinstance(kept, (tuple, list)) else (kept,):
                tensor = _seen_through(saved)
                write = None if tensor is None else self._since(tensor, owner)
                if tensor is not None and write is not None:
                    silent = _is_silent(grad_fn, name, saved)
                    yield Overwritten(write, owner, tensor, name in _RESULTS, silent)

    def _names(self, grad_fn: Any) -> tuple[str, ...]:
        """Return the attributes in which nodes of a kind keep tensors."""
        kind = type(grad_fn).__name__
        if kind not in self._kept_by:
            self._kept_by[kind] = tuple(n for n in dir(grad_fn) if n.startswith(_PREFIX))
        return self._kept_by[kind]

    def _since(self, tensor: Tensor, owner: int) -> Write | None:
        """Return a write to a tensor's memory that came after an op, or None."""
        ref, move = self._moved.get(id(tensor), (None, None))
        if ref is not None and ref() is tensor and move is not None and move.number > owner:
            return move
        stretches = self._by_storage.get(storage_of(tensor))
        if not stretches:
            return None
        low, high = _extent(tensor)
        return next(
            (
                write
                for (first, last), write in stretches.items()
                if write.number > owner and first < high and low < last
            ),
            None,
        )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return low, low + tensor.numel() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return low, low + (1 + sum((extent - 1) * int(step) for extent, step in steps)) * size


def _extent_of_part(tensor: Tensor, index: Any) -> tuple[int, int]:
    """Return the same for what an index selects, where that is a view; else for the whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts):
        return _extent(tensor)
    shape, stride = tensor.shape, tensor.stride()
    low, _ = _extent(tensor)

    def part(_: Tensor) -> tuple[int, int]:
        likeness = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        return _extent(likeness[index])

    first, last = unseen(part, tensor)
    return low + first, low + last


def _seen_through(saved: Any) -> Tensor | None:
    """Return the tensor that was kept, unchecked and not unpacked; None for anything else."""
    try:
        kept = saved.data
    except (AttributeError, RuntimeError):  # nothing kept, freed, or a torch that can't say
        return None
    return kept if isinstance(kept, Tensor) and kept.layout is torch.strided else None


def _is_silent(grad_fn: Any, name: str, saved: Any) -> bool:
    """Whether torch will hand out the tensor, overwritten as it is."""
    if saved.unpack_hook is not None:
        return True  # what a hook gives back is not checked
    checked = name.removeprefix("_raw")
    if not hasattr(type(grad_fn), checked):  # a custom Function's `saved_tensors`
        checked = checked.removeprefix("_")
    try:
        getattr(grad_fn, checked)
    except RuntimeError:
        return False
    return True
