"""Every operator of torch computes under `record()` what it does without, with the right verdicts.

The samples are those of torch's own tables of operators and modules (`torch.testing._internal`).
The default run takes the first two of each; `-m long` takes all.
"""

# Torch gives no types to `backward`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import collections
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import Log, Seen, differences, run, status_of_grad
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import gradtrace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opinfo = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.common_modules import module_db

DTYPES = (torch.float64, torch.complex128)
RECORDING = functools.partial(gradtrace.record, values="edges")  # all hooks look at values
FIRST = 2  # samples of each operator in the default run
COUNTS: collections.Counter[str] = collections.Counter()

# Plain runs of these differ among themselves, by how LAPACK finds its memory aligned.
NOT_REPEATABLE = {"linalg.lstsq"}
OPS = [
    op
    for op in (*opinfo.op_db, *autograd_function_db)
    if op.supports_autograd and op.name not in NOT_REPEATABLE
]
VARIANTS: dict[str, Callable[[Any], Any]] = {
    "function": lambda op: op.op,
    "method": lambda op: op.get_method(),
    "in place": lambda op: op.get_inplace(),
}


@pytest.fixture(scope="module", autouse=True)
def counts(pytestconfig: pytest.Config) -> Iterator[None]:
    """Say at the end how much was compared."""
    COUNTS.clear()
    yield
    text = ", ".join(f"{number} {what}" for what, number in sorted(COUNTS.items()))
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f" compared: {text}")  # noqa: T201  # counts are for whoever watches the run


# -- one sample ------------------------------------------------------------------------------------


def _fresh(value: Any) -> Any:
    """Return a copy of an argument that shares nothing with it; what requires grad is a leaf."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_(value.requires_grad)


def _scalar(outputs: list[Tensor]) -> Tensor | None:
    """Return a root that every differentiable output flows into."""
    roots = []
    for output in outputs:
        if output.requires_grad:
            dense = output if output.layout is torch.strided else output.to_dense()
            roots.append(torch.view_as_real(dense).sum() if dense.is_complex() else dense.sum())
    return sum(roots[1:], roots[0]) if roots else None


class Sample:
    """One call of one operator with its arguments, that can be run again and again."""

    def __init__(self, call: Any, arguments: Any, process: Any, *, in_place: bool = False) -> None:
        self._call = call
        self._arguments, self._spec = tree_flatten(arguments)
        self._process = process
        self._in_place = in_place
        self.leaves: list[Tensor] = []
        self.plain: list[bool] = []

    def __call__(self, log: Log) -> Any:
        """Run forward and backward."""
        arguments = [_fresh(value) for value in self._arguments]
        self.leaves = [
            each for each in arguments if isinstance(each, Tensor) and each.requires_grad
        ]
        args, kwargs = tree_unflatten(arguments, self._spec)
        if self._in_place:
            args = (args[0].clone(), *args[1:])
        result = self._call(*args, **kwargs)
        processed = self._process(result)
        outputs = [each for each in tree_leaves(processed) if isinstance(each, Tensor)]
        loss = _scalar(outputs)
        if loss is not None:
            loss.backward()
        return outputs, self.leaves

    def faults(self) -> list[str]:
        """Run without and with a recording, and return what is not as it should be."""
        run(self)
        plain = run(self)
        COUNTS["samples"] += 1
        recorded = run(self, RECORDING)
        found = differences(plain, recorded)
        if recorded.error is None and recorded.trace is not None:
            found += self._wrong_verdicts(recorded.trace)
        return found

    def _wrong_verdicts(self, trace: gradtrace.Trace) -> Iterator[str]:
        for at, leaf in enumerate(self.leaves):
            COUNTS["leaves"] += 1
            explanation = trace.explain(leaf)
            right = status_of_grad([leaf.grad])
            status = str(explanation.status)
            expected = (right,) if right else ("cut", "unused", "no_backward")
            if status not in expected:
                yield f"leaf {at}: {status}, but autograd says {right or 'no gradient'}"
            edges = (
                trace.graph.out_edges(explanation.node, data="reached")
                if explanation.node >= 0
                else ()
            )
            if bool(leaf.grad is not None) != any(passes for *_, passes in edges):
                yield f"leaf {at}: edges {list(edges)}, but autograd says {right or 'no gradient'}"


def _samples(op: Any, dtype: torch.dtype, limit: int | None) -> Iterator[tuple[str, Sample]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # `op.sample_inputs` looks through the whole stack for each sample: 0.1 s.
        samples = op.sample_inputs_func(op, "cpu", dtype, True)
        given = list(itertools.islice(samples, limit))
    for at, sample in enumerate(given):
        for name, of in VARIANTS.items():
            call = of(op)
            if call is None or (name == "in place" and sample.broadcasts_input):
                continue
            arguments = ((sample.input, *sample.args), sample.kwargs)
            process = sample.output_process_fn_grad
            yield f"{name} {at}", Sample(call, arguments, process, in_place=name == "in place")


def _check(op: Any, limit: int | None) -> None:
    faults = []
    COUNTS["operators"] += 1
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        for name, sample in _samples(op, dtype, limit):
            found = sample.faults()
            faults += [f"{dtype} {name}: {each}" for each in found]
    COUNTS["failures"] += len(faults)
    assert not faults, "\n".join(faults[:20])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator(op: Any) -> None:
    """Results, gradients, warnings and draws are the same; each input's status is autograd's."""
    _check(op, FIRST)


@pytest.mark.long
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator_with_all_samples(op: Any) -> None:
    """As above, for every sample that torch's own tests take."""
    _check(op, None)


