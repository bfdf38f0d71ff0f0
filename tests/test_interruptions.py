"""Interruptions: an exception at any point of a recorded program, also inside gradtrace's own code.

It comes out as it is, nothing is left behind, and what is recorded afterwards is right.

# NOTE [ Where an interrupt can arrive ]
Python looks for signals when a function is entered, after a call of a C function, and at the jump
back of a loop. `sys.setprofile` reports the first two as "call" and "c_return", and what the
profiling function raises there comes out there. So a trial counts these places in one run, and
raises at one of them in each of the runs that follow. A generator that goes on is left out: what is
raised on reporting its "call" passes its handlers by, which no signal does.
"""

# Torch's `backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from oracle import freeze, leftovers, no_collections, replaceable
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it
from torch.utils.checkpoint import checkpoint

import gradtrace

# Where an interrupt arrives in a callback that frees something, Python itself loses it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

OWN = str(Path(gradtrace.__file__).parent)

# -- the programs ----------------------------------------------------------------------------------


@dataclass
class Done:
    """What a program computed: its leaves with the right statuses, and graphs that live on."""

    leaves: dict[str, tuple[Tensor, str]]
    graphs: tuple[Tensor, ...] = ()

    def values(self) -> Any:
        """Return all numbers, to be compared bit for bit."""
        return freeze([leaf for leaf, _ in self.leaves.values()])


def weight(*shape: int) -> Tensor:
    """Return a leaf."""
    return torch.randn(*(shape or (3,)), requires_grad=True)


class Scale(Function):
    """A custom Function that can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Multiply by the other one."""
        x, factor = ctx.saved_tensors
        return gradients[0] * factor, gradients[0] * x


def training_step() -> Done:
    """Train a small model for a step, with an optimizer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 2).abs() + 1).pow(2).mean()
        loss.backward()
        optimizer.step()
    last: Any = model[2]
    return Done({"weight": (last.weight, "reached"), "bias": (last.bias, "reached")})


def cuts() -> Done:
    """Lose gradients by a detach, inside one of torch's functions, under no_grad and by a copy."""
    a, b, c, d, e = (weight() for _ in range(5))
    hidden = a.detach() * b + F.gumbel_softmax(c, hard=True).argmax()
    with torch.no_grad():
        hidden = hidden + d * 2
    hidden.mul_(b)
    hidden.sum().backward()
    return Done(
        {
            "a": (a, "cut"),
            "b": (b, "reached"),
            "c": (c, "cut"),
            "d": (d, "cut"),
            "e": (e, "unused"),
        }
    )


def function_twice() -> Done:
    """Differentiate a custom Function twice."""
    x, factor = weight(), weight()
    loss = Scale.apply(x, factor).pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.pow(2).sum().backward(retain_graph=True)
    return Done({"x": (x, "reached"), "factor": (factor, "reached")}, (loss,))


def block(x: Tensor, w: Tensor) -> Tensor:
    """Be what is checkpointed."""
    return (x * w).tanh()


def checkpoints() -> Done:
    """Checkpoint in both ways."""
    x, v, w = weight(), weight(), weight()
    hidden: Tensor = checkpoint(block, x, v, use_reentrant=True)
    output: Tensor = checkpoint(block, hidden, w, use_reentrant=False)
    output.sum().backward()
    return Done({"x": (x, "reached"), "v": (v, "reached"), "w": (w, "reached")})


def hooks() -> Done:
    """Have hooks of all kinds on, and a graph that lives on."""
    layer = nn.Linear(2, 2)
    handles: list[Any] = [
        layer.register_forward_hook(lambda *_: None),
        layer.register_full_backward_hook(lambda *_: None),
        layer.weight.register_hook(lambda gradient: gradient * 2),
        layer.bias.register_post_accumulate_grad_hook(lambda _: None),
    ]
    hidden = layer(weight(1, 2))
    hidden.register_hook(lambda gradient: gradient + 1)
    loss = hidden.sum()
    loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    return Done({"weight": (layer.weight, "reached"), "bias": (layer.bias, "reached")}, (loss,))


def compiled() -> Done:
    """Compile a function, which runs eagerly in a recording."""
    w = weight()
    torch.compile(block, backend="eager")(weight(), w).sum().backward()
    return Done({"w": (w, "reached")})


