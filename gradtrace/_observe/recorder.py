"""One recording: the observers put together, put on, and taken off again.

# NOTE [ Interrupted anywhere ]
Ctrl-C can arrive in our own code too: where a function is entered, after any call of a C function,
at a loop's jump back. A context manager written in Python has such places between what it puts on
and the `with` body, and again before its exit begins, and an `ExitStack` that was interrupted has
lost a callback. So what is put on is noted before it is put on; taking off looks at what is on, can
be repeated, and is repeated where it was interrupted. Counters and modes go up and down in `try`
statements, not in context managers.

What is left are the entry of `record.__exit__`, and a second interrupt while the first is dealt
with. Then all comes off when the `record` object is freed, as it is together with the exception's
traceback. That is seen to by a weak reference and not by a `__del__`, in which Python would lose an
interrupt of any other recording.

A mode whose thread is not the one that frees the object stays on there: it does nothing, and comes
off when this thread records again.

What was interrupted in being observed is noted as missed.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from gradtrace._observe import patches
from gradtrace._observe.backward import Backward
from gradtrace._observe.forward import Forward, Function, grad_mode, tensors_in
from gradtrace._observe.identity import Identity, grad_fn_of
from gradtrace._observe.names import Names, locals_of
from gradtrace._observe.norms import dispatches_itself
from gradtrace._observe.sites import Sites
from gradtrace._source import Category, category
from gradtrace._tape import Input, Node, Tape, node_of


class Recorder:
    """Records the thread that starts it until it is stopped."""

    def __init__(self, values: str, entered_by: object) -> None:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.tape = Tape(str(torch.__version__), when, values)
        self.names = Names(entered_by, self.tape.roots, self._named)
        self.identity = Identity(self.tape, self.names.of_leaf)
        self.forward = Forward(self.tape, self.identity)
        self.backward = Backward(self.tape, self.identity, self.forward)
        self._observers = patches.observers_here()
        self._thread = threading.get_ident()
        self._ended = False
        self.guard: weakref.ref[Any] | None = None  # what takes this off if nobody else did

    # -- on and off ------------------------------------------------------------------------------

    def start(self, models: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
        """Put everything on. Where it fails half-way, `take_off` takes off what is on."""
        for name, tensor in tensors.items():
            self.names.add_tensor(tensor, name)
        self.tape.models_given = bool(models)
        for prefix, model in models.items():
            self.names.add_model(model, prefix)
        for mode in _modes():
            if isinstance(mode, Forward) and mode.ended:
                _take_off(mode)
        patches.put_on(self, self._observers)
        torch._C._push_on_torch_function_stack(self.forward)

    def stop(self, frame: FrameType | None) -> None:
        """Take everything off. `frame` is where the recording ends: its variables name leaves."""
        try:
            if frame is not None:
                self.forward.silently(self._add_variables, frame)
            self.catch_up()
            if self.forward not in _modes():
                self.tape.troubles.append("the mode was taken off by somebody else")
        except BaseException as error:
            self.forward.missed("exit", error)
        finally:
            self._ended = True
        self.take_off()

    def take_off(self) -> None:
        """Take off whatever is on; see NOTE [ Interrupted anywhere ]."""
        self._ended = True
        self.forward.end()
        if threading.get_ident() == self._thread:
            _take_off(self.forward)
        patches.take_off(self, self._observers)
        self.backward.take_off()
        self.forward.anchors.outlive()
        self.guard = None

    def _add_variables(self, frame: FrameType) -> None:
        """Name leaves that were made inside the recording, and so before their assignment."""
        for name, held in locals_of(frame).items():
            value = self.identity.known(held) if isinstance(held, Tensor) else None
            node = None if value is None else self.tape.nodes[node_of(value)]
            if value is not None and node is not None and node.kind == "leaf":
                self.tape.names.setdefault(node_of(value), name)

    def _named(self, tensor: Tensor, name: str) -> None:
        """Watch a parameter that holds others: FSDP2 computes with those, and fills this one.

        Any other is met when it is used.
        """
        if not isinstance(tensor, nn.Parameter) or not dispatches_itself(tensor):
            return
        if tensor.requires_grad and self.identity.known(tensor) is None:
            self.identity.add_source(tensor, name=name, flavour="holder")

    def stop_in_child(self) -> None:
        """Record nothing more: this is a forked copy of the process."""
        self.forward.paused += 1

    def catch_up(self) -> None:
        """Put on the tape what is known by now only: names, norms that waited, requirements.

        Does nothing once the recording has ended: from then on the tape is final.
        """
        if not self._ended:
            self.forward.silently(self._catch_up)

    def _catch_up(self) -> None:
        self.backward.settle()
        self._notice_requirements()
        self._add_named()

    def _notice_requirements(self) -> None:
        """Note which data came to require a gradient after it was taken, and which leaves don't."""
        tape = self.tape
        for tensor, value in self.identity.living():
            node = tape.nodes[node_of(value)]
            if node is not None and node.kind == "input" and tensor.requires_grad:
                tape.required.add(node_of(value))
                tape.frozen.discard(node_of(value))
            elif node is not None and (node.kind == "leaf" or node_of(value) in tape.required):
                change = tape.frozen.discard if tensor.requires_grad else tape.frozen.add
                change(node_of(value))

    def _name_known(self) -> None:
        """Name the leaves that were met before their module: at the end both may be gone."""
        self.names.has_news = False
        for tensor, name, _ in self.names.tensors():
            value = self.identity.known(tensor)
            if value is not None:
                self.tape.names.setdefault(node_of(value), name)

    def _add_named(self) -> None:
        """Name the leaves that were met before their module was, and add those never met."""
        arrived = {arrival.leaf for arrival in self.tape.arrivals}
        for tensor, name, had_gradient in self.names.tensors():
            value = self.identity.known(tensor)
            if value is not None:
                self.tape.names.setdefault(node_of(value), name)
            elif isinstance(tensor, nn.Parameter):
                value = self.identity.add_source(tensor, name=name)
            if value is None or had_gradient or node_of(value) in arrived:
                continue
            if tensor.is_leaf and tensor.grad is not None:  # filled out of our sight, as FSDP does
                self.tape.filled_unseen.add(node_of(value))

    # -- what no mode sees -----------------------------------------------------------------------

    @property
    def _off(self) -> bool:
        return self.forward.paused > 0

    def around_engine(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """One run of the autograd engine."""
        if _is_tracing():
            return call(*args, **kwargs)
        return self.backward.run(call, sys._getframe(1), *args, **kwargs)

    def around_function(self, call: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """`apply` of a custom Function."""
        if function is CheckpointFunction:
            name, flavour = "checkpoint", "checkpoint"
        else:
            name, flavour = f"{function.__name__}.apply", "function"
        return self._closed(name, flavour, call, (function, *args), kwargs)

    def around_script(self, call: Any, script: Any, *args: Any, **kwargs: Any) -> Any:
        """A scripted or traced function, in which no mode sees anything."""
        name = getattr(script, "name", "script")
        return self._closed(name, "script", call, (script, *args), kwargs)

    def around_compiled(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Something that dynamo compiles: it gives wrong values where it traces through a mode."""
        name = _called_in_torch(sys._getframe(1))

        def unseen(*args: Any, **kwargs: Any) -> Any:
            with _mode_off(self.forward):
                return call(*args, **kwargs)

        return self._closed(name, "script", unseen, args, kwargs)

    def _closed(
        self,
        name: str,
        flavour: str,
        call: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        extra: tuple[Tensor, ...] = (),
    ) -> Any:
        """Record a call as one op, whatever it does inside."""
        forward = self.forward
        if self._off or _is_tracing() or forward.function is not None:
            return call(*args, **kwargs)
        try:
            where = forward.where(sys._getframe(2))
            direct, node = forward.silently(self._open, flavour, args, extra)
        except BaseException as error:
            forward.missed(name, error)
            return call(*args, **kwargs)
        function = Function(node, direct)
        try:
            forward.function = function
            result = call(*args, **kwargs)
        except BaseException:
            self._undo(function)
            raise
        finally:
            forward.function = None
            inputs = (*direct, *function.captured.values())
            self.tape.nodes[node] = Node("op", name, *where, grad_mode(), inputs, (), flavour)
        try:
            forward.silently(self._finish, name, flavour, inputs, result, where, function)
        except BaseException as error:
            forward.missed(name, error)
        return result

    def _finish(
        self,
        name: str,
        flavour: str,
        inputs: tuple[Input, ...],
        result: Any,
        where: Sites,
        function: Function,
    ) -> None:
        """Put on the tape what came out of a closed op."""
        forward, node = self.forward, function.node
        leaves = forward.leaves_started(name, function.dirty())
        outputs = [each for each in tensors_in((result,)) if id(each) not in leaves]
        if leaves and not outputs:
            into = tuple(dict.fromkeys(leaves.values()))
            others = tuple([g for g in inputs if node_of(g.value) not in into])
            entry = Node("op", name, *where, grad_mode(), others, (), flavour, None, into)
            self.tape.nodes[node] = entry
            return
        targets = function.targets(outputs)
        inputs = tuple([g._replace(target=g.value in targets) for g in inputs])
        forward.add_op(name, inputs, outputs, where, flavour=flavour, node=node)
        forward.note_writes(node, outputs, targets)

    def _undo(self, function: Function) -> None:
        """Give what a Function wrote to before it raised back to those that made it."""
        for tensor, value in function.dirty():
            self.identity.remember(tensor, value)
            self.identity.mark_unmarked(tensor, grad_fn_of(tensor), value)

    def _open(
        self, flavour: str, args: tuple[Any, ...], extra: tuple[Tensor, ...]
    ) -> tuple[tuple[Input, ...], int]:
        """Return the inputs of a closed op and the place that is kept for it on the tape."""
        given = [*tensors_in(args if flavour == "script" else _direct(args)), *extra]
        direct = tuple([self.identity.input(tensor) for tensor in given])
        return direct, self.tape.add(None)

    def around_module(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A module's forward: keeps the dotted path of the module that is running."""
        silently, modules = self.forward.silently, self.forward.modules
        depth = len(modules)
        try:
            path = silently(self._path_of, module, sys._getframe(1), modules[-1])
        except BaseException as error:
            self.forward.missed("module", error)
            path = modules[-1]
        try:
            modules.append(path)
            if not isinstance(module, torch.jit.ScriptModule):
                return call(module, *args, **kwargs)
            parameters = silently(lambda: tuple(module.parameters()))
            name = type(module).__name__
            return self._closed(name, "script", call, (module, *args), kwargs, parameters)
        finally:
            del modules[depth:]

    def _path_of(self, module: nn.Module, frame: FrameType | None, outer: str) -> str:
        path = self.names.of_module(module, frame, outer)
        if self.names.has_news:
            self._name_known()
        return path

    def around_variable(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """`Variable(x)`."""
        result = call(*args, **kwargs)
        if isinstance(result, Tensor):
            self._made("Variable", result, args[1:], kwargs)
        return result

    def around_copy(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """`copy.deepcopy` of a parameter: what runs inside is seen, and makes a copy."""
        self.forward.copying += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.forward.copying -= 1

    def constructed(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """A tensor class was called: `nn.Parameter(x)`, `torch.Tensor([a, b])`."""
        name = next(
            kind.__name__ for kind in type(tensor).__mro__ if kind.__module__.startswith("torch")
        )
        self._made(name, tensor, args, kwargs)

    def _made(
        self, name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        forward = self.forward
        if self._off or _is_tracing() or not _is_on(forward):
            return
        try:
            where = forward.where(sys._getframe(2))
            given = tensors_in((*args, *kwargs.values()))
            forward.silently(self._note_made, name, tensor, given, where)
        except BaseException as error:
            forward.missed(name, error)

    def _note_made(self, name: str, tensor: Tensor, given: Iterable[Tensor], where: Sites) -> None:
        forward = self.forward
        inputs = tuple([self.identity.input(source) for source in given])
        if forward.function is not None:
            forward._inside(forward.function, inputs, [], tensor)
        elif any(self._is_made(source) for source in inputs):
            forward.add_op(name, inputs, [tensor], where)

    def _is_made(self, source: Input) -> bool:
        """Whether a value has a story: it came out of an op, or is a leaf."""
        node = self.tape.nodes[node_of(source.value)]
        return node is None or node.kind != "input" or source.requires_grad


def _direct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that `Function.apply` takes as tensors: not those in containers."""
    return tuple(arg for arg in args if isinstance(arg, Tensor))


def _called_in_torch(frame: FrameType | None) -> str:
    """Return the name of the function of torch's that the program called: "cond"."""
    name = ""
    while frame is not None and category(frame.f_code) is Category.TORCH:
        name = frame.f_code.co_name
        frame = frame.f_back
    return name


def _is_tracing() -> bool:
    """Whether somebody traces what runs (torch.jit.trace, make_fx): none of it is computed."""
    if torch._C._get_tracing_state() is not None:
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _modes() -> list[Any]:
    """Return this thread's modes, the outermost first."""
    depth = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(at) for at in range(depth)]


def _is_on(mode: Forward) -> bool:
    """Whether a mode is on: while it handles a call it is not, and what runs belongs to that."""
    return any(each is mode for each in _modes())


@contextlib.contextmanager
def _mode_off(mode: Forward) -> Iterator[None]:
    """Take a mode off for a while, and put it back in its place among the others."""
    stack = _modes()
    if not _is_on(mode):
        yield
        return
    place = stack.index(mode)
    _take_off(mode)
    try:
        yield
    finally:
        above = [torch._C._pop_torch_function_stack() for _ in stack[place + 1 :]]
        for other in (mode, *reversed(above)):
            torch._C._push_on_torch_function_stack(other)


def _take_off(mode: Forward) -> None:
    """Take a mode off the stack, also where others were left on it out of order."""
    stack = _modes()
    kept = [other for other in stack if other is not mode]
    below = next((at for at, other in enumerate(stack) if other is mode), len(stack))
    try:
        _restack(below, kept)
    except BaseException:
        _restack(below, kept)
        raise


def _restack(below: int, kept: list[Any]) -> None:
    """Make these the stack of modes; up to a depth they are on it already."""
    while torch._C._len_torch_function_stack() > below:
        torch._C._pop_torch_function_stack()
    for mode in kept[below:]:
        torch._C._push_on_torch_function_stack(mode)
