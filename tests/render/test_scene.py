"""What a picture shows, whatever its format."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace._errors import UnknownNameError
from gradtrace._records import CutKind, Status
from gradtrace._render.scene import USES, Box, Frame, Kind, Sample, Scene, build_scene
from gradtrace._render.wording import many, passes_phrase

from .graphs import Sketch, detach_then_use_again, recurrent, stack_of_layers


def draw(sketch: Sketch, **options: object) -> Scene:
    """Return the scene of a sketch."""
    return build_scene(sketch.graph, sketch, **options)  # type: ignore[arg-type]  # as users give them


def box(scene: Scene, title: str) -> Box:
    """Return the only box with a title."""
    (found,) = (box for box in scene.boxes if box.title == title)
    return found


def titles(scene: Scene) -> set[str]:
    """Return what all boxes are called."""
    return {box.title for box in scene.boxes}


def verdicts(scene: Scene) -> Counter[Status]:
    """Return how many leaves are counted with each status."""
    counted: Counter[Status] = Counter()
    for drawn in scene.boxes:
        counted.update(dict(drawn.verdicts))
    return counted


def frames(frame: Frame) -> dict[str, Frame]:
    """Return a frame and all inside it by their paths."""
    inside = {path: found for child in frame.frames for path, found in frames(child).items()}
    return {frame.path: frame, **inside}


def test_arrows_are_reached_where_backward_went() -> None:
    """The way through the detach is not reached; the way round it is."""
    scene = draw(detach_then_use_again())
    names = {drawn.id: drawn.title for drawn in scene.boxes}
    reached = {(names[a.tail], names[a.head]): bool(a.reached) for a in scene.arrows}
    assert reached == {
        ("X", "K = add"): True,
        ("Y", "K = add"): True,
        ("K = add", "detach"): False,
        ("K = add", "L = mul"): True,
        ("detach", "mul"): False,
        ("Z", "mul"): True,
        ("mul", "L = mul"): True,
    }


def test_a_cut_names_its_line() -> None:
    """A cut says in which line of which file it is, and what is written there."""
    cut = box(draw(detach_then_use_again()), "detach")
    assert cut.kind is Kind.CUT
    assert cut.lines == ("train.py:4", "K.detach()")


def test_the_analysis_knows_names_and_places_better() -> None:
    """A leaf is called what the analysis calls it, since two nodes may have one name."""
    sketch = Sketch()
    first, second = sketch.leaf("w"), sketch.leaf("w")
    sketch.backward(sketch.op("add", first, second))
    sketch.renamed[second] = "w#2"
    assert titles(draw(sketch)) == {"w", "w#2", "add"}


def test_what_leads_to_no_root_is_left_out_and_counted() -> None:
    """A metric is not drawn, a note says so, and full=True draws it."""
    sketch = detach_then_use_again()
    sketch.op("argmax", 3)
    scene = draw(sketch)
    assert "argmax" not in titles(scene)
    assert "1 op not drawn: they lead to no root." in scene.notes
    assert "argmax" in titles(draw(sketch, full=True))


def test_without_a_root_everything_is_drawn() -> None:
    """A trace without a backward pass shows all it has, and says that there was none."""
    sketch = Sketch()
    sketch.op("exp", sketch.leaf("x", Status.NO_BACKWARD))
    scene = draw(sketch)
    assert titles(scene) == {"x", "exp"}
    assert "No backward pass was recorded, so no arrow is solid." in scene.notes


def test_an_escape_is_drawn_only_as_a_cut() -> None:
    """A logged item is left out; the item that is a leaf's only way out is drawn with its way."""
    sketch = Sketch()
    logged, lost = sketch.leaf("logged"), sketch.leaf("lost", Status.CUT)
    root = sketch.op("exp", logged)
    sketch.op("item", root, kind="escape", name="log")
    way = sketch.op("mul", lost, sketch.data("scale"))
    item = sketch.op("item", way, kind="escape", name="angle")
    sketch.cut(item, CutKind.ESCAPE, "lost")
    sketch.backward(root)
    assert titles(draw(sketch)) == {"logged", "exp", "lost", "scale", "mul", "angle = item"}