PROGRAMS = [training_step, cuts, function_twice, checkpoints, hooks]
Program = Callable[[], Done]

# -- raising somewhere -----------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a signal can arrive: an instruction, by its function, and the how manieth time."""

    file: str
    function: str
    first_line: int
    lasti: int
    event: str
    time: int

    @property
    def own(self) -> bool:
        """Whether it lies in gradtrace's code."""
        return self.file.startswith(OWN)

    def __str__(self) -> str:
        file = "/".join(Path(self.file).parts[-2:])
        return f"{file}: {self.function}+{self.lasti}, {self.event} no. {self.time}"


class Injector:
    """A profiling function that raises at one place, or only counts the places; see the NOTE."""

    def __init__(self, at: Place | None = None, error: BaseException | None = None) -> None:
        self.seen: dict[tuple[str, str, int, int, str], int] = {}
        self.fired = False
        self._at = None if at is None else at[:-1]
        self._left = 0 if at is None else at.time
        self._errors = [] if error is None else [error]  # let go of it when it is raised

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Be called by the interpreter."""
        if event != "c_return" and (event != "call" or _goes_on(frame)):
            return
        code = frame.f_code
        here = code.co_filename, code.co_qualname, code.co_firstlineno, frame.f_lasti, event
        if self._at is None:
            self.seen[here] = self.seen.get(here, 0) + 1
        elif here == self._at:
            self._left -= 1
            if not self._left:
                self.fired = True
                raise self._errors.pop()

    def places(self) -> list[Place]:
        """Return the first and the last time at each place that was met."""
        found = self.seen.items()
        return [Place(*here, n) for here, count in found for n in sorted({1, count})]


def _goes_on(frame: FrameType) -> bool:
    """Whether this is the frame of a generator, which is not entered but goes on."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


@contextlib.contextmanager
def profiled(function: Any) -> Iterator[None]:
    """Have a profiling function on."""
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(None)


class Watcher:
    """A profiling function that notes which code of gradtrace's runs."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Be called by the interpreter."""
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            self.seen.add(frame.f_code.co_qualname)


# -- trials ----------------------------------------------------------------------------------------


class Exit(SystemExit):
    """What a program ends itself with."""


def once(program: Program, done: list[Done]) -> None:
    """Run a program, and note what it computed."""
    torch.default_generator.manual_seed(0)
    done.append(program())


def twice(program: Program, done: list[Done]) -> None:
    """Run a program, survive whatever it raises, and run it again."""
    with contextlib.suppress(BaseException):
        once(program, done)
    done.clear()
    once(program, done)


Body = Callable[[Program, list[Done]], None]


def attempt(
    program: Program, body: Body, function: Any
) -> tuple[BaseException | None, list[Done], gradtrace.Trace | None]:
    """Run a program in a recording with a profiling function on; return what came out."""
    done: list[Done] = []
    raised = trace = None
    with no_collections():
        try:
            sys.setprofile(function)
            with gradtrace.record() as trace:
                body(program, done)
        except BaseException as caught:
            raised = caught
        finally:
            sys.setprofile(None)
    return raised, done, trace


@contextlib.contextmanager
def unraisable() -> Iterator[set[int]]:
    """Collect the ids of the errors that Python loses: they came up in what others' code frees."""
    lost: set[int] = set()

    def note(what: Any) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(what.exc_traceback)]
        if not any(frame.f_code.co_filename.startswith(OWN) for frame in frames):
            lost.add(id(what.exc_value))

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield lost
    finally:
        sys.unraisablehook = before


@functools.cache
def places(program: Program, body: Body) -> tuple[Place, ...]:
    """Return where a recorded program can be interrupted."""
    attempt(program, body, None)  # what is done once for a process is done by now
    counting = Injector()
    raised, _, _ = attempt(program, body, counting)
    assert raised is None
    return tuple(counting.places())


def wrong_verdicts(trace: gradtrace.Trace, done: Done, *also: str) -> list[str]:
    """Return the verdicts that are not the right ones, and not one that is allowed besides."""
    found = {
        name: (str(trace.explain(leaf).status), right)
        for name, (leaf, right) in done.leaves.items()
    }
    return [f"{n}: {s}, not {right}" for n, (s, right) in found.items() if s not in (right, *also)]


