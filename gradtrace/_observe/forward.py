"""The forward pass: a TorchFunctionMode that puts every call with tensors on the tape.

# NOTE [ Seeing into torch's own functions ]
A mode is off while its handler runs, so that the `detach` inside `F.gumbel_softmax` would not be
seen. The handler therefore calls a twin of a Python function of torch's: the same code object, over
globals in which `has_torch_function` answers no, with the mode put on again. Left alone are
functions that are running already in this thread (`Tensor.unflatten` reaches itself by `super()`),
those in `_OPAQUE`, and any call on which somebody else's `__torch_function__` has a say.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType, FunctionType, MethodType
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtrace import _cuts
from gradtrace._observe import sites
from gradtrace._observe.anchors import BEGIN, EVERY, Anchors
from gradtrace._observe.identity import (
    Identity,
    describe,
    facts_of,
    grad_fn_of,
    storage_of,
    unwrapped,
)
from gradtrace._observe.overwrites import Write, Writes
from gradtrace._tape import INSIDE, Input, Node, Tape, new_input, new_node, node_of, value_of

_OPAQUE: Final = frozenset(
    {"__repr__", "deepcopy", "__reduce_ex__", "__setstate__", "__format__", "__contains__"}
    | {"__array__", "__dlpack__", "register_hook", "register_post_accumulate_grad_hook"}
    | {"storage", "_typed_storage", "share_memory_", "__len__", "__hash__", "__dir__"}
)
_ASKS_FOR_OVERRIDES: Final = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)
_DEFAULT_HANDLERS: Final = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]  # a bound classmethod
    torch._C._disabled_torch_function_impl,
)

# `__float__` and its like keep their names: `float` is another op.
_PLAIN_NAMES: Final = frozenset({"__getitem__", "__setitem__", "__deepcopy__"})

_FOR_EVER: Final = 1 << 32  # pauses, of which each that is going on takes off one at its end

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")
Watch = Callable[[], AbstractContextManager[object]]

_plainly: Final[Watch] = contextlib.nullcontext
# A subclass's own handler, or a mode of the user's, would be called for each attribute that is read
# in observing.
_quietly: Final[Watch] = torch._C.DisableTorchFunction


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, in order, also those inside containers."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def name_of(func: Callable[..., Any]) -> str:
    """Return an op's name; attributes read and written are "data" and "data ="."""
    name: str = getattr(func, "__name__", None) or type(func).__name__
    if name == "grad" and isinstance(func, FunctionType):
        return "autograd.grad"
    if name in _PLAIN_NAMES:
        return name.strip("_")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "attribute")
        return attribute if name == "__get__" else f"{attribute} ="
    return name


class _Globals(dict[str, Any]):
    """A module's globals as its functions' twins see them: live, but nothing is overridden."""

    def __init__(self, of: dict[str, Any]) -> None:
        super().__init__({name: _answers_no for name in _ASKS_FOR_OVERRIDES if name in of})
        self._of = of

    def __missing__(self, name: str) -> Any:
        try:
            return self._of[name]
        except KeyError:
            builtins = self._of["__builtins__"]
            return builtins[name] if isinstance(builtins, dict) else getattr(builtins, name)


def _answers_no(*_: object) -> bool:
    return False


_globals: dict[int, _Globals] = {}


