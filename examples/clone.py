"""`clone()` is an identity that carries a gradient: values and gradients pass it unchanged.

python examples/clone.py [folder for the picture, "examples-output" unless given]
"""

import sys
from pathlib import Path

import torch

import gradtrace

x = torch.tensor(1.0, requires_grad=True)
with gradtrace.record() as trace:
    y = x.clone()
    y.backward()

print(f"x.clone()  -> x.grad = {x.grad}")
assert x.grad == 1
assert len(trace.clones) == 1
assert not trace.cuts

# Adding nothing is an identity too: new memory, the same gradient.
v = torch.tensor(1.0, requires_grad=True)
with gradtrace.record() as sum_trace:
    w = v + 0
    w.backward()

print(f"v + 0      -> v.grad = {v.grad}")
assert v.grad == 1
assert not sum_trace.clones

print()
print(trace.explain("x"))

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "examples-output")
folder.mkdir(parents=True, exist_ok=True)
print()
print(f"picture: {trace.export(folder / 'clone.png')}")
