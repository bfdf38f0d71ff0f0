"""record(): as block and decorator, nested, in threads, with errors; and the lines it blames."""

# Torch gives no types to `backward`, `apply` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs import leaf
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

import gradtrace

# -- block, decorator, last_trace ------------------------------------------------------------------


def test_record_is_a_decorator() -> None:
    """A decorated function is recorded at each call, and stays what it was otherwise."""
    w = leaf(1, 2)

    @gradtrace.record()
    def step(x: Tensor, scale: float = 1.0) -> Tensor:
        """Do one step."""
        loss = (w * x * scale).sum()
        loss.backward()
        return loss

    assert (step.__name__, step.__doc__) == ("step", "Do one step.")
    assert step(torch.ones(2), scale=2.0).item() == 6.0
    first = gradtrace.last_trace()
    step(torch.ones(2))
    second = gradtrace.last_trace()
    assert first is not second
    assert [len(each.backward_passes) for each in (first, second)] == [1, 1]
    assert first.leaves[0].name == "w"


def test_a_decorated_function_may_call_itself() -> None:
    """Each call has a recording of its own, also one inside another."""
    w = leaf(1, 2)

    @gradtrace.record()
    def step(depth: int) -> None:
        (w * 2).sum().backward()
        if depth:
            step(depth - 1)

    step(2)
    assert len(gradtrace.last_trace().backward_passes) == 1  # the innermost was entered last
    assert gradtrace.last_trace().reached("w")


def test_last_trace_without_as() -> None:
    """`last_trace()` is the trace of the latest block that was entered in this thread."""
    w = leaf(1, 2)
    with gradtrace.record():
        (w * 2).sum().backward()
    assert gradtrace.last_trace().reached(w)
    with gradtrace.record() as trace:
        pass
    assert gradtrace.last_trace() is trace


def test_last_trace_where_nothing_was_recorded() -> None:
    """A thread that recorded nothing has no latest trace, and is told so."""
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            gradtrace.last_trace()
        except gradtrace.RecordingError as error:
            caught.append(error)

    _in_thread(ask)
    assert "nothing was recorded in this thread" in str(caught[0])


def test_a_recording_object_can_be_used_again() -> None:
    """One `record(...)` may serve several blocks; each has its own trace."""
    w = leaf(1, 2)
    recording = gradtrace.record()
    traces = []
    for _ in range(2):
        with recording as trace:
            (w * 2).sum().backward()
        traces.append(trace)
    assert traces[0] is not traces[1]
    assert [len(each.ops) for each in traces] == [2, 2]


# -- nesting and threads ---------------------------------------------------------------------------


def test_recordings_nest() -> None:
    """Each recording sees all that happens inside it, the inner ones too."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as outer:
        first = (w * 2).sum()
        with gradtrace.record() as inner:
            second = (b.detach() * w).sum()
            second.backward()
        (first + b.sum()).backward()
    assert [each.op for each in inner.ops] == ["detach", "mul", "sum"]
    assert [each.op for each in outer.ops] == ["mul", "sum", "detach", "mul", "sum", "sum", "add"]
    assert (inner.explain(w).status, inner.explain(b).status) == ("reached", "cut")
    assert (outer.explain(w).status, outer.explain(b).status) == ("reached", "reached")
    assert [each.kind for each in outer.explain(b).cuts] == ["detach"]


def _in_thread(*functions: Any) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_another_thread_is_not_recorded() -> None:
    """A recording belongs to the thread that entered it."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        _in_thread(lambda: (w * 2).exp().sum())
        (w * 3).sum().backward()
    assert [each.op for each in trace.ops] == ["mul", "sum"]


def test_threads_record_for_themselves() -> None:
    """Recordings in several threads at once see their own thread only."""
    found: dict[int, tuple[list[str], bool]] = {}
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        w = leaf(1, 2)
        barrier.wait()
        with gradtrace.record() as trace:
            barrier.wait()
            h = w
            for _ in range(number):
                h = h.sin()
            h.sum().backward()
            barrier.wait()
        assert gradtrace.last_trace() is trace
        found[number] = ([each.op for each in trace.ops], trace.reached(w))

    _in_thread(*[functools.partial(work, number) for number in range(4)])
    assert found == {number: (["sin"] * number + ["sum"], True) for number in range(4)}


