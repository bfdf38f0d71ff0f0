"""What the tests of verdicts share: a way to write a program down with the right answers.

A program is a test function that records itself and returns the trace and its tensors by name.
What is expected of each tensor stands in the decorator: its status, and all of its cuts by kind and
text.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradtrace

Ran = tuple[gradtrace.Trace, Mapping[str, Any]]
Program = Callable[[], Ran]

PROGRAMS: list[Program] = []  # every program that `expect` was put on


@dataclass(frozen=True)
class Want:
    """What is right for one tensor: its status, and all of its cuts as (kind, expression).

    Cuts that are None are not looked at.
    """

    status: str
    cuts: tuple[tuple[str, str], ...] | None = ()


def want(status: str, /, **cuts: str | tuple[str, ...]) -> Want:
    """Write down a status and its cuts: `want("reached", detach="K.detach()")`."""
    pairs = [
        (kind, text)
        for kind, texts in cuts.items()
        for text in ((texts,) if isinstance(texts, str) else texts)
    ]
    return Want(status, tuple(sorted(pairs)))


cut = functools.partial(want, "cut")
reached = functools.partial(want, "reached")
zero = functools.partial(want, "zero")
REACHED, ZERO, NONFINITE, UNUSED = map(Want, ("reached", "zero", "nonfinite", "unused"))
FROZEN, NO_BACKWARD, UNKNOWN = map(Want, ("frozen", "no_backward", "unknown"))


def leaf(*values: float) -> Tensor:
    """Return a leaf of one dimension."""
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def gradient_of(tensor: Tensor) -> Tensor:
    """Return a leaf's `.grad`, which is there."""
    assert tensor.grad is not None
    return tensor.grad


def expect(*, grads: bool = True, **wanted: Want) -> Callable[[Program], Callable[[], None]]:
    """Make a test of a program: hold the trace against what is expected, and against autograd.

    Args:
        grads: Whether `.grad` at the end shows what arrived at the leaves. Not so where it was
            cleared, or where `torch.autograd.grad` returned the gradients.
        **wanted: For each name in what the program returns, what is right for this tensor.
    """

    def decorate(program: Program) -> Callable[[], None]:
        PROGRAMS.append(program)

        @functools.wraps(program)
        def test() -> None:
            trace, tensors = run(program)
            wrong = [
                f"{name}: {text}"
                for name, right in wanted.items()
                for text in faults(program, trace, tensors[name], right, grads=grads)
            ]
            assert not wrong, "\n".join([*wrong, "", trace.summary()])

        return test

    return decorate


def run(program: Program) -> Ran:
    """Run a program from the same seed, without the warnings that torch gives about such code."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program()


def faults(
    program: Program, trace: gradtrace.Trace, tensor: Tensor, right: Want, *, grads: bool
) -> list[str]:
    """Return what is wrong with the verdict on one tensor."""
    found = trace.explain(tensor)
    cuts = tuple(sorted((str(each.kind), each.source or "") for each in found.cuts))
    wrong = []
    if found.status != right.status:
        wrong.append(f"is {found.status}, not {right.status}")
    if right.cuts is not None and cuts != right.cuts:
        wrong.append(f"has the cuts {cuts}, not {right.cuts}")
    wrong += [text for each in found.cuts if (text := misplaced(program, each))]
    if found.leaf is not tensor.is_leaf:
        wrong.append(f"leaf is {found.leaf}, not {tensor.is_leaf}")
    if grads and tensor.is_leaf and (shown := shown_by_grad(tensor)) != _arrival(right.status):
        wrong.append(f"was expected to be {right.status}, but .grad shows {shown}")
    if str(found.status) not in str(found):
        wrong.append(f"its explanation does not name the status: {found}")
    return wrong


def misplaced(program: Program, found: gradtrace.Cut) -> str | None:
    """Return what is wrong with the place of a cut: it names the line that its text begins on."""
    lines, first = inspect.getsourcelines(program)
    place, source = found.location, found.source
    if place is None or source is None:
        return f"{found.kind} has no place"
    if place.file != program.__code__.co_filename:
        return f"{found.kind} is placed in {place.file}"
    line = linecache.getline(place.file, place.line)
    if source.splitlines()[0].strip() not in line:
        return f"{found.kind} is placed on line {place.line}: {line.strip()!r}"
    if first <= place.line < first + len(lines) or not any(source in line for line in lines):
        return None
    return f"{found.kind} is placed outside the program, on line {place.line}"


def shown_by_grad(tensor: Tensor) -> str | None:
    """Return what `.grad` shows of a leaf: a status, or None where nothing arrived."""
    gradient = tensor.grad
    if gradient is None:
        return None
    gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    if not bool(gradient.isfinite().all()):
        return "nonfinite"
    return "reached" if bool(gradient.any()) else "zero"


def _arrival(status: str) -> str | None:
    return status if status in ("reached", "zero", "nonfinite") else None
