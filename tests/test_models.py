"""Models as people have them run under `record()` as without, and each verdict on them is true.

Every model runs plain, with both kinds of checkpointing, and frozen with LoRA's adapters beside.
What `unused` and `cut` say of a parameter is held against the loss itself, computed again with
other values in it, and against the tensors that torch's dispatcher hands to ops.
"""

# Torch gives no types to `backward`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import linecache
import re
import tokenize
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Log, check_transparent, run, verdict_faults
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradtrace

peft = pytest.importorskip("peft")
from models import MODELS, Model  # noqa: E402  # without peft it need not be read


def ways_of(model: Model) -> Iterator[str]:
    """Yield the ways in which a model is tried."""
    yield "plain"
    if model.lora:
        yield "lora"
    if model.checkpointing:
        yield from ("reentrant", "checkpoint")
    if model.checkpointing and model.lora:
        yield "lora reentrant"


def made(model: Model, way: str) -> nn.Module:
    """Build a model, to be trained in one way."""
    module = model.make().train()
    if "lora" in way:
        config = peft.LoraConfig(
            r=2, target_modules=list(model.lora), modules_to_save=list(model.saved) or None
        )
        module = peft.get_peft_model(module, config)
    if "reentrant" in way or "checkpoint" in way:
        enable: Callable[..., None] = module.gradient_checkpointing_enable  # type: ignore[assignment]  # transformers' models have it
        enable({"use_reentrant": "reentrant" in way})
    return module


@dataclass
class Step:
    """One step of training; the model that it built last is kept, to be asked about."""

    model: Model
    way: str
    module: nn.Module = field(default_factory=nn.Module)
    _is_new: bool = False

    def recording(self) -> AbstractContextManager[gradtrace.Trace]:
        """Build the model, and return a recording that names its parameters."""
        self.module, self._is_new = made(self.model, self.way), True
        return gradtrace.record(self.module)

    def __call__(self, log: Log) -> object:
        """Do a step, and return all that can be seen of it and of the model afterwards."""
        if not self._is_new:
            self.module = made(self.model, self.way)
        self._is_new = False
        loss = self.loss()
        loss.backward()
        return loss, self.module

    def loss(self) -> Tensor:
        """Return the loss of the model as it is."""
        loss: Tensor = self.model.loss(self.module(**self.model.inputs()))
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """Return the model's parameters by name."""
        return dict(self.module.named_parameters())


# -- what a parameter does to the loss -------------------------------------------------------------