# -- errors ----------------------------------------------------------------------------------------


def test_a_block_that_raises() -> None:
    """The exception passes through, and the trace is final."""
    w = leaf(1, 2)
    with pytest.raises(ZeroDivisionError), gradtrace.record() as trace:  # noqa: PT012
        (w * 2).sum().backward()
        raise ZeroDivisionError
    assert trace.reached(w)
    assert gradtrace.last_trace() is trace


def test_an_error_of_torch_passes_through() -> None:
    """An op that raises leaves no op behind, and its error is torch's own."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        with pytest.raises(RuntimeError, match="must match"):
            w + torch.ones(3)
        (w * 2).sum().backward()
    assert [each.op for each in trace.ops] == ["mul", "sum"]


def test_backward_behind_the_block_is_not_seen() -> None:
    """A pass that starts behind the block is not seen; the explanation says to call it inside."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        loss = (w * 2).sum()
    loss.backward()
    assert w.grad is not None
    assert trace.explain(w).status == "no_backward"
    assert "inside the `with gradtrace.record()` block" in str(trace.explain(w))


def test_a_graph_from_before_the_block() -> None:
    """What was computed before the block is stood in for by what autograd knows of it.

    What was detached there, and what was not used at all, can't be told apart.
    """
    w, b = leaf(1, 2), leaf(3, 4)
    h = (w * 2).exp() + b.detach()
    with gradtrace.record() as trace:
        (h * 2).sum().backward()
    assert trace.explain(w).status == "reached"
    assert trace.explain(b).status == "unknown"
    assert "built before the recording" in str(trace.explain(b))


@pytest.mark.parametrize("values", ["all", "", None, 3])
def test_unknown_values_are_refused(values: Any) -> None:
    """`values` that is none of the three is an error that lists them."""
    with pytest.raises(gradtrace.RecordingError, match="'leaves', 'edges', 'none'"):
        gradtrace.record(values=values)


@pytest.mark.parametrize("model", [3, "net", [nn.ReLU()], {"net": 3}, nn.ReLU])
def test_models_that_are_no_modules(model: Any) -> None:
    """A model that is no module is refused before anything is recorded."""
    with pytest.raises(gradtrace.NotATensorError, match=r"nn\.Module"):
        gradtrace.record(model)


def test_names_of_what_is_no_tensor() -> None:
    """`names` that hold no tensors are refused."""
    with pytest.raises(gradtrace.NotATensorError, match="'w'"):
        gradtrace.record(names={"w": 3})  # type: ignore[dict-item]  # what is tested


# -- out= ------------------------------------------------------------------------------------------


def test_out_writes_at_exit(tmp_path: pathlib.Path) -> None:
    """`out` takes one path or several, and writes them when the block ends."""
    w = leaf(1, 2)
    one, two, three = (tmp_path / name for name in ("a.json", "b.dot", "c.graphml"))
    with gradtrace.record(out=one):
        (w * 2).sum().backward()
        assert not one.exists()
    with gradtrace.record(out=[two, str(three)]):
        (w * 2).sum().backward()
    assert json.loads(one.read_text())
    assert two.read_text().startswith("digraph")
    assert three.exists()


def test_out_writes_also_when_the_block_raises(tmp_path: pathlib.Path) -> None:
    """A step that raised is written, too, and its error is the one that is seen."""
    w = leaf(1, 2)
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), gradtrace.record(out=path):  # noqa: PT012
        (w * 2).sum().backward()
        raise ZeroDivisionError
    assert gradtrace.load(path).reached("w")


