"""A detached twin beside the tensor itself, and a name that is bound to the twin alone.

`K.detach()` leaves K as it was: gradients still flow through every other use of K. `K = K.detach()`
gives the name to the twin, and no later use of that name leads back to X and Y.

python examples/detach_and_use.py [folder for the picture, "examples-output" unless given]
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
with gradtrace.record() as twin:
    K = X + Y
    L = K.detach() * Z * K  # one way to X and Y is cut, the other is open
    L.backward()

print(f"L = K.detach() * Z * K        -> {X.grad}, {Y.grad}, {Z.grad}")
assert (X.grad, Y.grad, Z.grad) == (9, 9, 9)
twin.assert_reached("X", "Y", "Z")
assert [cut.kind for cut in twin.explain("X").cuts] == ["detach"]

X, Y, Z = one_two_three()
with gradtrace.record() as rebound:
    K = X + Y
    K = K.detach()
    L = K * 3 * Z * K  # both uses of the name are uses of the twin
    L.backward()

print(f"K = K.detach(); K * 3 * Z * K -> {X.grad}, {Y.grad}, {Z.grad}")
assert (X.grad, Y.grad, Z.grad) == (None, None, 27)
rebound.assert_cut("X", "Y", by="detach")
rebound.assert_reached("Z")

print()
print(twin.explain("X"))
print()
print(rebound.explain("X"))

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "examples-output")
folder.mkdir(parents=True, exist_ok=True)
print()
print(f"picture: {twin.export(folder / 'detach_and_use.png')}")