def test_unused_leaves_are_drawn_and_frozen_ones_only_where_used() -> None:
    """A frozen leaf that feeds nothing is left out, but an unused one is what people ask about."""
    sketch = Sketch()
    sketch.leaf("forgotten", Status.UNUSED)
    sketch.leaf("idle", Status.FROZEN)
    sketch.backward(sketch.op("mul", sketch.leaf("w"), sketch.leaf("used", Status.FROZEN)))
    assert titles(draw(sketch)) == {"forgotten", "used", "w", "mul"}


@pytest.mark.parametrize("is_cut", [False, True])
def test_writing_into_a_leaf_is_drawn_only_as_a_cut(is_cut: bool) -> None:
    """An optimizer's write is no arrow, the write that is a leaf's only way is one."""
    sketch = Sketch()
    online, target = sketch.leaf("online", Status.CUT), sketch.leaf("target")
    write = sketch.op("copy_", online)
    sketch.edge(write, target, weak=True)
    if is_cut:
        sketch.cut(write, CutKind.NO_GRAD, "online")
    sketch.backward(sketch.op("add", target, write))
    arrows = {(arrow.tail, arrow.head) for arrow in draw(sketch).arrows}
    assert ((write, target) in arrows) is is_cut


def test_a_parameter_lies_in_the_frame_of_its_module() -> None:
    """Ops and parameters of one module share a frame, in which names lose the module's path."""
    sketch = Sketch()
    weight = sketch.leaf("net.fc.weight")
    call = sketch.op("linear", sketch.data("x"), weight, module="net.fc")
    relu = sketch.op("relu", call, module="net")
    sketch.backward(sketch.op("sum", relu))
    scene = draw(sketch)
    found = frames(scene.frame)
    assert set(found["net.fc"].boxes) == {weight, call}
    assert found["net"].boxes == (relu,)
    assert box(scene, "weight").frame == "net.fc"


def test_boxes_say_which_of_several_passes_reached_them() -> None:
    """With two passes a box says "pass 1" or "all passes" if its arrows agree; with one nothing."""
    sketch = Sketch()
    shared = sketch.op("exp", sketch.leaf("w"))
    sketch.backward(sketch.op("sum", sketch.op("sin", shared), name="a"))
    assert {drawn.passes for drawn in draw(sketch).boxes} == {""}
    sketch.backward(sketch.op("mean", shared, name="b"))
    scene = draw(sketch)
    assert {drawn.title: drawn.passes for drawn in scene.boxes} == {
        "w": "all passes",
        "exp": "",
        "sin": "pass 0",
        "a = sum": "",
        "b = mean": "",
    }
    assert {arrow.passes for arrow in scene.arrows} == {""}
    assert Sample.PASSES not in scene.legend


def test_an_arrow_says_its_passes_where_no_box_does() -> None:
    """Between two boxes whose arrows differ in passes, the arrow has the numbers."""
    sketch = Sketch()
    one, two = sketch.op("exp", sketch.leaf("w")), sketch.op("sin", sketch.leaf("v"))
    sketch.edge(one, two)
    sketch.backward(sketch.op("sum", one))
    sketch.backward(sketch.op("sum", two))
    sketch.backward(sketch.op("mean", two))
    scene = draw(sketch)
    (labelled,) = (arrow for arrow in scene.arrows if arrow.passes)
    assert (labelled.tail, labelled.head, labelled.passes) == (one, two, "1–2")
    assert Sample.PASSES in scene.legend