class Taken(TorchDispatchMode):
    """Collects the memory of each tensor that any op takes, and then which parameters' that is."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()
        self.parameters: dict[str, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                self.memory.add(each.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def loss_of(step: Step, *changed: str, draw: int = 1, taken: Taken | None = None) -> str:
    """Return the exact loss at a fixed random point, in which some parameters are drawn anew."""
    torch.manual_seed(0)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = Step(step.model, step.way, made(step.model, step.way))
        _move(again.module, changed, draw)
        if taken is None:
            return float(again.loss()).hex()
        with taken:
            loss = float(again.loss()).hex()
    taken.parameters = {
        name: each.untyped_storage().data_ptr() in taken.memory
        for name, each in again.parameters().items()
    }
    return loss


@torch.no_grad()
def _move(module: nn.Module, changed: Container[str], draw: int) -> None:
    """Move a model to a fixed random point, but some of its parameters elsewhere."""
    values, others = torch.Generator().manual_seed(0), torch.Generator().manual_seed(draw)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=values) + 0.5)
    for name, parameter in module.named_parameters():
        here = torch.randn(parameter.shape, generator=values)
        there = 2 * torch.randn(parameter.shape, generator=others)
        parameter.copy_(there if name in changed else here)


def reached_without_reentrance(step: Step) -> set[str]:
    """Return the parameters that get a gradient where checkpointing is not re-entrant."""
    other = Step(step.model, step.way.replace("reentrant", "checkpoint"))
    seen = run(other)
    assert seen.error is None
    return {name for name, each in other.parameters().items() if each.grad is not None}


def untrue(step: Step, trace: gradtrace.Trace) -> Iterator[str]:
    """Yield what is wrong with the verdicts on parameters that should learn and got no gradient."""
    statuses = {
        name: trace.explain(name).status
        for name, parameter in step.parameters().items()
        if parameter.requires_grad and parameter.grad is None
    }
    if not statuses:
        return
    met = Taken()
    before = loss_of(step, taken=met)
    unused = [name for name, status in statuses.items() if status == "unused"]
    if loss_of(step, *unused) != before:
        yield f"unused, but the loss depends on some of {unused}"
    cut = [name for name, status in statuses.items() if status == "cut"]
    without = reached_without_reentrance(step) if cut and "reentrant" in step.way else set()
    for name in cut:
        differs = (loss_of(step, name, draw=draw) != before for draw in range(1, 6))
        if name not in without and not any(differs):  # what picks a code changes it now and then
            yield f"{name} is cut, but the loss does not depend on it"
    for name in unused:
        says_so = "No op in the recording took it" not in str(trace.explain(name))
        if met.parameters[name] != says_so:
            yield f"{name}: an op {'did not take' if says_so else 'took'} it"


# -- where things are said to be -------------------------------------------------------------------


@functools.cache
def tokens_of(file: str) -> tuple[tuple[str, int], ...]:
    """Return the characters of a file's code, without space and comments, each with its line."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    with tokenize.open(file) as opened:
        found = list(tokenize.generate_tokens(opened.readline))
    return tuple(
        (character, each.start[0])
        for each in found
        if each.type not in skipped
        for character in "".join(each.string.split())
    )


def misplaced(each: gradtrace.Cut | gradtrace.Op) -> str | None:
    """Return what is wrong with a place: its line exists, in an expression that reads as told."""
    place, source = each.location, each.source
    if place is None:
        return None if isinstance(each, gradtrace.Op) else f"{each} has no place"
    if not Path(place.file).is_file():
        return f"{place} does not exist"
    near = [(c, line) for c, line in tokens_of(place.file) if abs(line - place.line) < 40]
    code, told = "".join(c for c, _ in near), "".join((source or "?").split()).removesuffix("...")
    starts = (match.start() for match in re.finditer(f"(?={re.escape(told)})", code))
    lines = (range(near[at][1], near[at + len(told) - 1][1] + 1) for at in starts)
    if not any(place.line in each for each in lines):
        return f"{place}: {source!r} does not stand there"
    return None


def uncalled(cut: gradtrace.Cut) -> str | None:
    """Return what is wrong with a cut's caller: it is in these tests where the cut is not."""
    here = str(Path(__file__).parent)
    assert cut.location is not None
    ours = cut.location.file.startswith(here)
    caller = cut.called_from
    if ours and caller is None:
        return None
    if not ours and caller is not None and caller.file.startswith(here):
        return None if 1 <= caller.line <= len(linecache.getlines(caller.file)) else f"{caller}"
    return f"{cut.location} is called from {caller}"


def unread(trace: gradtrace.Trace, names: Iterable[str], folder: Path) -> Iterator[str]:
    """Yield what is wrong with the texts and files of a trace."""
    if "unseen" in trace.summary().split("\n")[0]:
        yield "summary"
    for name in names:
        explanation = trace.explain(name)
        text = " ".join(str(explanation).split())
        if not text.startswith(name) or f" is {explanation.status}: " not in text:
            yield f"the explanation of {name} is {text}"
        yield from (
            f"a hint is missing in {text}" for hint in explanation.hints if hint not in text
        )
    drawn = trace.export(folder / "model.dot").read_text(encoding="utf-8")
    if not drawn.startswith("digraph"):
        yield f"the picture is {drawn[:100]}"