def faults_of_attempt(
    program: Program, body: Body, injector: Injector, error: BaseException, plain: Any
) -> list[str]:
    """Raise an error in a recording; return what is wrong with what came out or is left behind."""
    before = replaceable()
    with unraisable() as lost:
        raised, done, trace = attempt(program, body, injector)
    found = []
    if raised is None:
        assert trace is not None
        if body is once and not isinstance(error, Exception) and id(error) not in lost:
            found.append("the exception has vanished")
        if done[0].values() != plain:
            found.append("another result")
        found += wrong_verdicts(trace, done[0], "unknown")
    elif raised is not error:
        found.append(f"{raised!r} came out")
    if body is twice and _is_torchs(error):
        found.clear()  # what torch had left on was on in the second run
    if _is_torchs(error):
        reset_torch()
    for each in (error, raised):
        if each is not None:
            each.__traceback__ = each.__context__ = None
    del raised, trace
    found += [f"left behind: {each}" for each in leftovers(before)]
    return found + faults_afterwards(program, done, plain)


def _is_torchs(error: BaseException) -> bool:
    """Whether an error came up in torch's code, where that leaves its own modes on.

    It does so, too, where it calls the handler to set the grad mode.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    *outer, place, _ = ["", *files, ""] if len(files) < 2 else files  # the last is the injector's
    return not place.startswith(OWN) or any(file.endswith("grad_mode.py") for file in outer)


def reset_torch() -> None:
    """Take off what torch leaves on where its own code is interrupted, recorded or not."""
    torch.set_grad_enabled(True)
    with contextlib.suppress(RuntimeError):  # which is what ends it: none is on
        while True:
            torch._C._autograd._pop_saved_tensors_default_hooks()


def faults_afterwards(program: Program, done: list[Done], plain: Any) -> list[str]:
    """Return what is wrong with torch, or another recording, after one that was interrupted."""
    found = []
    watcher, again = Watcher(), list[Done]()
    with profiled(watcher):
        for graph in (graph for each in done for graph in each.graphs):
            graph.backward()
        once(program, again)
    if watcher.seen:
        found.append(f"still runs: {watcher.seen}")
    with gradtrace.record() as trace:
        once(program, again)
    found += ["another result afterwards"] * any(each.values() != plain for each in again)
    return found + [f"in the next recording {each}" for each in wrong_verdicts(trace, again[1])]


def check(program: Program, body: Body, number: int, error: type[BaseException]) -> None:
    """Raise an error at so many places: most of them gradtrace's own, the rest anybody's."""
    plain = list[Done]()
    once(program, plain)
    draw = random.Random(f"{program.__name__} {body.__name__} {error.__name__}")
    found = places(program, body)
    own = [place for place in found if place.own]
    others = [place for place in found if not place.own]
    chosen = draw.sample(own, min(len(own), number))
    chosen += draw.sample(others, min(len(others), number // 4))
    wrong = []
    for place in chosen:
        raising = error("injected")
        injector = Injector(place, raising)
        faults = faults_of_attempt(program, body, injector, raising, plain[0].values())
        wrong += [f"{place}: {each}" for each in faults]
        wrong += [] if injector.fired else [f"{place}: not met again"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("body", [once, twice])
@pytest.mark.parametrize("program", PROGRAMS)
def test_keyboard_interrupt(program: Program, body: Body) -> None:
    """Ctrl-C comes out wherever it arrives, nothing stays, and what follows is recorded right."""
    check(program, body, 40, KeyboardInterrupt)


@pytest.mark.parametrize("error", [MemoryError, RecursionError, Exit, GeneratorExit])
@pytest.mark.parametrize("program", PROGRAMS)
def test_other_errors(program: Program, error: type[BaseException]) -> None:
    """An error of our own is kept from the program; one that ends the program comes out."""
    check(program, once, 10, error)


@pytest.mark.long
@pytest.mark.parametrize("body", [once, twice])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("program", [*PROGRAMS, compiled])
def test_errors_at_many_places(program: Program, error: type[BaseException], body: Body) -> None:
    """As above, at many more places."""
    check(program, body, 70, error)


# -- signals ---------------------------------------------------------------------------------------


class Alarm(BaseException):
    """What the handler of a signal raises."""


@contextlib.contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """Have a signal arrive after a while."""

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_signals(program: Program, number: int) -> None:
    """Have signals arrive at many times in a recorded program."""
    plain, seconds = list[Done](), list[float]()
    once(program, plain)
    for _ in range(5):
        start = time.perf_counter()
        attempt(program, once, None)
        seconds.append(time.perf_counter() - start)
    for at in range(number):
        before, done = replaceable(), list[Done]()
        wait = min(seconds) * (at + 1) / number
        with contextlib.suppress(Alarm), no_collections(), alarm_after(wait), gradtrace.record():
            once(program, done)
        reset_torch()
        assert not leftovers(before)
        assert not faults_afterwards(program, done, plain[0].values())


@pytest.mark.parametrize("program", [training_step, checkpoints])
def test_signals(program: Program) -> None:
    """Real signals find no more places than the trials above."""
    check_signals(program, 40)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_signals_at_many_times(program: Program) -> None:
    """As above, more often."""
    check_signals(program, 100)


# -- the places that are left ----------------------------------------------------------------------


def at_exit(body: Body = once) -> Place:
    """Return the entry of `record.__exit__`, where nothing is taken off yet."""
    (place,) = (p for p in places(hooks, body) if p.function == "record.__exit__" and p.lasti == 0)
    return place


def test_interrupt_at_the_entry_of_the_exit() -> None:
    """What an interrupt keeps from coming off comes off with the exception's traceback."""
    before = replaceable()
    raised, _, _ = attempt(hooks, once, Injector(at_exit(), KeyboardInterrupt("at exit")))
    assert raised is not None
    assert str(raised) == "at exit"
    assert leftovers(before)
    raised.__traceback__ = None
    assert not leftovers(before)