def test_ways_of_plain_data_are_told_from_cut_ways() -> None:
    """What no leaf flows into is plain; behind a leaf, cut or not, an arrow is not."""
    sketch = Sketch()
    cropped = sketch.op("getitem", sketch.data("x"), requires_grad=False)
    frozen = sketch.leaf("frozen", Status.FROZEN)
    detached = sketch.op("detach", sketch.leaf("w", Status.CUT), requires_grad=False)
    sketch.cut(detached, CutKind.DETACH, "w")
    product = sketch.op("mul", detached, cropped, frozen, requires_grad=False)
    sketch.backward(sketch.op("add", product, sketch.leaf("v")))
    scene = draw(sketch)
    names = {drawn.id: drawn.title for drawn in scene.boxes}
    assert {names[arrow.tail] for arrow in scene.arrows if arrow.plain} == {
        "x",
        "getitem",
        "frozen",
    }
    assert {Sample.PLAIN, Sample.NOT_REACHED, Sample.REACHED} <= set(scene.legend)


def test_an_activation_has_no_frame_of_its_own() -> None:
    """A frame without a leaf around one op, called once or often, is left out."""
    sketch = Sketch()
    weight = sketch.leaf("net.0.weight")
    calls = [sketch.op("linear", sketch.data("x"), weight, module="net.0") for _ in range(2)]
    acts = [sketch.op("relu", call, module="net.1") for call in calls]
    sketch.backward(sketch.op("add", *acts))
    scene = draw(sketch)
    assert set(frames(scene.frame)) == {"", "net", "net.0"}
    assert set(frames(scene.frame)["net"].boxes) == set(acts)


def test_a_long_name_of_an_op_is_shown() -> None:
    """The longest names of torch's losses fit, whatever variable takes the result."""
    sketch = Sketch()
    op = "binary_cross_entropy_with_logits"
    sketch.backward(sketch.op(op, sketch.leaf("w"), name="generator_loss"))
    assert f"generator_loss = {op}" in titles(draw(sketch))


def test_a_name_is_on_an_arrow_only_if_no_box_says_it() -> None:
    """The second result of an op is named on its arrow, the first in the box."""
    sketch = Sketch()
    split = sketch.op("split", sketch.leaf("w"), name="left")
    root = sketch.op("add", split)
    sketch.edge(split, root, tensor="right", output=1)
    sketch.backward(root)
    labels = Counter(arrow.label for arrow in draw(sketch).arrows)
    assert labels == {"": 2, "right": 1}


def test_parallel_arrows_that_are_alike_are_one() -> None:
    """`x * x` is one arrow."""
    sketch = Sketch()
    x = sketch.leaf("x")
    sketch.backward(sketch.op("mul", x, x))
    assert len(draw(sketch).arrows) == 1


def test_a_large_model_folds_and_keeps_its_cuts_in_sight() -> None:
    """Like layers become one that is open; the one with a cut is drawn for itself."""
    scene = draw(stack_of_layers(40, cut=3))
    found = frames(scene.frame)
    assert {"layers.2", "layers.3", "layers.4–39 × 36"} <= {f.title for f in found.values()}
    (cut,) = (drawn for drawn in scene.boxes if drawn.kind is Kind.CUT)
    assert cut.lines == ("train.py:5", "h.detach()")
    assert cut.frame == "encoder.layers.3"
    assert len(scene.boxes) < 40
    assert any("36 repeated modules" in note for note in scene.notes)


def test_a_collapsed_module_keeps_its_verdicts_and_its_cut() -> None:
    """One box for a layer counts its parameters by verdict and names the line that cuts."""
    scene = draw(stack_of_layers(40, cut=3), depth=2)
    # The layer before the cut differs from those before it: a way out of it is not reached.
    cut = box(scene, "layers.3")
    assert cut.cuts == ("detach train.py:5",)
    assert cut.lines == ("4 parameters: 2 reached, 2 cut", "12 ops")
    assert box(scene, "layers.4–39 × 36").lines == ("144 parameters reached", "396 ops")
    assert Sample.CUT in scene.legend
    assert any("collapsed" in note for note in scene.notes)


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.REACHED])
def test_a_layer_with_another_verdict_is_like_no_other(status: Status) -> None:
    """One parameter of one layer with another verdict keeps the layer out of the fold."""
    sketch = stack_of_layers(40)
    name = "encoder.layers.7.mlp.bias"
    node = next(n for n, found in sketch.graph.nodes(data="name") if found == name)
    sketch.statuses[node] = status
    titles_of_frames = {f.title for f in frames(draw(sketch).frame).values()}
    assert {"layers.1–6 × 6", "layers.7", "layers.8–39 × 32"} <= titles_of_frames