def twin_of(func: FunctionType) -> FunctionType | None:
    """Return the twin of one of torch's Python functions, or None where it can't have one."""
    code = func.__code__
    asks = any(name in code.co_names for name in _ASKS_FOR_OVERRIDES)
    if not asks or any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(code)):
        return None
    scope = _globals.setdefault(id(func.__globals__), _Globals(func.__globals__))
    twin = FunctionType(code, scope, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def grad_mode() -> str:
    """Return which grad mode is on."""
    if torch.is_grad_enabled():
        return "grad"
    return "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"


class Call:
    """What depends on the function only, worked out once for each function."""

    __slots__ = (
        "escape",
        "in_place",
        "metadata",
        "name",
        "no_data",
        "out_of",
        "overwrites",
        "pairwise",
        "shares",
        "special",
        "twin",
    )

    def __init__(self, func: Callable[..., Any]) -> None:
        self.name = name = name_of(func)
        self.metadata = name in _cuts.METADATA
        self.escape = name in _cuts.ESCAPES
        self.pairwise = name in _cuts.PAIRWISE
        self.shares = name in _cuts.SHARING_ESCAPES
        self.no_data = name in _cuts.SHAPE_ONLY_ENTIRELY
        self.out_of = _cuts.SHAPE_ONLY_ARGUMENTS.get(name, frozenset())
        self.in_place = _cuts.writes(name)
        self.overwrites = name not in _cuts.SAME_VALUES
        self.special = _SPECIAL.get(name)
        self.twin = None
        if (
            type(func) is FunctionType
            and name not in _OPAQUE
            and self.special is None
            and (func.__module__ or "").split(".")[0] == "torch"
        ):
            self.twin = twin_of(func)


class Function:
    """A custom Function (or another closed box) while its forward runs.

    What happens inside belongs to it: tensors from outside that are met inside become inputs of it.
    """

    __slots__ = ("captured", "direct", "node", "written")

    def __init__(self, node: int, direct: tuple[Input, ...]) -> None:
        self.node = node
        self.direct = direct
        self.captured: dict[int, Input] = {}
        self.written: list[tuple[weakref.ref[Tensor], int]] = []  # and what they were before

    def dirty(self) -> Iterator[tuple[Tensor, int]]:
        """Yield what was written to and lives, with what it was before; the first word last."""
        for ref, value in reversed(self.written):
            tensor = ref()
            if tensor is not None:
                yield tensor, value

    def targets(self, outputs: Sequence[Tensor]) -> tuple[int, ...]:
        """Return what the outputs were before, where all of them were written to (mark_dirty)."""
        before = {id(tensor): value for tensor, value in self.dirty()}
        found = tuple([before[id(tensor)] for tensor in outputs if id(tensor) in before])
        return found if len(found) == len(outputs) else ()

    def take(self, given: Input) -> None:
        """Note a tensor that was met inside; those made inside, and arguments, are not captured."""
        inside = value_of(self.node, INSIDE)
        if given.value != inside and all(given.value != known.value for known in self.direct):
            self.captured.setdefault(given.value, given._replace(captured=True))


class Forward(TorchFunctionMode):
    """The mode. One for each recording; belongs to the thread that entered it."""

    def __init__(self, tape: Tape, identity: Identity) -> None:
        super().__init__()
        self._tape = tape
        self._identity = identity
        self._calls: dict[Callable[..., Any], Call] = {}
        self._running: set[Callable[..., Any]] = set()
        self._stand_ins = sites.StandIns()
        self.anchors = Anchors()
        self.writes = Writes()
        self.modules: list[str] = [""]
        self.function: Function | None = None
        self.copying = 0
        self.paused = 0
        # Memory that a `.data` shares -> the tensor that it was read from.
        self._data_owners: dict[int, weakref.ref[Tensor]] = {}
        self.backward_of: dict[int, int] = {}  # leaf node -> the pass that last filled its .grad
        self.latest_pass: int | None = None  # the latest that filled any .grad
        self.gradient_of: dict[int, int] = {}  # value of a .grad tensor -> leaf node
        self.run_backward: Callable[..., Any] = lambda func, args, kwargs, frame: func(
            *args, **kwargs
        )
        self.pass_node: Callable[[int], int] = lambda index: index
        self.cleared: Callable[[int, sites.Sites], None] = lambda leaf, where: None

    # -- the handler -----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            call = self._calls[func]
        except (KeyError, TypeError):  # new, or somebody's callable that has no hash
            call = self._describe(func)
        if call.metadata or self.paused or torch._C._get_tracing_state() is not None:
            return func(*args, **kwargs)
        quiet = None
        if (types and not all(map(_has_default_handler, types))) or not _is_alone():
            quiet = _quietly
        elif call.twin is not None and func not in self._running:
            return self._look_inside(func, call.twin, args, kwargs, sys._getframe(1))
        if call.special is not None:
            return call.special(self, call, func, args, kwargs, sys._getframe(1), quiet or _plainly)
        return self.record(call, func, args, kwargs, sys._getframe(1), quiet)

    def _describe(self, func: Any) -> Call:
        try:
            call = Call(func)
        except BaseException as error:  # somebody's callable of a kind that torch has none of
            self.missed(type(func).__name__, error)
            call = Call(_answers_no)
        if _is_lasting(func):
            self._calls[func] = call
        return call

    def _look_inside(
        self, func: Any, twin: FunctionType, args: Args, kwargs: Kwargs, frame: FrameType
    ) -> Any:
        depth = torch._C._len_torch_function_stack()
        try:
            self._running.add(func)
            torch._C._push_on_torch_function_stack(self)
            return self._stand_ins.of(_caller_of(func, frame))(twin, args, kwargs)
        finally:
            try:
                if torch._C._len_torch_function_stack() > depth:
                    torch._C._pop_torch_function_stack()
            finally:
                self._running.discard(func)

    def where(self, frame: FrameType | None) -> sites.Sites:
        """Return site, user's own site and module path of the call that a frame is making."""
        return (*sites.find(frame), self.modules[-1])

    # -- ordinary ops ----------------------------------------------------------------------------

    def record(
        self,
        call: Call,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        frame: FrameType,
        quiet: Watch | None,
    ) -> Any:
        """Make a call and put it on the tape. What goes wrong in observing stays here."""
        try:
            if quiet is None:
                inputs, written = self._before(call, args, kwargs)
            else:
                with quiet():
                    inputs, written = self._before(call, args, kwargs)
        except BaseException as error:
            self.missed(call.name, error)
            return func(*args, **kwargs)
        try:
            result = self._stand_ins.of(frame)(func, args, kwargs)
        except BaseException as error:
            if written and not isinstance(error, Exception):  # it may have written all the same
                self.missed(call.name, error)
            raise
        try:
            if quiet is None:
                self._note(call, inputs, written, args, result, frame)
            else:
                with quiet():
                    self._note(call, inputs, written, args, result, frame)
        except BaseException as error:
            self.missed(call.name, error)
        return result

    def _before(
        self, call: Call, args: Args, kwargs: Kwargs
    ) -> tuple[tuple[Input, ...], Sequence[Tensor]]:
        """Return what a call takes and what it writes to; afterwards both may have changed."""
        inputs = () if call.no_data else self._inputs(call, args, kwargs)
        if not (call.in_place or "out" in kwargs):
            return inputs, ()
        written = self._written(call, args, kwargs)
        targets = set(map(self._identity.value, written))
        return tuple(g._replace(target=True) if g.value in targets else g for g in inputs), written

    def silently(self, observe: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Observe where the mode is on and tensors of any class pass by: nobody is to notice."""
        self.paused += 1
        try:
            with _quietly():
                return observe(*args, **kwargs)
        finally:
            self.paused -= 1

    @property
    def ended(self) -> bool:
        """Whether this mode does nothing any more, even if it is on."""
        return self.paused >= _FOR_EVER

    def end(self) -> None:
        """Do nothing from now on."""
        self.paused = 2 * _FOR_EVER

    def missed(self, name: str, error: BaseException) -> None:
        """Note a call that could not be observed; to be called where the error was caught.

        What ends the program goes on to end it: an interrupt is never kept from it.
        """
        self._tape.troubles.append(f"{name}: {type(error).__name__}: {error}")
        if not isinstance(error, Exception):
            try:
                raise error
            finally:
                del error  # else this frame, which its traceback holds, would hold it

    def _note(
        self,
        call: Call,
        inputs: tuple[Input, ...],
        written: Sequence[Tensor],
        args: Args,
        result: Any,
        frame: FrameType | None,
    ) -> None:
        if self.function is not None:
            self._inside(self.function, inputs, written, result)
        elif call.escape:
            self._add_escape(call, inputs, frame)
            if call.shares:
                with _quietly():
                    self._identity.exported(args[0])
        else:
            self._add(call, inputs, written, args, result, frame)

    def _inputs(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Input, ...]:
        if call.out_of:
            args = tuple(arg for at, arg in enumerate(args) if at not in call.out_of)
        if kwargs:
            skipped = ("out", "other") if call.out_of else ("out",)
            args = (*args, *(given for name, given in kwargs.items() if name not in skipped))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return tuple([self._identity.input(tensor) for tensor in tensors_in(args)])
        value = self._identity.value
        found = []
        for arg in args:
            if isinstance(arg, Tensor):
                found.append(new_input((value(arg), arg.requires_grad, False, False)))
            elif isinstance(arg, (tuple, list, dict)):
                found += [Input(value(each), each.requires_grad) for each in tensors_in((arg,))]
        return tuple(found)

    def _written(self, call: Call, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Return the tensors that a call writes to: the first argument, or `out`."""
        if "out" in kwargs:
            return list(tensors_in((kwargs["out"],)))
        first = args[:1] or tuple(kwargs.values())[:1]
        return list(tensors_in(first))

    def _inside(
        self, function: Function, inputs: tuple[Input, ...], written: Sequence[Tensor], result: Any
    ) -> None:
        for given in inputs:
            function.take(given)
        inside, unchanged = value_of(function.node, INSIDE), self._identity.unchanged
        for tensor in written:
            before = self._identity.value_before(tensor)
            if before != inside:
                function.written.append((weakref.ref(tensor), before))
        made = (tensor for tensor in tensors_in((result,)) if not unchanged(tensor))
        for tensor in (*tensors_in(written), *made):
            if not _is_leaf(unwrapped(tensor)):
                self._identity.remember(tensor, inside)

    def _add_escape(self, call: Call, inputs: tuple[Input, ...], frame: FrameType | None) -> None:
        if inputs:
            self._tape.add(Node("escape", call.name, *self.where(frame), grad_mode(), inputs, ()))

    def _add(
        self,
        call: Call,
        inputs: tuple[Input, ...],
        written: Sequence[Tensor],
        args: Args,
        result: Any,
        frame: FrameType | None,
    ) -> None:
        where = None
        if written:
            where = self.where(frame)
            self._note_writes(call, written, args, where)
            outputs = self._written_outputs(call, inputs, written, where)
        else:
            unchanged = self._identity.unchanged
            several = (result,) if isinstance(result, Tensor) else tensors_in((result,))
            outputs = [tensor for tensor in several if not unchanged(tensor)]
        if not outputs:
            return
        if not inputs and not written and not any(grad_fn_of(t) for t in outputs):
            self._add_sources(call, outputs, frame)
            return
        flavour = self._flavour_of_write(written)
        where = where or self.where(frame)
        if call.pairwise:
            self._add_pairs(call, inputs, list(tensors_in((result,))), where)
            return
        self.add_op(call.name, inputs, outputs, where, flavour=flavour, written=written)

    def _add_pairs(
        self, call: Call, inputs: tuple[Input, ...], results: list[Tensor], where: sites.Sites
    ) -> None:
        """Put a call on the tape each of whose results is made from one of its inputs alone."""
        if len(inputs) != len(results):
            self.add_op(call.name, inputs, results, where)
            return
        for given, result in zip(inputs, results, strict=True):
            if not self._identity.unchanged(result):
                self.add_op(call.name, (given,), [result], where)

    def _note_writes(
        self, call: Call, written: Sequence[Tensor], args: Args, where: sites.Sites
    ) -> None:
        """Note which memory a call wrote to, for what backward may need of it."""
        if not call.overwrites:
            return
        write = Write(len(self._tape.nodes), call.name, where)
        for tensor in written:
            # Where torch counts versions, it counts them for the whole tensor.
            part = call.name == "setitem" and self._is_silent(tensor)
            self.writes.note(tensor, write, index=args[1] if part else ...)

    def _written_outputs(
        self,
        call: Call,
        inputs: tuple[Input, ...],
        written: Sequence[Tensor],
        where: sites.Sites,
    ) -> list[Tensor]:
        """Return what a write gives a new value to, having noted the leaves that it starts anew."""
        outputs, leaves = [], []
        for tensor in written:
            if self._identity.untouched(tensor):
                continue
            leaf = self._started_anew(call.name, tensor)
            if leaf is None:
                outputs.append(tensor)
            else:
                leaves.append(leaf)
                self._identity.remember(tensor, self._identity.value(tensor))
        inputs = tuple([given for given in inputs if not given.target])
        if leaves and inputs:
            # Which of several tensors (`_foreach_*`) went into which leaf is not known.
            target = tuple(leaves) if len(written) == 1 else ()
            silent, mode = self._flavour_of_write(written), grad_mode()
            self._tape.add(Node("op", call.name, *where, mode, inputs, (), silent, None, target))
        if call.name in ("zero_", "_foreach_zero_"):
            self._notice_clearing(outputs, where)
        return outputs

    def _add_sources(self, call: Call, outputs: list[Tensor], frame: FrameType | None) -> None:
        """Put what a factory made on the tape: a leaf, or data."""
        where = self.where(frame)
        for tensor in outputs:
            kind = "leaf" if tensor.requires_grad else "input"
            node = self._tape.add(
                Node(kind, call.name, *where, grad_mode(), (), (describe(tensor),))
            )
            value = self._identity.register(tensor, value_of(node, 0))
            if tensor.requires_grad:
                self._identity.on_leaf(tensor, node_of(value))

    def add_op(
        self,
        name: str,
        inputs: tuple[Input, ...],
        outputs: list[Tensor],
        where: sites.Sites,
        *,
        flavour: str = "",
        written: Iterable[Tensor] = (),
        node: int | None = None,
    ) -> int:
        """Put an op with its results on the tape and make the results known."""
        plain = [unwrapped(tensor) for tensor in outputs]
        facts = [facts_of(tensor) for tensor in plain]
        described = tuple([output for output, _ in facts])
        flavour = flavour or self._circumstance()
        targets = tuple(map(self._identity.value_before, outputs)) if written else ()
        alias = self._alias(name, inputs, plain, targets)
        leaves = self._leaves_beside(plain) if targets else ()
        if leaves and not flavour:
            flavour = "through_detach"
        mode = grad_mode()
        entry = new_node(("op", name, *where, mode, inputs, described, flavour, alias, leaves))
        if node is None:
            node = self._tape.add(entry)
        else:
            self._tape.nodes[node] = entry
        if targets:
            self._tape.targets[node] = targets
        if targets and mode != "grad":  # a view's grad_fn is new, and leads on as before
            for at, (_, grad_fn) in enumerate(facts):
                self._identity.mark_unmarked(plain[at], grad_fn, targets[at])
        for at, (output, grad_fn) in enumerate(facts):
            value = value_of(node, at)
            self._identity.settle(outputs[at], plain[at], value, grad_fn)
            if output.requires_grad and grad_fn is None and _is_leaf(plain[at]):
                self._identity.leaf_made_by_op(outputs[at], value, where)
        for tensor in written:
            self._identity.wrote(tensor, node, silent=self._is_silent(tensor))
        if node > BEGIN and facts:
            self._anchor(node, facts[0][1])
        return node

    def leaves_started(self, name: str, written: Iterable[tuple[Tensor, int]]) -> dict[int, int]:
        """Return the leaves that a Function started anew, by the id of what it wrote to."""
        found: dict[int, int] = {}
        for tensor, before in written:
            leaf = self._started_anew(name, tensor)
            if leaf is not None:
                found[id(tensor)] = leaf
                self._identity.remember(tensor, before)
        return found

    def note_writes(self, node: int, outputs: list[Tensor], targets: tuple[int, ...]) -> None:
        """Note that an op wrote to its outputs, and what these were before."""
        if targets:
            self._tape.targets[node] = targets
            for tensor in outputs:
                self._identity.wrote(tensor, node, silent=self._is_silent(tensor))

    def _anchor(self, node: int, grad_fn: Any) -> None:
        """Hold every so many nodes of a deep graph; see `anchors.py`."""
        if grad_fn is not None and node % EVERY == 0:
            self.anchors.hold(grad_fn)
        elif node % 64 == 0 and self.anchors:
            self.anchors.release()

    def _circumstance(self) -> str:
        """Return the flavour that an op has from what it runs inside of."""
        if self.copying:
            return "within_copy"
        inside_transform = torch._C._functorch.peek_interpreter_stack() is not None
        return "transformed" if inside_transform else ""

    def _alias(
        self,
        name: str,
        inputs: tuple[Input, ...],
        outputs: list[Tensor],
        targets: tuple[int, ...],
    ) -> int | None:
        if not outputs or not (inputs or targets):
            return None
        shares = name in ("detach", "data", "data =") or outputs[0]._is_view()
        return node_of(targets[0] if targets else inputs[0].value) if shares else None

    def _is_silent(self, tensor: Tensor) -> bool:
        """Whether another tensor on this memory doesn't see the write by its version counter."""
        return bool(self._data_owners) and self._owner_at(storage_of(tensor)) is not None

    def _flavour_of_write(self, written: Iterable[Tensor]) -> str:
        through_data = any(self._data_owner(tensor) is not None for tensor in written)
        return "through_data" if through_data else ""

    def _owner_at(self, storage: int) -> Tensor | None:
        """Return the living tensor on a memory whose `.data` was read, or None."""
        ref = self._data_owners.get(storage)
        owner = None if ref is None else ref()
        # The memory may have been freed, and its number given to another tensor's.
        return None if owner is None or storage_of(owner) != storage else owner

    def _data_owner(self, tensor: Tensor) -> Tensor | None:
        """Return the living tensor whose `.data` a tensor is, or is a view of; or None."""
        if not self._data_owners:
            return None
        owner = self._owner_at(storage_of(tensor))
        return None if owner is None or _base(owner) is _base(tensor) else owner

    # -- writes into leaves ----------------------------------------------------------------------

    def _started_anew(self, name: str, tensor: Tensor) -> int | None:
        """Return the leaf that a write outside autograd's sight starts anew, or None."""
        if name in ("detach_", "requires_grad_"):
            return None
        if torch.is_grad_enabled() and grad_fn_of(tensor) is not None:
            return None
        return self._identity.written_leaf(tensor)

    def _leaves_beside(self, outputs: list[Tensor]) -> tuple[int, ...]:
        """Return the leaves whose memory was written to, as by `p.data.copy_(w)`."""
        leaves = map(self._identity.written_leaf, outputs)
        return tuple(dict.fromkeys(leaf for leaf in leaves if leaf is not None))

    # -- calls that need more than the rule ------------------------------------------------------

    def _read_data(
        self, call: Call, func: Any, args: Args, kwargs: Kwargs, frame: FrameType, watch: Watch
    ) -> Any:
        """`.data`, and its like: the result shares memory but no version counter."""
        result = self.record(call, func, args, kwargs, frame, watch)
        try:
            with watch():
                self._data_owners[storage_of(args[0])] = weakref.ref(args[0])
        except BaseException as error:
            self.missed(call.name, error)
        return result

    def _set_data(
        self, call: Call, func: Any, args: Args, kwargs: Kwargs, frame: FrameType, watch: Watch
    ) -> Any:
        inputs: tuple[Input, ...] = ()
        try:
            with watch():
                inputs = self._inputs(call, args[1:], {})
                self._identity.value(args[0])
        except BaseException as error:
            self.missed(call.name, error)
        result = func(*args, **kwargs)
        try:
            with watch():
                self._note_data(call, args[0], inputs, frame)
        except BaseException as error:
            self.missed(call.name, error)
        return result

    def _note_data(
        self, call: Call, target: Tensor, inputs: tuple[Input, ...], frame: FrameType
    ) -> None:
        where = self.where(frame)
        self.writes.note_move(target, Write(len(self._tape.nodes), call.name, where))
        if target.is_leaf and (target.requires_grad or isinstance(target, torch.nn.Parameter)):
            leaf = self._identity.known(target)
            target_node = () if leaf is None else (node_of(leaf),)
            if inputs:
                mode = grad_mode()
                self._tape.add(
                    Node("op", call.name, *where, mode, inputs, (), writes_to=target_node)
                )
            self._identity.moved(target)
        else:
            self.add_op(call.name, inputs, [target], where)

    def _after(
        self, call: Call, func: Any, args: Args, kwargs: Kwargs, frame: FrameType, watch: Watch
    ) -> Any:
        """Calls of which only what they leave behind is noted."""
        result = self._stand_ins.of(frame)(func, args, kwargs)
        try:
            with watch():
                _AFTER[call.name](self, args[0], result, frame)
        except BaseException as error:
            self.missed(call.name, error)
        return result

    def _note_grad_read(self, owner: Tensor, gradient: Any, frame: FrameType) -> None:
        """`.grad`: its tensor was made by the backward pass that filled it."""
        if not isinstance(gradient, Tensor):
            return
        leaf = self._identity.known(owner)
        if leaf is None:
            return
        made_by = self.backward_of.get(node_of(leaf), None if owner.is_leaf else self.latest_pass)
        if made_by is not None and not self._identity.unchanged(gradient):
            self._identity.register(gradient, value_of(self.pass_node(made_by)))
        self.gradient_of[self._identity.value(gradient)] = node_of(leaf)

    def _note_grad_set(self, owner: Tensor, result: Any, frame: FrameType) -> None:
        leaf = self._identity.known(owner)
        if leaf is not None:
            self.cleared(node_of(leaf), self.where(frame))

    def _notice_clearing(self, outputs: list[Tensor], where: sites.Sites) -> None:
        for tensor in outputs:
            known = self._identity.known(tensor)
            leaf = None if known is None else self.gradient_of.get(known)
            if leaf is not None:
                self.cleared(leaf, where)

    def _require_grad(
        self, call: Call, func: Any, args: Args, kwargs: Kwargs, frame: FrameType, watch: Watch
    ) -> Any:
        """`requires_grad_()` and `requires_grad = ...`: an op's result can become a leaf here."""
        before = value = None
        try:
            with watch():
                value, before = self._identity.value(args[0]), args[0].requires_grad
        except BaseException as error:
            self.missed(call.name, error)
        result = func(*args, **kwargs)
        try:
            with watch():
                if value is not None and args[0].requires_grad and not before:
                    self._note_leaf(args[0], value, frame)
        except BaseException as error:
            self.missed(call.name, error)
        return result

    def _note_leaf(self, tensor: Tensor, value: int, frame: FrameType) -> None:
        node = self._tape.nodes[node_of(value)]
        if self.function is not None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        if node is not None and node.kind == "op":
            self._identity.leaf_made_by_op(tensor, value, self.where(frame))
        else:
            self._identity.came_to_require(tensor, node_of(value))

    def _backward(
        self, call: Call, func: Any, args: Args, kwargs: Kwargs, frame: FrameType, watch: Watch
    ) -> Any:
        return self.run_backward(func, args, kwargs, frame)

    def _skip(
        self, call: Call, func: Any, args: Args, kwargs: Kwargs, frame: FrameType, watch: Watch
    ) -> Any:
        return func(*args, **kwargs)


def _is_lasting(func: Any) -> bool:
    """Whether a function lives on by itself: to hold it keeps nothing of the program's alive."""
    if type(func) is FunctionType:
        module = sys.modules.get(func.__module__)
        return getattr(module, func.__name__, None) is func or module is torch._tensor
    if type(func) is MethodType:
        return False
    return type(func).__module__.split(".")[0] in ("builtins", "torch")


def _caller_of(func: FunctionType, frame: FrameType) -> FrameType:
    """Return the frame that called one of torch's Python functions, which then called the mode."""
    at: FrameType | None = frame
    while at is not None and at.f_code is not func.__code__:
        at = at.f_back
    return frame if at is None or at.f_back is None else at.f_back


def _base(tensor: Tensor) -> Tensor | None:
    return tensor._base if tensor._is_view() else tensor


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a new tensor is a leaf: a view taken under no_grad calls itself one, and is none."""
    if not tensor.requires_grad or grad_fn_of(tensor) is not None:
        return False
    return torch.is_grad_enabled() or not tensor._is_view()


def _has_default_handler(kind: Any) -> bool:
    handler = kind.__torch_function__
    return getattr(handler, "__func__", handler) in _DEFAULT_HANDLERS


def _is_alone() -> bool:
    """Whether nobody else's mode is on, whose handler would miss the function that is seen into."""
    depth = torch._C._len_torch_function_stack()
    return not depth or all(
        _is_harmless(torch._C._get_function_stack_at(at)) for at in range(depth)
    )


def _is_harmless(mode: Any) -> bool:
    return isinstance(mode, Forward) or type(mode).__module__ == "torch.utils._device"


Special = Callable[[Forward, Call, Any, Args, Kwargs, FrameType, Watch], Any]
_SPECIAL: Final[dict[str, Special]] = {
    "data": Forward._read_data,
    "data =": Forward._set_data,
    "grad": Forward._after,
    "grad =": Forward._after,
    "requires_grad_": Forward._require_grad,
    "requires_grad =": Forward._require_grad,
    "backward": Forward._backward,
    "autograd.grad": Forward._backward,
    "_backward_hooks =": Forward._skip,
}
_AFTER: Final[dict[str, Callable[[Forward, Tensor, Any, FrameType], None]]] = {
    "grad": Forward._note_grad_read,
    "grad =": Forward._note_grad_set,
}
