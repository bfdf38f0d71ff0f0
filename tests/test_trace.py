"""Trace: every member of the public interface, live and loaded from a file."""

# Torch gives no types to `backward`, `apply` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import test_cases  # noqa: F401  # its programs are used here, too
import torch
from programs import PROGRAMS, Program, Ran, leaf, run
from torch import nn

import gradtrace

_FEW = PROGRAMS[::7]

_HOSTILE = (
    "quote\"and'quote",
    "a::b",
    "<script>alert(1)</script>",
    "back\\slash\\n",
    "编码器.权重",
    "two\nlines",
    "{record|field}",
    "node",
    "%s {name} \x07",
)


def _example() -> Ran:
    """Return a trace with a result that is used both detached and not."""
    X, Y, Z = leaf(1), leaf(2), leaf(3)  # noqa: N806
    with gradtrace.record() as trace:
        K = X + Y  # noqa: N806
        L = K.detach() * Z * K  # noqa: N806
        L.backward()
    return trace, locals()


# -- names and records -----------------------------------------------------------------------------


def test_leaves_are_named_by_their_variables() -> None:
    """Leaves take the names of the local variables that hold them, in the order of their use."""
    trace, _ = _example()
    assert [each.name for each in trace.leaves] == ["X", "Y", "Z"]
    assert {each.status for each in trace.leaves} == {gradtrace.Status.REACHED}


def test_a_leaf_made_in_the_block_has_its_variables_name() -> None:
    """A leaf that a helper made in the block is named by its variable, not by an inner one."""
    with gradtrace.record() as trace:
        w = leaf(1, 2)
        (lambda inner: inner * 2)(w).sum().backward()
    assert [each.name for each in trace.leaves] == ["w"]


def test_a_leaf_record_holds_plain_facts() -> None:
    """A leaf's record gives shape, dtype, device and its node in the graph."""
    trace, _ = _example()
    x = trace.leaves[0]
    assert (x.shape, x.dtype, x.device, x.requires_grad) == ((1,), "float32", "cpu", True)
    assert trace.graph.nodes[x.node]["name"] == "X"


def test_results_are_named_by_their_assignments() -> None:
    """Results take the names that they are assigned to; what is not assigned has none."""
    trace, _ = _example()
    assert [(each.op, each.name) for each in trace.ops] == [
        ("add", "K"),
        ("detach", None),
        ("mul", None),
        ("mul", "L"),
    ]


def test_ops_say_where_and_what_they_are() -> None:
    """An op's record has its line, its function, its expression and autograd's node."""
    trace, _ = _example()
    add = trace.ops[0]
    first = _example.__code__.co_firstlineno
    assert add.location == gradtrace.Location(__file__, first + 4, "_example")
    assert (add.source, add.grad_fn, add.reached) == ("X + Y", "AddBackward0", (0,))
    assert trace.ops[1].grad_fn is None


def test_an_op_that_is_a_cut_says_so() -> None:
    """The kind of cut stands in the op's record and in the graph's node."""
    trace, _ = _example()
    (detach,) = trace.detaches
    assert detach.cut is gradtrace.CutKind.DETACH
    assert trace.graph.nodes[detach.node]["cut"] == "detach"
    assert [each.cut for each in trace.ops if each is not detach and each.op != "detach"] == [
        None
    ] * 3