def test_an_out_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    """A path that can't be written raises at exit; what the block raised comes first."""
    with pytest.raises(gradtrace.ExportError), gradtrace.record(out=tmp_path / "trace.xyz"):
        pass
    with (
        pytest.raises(ZeroDivisionError) as caught,
        gradtrace.record(out=tmp_path / "trace.xyz"),
    ):
        raise ZeroDivisionError
    assert "trace.xyz" in caught.value.__notes__[0]


# -- what is computed from values ------------------------------------------------------------------


def test_values_none_looks_at_no_gradient() -> None:
    """With `values="none"` arrivals have no norms, and what arrived is reached."""
    w, b = leaf(1, 2), leaf(0, 0)
    with gradtrace.record(values="none") as trace:
        (w * b).sum().backward()
    assert [each.norm for each in trace.gradients] == [None, None]
    assert trace.explain(w).status == "reached"


def test_values_edges_keeps_norms_on_edges() -> None:
    """With `values="edges"` each edge that was reached has the gradient's norm."""
    w = leaf(3, 4)
    with gradtrace.record(values="edges") as trace:
        w.pow(2).sum().backward()
    norms = {
        facts["tensor"] or facts["shape"]: dict(facts["norms"])[0]
        for _, _, facts in trace.graph.edges(data=True)
    }
    assert norms == pytest.approx({"w": 10.0, (2,): 2**0.5})


# -- lines -----------------------------------------------------------------------------------------


def _line(function: Any, text: str) -> int:
    """Return the number of the only line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [at for at, line in enumerate(lines) if text in line and "_line(" not in line]
    return first + found


def test_an_expression_over_several_lines() -> None:
    """A call over several lines is placed on the line of the call, with its own text."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        loss = (
            b
            * w.exp()
            .detach()
            .mul(2)
        ).sum()  # fmt: skip
        loss.backward()
    (cut,) = trace.explain(w).cuts
    assert (cut.source or "").replace("\n", "").replace(" ", "") == "w.exp().detach()"
    assert cut.location is not None
    here = test_an_expression_over_several_lines
    assert cut.location.line in (_line(here, "* w.exp()"), _line(here, ".detach()\n"))
    assert cut.location.function.endswith("test_an_expression_over_several_lines")


def test_several_ops_on_one_line_are_told_apart() -> None:
    """Of several ops on one line each has its own expression."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        (w.detach() * b + b.detach() * w).sum().backward()
    assert [each.source for each in trace.explain(w).cuts] == ["w.detach()"]
    assert [each.source for each in trace.explain(b).cuts] == ["b.detach()"]


def test_lines_in_lambdas_and_comprehensions() -> None:
    """An op in a lambda or comprehension is placed on its line there."""
    w, b = leaf(1, 2), leaf(3, 4)
    stop = lambda t: t.detach()  # noqa: E731  # how people write it
    with gradtrace.record() as trace:
        parts = [part.data for part in w.unbind()]
        loss = (stop(w) * b).sum() + torch.stack(parts).sum()
        loss.backward()
    cuts = {each.source: each.location for each in trace.explain(w).cuts}
    here = test_lines_in_lambdas_and_comprehensions
    assert cuts.keys() == {"t.detach()", "part.data"}
    assert [each.source for each in trace.explain(w).cuts].count("part.data") == 2
    lines = {source: place.line for source, place in cuts.items() if place is not None}
    assert lines == {
        "t.detach()": _line(here, "lambda t:"),
        "part.data": _line(here, "for part in"),
    }


def test_code_without_a_source() -> None:
    """Code that was made by exec has a line and no text, and all works."""
    space: dict[str, Any] = {"w": leaf(1, 2), "b": leaf(3, 4), "record": gradtrace.record}
    exec(
        "with record() as trace:\n    h = w * 2\n    (h.detach() * b).sum().backward()\n",
        space,
    )
    (cut,) = space["trace"].explain(space["w"]).cuts
    assert (cut.kind, cut.source, cut.location.line) == ("detach", None, 3)
    assert str(space["trace"].explain(space["w"]))
    assert space["trace"].summary()


@pytest.fixture
def library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a module that was installed into a site-packages folder."""
    folder = tmp_path / "lib" / "site-packages"
    package = folder / "losslib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from losslib._inner import stopped\n\ndef loss(x, y):\n    return (stopped(x) * y).sum()\n"
    )
    (package / "_inner.py").write_text("def stopped(x):\n    return x.detach()\n")
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("losslib")
    for name in ("losslib", "losslib._inner"):
        sys.modules.pop(name, None)


