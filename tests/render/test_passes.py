"""`passes=`: a picture as if only some backward passes had run, which torch is asked to do."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtrace
from gradtrace._errors import ExportError
from gradtrace._render import _scene
from gradtrace._render.scene import Scene

Steps = Sequence[tuple[str, int, int]]
LEAVES = 3
steps = st.lists(
    st.tuples(
        st.sampled_from(["mul", "add", "exp", "detach", "no_grad"]),
        st.integers(0, 30),
        st.integers(0, 30),
    ),
    min_size=3,
    max_size=12,
)


def ran(program: Steps, wanted: Collection[int], passes: int = 3) -> gradtrace.Trace:
    """Return the trace of one program of which only some of the backward passes are run."""
    with gradtrace.record() as trace:
        values = [torch.full((2,), 0.1 * (at + 1), requires_grad=True) for at in range(LEAVES)]
        for op, one, other in program:
            left, right = values[one % len(values)], values[other % len(values)]
            if op == "detach":
                made = left.detach()
            elif op == "no_grad":
                with torch.no_grad():
                    made = left * right
            else:
                made = left.exp().clamp(max=2) if op == "exp" else getattr(torch, op)(left, right)
            values.append(made)
        roots = [(values[-1 - at] * values[at % LEAVES]).sum() for at in range(passes)]
        for index, root in enumerate(roots):
            if index in wanted:
                root.backward(retain_graph=True)
    return trace


def shown(trace: gradtrace.Trace, **options: Any) -> object:
    """Return what a picture shows, but for the numbers of passes."""
    scene: Scene = _scene(trace.graph, trace._now, options)  # type: ignore[arg-type]  # as users do
    boxes = [
        (b.id, b.kind, b.title, b.cuts, b.verdicts, b.status, len(b.roots), b.frame)
        for b in scene.boxes
    ]
    arrows = [(a.tail, a.head, len(a.reached), a.plain, a.label) for a in scene.arrows]
    return boxes, arrows


@settings(deadline=None, max_examples=60)
@given(steps, st.sets(st.integers(0, 2), min_size=1), st.booleans())
def test_a_pass_that_is_left_out_might_not_have_run(
    program: Steps, wanted: set[int], full: bool
) -> None:
    """The picture is that of a program in which torch was never asked for the other passes."""
    everything, some = ran(program, {0, 1, 2}), ran(program, wanted)
    assert shown(everything, passes=sorted(wanted), full=full) == shown(some, full=full)


def test_what_only_another_pass_reached_is_not_reached() -> None:
    """The verdict of a leaf, its arrow and its gradient are those of the passes that are left."""
    program = [("mul", 0, 1), ("exp", 0, 0), ("exp", 2, 2)]
    trace = ran(program, {0, 1, 2})
    assert {leaf.status for leaf in trace.leaves} == {"reached"}
    dot = trace.to_dot(passes=[1])
    assert "unused" in dot
    assert "Drawn as if only pass 1 of 3 had run." in dot
    assert "pass 1 starts here" not in dot  # of one pass no number is needed


def test_passes_inside_of_a_pass_stay_with_it() -> None:
    """What re-entrant checkpointing starts inside a pass belongs to the pass."""
    layer = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    with gradtrace.record(layer) as trace:
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
        (x * 2).sum().backward()
    outer = next(done.index for done in trace.backward_passes if done.inside is None)
    assert any(done.inside == outer for done in trace.backward_passes)
    scene = _scene(trace.graph, trace._now, {"passes": [outer]})
    assert {box.title: box.status for box in scene.boxes}["weight"] == "reached"


def test_no_such_pass_names_those_there_are() -> None:
    """A number that no pass has is an error, not a picture without arrows."""
    trace = ran([("mul", 0, 1)], {0, 1})
    with pytest.raises(ExportError, match=r"no backward pass 5[\s\S]*recorded are 0, 1;"):
        trace.to_dot(passes=[0, 5])


def test_the_trace_is_as_it_was() -> None:
    """To draw some passes changes nothing in the trace."""
    trace = ran([("detach", 0, 1), ("mul", 0, 3)], {0, 1, 2})
    before = trace.to_dot(), trace.summary()
    trace.to_dot(passes=[1])
    assert (trace.to_dot(), trace.summary()) == before
