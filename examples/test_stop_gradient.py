"""Tests that keep stop-gradients where they are meant: a target network, BYOL, a VQ-VAE.

Copy what fits, and put your own training step in place of these. Each test fails if a stop-gradient
disappears, if it moves, or if one comes in that cuts what should learn; its message says where.

python -m pytest examples/test_stop_gradient.py
"""

import copy
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

# -- a target network, as in DQN -------------------------------------------------------------------


def temporal_difference(online: nn.Module, target: nn.Module) -> Tensor:
    """Return the loss of one step: the target network's opinion is a constant."""
    states, rewards = torch.randn(8, 4), torch.randn(8)
    with torch.no_grad():
        goals = rewards + 0.99 * target(states).amax(1)
    return F.smooth_l1_loss(online(states).amax(1), goals)


def test_the_target_network_is_not_trained(gradtrace: ModuleType) -> None:
    """The fixture is the module `gradtrace`; if the test fails, its report has the trace."""
    online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    target = copy.deepcopy(online)
    with gradtrace.record({"online": online, "target": target}) as trace:
        temporal_difference(online, target).backward()
    trace.assert_all_reached(online)
    trace.assert_cut(target, by="no_grad")


# -- BYOL: the projection of one view is the goal of the other's prediction ------------------------


class Byol(nn.Module):
    """An online encoder with a predictor, and a target encoder that follows it slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.target = copy.deepcopy(self.online)
        self.predictor = nn.Linear(4, 4)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the loss between the prediction for one view and the other's target."""
        prediction = F.normalize(self.predictor(self.online(one)), dim=1)
        goal = F.normalize(self.target(other), dim=1).detach()
        return (prediction - goal).square().sum(1).mean()


@pytest.fixture
def byol() -> Byol:
    """Made here, since copying the encoder is no part of the step that is tested."""
    return Byol()


@pytest.mark.gradtrace(
    reached=["online.*", "predictor.*"],
    cut=["target.*"],
    only_cuts=["F.normalize(self.target(other), dim=1).detach()"],
)
def test_byol_does_not_collapse(byol: Byol) -> None:
    """The marker records the whole test, and checks which leaves were reached."""
    byol(torch.randn(8, 8), torch.randn(8, 8)).backward()


# -- a VQ-VAE: straight through the codebook, and a term for each side -----------------------------


class VqVae(nn.Module):
    """An encoder whose results are replaced by the nearest of 32 codes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.codebook = nn.Parameter(torch.randn(32, 4))
        self.decoder = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss: three terms, each for its side."""
        z = self.encoder(x)
        code = self.codebook[torch.cdist(z, self.codebook).argmin(1)]
        straight = z + (code - z).detach()
        reconstruction = F.mse_loss(self.decoder(straight), x)
        codebook_loss = F.mse_loss(code, z.detach())
        commitment = F.mse_loss(z, code.detach())
        return reconstruction + codebook_loss + 0.25 * commitment


def test_each_term_of_a_vqvae_trains_its_side(gradtrace: ModuleType) -> None:
    """`trace.terms()` says which addend of the loss reached which leaf."""
    model = VqVae()
    with gradtrace.record(model) as trace:
        model(torch.randn(16, 8)).backward()
    reached = {term.name: set(term.leaves) for term in trace.terms()}
    encoder = {"encoder.weight", "encoder.bias"}
    assert reached == {
        "reconstruction": encoder | {"decoder.weight", "decoder.bias"},
        "codebook_loss": {"codebook"},
        "0.25 * commitment": encoder,
    }


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", __file__]))
