"""Real models: their default pictures are small enough to read, and show what matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradtrace
from gradtrace._records import Status
from gradtrace._render import layout, render
from gradtrace._render.scene import Kind, Scene, build_scene

from .models import MODELS
from .test_layout import size
from .test_scene import frames

BOXES = 150
PIXELS = 4_000
FROM_ELSEWHERE = {"bert", "bert_with_a_cut", "gpt2"}
QUICK = {"byol", "experts", "gan", "lstm", "unet"}


def recorded(name: str) -> gradtrace.Trace:
    """Return the trace of a model, or skip where its library is missing."""
    if name in FROM_ELSEWHERE:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    return MODELS[name]()


def scene_of(trace: gradtrace.Trace) -> Scene:
    """Return what the default picture shows."""
    return build_scene(trace.graph, trace._now)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in MODELS]
)
def test_the_default_picture_can_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has few boxes, and its text is legible within 4,000 pixels."""
    trace = recorded(name)
    seen: list[float] = []

    def noted(svg: bytes, dpi: Callable[[bytes], float] = layout._dpi) -> float:
        seen.append(dpi(svg))
        return seen[-1]

    monkeypatch.setattr(layout, "_dpi", noted)
    png = render(trace.graph, trace._now, ".png")
    assert max(size(png)) <= PIXELS
    assert seen[-1] >= layout._LEAST_DPI - 0.1  # 9 points are 7.5 pixels
    assert len(scene_of(trace).boxes) <= BOXES


def counted(scene: Scene) -> int:
    """Return how many leaves the boxes of a scene count."""
    return sum(number for box in scene.boxes for _, number in box.verdicts)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_counted(name: str) -> None:
    """The default picture counts each leaf that wants a gradient, and each cut has its place."""
    trace = recorded(name)
    scene = scene_of(trace)
    drawn = {node for box in scene.boxes for node in box.nodes}
    leaves = {leaf.node for leaf in trace.leaves}
    assert {leaf.node for leaf in trace.leaves if leaf.requires_grad} <= drawn
    assert counted(scene) == len(leaves & drawn)
    owners = {node: box for box in scene.boxes for node in box.nodes}
    assert all(owners[cut.node].kind is Kind.CUT or owners[cut.node].cuts for cut in trace.cuts)


@pytest.mark.long
def test_like_layers_fold_and_the_one_with_a_cut_does_not() -> None:
    """Twelve like layers are one that is open; a detach in the sixth parts them."""
    titles = {frame.title for frame in frames(scene_of(recorded("gpt2")).frame).values()}
    assert "h.0–11 × 12" in titles
    titles = {frame.title for frame in frames(scene_of(recorded("bert_with_a_cut")).frame).values()}
    assert {"layer.0–4 × 5", "layer.5", "layer.6–11 × 6"} <= titles


def test_a_router_that_learns_nothing_is_seen() -> None:
    """Of a mixture of experts the router is cut, and an expert that no token chose is unused."""
    scene = scene_of(recorded("experts"))
    (cut,) = (box for box in scene.boxes if box.kind is Kind.CUT)
    assert "argmax" in cut.title
    statuses = {(box.frame.split(".")[0], box.status) for box in scene.boxes if box.status}
    assert ("router", Status.CUT) in statuses
    assert ("experts", Status.UNUSED) in statuses
