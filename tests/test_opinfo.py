"""Every operator of torch computes under `record()` what it does without, with the right verdicts.

The samples are those of torch's own tables of operators and modules (`torch.testing._internal`).
The default run takes the first of each; `-m long` takes all, in every variant. What is right is
asked of autograd: of `.grad` and of `torch.autograd.grad`, and for the edges of `walk.py`. None of
it is beyond judging: a status that is `unknown` is a failure.
"""

# Torch gives no types to `backward`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from oracle import Log, Seen, differences, run, status_of_grad
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from walk import Comparison, Walk

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
if torch.__version__ < "2.7":
    NOT_REPEATABLE.add("sgn")  # its gradient there is memory that nobody wrote
# Inputs of these are used twice, once without a derivative: the norm of order 0 has none.
CUT_BESIDES = {"nn.functional.normalize", "masked.normalize"}

# Torch's table of Functions binds their `apply` long before. Where that is a C method (2.14) nobody
# sees that a Function runs: its verdicts may be `unknown`, and it is another op.
FUNCTIONS = autograd_function_db if hasattr(torch.autograd.Function.apply, "__func__") else ()
OPS = [op for op in (*opinfo.op_db, *FUNCTIONS) if op.supports_autograd]
WITH_OUT = [op for op in OPS if op.supports_out]
WITH_ERRORS = [op for op in OPS if op.error_inputs_func is not None]
VARIANTS: dict[str, Callable[[Any], Any]] = {
    "function": lambda op: op.op,
    "method": lambda op: op.get_method(),
    "in place": lambda op: op.get_inplace(),
    "operator": lambda op: op.operator_variant,
    "in-place operator": lambda op: op.inplace_operator_variant,
}


@pytest.fixture(scope="module", autouse=True)
def counts(pytestconfig: pytest.Config) -> Iterator[None]:
    """Say at the end how much was compared."""
    COUNTS.clear()
    COUNTS.update(failures=0, unknown=0)
    yield
    text = ", ".join(f"{number} {what}" for what, number in sorted(COUNTS.items()))
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f" compared: {text}")  # noqa: T201  # counts are for whoever watches the run


# -- one program -----------------------------------------------------------------------------------


def _fresh(value: Any) -> Any:
    """Return a copy of an argument that shares nothing with it; what requires grad is a leaf."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_(value.requires_grad)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _scalar(outputs: list[Tensor]) -> Tensor | None:
    """Return a root that every differentiable output flows into."""
    roots = []
    for output in outputs:
        if output.requires_grad:
            dense = output if output.layout is torch.strided else output.to_dense()
            roots.append(torch.view_as_real(dense).sum() if dense.is_complex() else dense.sum())
    return sum(roots[1:], roots[0]) if roots else None


class Pull:
    """Forward and backward of what a subclass makes, again and again."""

    by_grad = False  # `torch.autograd.grad` in place of `backward`
    walking = False
    may_be_cut = False  # on one of the ways of a leaf that is reached

    def __init__(self) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self.gradients: dict[str, Tensor | None] = {}
        self.loss: Tensor | None = None
        self.walk: Walk | None = None
        self.trace: gradtrace.Trace | None = None

    def forward(self) -> Any:
        """Set leaves and outputs; return what else there is to compare."""
        raise NotImplementedError

    def __call__(self, log: Log) -> Any:
        """Run forward and backward."""
        self.leaves, self.outputs, self.gradients, self.walk = {}, [], {}, None
        made = self.forward()
        self.loss = _scalar(self.outputs)
        if self.loss is not None:
            with self._watch(self.loss):
                returned = self._pull(self.loss)
            self.gradients = dict(zip(self._differentiable(), returned, strict=True))
        return made, self.outputs, self.leaves, self.gradients

    def _differentiable(self) -> dict[str, Tensor]:
        return {
            name: leaf
            for name, leaf in self.leaves.items()
            if leaf.requires_grad and not nn.parameter.is_lazy(leaf)
        }

    def _pull(self, loss: Tensor) -> list[Tensor | None]:
        leaves = list(self._differentiable().values())
        if self.by_grad and leaves:
            return list(torch.autograd.grad(loss, leaves, allow_unused=True))
        loss.backward()
        return [leaf.grad for leaf in leaves]

    def _watch(self, loss: Tensor) -> contextlib.AbstractContextManager[object]:
        self.walk = Walk([loss]) if self.walking else None
        return self.walk or contextlib.nullcontext()


def _compare(program: Pull, *, walking: bool = False) -> list[str]:
    """Run without and with a recording; return what differs. The program keeps the trace."""
    COUNTS["samples"] += 1
    found, recorded = _compare_once(program, walking)
    if found:  # by now is done what torch does once for a process
        found, recorded = _compare_once(program, walking)
    if found and recorded.error is not None:
        found.append(recorded.raised)
    return found


def _compare_once(program: Pull, walking: bool) -> tuple[list[str], Seen]:
    plain = run(program)
    recorded = _record(program, walking=walking)
    return differences(plain, recorded), recorded


def _record(program: Pull, *, walking: bool) -> Seen:
    program.walking = walking
    recorded = run(program, RECORDING)
    program.walking = False
    program.trace = recorded.trace if recorded.error is None else None
    return recorded


def _wrong(program: Pull) -> Iterator[str]:
    """Yield where the verdicts and edges of the latest recording are not autograd's."""
    if program.trace is not None:
        yield from _wrong_verdicts(program, program.trace)
        if program.walk is not None:
            yield from _wrong_edges(program, program.walk, program.trace)


