"""`detach()` cuts the way back: the same product with it and without it.

python examples/detach.py [folder for the picture, "examples-output" unless given]
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

import gradtrace


def one_two_three() -> list[Tensor]:
    """Return three new leaves: 1, 2 and 3."""
    return [torch.tensor(value, requires_grad=True) for value in (1.0, 2.0, 3.0)]


X, Y, Z = one_two_three()
with gradtrace.record() as whole:
    K = X + Y
    L = K * Z
    L.backward()

print(f"K * Z           X.grad, Y.grad, Z.grad = {X.grad}, {Y.grad}, {Z.grad}")
assert (X.grad, Y.grad, Z.grad) == (3, 3, 3)
assert whole.reached("X", "Y", "Z")

X, Y, Z = one_two_three()
with gradtrace.record() as trace:
    K = X + Y
    L = K.detach() * Z
    L.backward()

print(f"K.detach() * Z  X.grad, Y.grad, Z.grad = {X.grad}, {Y.grad}, {Z.grad}")
assert (X.grad, Y.grad, Z.grad) == (None, None, 3)
trace.assert_cut("X", "Y", by="detach", at="K.detach()")
trace.assert_reached("Z")

print()
print(trace.explain("X"))

# The picture in text: `reached` holds the backward passes that came back along an edge. An edge is
# solid in the picture where there are some, and dashed where there are none.
print()
nodes = trace.graph.nodes
edges = {}
for source, target, passes in trace.graph.edges(data="reached"):
    ends = [nodes[node]["name"] or nodes[node]["op"] for node in (source, target)]
    edges[" -> ".join(ends)] = "solid" if passes else "dashed"
for edge, line in edges.items():
    print(f"{line:6}  {edge}")
assert edges == {
    "X -> K": "dashed",
    "Y -> K": "dashed",
    "K -> detach": "dashed",
    "detach -> L": "dashed",
    "Z -> L": "solid",
}

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "examples-output")
folder.mkdir(parents=True, exist_ok=True)
print()
print(f"picture: {trace.export(folder / 'detach.png')}")
