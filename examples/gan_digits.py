"""A GAN on 8 x 8 digits: which networks does each of the two backward passes reach?

The discriminator's step must not train the generator: it takes `fake.detach()`. The generator's
step must go through the discriminator. Neither is visible in the losses if it breaks.

python examples/gan_digits.py [folder for the picture, "examples-output" unless given]
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gradtrace

torch.set_num_threads(1)  # matrices this small are slower on several
torch.manual_seed(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # 1,797 rows in [-1, 1]

generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))


def looks(images: Tensor, real: bool) -> Tensor:
    """Return the loss of the discriminator's opinion against "these are real" or "are not"."""
    opinion = discriminator(images)
    return nn.functional.binary_cross_entropy_with_logits(
        opinion, torch.full_like(opinion, float(real))
    )


def step() -> tuple[float, float]:
    """Train both networks once and return the losses."""
    real = images[torch.randint(len(images), (64,))]
    fake = generator(torch.randn(64, 16))

    discriminator_optimizer.zero_grad()
    discriminator_loss = looks(real, True) + looks(fake.detach(), False)
    discriminator_loss.backward()
    discriminator_optimizer.step()

    generator_optimizer.zero_grad()
    generator_loss = looks(fake, True)
    generator_loss.backward()
    generator_optimizer.step()
    return discriminator_loss.item(), generator_loss.item()


for number in range(1, 601):
    losses = step()
    if number % 200 == 0:
        print(f"step {number}: discriminator {losses[0]:.2f}, generator {losses[1]:.2f}")

with gradtrace.record({"generator": generator, "discriminator": discriminator}) as trace:
    step()

print()
print(f"{'gradient from':24}" + "  ".join(done.roots[0] for done in trace.backward_passes))
reached = {(gradient.leaf, gradient.backward_pass) for gradient in trace.gradients}
for leaf in trace.leaves:
    cells = ["yes" if (leaf.name, done.index) in reached else "-" for done in trace.backward_passes]
    print(f"{leaf.name:24}{cells[0]:20}{cells[1]}")

# The generator's pass also fills the discriminator's `.grad`: the next step's zero_grad() drops
# that before anybody uses it.
for leaf in trace.leaves:
    passes = {index for name, index in reached if name == leaf.name}
    assert passes == ({1} if leaf.name.startswith("generator.") else {0, 1})

print()
print(trace.explain("generator.0.weight"))
trace.assert_reached("generator.*", "discriminator.*")
assert [cut.source for cut in trace.explain("generator.0.weight").cuts] == ["fake.detach()"]

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "examples-output")
folder.mkdir(parents=True, exist_ok=True)
print()
print(f"picture: {trace.export(folder / 'gan_digits.png')}")