def test_clones_and_detaches_are_listed() -> None:
    """`clones` and `detaches` hold the ops of those names."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        h = w.clone()
        h.detach_()
        (h.clone().detach() + w).sum().backward()
    assert [each.op for each in trace.clones] == ["clone", "clone"]
    assert [each.op for each in trace.detaches] == ["detach_", "detach"]


def test_cuts_name_the_leaves_that_they_block() -> None:
    """A cut lists every leaf that loses a way there."""
    trace, _ = _example()
    (found,) = trace.cuts
    assert (found.kind, found.op, found.blocked) == ("detach", "detach", ("X", "Y"))
    assert found.source == "K.detach()"
    assert found.location is not None
    assert found.location.line == _example.__code__.co_firstlineno + 5


def test_gradients_are_listed_in_order() -> None:
    """Each arrival has its pass, its shape and its norm, in the order of arrival."""
    w, b = leaf(3, 4), leaf(1, 1)
    with gradtrace.record() as trace:
        (w * b.detach()).sum().backward()
        w.pow(2).sum().backward()
    assert [(g.leaf, g.backward_pass, g.order, g.shape) for g in trace.gradients] == [
        ("w", 0, 0, (2,)),
        ("w", 1, 1, (2,)),
    ]
    assert [g.norm for g in trace.gradients] == pytest.approx([2**0.5, 10.0])
    assert [g.dtype for g in trace.gradients] == ["float32", "float32"]


def test_backward_passes_are_described() -> None:
    """Each pass has its kind, roots, line, inputs and flags."""
    w, b = leaf(1, 2), leaf(3, 4)
    with gradtrace.record() as trace:
        loss = (w * b).sum()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, [w], create_graph=True)
        with pytest.raises(RuntimeError):
            w.detach().sum().backward()
    passes = trace.backward_passes
    assert [(p.index, p.kind) for p in passes] == [(0, "backward"), (1, "grad"), (2, "backward")]
    assert [p.roots for p in passes[:2]] == [("loss",), ("loss",)]
    assert [p.inputs for p in passes] == [None, ("w",), None]
    assert [(p.retain_graph, p.create_graph) for p in passes] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    assert [p.error is None for p in passes] == [True, True, False]
    assert (passes[2].error or "").startswith("RuntimeError: element 0 of tensors does not require")
    lines = [p.location.line for p in passes if p.location is not None]
    first = test_backward_passes_are_described.__code__.co_firstlineno
    assert lines == [first + 5, first + 6, first + 8]


def test_a_pass_inside_a_pass_is_told() -> None:
    """Re-entrant checkpointing starts a pass inside the pass of the loss."""
    net, x = nn.Linear(2, 2), leaf(1, 2)
    with gradtrace.record() as trace:
        torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True).sum().backward()
    outer, inner = trace.backward_passes
    assert (outer.inside, inner.inside) == (None, 0)
    assert trace.reached(net, x)


# -- modules and parameters ------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.encoder(x) * 2
        y: torch.Tensor = self.head(h)
        return y


def test_parameters_are_named_by_path() -> None:
    """Without `model` parameters are named by their path from the outermost module."""
    net = _Net()
    with gradtrace.record() as trace:
        net(torch.ones(2)).sum().backward()
    names = ["encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias"]
    assert [each.name for each in trace.leaves] == names


def test_ops_carry_the_path_of_their_module() -> None:
    """An op's module is the dotted path of the module whose forward was running."""
    net = _Net()
    with gradtrace.record(net) as trace:
        net(torch.ones(2)).sum().backward()
    assert [(each.op, each.module) for each in trace.ops] == [
        ("linear", "encoder.0"),
        ("relu", "encoder.1"),
        ("mul", ""),
        ("linear", "head"),
        ("sum", ""),
    ]


