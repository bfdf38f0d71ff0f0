"""What holds for every test: it starts from a seed, and leaves nothing of a recording behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracle import leftovers, replaceable


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Fail a test after which a mode, a replacement or an observer is still on."""
    torch.manual_seed(0)
    before = replaceable()
    yield
    assert not leftovers(before)
