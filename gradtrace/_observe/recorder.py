"""One recording: the observers put together, put on, and taken off again."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Iterator, Mapping
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
        self._stack = contextlib.ExitStack()
        self._ended = False

    # -- on and off ------------------------------------------------------------------------------

    def start(self, models: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
        """Put everything on. What was on comes off again where something fails half-way."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            for name, tensor in tensors.items():
                self.names.add_tensor(tensor, name)
            self.tape.models_given = bool(models)
            for prefix, model in models.items():
                self.names.add_model(model, prefix)
            stack.enter_context(patches.observing(self))
            stack.enter_context(_mode_on(self.forward))
            self._stack = stack.pop_all()

    def stop(self, frame: FrameType | None) -> None:
        """Take everything off. `frame` is where the recording ends: its variables name leaves."""
        try:
            if frame is not None:
                with self.forward.silence():
                    self._add_variables(locals_of(frame))
        finally:
            self._stack.close()

    def _add_variables(self, variables: Mapping[str, Any]) -> None:
        """Name leaves that were made inside the recording, and so before their assignment."""
        for name, held in variables.items():
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

    def _close(self) -> None:
        self.catch_up()
        self._ended = True
        with self.forward.silence():
            self.backward.close()
        self.forward.anchors.outlive()

    def catch_up(self) -> None:
        """Put on the tape what is known by now only: names, norms that waited, requirements.

        Does nothing once the recording has ended: from then on the tape is final.
        """
        if self._ended:
            return
        with self.forward.silence():
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
            with forward.silence():
                direct, node = self._open(flavour, args, extra)
        except Exception as error:
            forward.missed(name, error)
            return call(*args, **kwargs)
        forward.function = function = Function(node, direct)
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self._undo(function)
            raise
        finally:
            forward.function = None
            inputs = (*direct, *function.captured.values())
            self.tape.nodes[node] = Node("op", name, *where, grad_mode(), inputs, (), flavour)
        try:
            with forward.silence():
                leaves = forward.leaves_started(name, function.dirty())
                outputs = [each for each in tensors_in((result,)) if id(each) not in leaves]
                if leaves and not outputs:
                    into = tuple(dict.fromkeys(leaves.values()))
                    others = tuple([g for g in inputs if node_of(g.value) not in into])
                    entry = Node("op", name, *where, grad_mode(), others, (), flavour, None, into)
                    self.tape.nodes[node] = entry
                    return result
                targets = function.targets(outputs)
                inputs = tuple([g._replace(target=g.value in targets) for g in inputs])
                forward.add_op(name, inputs, outputs, where, flavour=flavour, node=node)
                forward.note_writes(node, outputs, targets)
        except Exception as error:
            forward.missed(name, error)
        return result

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
        modules = self.forward.modules
        try:
            with self.forward.silence():
                path = self.names.of_module(module, sys._getframe(1), modules[-1])
                if self.names.has_news:
                    self._name_known()
        except Exception as error:
            self.forward.missed("module", error)
            path = modules[-1]
        modules.append(path)
        depth = len(modules)
        try:
            if not isinstance(module, torch.jit.ScriptModule):
                return call(module, *args, **kwargs)
            with self.forward.silence():
                name, parameters = type(module).__name__, tuple(module.parameters())
            return self._closed(name, "script", call, (module, *args), kwargs, parameters)
        finally:
            del modules[depth - 1 :]

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
            with forward.silence():
                given = tensors_in((*args, *kwargs.values()))
                inputs = tuple([self.identity.input(source) for source in given])
                if forward.function is not None:
                    forward._inside(forward.function, inputs, [], tensor)
                elif any(self._is_made(source) for source in inputs):
                    forward.add_op(name, inputs, [tensor], where)
        except Exception as error:
            forward.missed(name, error)

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


@contextlib.contextmanager
def _mode_on(mode: Forward) -> Iterator[None]:
    """Put a mode on, and take that one off again, also where others were left out of order."""
    torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        _take_off(mode)


def _modes() -> list[Any]:
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
    above = []
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)