def test_layers_that_are_all_cut_fold_into_none() -> None:
    """Even where all layers have the same verdicts, none with a cut parameter hides."""
    sketch = Sketch()
    h = sketch.data("x")
    for layer in range(30):
        weight = sketch.leaf(f"net.{layer}.weight", Status.CUT)
        h = sketch.op("mul", h, weight, module=f"net.{layer}", requires_grad=False)
        sketch.cut(h, CutKind.NO_GRAD, f"net.{layer}.weight")
    sketch.backward(sketch.op("add", h, sketch.leaf("w")))
    assert sum(drawn.kind is Kind.CUT for drawn in draw(sketch, limit=100).boxes) == 30


def test_a_layer_of_another_shape_or_op_is_like_no_other() -> None:
    """Leaves of other sizes, another op or another way between two ops end a run."""
    for change in ("shape", "op", "edge"):
        sketch = stack_of_layers(40)
        nodes = sketch.graph.nodes
        if change == "shape":
            names = nodes(data="name")
            leaf = next(n for n, found in names if found == "encoder.layers.7.mlp.bias")
            nodes[leaf]["shape"] = (2,)
        else:
            inside = [
                n for n, found in nodes(data="module") if found.startswith("encoder.layers.7.")
            ]
            if change == "op":
                nodes[inside[4]]["op"] = "flip"
            else:
                sketch.edge(inside[1], inside[4])
        found = {f.title for f in frames(draw(sketch).frame).values()}
        assert {"layers.1–6 × 6", "layers.7", "layers.8–39 × 32"} <= found


def test_items_with_a_gap_between_them_are_no_run() -> None:
    """Only neighbours fold: what stands between them would be passed over."""
    sketch = Sketch()
    weights = [sketch.leaf(f"net.{item}.weight") for item in (0, 1, 3, 4)]
    for weight in weights:
        item = sketch.graph.nodes[weight]["name"].rpartition(".")[0]
        sketch.backward(sketch.op("exp", weight, module=item))
    found = draw(sketch, depth=0, limit=1)
    assert verdicts(found) == {Status.REACHED: 4}
    titles_of_frames = {f.title for f in frames(draw(sketch, limit=10).frame).values()}
    assert not any("0–4" in title or "0–3" in title for title in titles_of_frames)


def test_lists_in_lists_fold_both() -> None:
    """Of like blocks in like stages one block of one stage is drawn, and all leaves are counted."""
    sketch = Sketch()
    h = sketch.data("x")
    h = sketch.op("mul", h, sketch.leaf("start"))
    for stage in range(6):
        for block in range(5):
            path = f"net.{stage}.{block}"
            weight = sketch.leaf(f"{path}.weight")
            h = sketch.op("tanh", sketch.op("mul", h, weight, module=path), module=path)
    sketch.backward(sketch.op("sum", h))
    scene = draw(sketch)
    assert {f.title for f in frames(scene.frame).values()} >= {"net.0–5 × 6", "0–5.0–4 × 5"}
    assert box(scene, "weight").times == 30
    assert verdicts(scene) == {Status.REACHED: 31}


def test_chains_are_one_box() -> None:
    """Ops in a row share a box named by the last result, but no cut and no branch."""
    sketch = Sketch()
    h = sketch.op("linear", sketch.data("x"), *(sketch.leaf(f"w{at}") for at in range(70)))
    h = sketch.op("relu", sketch.op("view", h))
    h = sketch.op("transpose", h, name="y")
    cut = sketch.op("detach", h, requires_grad=False)
    sketch.cut(cut, CutKind.DETACH, "w0")
    sketch.backward(sketch.op("add", sketch.op("exp", cut), sketch.op("sin", h)))
    scene = draw(sketch, limit=10)
    assert {"detach", "exp", "sin", "add"} < titles(scene)
    assert box(scene, "y = linear → view → relu →").lines == ("transpose",)