def test_two_modules_are_told_apart_by_their_variables() -> None:
    """Where several outermost modules are called, their variables stand before the paths."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 1)
    with gradtrace.record() as trace:
        b(a(torch.ones(2))).sum().backward()
    assert [each.name for each in trace.leaves] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert [each.module for each in trace.ops] == ["a", "b", ""]


def test_a_dict_of_models_names_them() -> None:
    """`record({name: model})` puts the names before the paths, also of unused parameters."""
    a, b = nn.Linear(2, 2), nn.Linear(2, 1)
    with gradtrace.record({"gen": a, "disc": b}) as trace:
        a(torch.ones(2)).sum().backward()
    status = {each.name: str(each.status) for each in trace.leaves}
    assert status == {
        "gen.weight": "reached",
        "gen.bias": "reached",
        "disc.weight": "unused",
        "disc.bias": "unused",
    }


def test_given_names_come_first() -> None:
    """`names=` names leaves and data whatever their variables are called."""
    x, y = leaf(1), torch.ones(1)
    with gradtrace.record(names={"weight of x": x, "the data": y}) as trace:
        (x * y).sum().backward()
    assert [each.name for each in trace.leaves] == ["weight of x"]
    assert trace.explain("weight of x").status == "reached"
    assert trace.explain("the data").status == "frozen"


def test_two_leaves_of_one_name_are_told_apart() -> None:
    """Each label in `leaves` belongs to one leaf and finds it again."""
    with gradtrace.record() as trace:
        for value in (1.0, 2.0):
            w = leaf(value)
            (w * 2).sum().backward()
    labels = [each.name for each in trace.leaves]
    assert len(set(labels)) == 2
    assert [trace.explain(label).node for label in labels] == [each.node for each in trace.leaves]


# -- questions -------------------------------------------------------------------------------------


def test_explain_takes_tensors_and_names() -> None:
    """A tensor and its name get the same explanation, leaves and results alike."""
    trace, tensors = _example()
    for name in "XYZKL":
        assert str(trace.explain(tensors[name])) == str(trace.explain(name))


def test_reached_takes_tensors_names_patterns_and_modules() -> None:
    """`reached` holds when a gradient arrived at every one of its arguments."""
    net, idle = _Net(), leaf(1)
    with gradtrace.record(net, names={"idle": idle}) as trace:
        (net(torch.ones(2)).sum() + idle.detach()).backward()
    assert trace.reached(net, "encoder.*", net.head.weight, "head.bias", "*.weight")
    assert not trace.reached(net, idle)
    assert not trace.reached("idle")


def test_paths_lead_from_the_tensor_to_a_root() -> None:
    """Each path is a way in the graph, from the tensor to a root; cut ways are among them."""
    trace, tensors = _example()
    found = trace.paths("X")
    assert len(found) == 2
    for path in found:
        assert nx.is_path(trace.graph, path)
        assert path[0] == trace.explain("X").node
        assert trace.graph.nodes[path[-1]]["root_of"] == (0,)
    assert found == trace.paths(tensors["X"])


def test_paths_are_limited() -> None:
    """No more than `limit` ways are given where there are very many."""
    w = leaf(1.0)
    with gradtrace.record() as trace:
        h = w
        for _ in range(40):
            h = h + h
        h.sum().backward()
    assert len(trace.paths(w, limit=5)) <= 5
    assert str(trace.explain(w).status) == "reached"


def test_the_trace_can_be_read_inside_the_block() -> None:
    """A trace is readable at any time, and is true for what was recorded up to then."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        before = trace.explain(w).status
        loss = (w * 2).sum()
        assert [each.op for each in trace.ops] == ["mul", "sum"]
        assert trace.explain(w).status == "no_backward"
        loss.backward()
        assert trace.explain(w).status == "reached"
        (w * 3).sum()
    assert before == "no_backward"
    assert [each.op for each in trace.ops] == ["mul", "sum", "mul", "sum"]


