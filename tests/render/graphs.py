"""Graphs made by hand, and a stand-in for their analysis, so that renderers are tested alone."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx

from gradtrace._records import (
    BackwardPass,
    Cut,
    CutKind,
    Gradient,
    Leaf,
    Location,
    Status,
)

_NODE: dict[str, Any] = {
    "name": None,
    "op": None,
    "grad_fn": None,
    "module": "",
    "file": None,
    "line": None,
    "function": None,
    "source": None,
    "called_from_file": None,
    "called_from_line": None,
    "called_from_function": None,
    "requires_grad": True,
    "shape": (1,),
    "dtype": "float32",
    "device": "cpu",
    "cut": None,
    "reached": (),
    "root_of": (),
    "shares_storage_with": None,
    "grad_mode": "grad",
}
_EDGE: dict[str, Any] = {
    "tensor": None,
    "output": 0,
    "shape": (1,),
    "dtype": "float32",
    "device": "cpu",
    "requires_grad": True,
    "reached": (),
    "input": 0,
    "linked": True,
    "undefined": (),
    "not_requested": (),
    "norms": (),
    "weak": False,
    "apart": None,
}


@dataclass
class Sketch:
    """A graph in the making; it analyses itself as far as renderers ask.

    Statuses and blocked leaves are told, not found out: that is the work of the real analysis.
    """

    graph: nx.MultiDiGraph = field(default_factory=nx.MultiDiGraph)
    statuses: dict[int, Status] = field(default_factory=dict)
    blocked: dict[int, tuple[str, ...]] = field(default_factory=dict)
    backward_passes: list[BackwardPass] = field(default_factory=list)
    norms: list[Gradient] = field(default_factory=list)
    renamed: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph.graph["passes"] = ()

    def add(self, kind: str, **attributes: Any) -> int:
        """Add a node and return its number."""
        node = len(self.graph)
        self.graph.add_node(node, **{**_NODE, "kind": kind, **attributes})
        return node

    def leaf(self, name: str, status: Status = Status.REACHED, **attributes: Any) -> int:
        """Add a leaf whose verdict is told."""
        attributes.setdefault("requires_grad", status is not Status.FROZEN)
        node = self.add("leaf", name=name, **attributes)
        self.statuses[node] = status
        return node

    def data(self, name: str | None, **attributes: Any) -> int:
        """Add data that needs no gradient."""
        return self.add("input", name=name, requires_grad=False, **attributes)

    def op(
        self,
        op: str,
        *takes: int,
        name: str | None = None,
        at: int | None = None,
        source: str | None = None,
        **attributes: Any,
    ) -> int:
        """Add an op that takes the first result of some nodes; `at` is a line of train.py."""
        where: dict[str, Any] = (
            {} if at is None else {"file": "train.py", "line": at, "function": "step"}
        )
        facts = {"op": op, "name": name, "source": source, **where, **attributes}
        node = self.add(facts.pop("kind", "op"), **facts)
        for tail in takes:
            self.edge(tail, node)
        return node

    def edge(self, tail: int, head: int, **attributes: Any) -> None:
        """Let one node take the result of another, by its name unless told otherwise."""
        name = self.graph.nodes[tail]["name"]
        self.graph.add_edge(tail, head, **{**_EDGE, "tensor": name, **attributes})

    def cut(self, node: int, kind: CutKind, *blocked: str) -> None:
        """Mark an op as a cut for some leaves."""
        self.graph.nodes[node]["cut"] = str(kind)
        self.blocked[node] = blocked

    def backward(self, root: int, at: int | None = None, kind: str = "backward") -> None:
        """Add a pass that goes from a root back through every op that is no cut."""
        index = len(self.backward_passes)
        data = self.graph.nodes[root]
        data["root_of"] += (index,)
        location = None if at is None else Location("train.py", at, "step")
        names = (data["name"] or data["op"],)
        self.backward_passes.append(
            BackwardPass(index, kind, names, location, None, create_graph=False, retain_graph=False)
        )
        self.graph.graph["passes"] += ((("index", index),),)
        self._reach(root, index)

    def _reach(self, root: int, index: int) -> None:
        pending = deque([root])
        while pending:
            node = pending.popleft()
            data = self.graph.nodes[node]
            if index in data["reached"]:
                continue
            data["reached"] += (index,)
            if data["cut"]:
                continue
            for tail, _, edge in self.graph.in_edges(node, data=True):
                wants = self.graph.nodes[tail]["requires_grad"]
                if wants and not self.graph.nodes[tail]["cut"]:
                    edge["reached"] += (index,)
                    pending.append(tail)

    def gradient(self, node: int, norm: float | None, backward_pass: int = 0) -> None:
        """Let a gradient arrive at a leaf."""
        data = self.graph.nodes[node]
        order = len(self.norms)
        self.norms.append(
            Gradient(data["name"], node, backward_pass, data["shape"], "float32", norm, order)
        )

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Return the leaves as told."""
        return tuple(self._leaf(node, status) for node, status in self.statuses.items())

    def _leaf(self, node: int, status: Status) -> Leaf:
        data = self.graph.nodes[node]
        wants = data["requires_grad"]
        name = self.renamed.get(node, data["name"])
        return Leaf(name, node, data["shape"], data["dtype"], "cpu", wants, status)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Return the cuts as told."""
        return tuple(self._cut(node, blocked) for node, blocked in self.blocked.items())

    def _cut(self, node: int, blocked: Sequence[str]) -> Cut:
        data = self.graph.nodes[node]
        location = Location(data["file"], data["line"], "step") if data["file"] else None
        return Cut(
            kind=CutKind(data["cut"]),
            op=data["op"],
            node=node,
            location=location,
            called_from=None,
            source=data["source"],
            module=data["module"],
            blocked=tuple(blocked),
        )

    @property
    def passes(self) -> tuple[BackwardPass, ...]:
        """Return the passes as started."""
        return tuple(self.backward_passes)

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Return the gradients as told."""
        return tuple(self.norms)

    @property
    def leads_to_root(self) -> set[int]:
        """Return all nodes before a root, found by networkx."""
        roots = {node for node, passes in self.graph.nodes(data="root_of") if passes}
        data_flow = nx.DiGraph(
            (tail, head) for tail, head, edge in self.graph.edges(data=True) if not edge["weak"]
        )
        before: Iterable[set[int]] = (
            nx.ancestors(data_flow, root) for root in roots if root in data_flow
        )
        return roots.union(*before)