def test_an_activation_called_at_many_places_is_no_knot() -> None:
    """A module without leaves that is called twice is not one box with a loop around it."""
    sketch = Sketch()
    h = sketch.data("x")
    for layer in ("a", "b", "c"):
        for _ in range(3):
            h = sketch.op("mul", h, sketch.leaf(f"net.{layer}.w"), module=f"net.{layer}")
        h = sketch.op("relu", h, module="net.act")
    sketch.backward(sketch.op("sum", h))
    scene = draw(sketch, depth=1)
    assert sum(drawn.title == "relu" for drawn in scene.boxes) == 3
    assert not any(arrow.back for arrow in scene.arrows)


def test_a_root_is_never_inside_a_collapsed_module() -> None:
    """Where backward started is seen even where a model computes its own loss."""
    sketch = Sketch()
    inner = sketch.op("linear", sketch.leaf("w"), module="model.fc")
    sketch.backward(sketch.op("sum", inner, module="model", name="loss"))
    assert box(draw(sketch, depth=0), "loss = sum").roots == (0,)


def test_a_line_reached_half_of_the_time_is_two_boxes() -> None:
    """Folding never puts reached and unreached ops of one line into one box."""
    sketch = Sketch()
    leaf = sketch.leaf("w")
    calls = [sketch.op("exp", leaf, at=3) for _ in range(200)]
    for number, call in enumerate(calls[:80]):
        calls[number] = sketch.op("detach", call, at=4, requires_grad=False)
        sketch.cut(calls[number], CutKind.DETACH, "w")
    sketch.backward(sketch.op("stack", *calls))
    expected = {"w", "exp × 80", "exp × 120", "detach × 80", "stack"}
    assert titles(draw(sketch)) == expected


def test_depth_says_how_many_levels_are_open() -> None:
    """With depth=0 the outermost modules are one box each."""
    assert titles(draw(stack_of_layers(2), depth=0)) == {"tokens", "encoder", "loss = sum"}


def test_a_long_loop_folds_by_line() -> None:
    """Two thousand steps become a box for each line."""
    scene = draw(recurrent(2_000))
    assert len(scene.boxes) < 20
    assert "matmul × 2,000" in titles(scene)
    assert any("drawn together by line" in note for note in scene.notes)


def test_the_roots_of_a_long_training_fold() -> None:
    """A thousand passes are not a thousand boxes."""
    sketch = Sketch()
    weight = sketch.leaf("w")
    for _ in range(1_000):
        sketch.backward(sketch.op("sum", sketch.op("exp", weight, at=3), name="loss", at=4))
    folded = box(draw(sketch), "sum × 1,000")
    assert folded.roots == tuple(range(1_000))
    assert folded.lines[-1] == "passes 0–999 start here"


def test_what_was_not_seen_is_said() -> None:
    """Passes that raised, and passes whose arrows nobody saw, are notes."""
    sketch = Sketch()
    root = sketch.op("exp", sketch.leaf("w"))
    sketch.backward(root)
    sketch.backward(root)
    first, second = sketch.backward_passes
    sketch.backward_passes = [
        replace(first, observed=False),
        replace(second, error="RuntimeError: no"),
    ]
    assert draw(sketch).notes == (
        "Started outside torch's Python API, so its arrows were not seen: 0.",
        "Pass 1 raised RuntimeError: no",
    )


def test_full_draws_each_node() -> None:
    """Nothing is collapsed or folded on request."""
    sketch = stack_of_layers(12)
    scene = draw(sketch, full=True)
    assert {node for drawn in scene.boxes for node in drawn.nodes} == set(sketch.graph)
    assert all(len(drawn.nodes) == 1 for drawn in scene.boxes)


def test_a_busy_leaf_is_drawn_in_copies() -> None:
    """No leaf has more arrows than a layout program can bear, and none is lost."""
    sketch = Sketch()
    leaf = sketch.leaf("w")
    uses = [sketch.op("exp", leaf, at=line) for line in range(60)]
    sketch.backward(sketch.op("stack", *uses))
    scene = draw(sketch)
    tails = Counter(arrow.tail for arrow in scene.arrows if arrow.head in uses)
    assert max(tails.values()) <= USES
    assert tails.total() == len(uses)
    assert sum(drawn.title == "w (again)" for drawn in scene.boxes) == len(tails) - 1
    assert verdicts(scene) == {Status.REACHED: 1}