def _wrong_verdicts(program: Pull, trace: gradtrace.Trace) -> Iterator[str]:
    for name, leaf in program.leaves.items():
        COUNTS["leaves"] += 1
        explained = trace.explain(leaf)
        status = str(explained.status)
        right = status_of_grad([program.gradients.get(name)])
        if status == "unknown":
            COUNTS["unknown"] += 1
        expected = (right,) if right else ("cut", "unused")
        if not leaf.requires_grad:
            expected = ("frozen",)
        elif program.loss is None:
            expected = ("no_backward",)
        if status not in expected:
            yield f"leaf {name}: {status}, but autograd says {right or 'no gradient'}"
        if status == "reached" and explained.cuts and not program.may_be_cut:
            yield f"leaf {name}: reached, but cut by {[cut.op for cut in explained.cuts]}"


def _wrong_edges(program: Pull, walk: Walk, trace: gradtrace.Trace) -> Iterator[str]:
    comparison = Comparison(walk, trace)
    COUNTS["edges"] += comparison.edges
    yield from comparison.faults()
    for at, output in enumerate(program.outputs):
        if output.requires_grad and not output.is_leaf:
            status, right = str(trace.explain(output).status), walk.arrived(output)
            if (status == "reached") != right:
                yield f"output {at}: {status}, but autograd says {right}"


def _faults(program: Pull, at: int, *, both: bool = False) -> list[str]:
    """Compare everything.

    Args:
        program: What to run.
        at: Gradients are taken by `backward` for even ones, by `torch.autograd.grad` for others.
        both: Whether to take them either way, and to compare without the walk's hooks.
    """
    program.by_grad = bool(at % 2)
    if not both:
        return [*_compare(program, walking=True), *_wrong(program)]
    found = [*_compare(program), *_wrong(program)]
    if program.trace is not None:
        program.by_grad = not program.by_grad
        _record(program, walking=True)
        found += _wrong(program)
    return found


# -- operators -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One way of calling one operator, with what it is called with."""

    call: Any
    arguments: Any  # (args, kwargs)
    process: Any
    in_place: bool = False
    frozen: Callable[[int], bool] = lambda at: False  # which inputs shall not require grad
    detached: Callable[[int], bool] = lambda at: False  # which inputs are used by their `detach()`
    out: Any = None  # outputs to write to
    grad_mode: bool = True