def test_interrupt_at_the_exit_of_a_decorated_function() -> None:
    """The same holds for a decorated function, which stays."""
    before = replaceable()
    recorded = gradtrace.record()(hooks)
    with contextlib.suppress(KeyboardInterrupt), profiled(Injector(at_exit(), KeyboardInterrupt())):
        recorded()
    assert not leftovers(before)
    recorded()
    assert not leftovers(before)


class Twice(Injector):
    """Raises once more at the next place of gradtrace's own."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Be called by the interpreter."""
        if self.fired and self._left == 0 and frame.f_code.co_filename.startswith(OWN):
            self._left = -1
            raise KeyboardInterrupt("again")
        super().__call__(frame, event, _)


def test_an_interrupt_dies_with_its_handling() -> None:
    """An interrupt that came in observing is in no cycle: what its frames held is freed at once."""

    def interrupted(place: Place, refs: list[weakref.ref[Tensor]]) -> None:
        injector = Injector(place, KeyboardInterrupt())
        with contextlib.suppress(KeyboardInterrupt), profiled(injector), gradtrace.record():
            held = weight()
            refs.append(weakref.ref(held))
            (held.detach().mul_(2) + held).sum().backward()
            cuts()

    observing = ("Forward.", "Identity.", "Backward.", "_Watched.")
    chosen = [p for p in places(cuts, once) if p.own and p.function.startswith(observing)]
    assert len(chosen) > 100
    refs: list[weakref.ref[Tensor]] = []
    with no_collections():
        for place in chosen:
            interrupted(place, refs)
            reset_torch()
            assert [ref for ref in refs if ref() is not None] == [], place
    assert refs


def test_two_interrupts() -> None:
    """A second interrupt, while the first is dealt with, leaves nothing behind for long."""
    ending = ("record.__exit__", "record._forget", "Recorder.", "_Replacements.", "take_off")
    chosen = [p for p in places(hooks, once) if p.own and p.function.startswith(ending)]
    assert len(chosen) > 40
    plain = list[Done]()
    once(hooks, plain)
    for place in chosen:
        before = replaceable()
        raised, _, _ = attempt(hooks, once, Twice(place, KeyboardInterrupt("first")))
        assert isinstance(raised, KeyboardInterrupt), place
        raised.__traceback__ = raised.__context__ = None
        assert not leftovers(before), place
        assert not faults_afterwards(hooks, [], plain[0].values()), place