def test_only_draws_one_tensor_s_story() -> None:
    """Only the ways of the tensor to the roots are drawn."""
    scene = draw(detach_then_use_again(), only="Z")
    assert titles(scene) == {"Z", "mul", "L = mul"}
    assert any("no way from Z to a root" in note for note in scene.notes)


def test_only_draws_the_ways_to_what_cuts_it() -> None:
    """A leaf's ways that end at its own cut are drawn; what it leads to without one is not."""
    sketch = Sketch()
    lost, other = sketch.leaf("lost", Status.CUT), sketch.leaf("other")
    way = sketch.op("exp", lost)
    sketch.op("print", way)
    sketch.cut(sketch.op("item", way, kind="escape", name="angle"), CutKind.ESCAPE, "lost")
    sketch.backward(sketch.op("sum", other))
    assert titles(draw(sketch, only="lost")) == {"lost", "exp", "angle = item"}
    assert titles(draw(sketch, only="other")) == {"other", "sum"}


def test_only_of_a_leaf_that_leads_nowhere_is_the_leaf() -> None:
    """What asks why a leaf is unused or frozen gets a picture with the leaf."""
    sketch = Sketch()
    sketch.leaf("idle", Status.FROZEN)
    sketch.leaf("forgotten", Status.UNUSED)
    sketch.backward(sketch.op("sum", sketch.leaf("w")))
    assert titles(draw(sketch, only="idle")) == {"idle"}
    assert titles(draw(sketch, only="forgotten")) == {"forgotten"}


def test_only_on_nothing_names_what_is_near() -> None:
    """A wrong name is an error that gives the nearest right one."""
    with pytest.raises(UnknownNameError, match=r"'weigth'[\s\S]*'weight'"):
        draw(_one_leaf("weight"), only="weigth")


def test_gradient_graph_only_leaves_out_what_no_gradient_can_come_to() -> None:
    """Data, frozen leaves and what lies behind a cut are hidden; the cut itself stays."""
    sketch = Sketch()
    frozen, lost = sketch.leaf("frozen", Status.FROZEN), sketch.leaf("lost", Status.CUT)
    mask = sketch.op("gt", sketch.data("x"), requires_grad=False)
    detached = sketch.op("detach", sketch.op("exp", lost), requires_grad=False)
    sketch.cut(detached, CutKind.DETACH, "lost")
    behind = sketch.op("round", detached, frozen, mask, requires_grad=False)
    sketch.backward(sketch.op("mul", behind, sketch.leaf("w")))
    scene = draw(sketch, gradient_graph_only=True)
    assert titles(scene) == {"lost", "exp", "detach", "w", "mul"}
    assert any("2 ops and 1 leaf not drawn: no gradient comes there" in n for n in scene.notes)


def _one_leaf(name: str) -> Sketch:
    sketch = Sketch()
    sketch.backward(sketch.op("exp", sketch.leaf(name)))
    return sketch


def test_the_legend_has_what_occurs_and_nothing_else() -> None:
    """A picture without a cut explains no cut."""
    assert draw(_one_leaf("w")).legend == (Sample.LEAF, Sample.OP, Sample.ROOT, Sample.REACHED)


@st.composite
def sketches(draw_value: st.DrawFn) -> Sketch:
    """Return a random program: leaves and ops in random modules, lines and passes."""
    sketch = Sketch()
    paths = st.sampled_from(["", "a", "a.0", "a.1", "a.1.b", "c"])
    for number in range(draw_value(st.integers(1, 12))):
        path = draw_value(paths)
        name = f"{path}.w{number}" if path else f"w{number}"
        sketch.leaf(name, draw_value(st.sampled_from(list(Status))))
    for _ in range(draw_value(st.integers(1, 25))):
        known = st.integers(0, len(sketch.graph) - 1)
        takes = draw_value(st.lists(known, max_size=3))
        op = sketch.op("op", *takes, module=draw_value(paths), at=draw_value(st.integers(1, 4)))
        if draw_value(st.booleans()):
            _cut_what_leads_to(sketch, op, draw_value(st.sampled_from(list(CutKind))))
    for _ in range(draw_value(st.integers(0, 2))):
        sketch.backward(draw_value(st.integers(0, len(sketch.graph) - 1)))
    return sketch