def product_of_a_sum() -> Sketch:
    """(X + Y) * Z: nothing is detached."""
    sketch = Sketch()
    x, y, z = (sketch.leaf(name) for name in "XYZ")
    k = sketch.op("add", x, y, name="K", at=3, source="X + Y")
    root = sketch.op("mul", k, z, name="L", at=4, source="K * Z")
    sketch.backward(root, at=5)
    for leaf in (x, y, z):
        sketch.gradient(leaf, 3.0)
    return sketch


def detach_the_sum() -> Sketch:
    """K.detach() * Z: X and Y are cut."""
    sketch = Sketch()
    x, y = (sketch.leaf(name, Status.CUT) for name in "XY")
    z = sketch.leaf("Z")
    k = sketch.op("add", x, y, name="K", at=3, source="X + Y")
    detached = sketch.op("detach", k, at=4, source="K.detach()", requires_grad=False)
    sketch.cut(detached, CutKind.DETACH, "X", "Y")
    root = sketch.op("mul", detached, z, name="L", at=4, source="K.detach() * Z")
    sketch.backward(root, at=5)
    sketch.gradient(z, 3.0)
    return sketch


def detach_then_use_again() -> Sketch:
    """K.detach() * Z * K: X and Y are reached, with one way cut."""
    sketch = Sketch()
    x, y, z = (sketch.leaf(name) for name in "XYZ")
    k = sketch.op("add", x, y, name="K", at=3, source="X + Y")
    detached = sketch.op("detach", k, at=4, source="K.detach()", requires_grad=False)
    sketch.cut(detached, CutKind.DETACH, "X", "Y")
    product = sketch.op("mul", detached, z, at=4, source="K.detach() * Z")
    root = sketch.op("mul", product, k, name="L", at=4, source="K.detach() * Z * K")
    sketch.backward(root, at=5)
    for leaf in (x, y, z):
        sketch.gradient(leaf, 9.0)
    return sketch


