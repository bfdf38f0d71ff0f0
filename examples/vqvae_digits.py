"""A VQ-VAE on 8 x 8 digits: which term of the loss trains the encoder, the codebook, the decoder?

Choosing the nearest code has no derivative. The straight-through estimator hands the decoder's
gradient to the encoder as if nothing had been chosen; the codebook learns from a term of its own.
Three detaches say who learns from what, and a misplaced one still trains, only worse.

python examples/vqvae_digits.py [folder for the picture, "examples-output" unless given]
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gradtrace

CODES, WIDTH, PLACES = 32, 8, 4  # an image becomes 4 codes out of 32, each a vector of 8


class VQVAE(nn.Module):
    """An autoencoder whose middle is a choice from a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, PLACES * WIDTH))
        self.codebook = nn.Parameter(torch.randn(CODES, WIDTH) / 10)
        self.decoder = nn.Sequential(nn.Linear(PLACES * WIDTH, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three terms of the loss."""
        z = self.encoder(images).view(-1, PLACES, WIDTH)
        nearest = torch.cdist(z.flatten(0, 1), self.codebook).argmin(dim=1)
        quantized = self.codebook[nearest].view_as(z)
        straight_through = z + (quantized - z).detach()  # forward: quantized, backward: z
        mse = nn.functional.mse_loss
        reconstruction = mse(self.decoder(straight_through.flatten(1)), images)
        codebook_loss = mse(quantized, z.detach())
        commitment = 0.25 * mse(z, quantized.detach())
        return reconstruction, codebook_loss, commitment


torch.set_num_threads(1)  # matrices this small are slower on several
torch.manual_seed(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16  # 1,797 rows in [0, 1]
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def batch() -> Tensor:
    """Return 64 images."""
    return images[torch.randint(len(images), (64,))]


for number in range(1, 601):
    terms = model(batch())
    optimizer.zero_grad()
    sum(terms).backward()
    optimizer.step()
    if number % 200 == 0:
        print(f"step {number}: reconstruction {terms[0].item():.4f}")

# A backward pass for each term tells them apart; their gradients add up to that of the sum.
with gradtrace.record(model) as trace:
    for term in model(batch()):
        term.backward(retain_graph=True)

reached = {(gradient.leaf, gradient.backward_pass) for gradient in trace.gradients}
print()
print(f"{'gradient from':18}" + "  ".join(done.roots[0] for done in trace.backward_passes))
for leaf in trace.leaves:
    cells = ["yes" if (leaf.name, done.index) in reached else "-" for done in trace.backward_passes]
    print(f"{leaf.name:18}{cells[0]:16}{cells[1]:15}{cells[2]}")

expected = {"encoder": {0, 2}, "codebook": {1}, "decoder": {0}}
for leaf in trace.leaves:
    passes = {index for name, index in reached if name == leaf.name}
    assert passes == expected[leaf.name.split(".")[0]]

cuts = {cut.source for cut in trace.explain("codebook").cuts if cut.kind == "detach"}
assert cuts == {"(quantized - z).detach()", "quantized.detach()"}

print()
print(trace.explain("codebook"))
print()
print(trace.explain("encoder.0.weight"))

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "examples-output")
folder.mkdir(parents=True, exist_ok=True)
print()
print(f"picture: {trace.export(folder / 'vqvae_digits.png')}")