def test_a_librarys_line_names_the_users_own(library: Any) -> None:
    """Where a cut lies in a library, `called_from` is the innermost line of the user's own code."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        library.loss(w * 2, b).backward()
    (cut,) = trace.explain(w).cuts
    assert cut.location is not None
    assert cut.called_from is not None
    assert pathlib.Path(cut.location.file).name == "_inner.py"
    assert (cut.location.line, cut.source) == (2, "x.detach()")
    assert cut.called_from.file == __file__
    here = test_a_librarys_line_names_the_users_own
    assert cut.called_from.line == _line(here, "library.loss(w * 2, b)")
    assert f"test_record.py:{cut.called_from.line}" in str(trace.explain(w))


def test_a_users_own_line_has_no_caller() -> None:
    """Where a cut lies in the user's code, `called_from` is None."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        (w.detach() * b).sum().backward()
    (cut,) = trace.explain(w).cuts
    assert cut.called_from is None


def test_torchs_own_lines_are_never_blamed() -> None:
    """What happens inside torch is placed on the line that called torch."""
    w, b, x = leaf(1, 2, 3), leaf(4, 5, 6), torch.randn(1, 2, 4, requires_grad=True)
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    with gradtrace.record() as trace:
        hard = F.gumbel_softmax(w, hard=True)
        kind = torch.distributions.Categorical(logits=b).sample()
        seen = attention(x, x, x)[0].sum()
        (hard.sum() + hard[kind] + seen).backward()
    files = {each.location.file for each in trace.ops if each.location is not None}
    assert files == {__file__}
    assert all(each.location is not None for each in trace.ops)


# -- modules ---------------------------------------------------------------------------------------


def test_functional_use_of_a_module_keeps_the_path() -> None:
    """A module inside another that is called by hand has its own path."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    net = Net()
    with gradtrace.record() as trace:
        net(torch.ones(2)).sum().backward()
    assert [each.module for each in trace.ops] == ["blocks.0", "blocks.1", ""]
    assert trace.leaves[0].name == "blocks.0.weight"


def test_a_module_that_raises_leaves_its_path() -> None:
    """An error in a forward ends the module's path, too."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    net, w = Broken(), leaf(1, 2)
    with gradtrace.record() as trace:
        with pytest.raises(ValueError, match="no"):
            net(w)
        (w * 2).sum().backward()
    assert [each.module for each in trace.ops] == ["", ""]


def test_leaves_are_left_as_they_were() -> None:
    """No hook stays on a leaf, not even the empty dictionary that torch keeps hooks in."""
    w, hooked = leaf(1, 2), leaf(3, 4)
    hooked.register_post_accumulate_grad_hook(lambda tensor: None)
    with gradtrace.record():
        (w * hooked).sum().backward()
    assert w._post_accumulate_grad_hooks is None
    assert w._backward_hooks is None
    assert len(hooked._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize("backward", ["loss.backward()", "pass"])
def test_deep_graphs_are_freed(backward: str) -> None:
    """A graph of many thousand nodes in a row does not kill the process when it is freed."""
    program = f"""
import gc, torch, gradtrace
x = torch.ones(3, requires_grad=True)
with gradtrace.record() as trace:
    h = x
    for _ in range(60_000):
        h = h * 1.0001
    loss = h.sum()
    {backward}
    del h, loss
with gradtrace.record():
    h = x
    for _ in range(60_000):
        h = h * 1.0001
assert not trace.graph.graph["troubles"]
del h
gc.collect()
from gradtrace._observe import anchors
assert not anchors._outliving and anchors._release_outliving not in gc.callbacks
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("alive\n", 0), done.stderr