TUTORIAL = (product_of_a_sum, detach_the_sum, detach_then_use_again)


def recurrent(steps: int) -> Sketch:
    """A loop in which two leaves are used at every step."""
    sketch = Sketch()
    w, u = sketch.leaf("W"), sketch.leaf("U")
    x, h = sketch.data("x"), sketch.data("h0")
    for _ in range(steps):
        item = sketch.op("getitem", x, at=3, source="x[t] @ W", requires_grad=False)
        left = sketch.op("matmul", item, w, at=3, source="x[t] @ W")
        right = sketch.op("matmul", h, u, at=4, source="h @ U")
        h = sketch.op("tanh", sketch.op("add", left, right, at=5), name="h", at=5)
    sketch.backward(sketch.op("sum", h, name="loss", at=6), at=7)
    return sketch


def stack_of_layers(layers: int, *, cut: int | None = None) -> Sketch:
    """Layers of twelve ops and four parameters; in one of them two parameters may be cut."""
    sketch = Sketch()
    h = sketch.data("tokens")
    for layer in range(layers):
        path = f"encoder.layers.{layer}"
        verdict = Status.CUT if layer == cut else Status.REACHED
        inner = [sketch.leaf(f"{path}.attention.{name}", verdict) for name in ("weight", "bias")]
        outer = [sketch.leaf(f"{path}.mlp.{name}") for name in ("weight", "bias")]
        skip = h
        h = sketch.op("linear", h, *inner, module=f"{path}.attention", at=3)
        for _ in range(8):
            h = sketch.op("roll", h, module=f"{path}.attention", at=4)
        if layer == cut:
            h = sketch.op("detach", h, module=path, at=5, source="h.detach()", requires_grad=False)
            sketch.cut(
                h, CutKind.DETACH, *(f"{path}.attention.{name}" for name in ("weight", "bias"))
            )
        h = sketch.op("linear", h, *outer, module=f"{path}.mlp", at=6)
        h = sketch.op("add", skip, h, module=path, at=7)
    sketch.backward(sketch.op("sum", h, name="loss", at=8), at=9)
    return sketch


HOSTILE = (
    "node",
    'a"b',
    "c\\N\\G\\\\",
    "<script>alert(1)</script>",
    "a::b",
    "多层感知机.权重",
    "<",
    "<b>",
    "&amp;",
    "graph",
    "-->",
    "{|}",
)


def hostile() -> Sketch:
    """Every text of a trace chosen to break a format."""
    sketch = Sketch()
    leaves = [sketch.leaf(name) for name in HOSTILE]
    product = sketch.op(
        '"<op>\\N"', *leaves, name="</svg>", module='m<x>"\\.y', at=1, source="'<' \"\\"
    )
    detached = sketch.op(
        "detach",
        product,
        file='C:\\Node "b"\\<t>.py',
        line=2,
        function="<f>",
        source='"\\<script>"',
    )
    sketch.cut(detached, CutKind.DETACH, *HOSTILE[:3])
    sketch.backward(sketch.op("sum", detached, name="L"))
    return sketch


def check_gold(name: str, text: str) -> None:
    """Compare a text with the file of that name, or write it if GRADTRACE_NEW_GOLD is set."""
    path = Path(__file__).with_name("gold") / name
    if os.environ.get("GRADTRACE_NEW_GOLD"):
        path.write_text(text, encoding="utf-8", newline="\n")
    assert text == path.read_text(encoding="utf-8")