class Called(Pull):
    """The call of a sample."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample
        self._flat, self._spec = tree_flatten(sample.arguments)

    def forward(self) -> Any:
        """Call the operator."""
        sample = self.sample
        args, kwargs = tree_unflatten(self._given(), self._spec)
        if sample.in_place:
            args = (args[0].clone(), *args[1:])
        if sample.out is not None:
            return self._write(args, kwargs)
        result = sample.call(*args, **kwargs)
        self.outputs = _tensors(sample.process(result))
        return None

    def _given(self) -> list[Any]:
        """Return fresh arguments, after noting the leaves among them."""
        given = []
        for value in self._flat:
            fresh = _fresh(value)
            if isinstance(fresh, Tensor) and fresh.requires_grad:
                at = len(self.leaves)
                fresh.requires_grad_(not self.sample.frozen(at))
                self.leaves[str(at)] = fresh
                fresh = fresh.detach() if self.sample.detached(at) else fresh
            given.append(fresh)
        return given

    def _write(self, args: Any, kwargs: Any) -> Any:
        """Call the operator with `out=`, and use what it wrote beside a weight."""
        out = tree_map(_fresh, self.sample.out)
        with torch.set_grad_enabled(self.sample.grad_mode):
            result = self.sample.call(*args, **kwargs, out=out)
        carriers = [each for each in _tensors(out) if each.is_floating_point() or each.is_complex()]
        weights = [torch.ones((), dtype=each.dtype, requires_grad=True) for each in carriers]
        self.leaves |= {f"weight {at}": weight for at, weight in enumerate(weights)}
        self.outputs = [each * weight for each, weight in zip(carriers, weights, strict=True)]
        return result, out


def _samples(op: Any, limit: int | None) -> Iterator[tuple[str, int, Any]]:
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # `op.sample_inputs` looks through the whole stack for each sample: 0.1 s.
            samples = op.sample_inputs_func(op, "cpu", dtype, True)
            given = list(itertools.islice(samples, limit))
        for at, sample in enumerate(given):
            yield f"{dtype} {at}", at, sample


def _called(given: Any, call: Any, *, in_place: bool = False) -> Sample:
    arguments = ((given.input, *given.args), given.kwargs)
    return Sample(call, arguments, given.output_process_fn_grad, in_place)


def _variants(op: Any, given: Any) -> Iterator[tuple[str, Sample]]:
    for name, of in VARIANTS.items():
        call = of(op)
        in_place = name.startswith("in")
        if call is None or (in_place and given.broadcasts_input):
            continue
        if name.endswith("operator") and (len(given.args) != 1 or given.kwargs):
            continue
        yield name, _called(given, call, in_place=in_place)


def _is_real(fault: str, op: Any) -> bool:
    return op.name not in NOT_REPEATABLE or not fault.startswith("result")


def _verdict(faults: Iterable[str]) -> None:
    found = list(faults)
    COUNTS["failures"] += len(found)
    assert not found, "\n".join(found[:20])


def _check(op: Any, limit: int | None) -> Iterator[str]:
    COUNTS["operators"] += 1
    for name, at, given in _samples(op, limit):
        variants = itertools.islice(_variants(op, given), 1 if limit and at else None)
        for variant, sample in variants:
            program = Called(sample)
            program.may_be_cut = op.name in CUT_BESIDES
            both = at == 0 and variant == "function"
            for fault in _faults(program, at, both=both):
                if _is_real(fault, op):
                    yield f"{name} {variant}: {fault}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator(op: Any) -> None:
    """Results, gradients, warnings and draws are the same; statuses and edges are autograd's."""
    _verdict(_check(op, FIRST))


@pytest.mark.long
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator_with_all_samples(op: Any) -> None:
    """As above, for every sample that torch's own tests take."""
    _verdict(_check(op, None))


# -- inputs that require no grad -------------------------------------------------------------------


def _is_every_other(first: int, at: int) -> bool:
    return at % 2 == first % 2


def _check_mixtures(op: Any, limit: int) -> Iterator[str]:
    for name, at, given in _samples(op, limit):
        sample = _called(given, op.op)
        whole = Called(sample)
        run(whole)
        number = len(whole.leaves)
        if number < 2:
            continue
        half = Called(replace(sample, frozen=functools.partial(_is_every_other, at)))
        half.may_be_cut = op.name in CUT_BESIDES
        for fault in _faults(half, at):
            if _is_real(fault, op):
                yield f"{name} half frozen: {fault}"
        for which in range(min(number, 3)):
            yield from _check_detached(whole, which, name)


def _check_detached(whole: Called, which: int, name: str) -> Iterator[str]:
    program = Called(replace(whole.sample, detached=lambda each: each == which))
    program.may_be_cut = True
    _record(program, walking=True)
    yield from (f"{name} with {which} detached: {fault}" for fault in _wrong(program))
    if program.loss is None or program.trace is None:
        return
    explained = program.trace.explain(program.leaves[str(which)])
    kinds = {str(cut.kind) for cut in explained.cuts}
    COUNTS["detached"] += 1
    needed = whole.gradients.get(str(which)) is not None
    same_roots = [o.requires_grad for o in whole.outputs] == [
        o.requires_grad for o in program.outputs
    ]
    if needed and same_roots and (explained.status != "cut" or kinds != {"detach"}):
        yield f"{name} with {which} detached: {explained.status} by {kinds}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator_with_some_inputs_frozen_or_detached(op: Any) -> None:
    """With gradients for half of its inputs, or with one detached, the verdicts are as right."""
    _verdict(_check_mixtures(op, 1))


@pytest.mark.long
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator_with_some_inputs_frozen_or_detached_in_more_samples(op: Any) -> None:
    """As above, for some more of the samples."""
    _verdict(_check_mixtures(op, 4))