def _cut_what_leads_to(sketch: Sketch, op: int, kind: CutKind) -> None:
    """Cut a way of each leaf from which one leads here past no other cut."""
    open_ways = nx.subgraph_view(
        sketch.graph, filter_node=lambda n: not sketch.graph.nodes[n]["cut"]
    )
    before = {leaf.node for leaf in sketch.leaves if leaf.requires_grad} & nx.ancestors(
        open_ways, op
    )
    sketch.cut(op, kind, *(sketch.graph.nodes[leaf]["name"] for leaf in sorted(before)))


@st.composite
def layered(draw_value: st.DrawFn) -> Sketch:
    """Return lists of random layers, most of them alike, some changed in one respect."""
    sketch = Sketch()
    steps = draw_value(
        st.lists(
            st.tuples(st.sampled_from(["mul", "add", "tanh"]), st.booleans()),
            min_size=1,
            max_size=5,
        )
    )
    h = sketch.op("mul", sketch.leaf("start"))
    for layer in range(draw_value(st.integers(2, 6))):
        change = draw_value(
            st.sampled_from(["none"] * 5 + ["cut", "status", "op", "shape", "skip"])
        )
        start = h
        for step, (op, takes_leaf) in enumerate(steps):
            path = f"net.{layer}" if step % 2 else f"net.{layer}.sub"
            takes = [h, start] if change == "skip" else [h]
            if takes_leaf:
                status = Status.ZERO if change == "status" else Status.REACHED
                shape = (2,) if change == "shape" else (1,)
                takes.append(sketch.leaf(f"{path}.w{step}", status, shape=shape))
            h = sketch.op(f"{op}2" if change == "op" else op, *takes, module=path, at=step)
            if change == "cut" and step == 0:
                _cut_what_leads_to(sketch, h, CutKind.DETACH)
    for _ in range(draw_value(st.integers(1, 2))):
        sketch.backward(sketch.op("sum", h))
    return sketch


programs = st.one_of(sketches(), layered())
options = st.fixed_dictionaries(
    {},
    optional={
        "limit": st.integers(1, 60),
        "depth": st.integers(0, 3),
        "full": st.booleans(),
        "gradient_graph_only": st.booleans(),
    },
)


@given(programs, options)
def test_no_verdict_is_lost_by_any_option(sketch: Sketch, asked: dict[str, object]) -> None:
    """Whatever is asked, each leaf that wants a gradient is counted with its verdict in one box."""
    drawn = draw(sketch, **asked)
    wanting = [leaf.node for leaf in sketch.leaves if leaf.requires_grad]
    owners = Counter(node for found in drawn.boxes for node in found.nodes)
    assert all(owners[leaf] == 1 for leaf in wanting)
    for found in drawn.boxes:
        inside = Counter(sketch.statuses[n] for n in found.nodes if n in sketch.statuses)
        assert dict(found.verdicts) == inside
        assert found.status is None or set(inside) <= {found.status}
        if found.status is None and inside:
            total = many(inside.total(), "parameter")
            assert any(line.startswith(total) for line in found.lines)
        elif inside:
            assert inside.total() % found.times == 0