# -- the tests -------------------------------------------------------------------------------------

TRIALS = [
    pytest.param(
        name,
        way,
        id=f"{name}-{way.replace(' ', '-')}",
        marks=() if model.quick and way == "plain" else pytest.mark.long,
    )
    for name, model in MODELS.items()
    for way in ways_of(model)
]


@pytest.mark.parametrize(("name", "way"), TRIALS)
def test_a_model(name: str, way: str, tmp_path: Path) -> None:
    """A model trains bit for bit as without, and all that is said of its parameters is true."""
    step = Step(MODELS[name], way)
    seen = check_transparent(step, step.recording)
    trace, parameters = seen.trace, step.parameters()
    assert trace is not None
    faults = verdict_faults(parameters, trace)
    for each, parameter in parameters.items():
        by_tensor, by_name = trace.explain(parameter), trace.explain(each)
        if str(by_tensor) != str(by_name):
            faults.append(f"{each}: by its tensor {by_tensor}")
        if (by_name.status == "frozen") is parameter.requires_grad:
            faults.append(f"{each}: requires_grad is {parameter.requires_grad}")
    faults += [text for cut in trace.cuts if (text := misplaced(cut) or uncalled(cut))]
    faults += [text for op in trace.ops if (text := misplaced(op))]
    faults += unread(trace, parameters, tmp_path)
    faults += untrue(step, trace)
    assert not faults, "\n".join([*faults, "", trace.summary()])


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.quick])
def test_a_model_that_is_built_inside(name: str) -> None:
    """A model may be built inside the recording, which then names its parameters by itself."""
    step = Step(MODELS[name], "plain")
    seen = check_transparent(step)
    assert seen.trace is not None
    assert not verdict_faults(step.parameters(), seen.trace)


@pytest.mark.filterwarnings("ignore")  # what libraries say of each other
def test_a_saved_trace(tmp_path: Path) -> None:
    """A loaded trace says of each parameter what the live one says."""
    step = Step(MODELS["distilbert"], "lora")
    with step.recording() as trace:
        step(Log())
    loaded = gradtrace.load(trace.save(tmp_path / "step.json"))
    assert loaded.summary() == trace.summary()
    for name in step.parameters():
        assert str(loaded.explain(name)) == str(trace.explain(name))


@pytest.mark.filterwarnings("ignore")
def test_adapters_behind_reentrant_checkpointing() -> None:
    """Adapters get nothing where no input of a block requires grad, and the way out is named."""
    step = Step(MODELS["llama"], "lora reentrant")
    with step.recording() as trace:
        step.module.base_model.model.disable_input_require_grads()  # type: ignore[operator, union-attr]  # peft's models have it
        step(Log())
    adapters = [name for name in step.parameters() if "lora_" in name]
    head = [name for name in step.parameters() if "lm_head.modules_to_save" in name]
    assert adapters
    assert all(step.parameters()[name].grad is None for name in adapters)
    trace.assert_cut(*adapters, by="no_grad", at="_gradient_checkpointing_func")
    trace.assert_reached(*head)
    assert "enable_input_require_grads()" in str(trace.explain(adapters[0]))


@pytest.mark.filterwarnings("ignore")
def test_an_auxiliary_loss_beside_a_checkpoint() -> None:
    """Router scores that a hook takes out of a re-entrant checkpoint train no router.

    The router is reached by the other loss all the same, so that nothing shows this but its cuts.
    """
    step = Step(MODELS["mixtral"], "reentrant")
    with step.recording() as trace:
        output = step.module(**step.model.inputs())
        output.loss.backward()
    assert not output.aux_loss.requires_grad
    found = trace.explain("model.layers.0.mlp.gate.weight")
    assert found.status == "reached"
    assert {(str(cut.kind), cut.op) for cut in found.cuts} == {("no_grad", "checkpoint")}
    assert "a hook, a list or an attribute" in " ".join(str(found).split())