# -- out= ------------------------------------------------------------------------------------------


def _outs(op: Any, given: Any) -> Any:
    """Return tensors that an operator can write to, or None where this sample has no such."""
    (args, kwargs) = tree_map(
        lambda value: value.detach().clone() if isinstance(value, Tensor) else value,
        ((given.input, *given.args), given.kwargs),
    )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = op.op(*args, **kwargs)
    except RuntimeError:
        return None
    return made if isinstance(made, Tensor) or all(map(torch.is_tensor, made)) else None


def _check_out(op: Any, limit: int | None) -> Iterator[str]:
    COUNTS["operators with out="] += 1
    for name, at, given in _samples(op, limit):
        out = _outs(op, given)
        if out is None:
            continue
        whole = Called(_called(given, op.op))
        run(whole)
        sample = replace(_called(given, op.op), out=tree_map(torch.zeros_like, out))
        refused = Called(sample)
        plain = Called(replace(sample, frozen=lambda each: True))
        hidden = Called(replace(sample, grad_mode=False))
        for program in (hidden, refused, plain)[: 3 - at if at < FIRST else 1]:
            for fault in _faults(program, at):
                if _is_real(fault, op):
                    yield f"{name}: {fault}"
        yield from (f"{name}: {fault}" for fault in _uncut(hidden, whole))


def _uncut(program: Called, whole: Called) -> Iterator[str]:
    """Yield what was not cut by `no_grad` though a gradient arrives without it."""
    trace = program.trace
    if trace is None or program.loss is None:
        return
    for leaf, gradient in whole.gradients.items():
        explained = trace.explain(program.leaves[leaf])
        kinds = {str(cut.kind) for cut in explained.cuts}
        if gradient is not None and (explained.status != "cut" or kinds != {"no_grad"}):
            yield f"leaf {leaf}: {explained.status} by {kinds}"


@pytest.mark.parametrize("op", WITH_OUT, ids=lambda op: op.formatted_name)
def test_operator_with_out(op: Any) -> None:
    """Writing to `out=` is the same, refusals included; under `no_grad` it cuts the inputs."""
    _verdict(_check_out(op, 1))


@pytest.mark.long
@pytest.mark.parametrize("op", WITH_OUT, ids=lambda op: op.formatted_name)
def test_operator_with_out_with_all_samples(op: Any) -> None:
    """As above, for every sample that torch's own tests take."""
    _verdict(_check_out(op, None))


# -- wrong calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", WITH_ERRORS, ids=lambda op: op.formatted_name)
def test_operator_with_wrong_inputs(op: Any) -> None:
    """What torch refuses is refused with the same words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(op.error_inputs_func(op, "cpu"))
    found = []
    for at, each in enumerate(given):
        COUNTS["wrong calls"] += 1
        program = Called(_called(each.sample_input, op.op))
        found += [f"{at}: {fault}" for fault in _compare(program)]
    _verdict(found)


# -- modules ---------------------------------------------------------------------------------------


class Module(Pull):
    """One module, constructed and called on one sample."""

    def __init__(self, kind: Any, given: Any, *, training: bool) -> None:
        super().__init__()
        self._kind = kind
        self._given = given
        self._training = training

    def forward(self) -> Any:
        """Construct it and run its forward."""
        made = self._given.constructor_input
        model = self._kind(*tree_map(_fresh, made.args), **tree_map(_fresh, made.kwargs))
        model.train(self._training)
        if self._given.forward_input is not None:
            args, kwargs = self._given.forward_input.args, self._given.forward_input.kwargs
            arguments = tree_map(_fresh, (args, kwargs))
            self.outputs = _tensors(model(*arguments[0], **arguments[1]))
            inputs = enumerate(_tensors(arguments))
            self.leaves = {f"argument {at}": each for at, each in inputs if each.requires_grad}
        self.leaves |= dict(model.named_parameters())
        return model


def _check_module(info: Any, limit: int | None) -> Iterator[str]:
    COUNTS["modules"] += 1
    for training in (True, False):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
            )
        for at, each in enumerate(given[:limit]):
            program = Module(info.module_cls, each, training=training)
            for fault in _faults(program, at, both=at == 0):
                yield f"training {training} {at}: {fault}"


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module(info: Any) -> None:
    """A module computes the same in training and in eval; its verdicts and edges are right."""
    _verdict(_check_module(info, FIRST))


@pytest.mark.long
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module_with_all_samples(info: Any) -> None:
    """As above, for every sample that torch's own tests take."""
    _verdict(_check_module(info, None))