def test_reading_inside_the_block_records_nothing() -> None:
    """Reading a trace changes neither it nor what is recorded afterwards."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        loss = (w.detach() * w).sum()
        loss.backward()
        for _ in range(2):
            str(trace), trace.to_dot(), str(trace.explain(w)), trace.reached(w), trace.paths(w)
        assert len(trace.ops) == 3
    assert len(trace.ops) == 3


# -- text ------------------------------------------------------------------------------------------


def test_the_summary_of_an_empty_trace() -> None:
    """An empty trace has a summary and empty records."""
    with gradtrace.record() as trace:
        pass
    assert trace.summary().splitlines()[0] == "0 leaves, 0 ops, 0 backward passes, 0 cuts"
    assert (trace.leaves, trace.ops, trace.cuts) == ((), (), ())
    assert (trace.gradients, trace.backward_passes) == ((), ())
    assert (trace.clones, trace.detaches) == ((), ())
    assert trace.to_dot().startswith("digraph")


def test_the_summary_shows_counts_passes_leaves_and_cuts() -> None:
    """The summary has a row for each leaf and each cut with its line, and is what str() gives."""
    trace, _ = _example()
    text = trace.summary()
    assert text == str(trace)
    assert text.splitlines()[0] == "3 leaves, 4 ops, 1 backward pass, 1 cut"
    line = _example.__code__.co_firstlineno + 5
    assert f"test_trace.py:{line}" in text
    assert "K.detach()" in text
    assert "blocks X, Y" in text


def test_repr_is_one_line_of_counts() -> None:
    """The repr says what kind of thing it is and how much it holds."""
    trace, _ = _example()
    assert repr(trace).startswith("<gradtrace.Trace: 4 ops, 3 leaves")
    assert "\n" not in repr(trace)


# -- bad input -------------------------------------------------------------------------------------


def test_an_unknown_name_gets_the_nearest() -> None:
    """A misspelt name is an error that names what was given and the nearest names."""
    net = _Net()
    with gradtrace.record(net) as trace:
        net(torch.ones(2)).sum().backward()
    with pytest.raises(gradtrace.UnknownNameError) as caught:
        trace.explain("encoder.0.wieght")
    assert "'encoder.0.wieght'" in str(caught.value)
    assert "'encoder.0.weight'" in str(caught.value)
    assert "trace.leaves" in str(caught.value)


def test_a_pattern_that_matches_nothing() -> None:
    """A pattern that matches no leaf is an error, so that a misspelt one never passes."""
    trace, _ = _example()
    for ask in (trace.reached, trace.assert_reached, trace.assert_not_reached, trace.assert_cut):
        with pytest.raises(gradtrace.NoMatchError, match=r"'encoder\.\*'"):
            ask("encoder.*")


def test_nothing_to_look_at() -> None:
    """Asking about no tensor at all is an error, and never passes."""
    trace, _ = _example()
    for ask in (trace.reached, trace.assert_reached, trace.assert_not_reached, trace.assert_cut):
        with pytest.raises(gradtrace.NoMatchError):
            ask()
        with pytest.raises(gradtrace.NoMatchError):
            ask(nn.ReLU())


@pytest.mark.parametrize("thing", [None, 3, 2.5, np.ones(3), [1], {"a": 1}, object(), b"X", True])
def test_things_that_are_no_tensors(thing: object) -> None:
    """What is neither tensor nor name is a NotATensorError that names its type."""
    trace, _ = _example()
    for ask in (trace.explain, trace.reached, trace.paths, trace.assert_cut):
        with pytest.raises(gradtrace.NotATensorError, match=type(thing).__name__):
            ask(thing)


def test_explain_takes_one_tensor() -> None:
    """A module is no single tensor: the error says what to do instead."""
    net = _Net()
    with gradtrace.record(net) as trace:
        net(torch.ones(2)).sum().backward()
    with pytest.raises(gradtrace.NotATensorError, match="Net"):
        trace.explain(net)


def test_a_tensor_of_another_program() -> None:
    """A tensor that nothing in the recording took is unused, and says so, or frozen."""
    trace, _ = _example()
    stranger = leaf(1)
    assert trace.explain(stranger).status == "unused"
    assert "No op in the recording took it" in str(trace.explain(stranger))
    assert trace.explain(torch.ones(2)).status == "frozen"
    assert not trace.reached(stranger)
    assert trace.paths(stranger) == ()


# -- the graph -------------------------------------------------------------------------------------

_PLAIN = (str, int, float, bool, type(None))
_NODE = {
    "kind", "name", "op", "grad_fn", "module", "file", "line", "function", "source",
    "called_from_file", "called_from_line", "called_from_function", "requires_grad", "shape",
    "dtype", "device", "cut", "reached", "root_of", "shares_storage_with", "grad_mode",
}  # fmt: skip
_EDGE = {"tensor", "output", "shape", "dtype", "device", "requires_grad", "reached"}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_graph_holds_plain_values(program: Program) -> None:
    """Every attribute of the graph is a plain value, and the documented ones are always there."""
    graph = run(program)[0].graph
    assert type(graph) is nx.MultiDiGraph
    assert {"version", "torch", "passes", "when"} <= set(graph.graph)
    groups: list[dict[str, Any]] = [graph.graph]
    for _, facts in graph.nodes(data=True):
        assert facts.keys() >= _NODE
        assert facts["kind"] in ("leaf", "input", "op", "escape")
        groups.append(facts)
    for _, _, facts in graph.edges(data=True):
        assert facts.keys() >= _EDGE
        groups.append(facts)
    assert [value for facts in groups for value in facts.values() if not _is_plain(value)] == []
    assert nx.is_directed_acyclic_graph(graph)


def test_a_detach_shares_storage_and_a_clone_does_not() -> None:
    """`shares_storage_with` names a detach's and a view's producer."""
    w = leaf(1, 2)
    with gradtrace.record() as trace:
        h = w * 2
        (h.detach() + h.view(2) + h.clone()).sum().backward()
    nodes = {facts["op"]: facts for _, facts in trace.graph.nodes(data=True)}
    mul = next(node for node, facts in trace.graph.nodes(data=True) if facts["op"] == "mul")
    assert nodes["detach"]["shares_storage_with"] == mul
    assert nodes["view"]["shares_storage_with"] == mul
    assert nodes["clone"]["shares_storage_with"] is None


# -- a loaded trace --------------------------------------------------------------------------------


def _answers(trace: gradtrace.Trace) -> list[object]:
    names = [each.name for each in trace.leaves]
    results = dict.fromkeys(each.name for each in trace.ops if each.name is not None)
    return [
        trace.leaves,
        trace.ops,
        trace.cuts,
        trace.backward_passes,
        [(g.leaf, g.order, repr(g.norm), g.cleared) for g in trace.gradients],
        trace.summary(),
        trace.to_dot(),
        [str(trace.explain(name)) for name in (*names, *results)],
        [trace.paths(name) for name in names],
    ]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_loaded_trace_answers_as_the_live_one(program: Program, tmp_path: pathlib.Path) -> None:
    """Records, summary, picture, explanations and paths survive saving and loading."""
    trace, _ = run(program)
    loaded = gradtrace.load(trace.save(tmp_path / "trace.json"))
    assert _answers(loaded) == _answers(trace)


def test_a_loaded_trace_knows_names_only(tmp_path: pathlib.Path) -> None:
    """A tensor or module given to a loaded trace is an error that says to give the name."""
    trace, tensors = _example()
    loaded = gradtrace.load(trace.save(tmp_path / "trace.json"))
    for thing in (tensors["X"], nn.Linear(1, 1), nn.Parameter(torch.ones(1))):
        with pytest.raises(gradtrace.ForeignTensorError, match="name"):
            loaded.reached(thing)
    with pytest.raises(gradtrace.NotATensorError):
        loaded.explain(None)
    loaded.assert_reached("X", "Y", "Z")


# -- names that attack -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_names(name: str, tmp_path: pathlib.Path) -> None:
    """Any text may be a name: it is found again, and survives every text and file."""
    w = leaf(1, 2)
    with gradtrace.record(names={name: w}) as trace:
        (w.detach() + w).sum().backward()
    assert trace.explain(name).status == "reached"
    loaded = gradtrace.load(trace.save(tmp_path / "trace.json"))
    assert [each.name for each in loaded.leaves] == [name]
    assert str(loaded.explain(name)) == str(trace.explain(name))
    assert "<script>" not in trace.to_dot()
    assert trace.summary()
    with pytest.raises(gradtrace.UnknownNameError):
        trace.explain(name + "!")


# -- exporting -------------------------------------------------------------------------------------


def test_an_unknown_suffix_is_refused(tmp_path: pathlib.Path) -> None:
    """A suffix that no form has is an error that lists those there are, and nothing is written."""
    trace, _ = _example()
    with pytest.raises(gradtrace.ExportError, match=r"\.json"):
        trace.export(tmp_path / "trace.xyz")
    with pytest.raises(gradtrace.ExportError):
        trace.export(tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


def test_export_returns_the_path(tmp_path: pathlib.Path) -> None:
    """`export` writes by suffix and returns where to."""
    trace, _ = _example()
    for suffix in (".json", ".dot", ".graphml"):
        path = trace.export(str(tmp_path / f"trace{suffix}"))
        assert path == tmp_path / f"trace{suffix}"
        assert path.stat().st_size > 0


def _asks() -> list[Callable[[gradtrace.Trace], object]]:
    return [str, repr, lambda t: t.to_dot(), lambda t: t.leaves, lambda t: t.cuts]


@pytest.mark.parametrize("program", _FEW, ids=lambda program: program.__name__)
def test_asking_twice_gives_the_same(program: Program) -> None:
    """A trace's answers do not change by asking."""
    trace, _ = run(program)
    for ask in _asks():
        assert ask(trace) == ask(trace)


def test_a_program_that_calls_eval_still_has_its_names() -> None:
    """`model.eval()` in a function hides none of its variables."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    second.eval()
    with gradtrace.record() as trace:
        second(first(torch.ones(2))).sum().backward()
    assert {leaf.name for leaf in trace.leaves} == {
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    }


def test_leaves_of_a_model_that_lives_in_the_block_only() -> None:
    """A model that is made, used and dropped in the block has its names all the same."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        next(model.parameters()).square().sum().backward()  # met before any module is called
        model(torch.ones(2)).sum().backward()

    with gradtrace.record() as trace:
        program()
    assert [each.name for each in trace.leaves] == ["0.weight", "0.bias"]
