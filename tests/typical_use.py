"""Typical user code: mypy reads it with the tests, and notices a type that users would trip over.

Each misuse carries an ignore, which `--strict` reports where it is not needed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import gradtrace


@gradtrace.record(out="step.json")
def step(model: nn.Module, x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Do one step, recorded."""
    loss: Tensor = (model(x) * scale).pow(2).mean()
    torch.autograd.backward(loss)
    return loss


def train(model: nn.Module, batch: Tensor) -> float:
    """Use every part of the interface as people do."""
    target = torch.ones(3, requires_grad=True)
    names = {"target": target}
    with gradtrace.record(model, names=names, values="edges", out=Path("a.json")) as trace:
        loss = (model(batch) - target.detach()).pow(2).mean()
        torch.autograd.backward(loss)
    explanation: gradtrace.Explanation = trace.explain("target")
    status: gradtrace.Status = explanation.status
    kinds: list[gradtrace.CutKind] = [cut.kind for cut in explanation.cuts]
    lines = [cut.location.line for cut in trace.cuts if cut.location is not None]
    leaves: tuple[gradtrace.Leaf, ...] = trace.leaves
    norms: list[float | None] = [gradient.norm for gradient in trace.gradients]
    reached: bool = trace.reached("encoder.*", model, target)
    trace.assert_cut(target, by="detach", at="train.py")
    trace.assert_reached(model)
    path: Path = trace.export("step.json")
    loaded: gradtrace.Trace = gradtrace.load(path)
    shown = (status, kinds, lines, leaves, norms, reached, loaded.summary(), loaded.paths("target"))
    result: Tensor = step(model, batch, scale=2.0)
    return float(result) + len(gradtrace.last_trace().ops) + len(shown)


def misuse(model: nn.Module, x: Tensor) -> None:
    """Give what the interface does not take."""
    step("no module", x)  # type: ignore[arg-type]  # a decorated function keeps its types
    step(model, x, factor=2.0)  # type: ignore[call-arg]  # and its names
    gradtrace.record(values=3)  # type: ignore[arg-type]  # a word is needed
    gradtrace.record(names={"w": "no tensor"})  # type: ignore[dict-item]  # tensors are needed
    gradtrace.load(3)  # type: ignore[arg-type]  # a path is needed
