"""A loss that falls while half of the model stands still, and the line that is to blame.

python examples/quickstart.py [folder for the picture, "examples-output" unless given]
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import gradtrace


class Classifier(nn.Module):
    """An encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)

    @torch.no_grad()  # right for the search index that it was written for
    def embed(self, x: Tensor) -> Tensor:
        """Return a vector for each row."""
        return torch.relu(self.encoder(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each row and class."""
        return self.head(self.embed(x))


torch.manual_seed(0)
inputs = torch.randn(256, 16)
targets = inputs[:, :4].argmax(dim=1)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def step() -> float:
    """Train on the batch once and return the loss."""
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = [step() for _ in range(100)]
print(f"loss after 1 step {losses[0]:.2f}, after 100 steps {losses[-1]:.2f}: looks fine")
print()

with gradtrace.record(model) as trace:
    step()

print(trace)
print()
print(trace.explain("encoder.weight"))
trace.assert_cut(model.encoder, by="no_grad")
trace.assert_reached(model.head)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "examples-output")
folder.mkdir(parents=True, exist_ok=True)
print()
print(f"picture: {trace.export(folder / 'quickstart.png')}")
