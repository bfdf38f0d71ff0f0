"""Norms of gradients, exact about what matters: all zero, not finite, or neither.

A plain norm squares: in float32 it makes zero of 1e-30 and an infinity of 1e30, and either would be
a wrong verdict. So it is believed only in the range in which squares are safe; outside it the norm
is taken again with more care.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from gradtrace._observe.identity import unwrapped

_PIECE: Final = 1 << 20  # elements that are copied at once
R = TypeVar("R")

_PLAIN: Final = (Tensor, torch.nn.Parameter)
_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SAFE: Final = {torch.float32: (1e-15, 1e15), torch.float64: (1e-140, 1e140)}


def norm_of(gradient: Tensor) -> float | Tensor | None:
    """Return the Euclidean norm of a gradient.

    Args:
        gradient: Any shape and layout, floating or complex. Neither changed nor kept.

    Returns:
        A number; for a gradient on a device a tensor without dimensions, since reading it would
        wait for the device; None where the values cannot be read (a meta tensor, a batch of
        `is_grads_batched`) or where a subclass would notice.

    Source: torch.linalg.vector_norm, ord=2.
    """
    if gradient.is_meta or dispatches_itself(gradient) or _is_batch(gradient):
        return None
    with torch._C.DisableTorchFunction():
        grad_mode = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # `torch.no_grad()` can be interrupted half-way
            return unseen(_norm, unwrapped(gradient))
        except RuntimeError:  # inside a vmap (`is_grads_batched`), which knows no rule for this
            return None
        finally:
            torch._C._set_grad_enabled(grad_mode)


def _norm(gradient: Tensor) -> float | Tensor:
    values = _dense(gradient)
    return _on_cpu(values) if values.device.type == "cpu" else _on_device(values)


def _dense(values: Tensor) -> Tensor:
    """Return strided values with the same norm."""
    if values.is_sparse:
        return values.coalesce().values()
    if values.layout in _COMPRESSED:  # making another one would warn that they are in beta
        return values.values()
    if values.is_nested:
        return values.values() if values.layout is torch.jagged else values.to_padded_tensor(0)
    return values.detach() if values.layout is torch.strided else values.to_dense()


def _on_cpu(values: Tensor) -> float:
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    kept = real.dtype if real.dtype in _SAFE else torch.float32
    norm = _plain(real, kept).item()
    low, high = _SAFE[kept]
    return norm if low < norm < high else _careful(real).item()


def _plain(values: Tensor, dtype: torch.dtype) -> Tensor:
    pieces = (values,) if values.dtype == dtype else _pieces(values)  # else it is copied
    return _joined([torch.linalg.vector_norm(piece, dtype=dtype) for piece in pieces])


def _joined(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of what these are the norms of the pieces of."""
    if len(norms) == 1:
        return norms[0]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def _on_device(values: Tensor) -> Tensor:
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if real.device.type == "mps":  # has no float64
        norm: Tensor = torch.linalg.vector_norm(real)
        return norm
    return _careful(real)


def _careful(values: Tensor) -> Tensor:
    """Return the norm in float64, scaled so that squares neither overflow nor vanish."""
    if values.numel() == 0:
        return values.new_zeros((), dtype=torch.float64)
    pieces = _pieces(values)
    largest = torch.stack([_largest(piece) for piece in pieces]).amax().double()
    if values.device.type == "cpu" and not (largest > 0 and largest.isfinite()):
        return largest
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return _joined([torch.linalg.vector_norm(piece.double() / scale) for piece in pieces]) * scale


def _largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, or NaN where there is one."""
    if values.device.type == "cpu":  # where the norm takes a hundred times as long
        for dim, stride in enumerate(values.stride()):
            values = values if stride else values.narrow(dim, 0, 1)  # the same over and over
        return torch.stack(torch.aminmax(values)).abs().amax()
    largest: Tensor = torch.linalg.vector_norm(values, ord=float("inf"))
    return largest


def _pieces(values: Tensor) -> Sequence[Tensor]:
    """Return views that a copy of costs little memory: a gradient may be as large as all else."""
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    values = values.permute(order)
    if values.numel() <= _PIECE:
        return (values,)
    if values.is_contiguous():
        return torch.split(values.view(-1), _PIECE)
    dim = max(range(values.dim()), key=values.shape.__getitem__)
    return torch.split(values, max(1, _PIECE * values.shape[dim] // values.numel()), dim)


def dispatches_itself(tensor: Tensor) -> bool:
    """Whether a subclass would see our own ops (DTensor, FakeTensor, somebody's logging tensor)."""
    handler = type(tensor).__torch_dispatch__
    return handler is not torch._C._disabled_torch_dispatch_impl and type(tensor) not in _PLAIN


_is_batch = torch._C._functorch.is_legacy_batchedtensor


def unseen(norm: Callable[[Tensor], R], gradient: Tensor) -> R:
    """Keep other people's dispatch modes (FlopCounterMode, DebugMode) from seeing our own ops."""
    if not torch._C._len_torch_dispatch_stack():
        return norm(gradient)
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return norm(gradient)
