"""Parallel training in a group of one process: the same results, and the right verdicts."""

# Torch gives no types to `backward`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import Log, check_transparent
from torch import Tensor, distributed, nn
from torch.distributed import device_mesh

import gradtrace

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="torch is built without")


@pytest.fixture(autouse=True)
def group(tmp_path: pathlib.Path) -> Iterator[None]:
    """Make this process a group of its own."""
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def _mesh() -> Any:
    return device_mesh.init_device_mesh("cpu", (1,))


def _sharded() -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model, mesh=_mesh())
    return model


def _local(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local()
    return local


def _step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(2, 4)).square().sum()
    loss.backward()
    return loss


def test_data_parallel() -> None:
    """DistributedDataParallel reduces the same gradients, and each parameter is reached."""

    def program(log: Log) -> Any:
        model = nn.parallel.DistributedDataParallel(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            log(_step(model))
            optimizer.step()
        return model.module

    seen = check_transparent(program)
    assert seen.trace is not None
    assert {str(leaf.status) for leaf in seen.trace.leaves} == {"reached"}


def test_distributed_tensors() -> None:
    """DTensor gives the same gradients."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def program(_: Log) -> Any:
        weight = distribute_tensor(torch.randn(4, 4), _mesh(), [Shard(0)]).requires_grad_()
        (distribute_tensor(torch.randn(4, 4), _mesh(), [Shard(0)]) * weight).sin().sum().backward()
        return _local(weight.grad)

    check_transparent(program)


def test_fully_sharded_gradients() -> None:
    """FSDP2 gives the same gradients."""

    def program(log: Log) -> Any:
        model = _sharded()
        log(_step(model))
        return [_local(p.grad) for p in model.parameters()]

    check_transparent(program)


class _Partly(nn.Module):
    """A model that detaches one of its parameters, and never takes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stopped = nn.Parameter(torch.ones(4))
        self.idle = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what gets no gradient."""
        scaled: Tensor = self.linear(x) * self.stopped.detach()
        return scaled


@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="fails there on a CPU")
@pytest.mark.parametrize("given", [True, False])
def test_fully_sharded_verdicts(given: bool) -> None:
    """A parameter of FSDP2 that got a gradient is reached; of others nothing is claimed."""
    from torch.distributed.fsdp import fully_shard

    model = _Partly()
    fully_shard(model, mesh=_mesh())
    with gradtrace.record(model if given else None) as trace:
        for _ in range(2):
            _step(model)
    filled = {name: p.grad is not None for name, p in model.named_parameters()}
    assert filled == {"linear.weight": True, "linear.bias": True, "stopped": False, "idle": False}
    for name, parameter in model.named_parameters():
        found = trace.explain(parameter)
        assert found.status == ("reached" if filled[name] else "unknown")
        assert len(found.gradients) == (2 if filled[name] else 0)
        assert parameter._post_accumulate_grad_hooks is None
    whole = [leaf for leaf in trace.leaves if leaf.status == "cut"]
    assert [leaf.shape for leaf in whole] == [(4,)]