def test_interrupt_while_the_mode_is_off() -> None:
    """Where an interrupt keeps the mode from going on again, what it missed is unknown."""
    place = next(p for p in places(cuts, twice) if p.function == "_ModeOff.__exit__")
    before, error = replaceable(), KeyboardInterrupt("kept")
    raised, done, trace = attempt(cuts, twice, Injector(place, error))
    assert raised is None
    assert trace is not None
    assert wrong_verdicts(trace, done[0], "unknown") == []
    assert "unknown" in {str(trace.explain(leaf).status) for leaf, _ in done[0].leaves.values()}
    assert not leftovers(before)


def test_a_recording_that_another_thread_frees() -> None:
    """It ends for the process at once, and for its own thread when that records again."""
    before = replaceable()
    held = [gradtrace.record()]
    held[0].__enter__()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert leftovers(before) == ["a torch function mode"]
    w = weight()
    with gradtrace.record() as trace:
        (w * 2).sum().backward()
    assert trace.reached(w)
    assert not leftovers(before)


def test_a_tensor_that_nothing_took_where_a_call_was_missed() -> None:
    """Where a call was missed, what no other call took is unknown, not unused."""

    class Unobservable(Tensor):
        @property
        def dtype(self) -> Any:  # type: ignore[override]  # it is to be unlike a tensor's
            raise ValueError("not to be seen")

    w = weight()
    with gradtrace.record() as trace:
        torch.ones(3).as_subclass(Unobservable).mul(weight())
        weight().sum().backward()
    assert trace.graph.graph["troubles"]
    assert str(trace.explain(w).status) == "unknown"


# -- recursion -------------------------------------------------------------------------------------


def test_recursion_without_end() -> None:
    """A program that recurses for ever gets its RecursionError, and nothing stays."""

    def deeper(x: Tensor) -> Tensor:
        return deeper(F.relu(x * 2))

    before = replaceable()
    w = weight()
    with gradtrace.record() as trace:
        with pytest.raises(RecursionError):
            deeper(w)
        (w * 2).sum().backward()
    assert str(trace.explain(w).status) == "reached"
    with pytest.raises(RecursionError), gradtrace.record():
        deeper(w)
    assert not leftovers(before)


def test_recording_at_the_recursion_limit() -> None:
    """A recording that begins too deep, or can't end there, leaves nothing behind."""

    def deeper(x: Tensor) -> int:
        try:
            left = deeper(x)
        except RecursionError:
            left = 60
        if left:
            with contextlib.suppress(RecursionError), gradtrace.record():
                x * 2
        return max(left - 1, 0)

    before = replaceable()
    deeper(weight())
    assert not leftovers(before)


# -- other processes -------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> None:
    """Run a function in a forked process, and fail if it fails there."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_fork_inside_the_block() -> None:
    """A child records nothing, and has a plain torch behind the block; the parent goes on."""
    before = replaceable()
    w = weight()
    child = None
    with gradtrace.record() as trace:
        (w * 2).sum().backward()
        child = os.fork()
        if not child:
            v = weight()
            (v * 3).sum().backward()
    if not child:
        code = 1
        try:
            assert not leftovers(before)
            assert len(trace.backward_passes) == 1
            with gradtrace.record() as own:
                (w * 2).sum().backward()
            assert own.reached(w)
            assert not leftovers(before)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert not leftovers(before)
    assert len(trace.backward_passes) == 1
    assert trace.reached(w)


def test_fork_while_other_threads_record() -> None:
    """In a child other threads' recordings, whose threads are not there, are not on."""
    before = replaceable()
    inside, go_on = threading.Event(), threading.Event()

    def record() -> None:
        with gradtrace.record():
            inside.set()
            go_on.wait(20)

    def work() -> None:
        assert not leftovers(before)
        w = weight()
        with gradtrace.record() as trace:
            (w * 2).sum().backward()
        assert trace.reached(w)
        assert not leftovers(before)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        assert inside.wait(20)
        in_child(work)
    finally:
        go_on.set()
        thread.join()
    assert not leftovers(before)