# -- modules ---------------------------------------------------------------------------------------


class ModuleSample:
    """One module, constructed and called on one sample."""

    def __init__(self, kind: Any, given: Any, *, training: bool) -> None:
        self._kind = kind
        self._given = given
        self._training = training
        self.leaves: dict[str, Tensor] = {}

    def __call__(self, log: Log) -> Any:
        """Construct, run forward and backward."""
        made = self._given.constructor_input
        model = self._kind(*tree_map(_fresh, made.args), **tree_map(_fresh, made.kwargs))
        model.train(self._training)
        self.leaves = {}
        if self._given.forward_input is None:
            return model
        args, kwargs = self._given.forward_input.args, self._given.forward_input.kwargs
        arguments = tree_map(_fresh, (args, kwargs))
        result = model(*arguments[0], **arguments[1])
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        loss = _scalar(outputs)
        if loss is not None:
            loss.backward()
        self.leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for at, each in enumerate(tree_leaves(arguments)):
            if isinstance(each, Tensor) and each.requires_grad:
                self.leaves[f"argument {at}"] = each
        return outputs, model, self.leaves

    def faults(self) -> list[str]:
        """Run without and with a recording, and return what is not as it should be."""
        run(self)
        plain = run(self)
        COUNTS["samples"] += 1
        recorded = run(self, RECORDING)
        return differences(plain, recorded) + list(self._wrong_verdicts(recorded))

    def _wrong_verdicts(self, recorded: Seen) -> Iterator[str]:
        if recorded.error is not None or recorded.trace is None:
            return
        for name, leaf in self.leaves.items():
            COUNTS["leaves"] += 1
            if nn.parameter.is_lazy(leaf):
                continue
            right = status_of_grad([leaf.grad])
            status = str(recorded.trace.explain(leaf).status)
            if status not in ((right,) if right else ("cut", "unused", "no_backward")):
                yield f"{name}: {status}, but autograd says {right or 'no gradient'}"


def _check_module(info: Any, limit: int | None) -> None:
    faults = []
    COUNTS["modules"] += 1
    for training in (True, False):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
            )
        for at, each in enumerate(given[:limit]):
            found = ModuleSample(info.module_cls, each, training=training).faults()
            faults += [f"training {training} {at}: {fault}" for fault in found]
    COUNTS["failures"] += len(faults)
    assert not faults, "\n".join(faults[:20])


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module(info: Any) -> None:
    """A module computes the same in training and in eval; its parameters' statuses are right."""
    _check_module(info, FIRST)


@pytest.mark.long
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module_with_all_samples(info: Any) -> None:
    """As above, for every sample that torch's own tests take."""
    _check_module(info, None)