@given(programs, options)
def test_no_cut_is_hidden_by_any_option(sketch: Sketch, asked: dict[str, object]) -> None:
    """Whatever is asked, a cut of a leaf has its own box, or its box names or counts its place."""
    drawn = draw(sketch, **asked)
    owners = {node: found for found in drawn.boxes for node in found.nodes}
    for cut in sketch.cuts:
        if cut.blocked and (cut.node in sketch.leads_to_root or not sketch.passes):
            found = owners[cut.node]
            assert found.kind is Kind.CUT or found.cuts
    for found in drawn.boxes:
        places = {
            (sketch.graph.nodes[node]["cut"], sketch.graph.nodes[node]["line"])
            for node in found.nodes
            if sketch.graph.nodes[node]["cut"]
        }
        if found.cuts:
            counted = sum(int(line.split()[0]) for line in found.cuts if line.endswith(" more"))
            assert len([line for line in found.cuts if " more" not in line]) + counted == len(
                places
            )


@given(programs, options)
def test_only_draws_all_ways_of_one_leaf(sketch: Sketch, asked: dict[str, object]) -> None:
    """The leaf with its verdict and what lies on its ways to roots are drawn, and only that."""
    leaf = sketch.leaves[0]
    drawn = draw(sketch, only=leaf.name, **{**asked, "gradient_graph_only": False})
    nodes = {node for found in drawn.boxes for node in found.nodes}
    after = {leaf.node} | nx.descendants(sketch.graph, leaf.node)
    stops = {cut.node for cut in sketch.cuts if leaf.name in cut.blocked}
    ends = stops | sketch.leads_to_root if sketch.passes else set(sketch.graph)
    before = set().union(*(nx.ancestors(sketch.graph, end) for end in ends), ends)
    assert nodes == (after & before) | {leaf.node}
    assert verdicts(drawn)[leaf.status] >= 1


@given(layered(), options)
def test_a_fold_hides_no_difference(sketch: Sketch, asked: dict[str, object]) -> None:
    """What shares one place in a run has one verdict, one op, the same passes, and no cut."""
    drawn = draw(sketch, **asked)
    data = sketch.graph.nodes
    for found in drawn.boxes:
        if found.times > 1:
            facts = Counter(
                (data[n]["op"], data[n]["shape"], data[n]["reached"], sketch.statuses.get(n))
                for n in found.nodes
            )
            assert all(number % found.times == 0 for number in facts.values())
            assert not any(data[node]["cut"] for node in found.nodes)
        if found.module and "×" in found.title:
            assert not found.cuts
            assert Status.CUT not in dict(found.verdicts)


@given(programs, st.integers(1, 40))
def test_arrows_between_boxes_are_those_between_their_nodes(sketch: Sketch, limit: int) -> None:
    """Solid and dashed are true of the nodes behind two boxes, and no way is lost."""
    scene = draw(sketch, limit=limit)
    owner = {node: drawn.id for drawn in scene.boxes for node in drawn.nodes}
    expected = {
        (owner[tail], owner[head], bool(edge["reached"]))
        for tail, head, edge in sketch.graph.edges(data=True)
        if tail in owner and head in owner and owner[tail] != owner[head]
    }
    assert {(a.tail, a.head, bool(a.reached)) for a in scene.arrows} == expected


@given(programs, st.integers(1, 40))
def test_each_arrow_s_passes_can_be_read(sketch: Sketch, limit: int) -> None:
    """With several passes each solid arrow, or a box at its end, says which of them it means."""
    scene = draw(sketch, limit=limit)
    total = len(sketch.passes)
    said = {drawn.id: {drawn.passes, *_starts(drawn, total)} for drawn in scene.boxes}
    for arrow in scene.arrows:
        if arrow.reached and total > 1 and not arrow.passes:
            assert passes_phrase(arrow.reached, total) in said[arrow.tail] | said[arrow.head]


def _starts(drawn: Box, total: int) -> set[str]:
    return {passes_phrase(drawn.roots, total)} if drawn.roots and not drawn.passes else set()


@given(programs, st.integers(1, 40))
def test_each_box_lies_in_one_frame(sketch: Sketch, limit: int) -> None:
    """The tree of frames holds every box once, in the frame that the box names."""
    scene = draw(sketch, limit=limit)
    held = Counter(number for frame in frames(scene.frame).values() for number in frame.boxes)
    assert held == Counter(drawn.id for drawn in scene.boxes)
