"""What is replaced in torch while anything records, since no mode sees it.

One set of replacements serves all recordings of the process: the first puts them on, the last takes
them off. Each asks the recordings of its own thread and costs a list look-up where there is none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from gradtrace._observe.forward import Forward

Call = Callable[..., Any]


class Observer(Protocol):
    """What a recording does around the calls that are replaced."""

    def around_engine(self, call: Call, *args: Any, **kwargs: Any) -> Any: ...
    def around_function(self, call: Call, function: Any, *args: Any, **kwargs: Any) -> Any: ...
    def around_module(self, call: Call, module: Any, *args: Any, **kwargs: Any) -> Any: ...
    def around_script(self, call: Call, script: Any, *args: Any, **kwargs: Any) -> Any: ...
    def around_variable(self, call: Call, *args: Any, **kwargs: Any) -> Any: ...
    def around_copy(self, call: Call, *args: Any, **kwargs: Any) -> Any: ...
    def around_compiled(self, call: Call, *args: Any, **kwargs: Any) -> Any: ...
    def constructed(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None: ...


class _Thread(threading.local):
    def __init__(self) -> None:
        self.observers: list[Observer] = []


_thread = _Thread()


def observers_here() -> list[Observer]:
    """Return who is asked about what happens in this thread, the outermost first."""
    return _thread.observers


def put_on(observer: Observer, observers: list[Observer]) -> None:
    """Have an observer asked, together with those in a list from `observers_here`."""
    _replacements.put_on(observer)
    observers.append(observer)


def take_off(observer: Observer, observers: list[Observer]) -> None:
    """Have an observer asked no longer, if it was."""
    if observer in observers:
        observers.remove(observer)
    _replacements.take_off(observer)


class _Replacements:
    """All replacements together: on while at least one recording of the process runs.

    Both methods can be interrupted anywhere: see NOTE [ Interrupted anywhere ] in `recorder.py`.
    """

    def __init__(self) -> None:
        # A recording that was dropped comes off at a garbage collection, which may come in here.
        self._lock = threading.RLock()
        self._recordings: set[Observer] = set()
        self._undo: list[Callable[[], None]] = []  # each can be repeated; the latest last
        self._whole = False

    def put_on(self, observer: Observer) -> None:
        """Keep the replacements on for one recording."""
        with self._lock:
            self._recordings.add(observer)
            if not self._whole:
                self._restore()
                self._replace_all()
                self._whole = True

    def take_off(self, observer: Observer) -> None:
        """Take the replacements off if no other recording needs them."""
        with self._lock:
            self._recordings.discard(observer)
            if not self._recordings:
                self._restore()

    def in_child(self, observers: list[Observer]) -> None:
        """Go on in a forked process, in which there are no threads but one."""
        self._lock = threading.RLock()
        self._recordings.intersection_update(observers)
        if not self._recordings:
            self._restore()

    def _replace_all(self) -> None:
        stance = _Stance()
        self._undo.append(stance.release)
        stance.force_soon()
        self._replace(torch, "compile", _compile_around(torch.compile, stance))
        variable = torch.autograd.Variable
        self._replace(variable, "_execution_engine", _Engine(variable._execution_engine))
        self._replace_apply()
        around_module = _method_around("around_module", nn.Module.__call__)
        self._replace(nn.Module, "__call__", around_module)
        for script in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            around_script = _method_around("around_script", script.__call__)
            self._replace(script, "__call__", around_script)
        around_copy = _method_around("around_copy", nn.Parameter.__deepcopy__)
        self._replace(nn.Parameter, "__deepcopy__", around_copy)
        around_variable = _method_around("around_variable", type.__call__)
        self._replace(type(variable), "__call__", around_variable)
        self._replace(Tensor, "__init__", _constructed)
        for name, listed in _OVERRIDE_QUESTIONS.items():
            asks = getattr(torch.overrides, name)
            self._replace(torch.overrides, name, _besides_us(asks, listed))
        self._replace(torch.overrides, "_pop_mode_temporarily", _ModeOff)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        own = name in vars(owner)
        self._undo.append(functools.partial(_put_back, owner, name, own, vars(owner).get(name)))
        setattr(owner, name, replacement)

    def _replace_apply(self) -> None:
        """Replace `Function.apply`; see NOTE [ Functions bound before the recording ]."""
        method = torch.autograd.Function.__dict__["apply"]
        function = getattr(method, "__func__", None)
        code = _apply_of_python()
        if type(function) is not FunctionType or function.__code__.co_freevars != code.co_freevars:
            self._replace(torch.autograd.Function, "apply", _classmethod_around(method))
            return
        before = function.__code__
        original = FunctionType(before, function.__globals__, closure=function.__closure__)
        original.__defaults__ = function.__defaults__
        original.__kwdefaults__ = function.__kwdefaults__
        _apply[:] = [original]
        self._undo.append(functools.partial(setattr, function, "__code__", before))
        function.__code__ = code

    def _restore(self) -> None:
        """Put back exactly what stood in each place."""
        self._whole = False
        while self._undo:
            undo = self._undo[-1]
            undo()
            if self._undo and self._undo[-1] is undo:
                self._undo.pop()


def _put_back(owner: Any, name: str, own: bool, before: Any) -> None:
    """Put back what stood in a place: itself, or nothing."""
    if own:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)


_replacements = _Replacements()


def _around(method: str, call: Call) -> Call:
    """Wrap a call in what each observer of this thread does around it, the latest outermost."""
    for observer in _thread.observers:
        call = functools.partial(getattr(observer, method), call)
    return call


def _method_around(method: str, original: Call) -> Call:
    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _thread.observers:
            return original(self, *args, **kwargs)
        return _around(method, original)(self, *args, **kwargs)

    return replacement


# NOTE [ Functions bound before the recording ]
# `cube = Cube.apply` at the top of a module is bound before any recording starts, and holds the
# Python function behind the class method. Not that function but its code is therefore replaced. In
# torch 2.14 `apply` is a C method that has none; there its result is met as one made unseen.


def _apply_of_python() -> CodeType:
    """Return code that can stand in for that of torch's `apply`, in its globals."""
    __class__: Any = None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        __class__  # noqa: B018  # torch's own code has this free variable, for `super()`
        from gradtrace._observe import patches  # noqa: PLW0406  # these globals are torch's

        return patches.recoded_apply(cls, *args, **kwargs)

    return apply.__code__


_apply: list[Call] = []  # what torch's `apply` does; stays for calls that are on their way


def recoded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what `Function.apply` does, observed."""
    if not _thread.observers:
        return _apply[0](cls, *args, **kwargs)
    return _around("around_function", _apply[0])(cls, *args, **kwargs)


def _classmethod_around(original: Any) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Bound by hand: it is a classmethod in torch 2.6 to 2.13, and a C method in 2.14.
        return original.__get__(None, cls)(*args, **kwargs)

    @functools.wraps(original.__get__(None, torch.autograd.Function))
    def replacement(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _thread.observers:
            return apply(cls, *args, **kwargs)
        return _around("around_function", apply)(cls, *args, **kwargs)

    return classmethod(replacement)


def _constructed(self: Tensor, *args: Any, **kwargs: Any) -> None:
    """Stand in for `object.__init__`, which tensor classes inherit, and note what was made.

    This is where `torch.Tensor([...])` and `nn.Parameter(x)` pass by.
    """
    if type(self).__init__ is not _constructed:
        object.__init__(self, *args, **kwargs)  # a subclass's super().__init__(...): its errors
        return
    for observer in _thread.observers:
        observer.constructed(self, *args, **kwargs)


# Whether the arguments that are asked about come as one container.
_OVERRIDE_QUESTIONS: Final = {
    "has_torch_function": True,
    "has_torch_function_unary": False,
    "has_torch_function_variadic": False,
}


def _besides_us(original: Call, listed: bool) -> Call:
    """Answer `torch.overrides.has_torch_function` as if our own modes were not on.

    Attention takes another way, with other rounding, where anybody overrides torch's functions.
    """

    @functools.wraps(original)
    def replacement(*args: Any) -> Any:
        if not _thread.observers or not _only_ours():
            return original(*args)
        return any(map(_overrides, args[0] if listed else args)) and original(*args)

    return replacement


def _only_ours() -> bool:
    depth = torch._C._len_torch_function_stack()
    stack = map(torch._C._get_function_stack_at, range(depth))
    return all(isinstance(mode, Forward) for mode in stack)


def _overrides(thing: object) -> bool:
    """Whether an argument has a say in torch's functions, as torch itself sees it."""
    handler = getattr(type(thing), "__torch_function__", None)
    plain = (None, torch._C._disabled_torch_function_impl)
    return type(thing) is not Tensor and handler not in plain


class _ModeOff:
    """Torch's `_pop_mode_temporarily`, through which its Python functions call a mode.

    Torch's own is a generator. An interrupt at its end leaves the mode off until the generator is
    freed, which then puts it on again, where the recording may have ended long ago.
    """

    def __enter__(self) -> Any:
        depth = torch._C._len_torch_function_stack()
        self._mode = torch._C._get_function_stack_at(depth - 1)
        try:
            torch._C._pop_torch_function_stack()
        except BaseException:
            if torch._C._len_torch_function_stack() < depth:
                torch._C._push_on_torch_function_stack(self._mode)
            raise
        return self._mode

    def __exit__(self, *_: object) -> None:
        torch._C._push_on_torch_function_stack(self._mode)


class _Engine:
    """Stands before torch's engine: the one door through which Python starts a backward pass."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return _around("around_engine", self._engine.run_backward)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Stance:
    """Has compiled functions run eagerly, so that every op is seen and no graph is broken.

    Dynamo traced through a mode like ours gives wrong values with no error (torch 2.13, 2.14). So
    the stance is force_eager as long as anything records; what the program chooses meanwhile is
    kept for it, and put on at the end. Where dynamo is not loaded yet, loading it would cost a
    second; then this waits until somebody does.
    """

    def __init__(self) -> None:
        self._chosen: Any = None
        self._is_forced = False
        self._modules: tuple[Any, Any] | None = None  # dynamo's two, once the stance may be forced
        self._set: Call = lambda stance: stance
        self._imports = _Imports("torch._dynamo", self._force)

    def force_soon(self) -> None:
        """Have compiled functions run eagerly, now or when dynamo is loaded."""
        if "torch._dynamo" in sys.modules:
            self._force()
        else:
            sys.meta_path.insert(0, self._imports)

    def _force(self) -> None:
        decorators: Any = importlib.import_module("torch._dynamo.decorators")
        eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
        self._set, self._chosen = eval_frame._set_stance, eval_frame._stance
        self._modules = decorators, eval_frame
        self._set(eval_frame.DynamoStance("force_eager"))
        decorators._set_stance = self._choose
        self._is_forced = True

    def release(self) -> None:
        """Put on what the program chose. Can be repeated where it was interrupted."""
        self._imports.close()
        if self._modules is not None:
            decorators, eval_frame = self._modules
            decorators._set_stance = self._set
            eval_frame._stance = self._chosen
            self._is_forced = False
            self._modules = None

    def _choose(self, stance: Any) -> Any:
        before, self._chosen = self._chosen, stance
        return before

    @contextlib.contextmanager
    def as_chosen(self) -> Iterator[None]:
        """Compile as the program has it, for a call inside which nothing is observed."""
        if not self._is_forced:
            yield
            return
        forced = self._set(self._chosen)
        self._is_forced = False
        try:
            yield
        finally:
            self._is_forced = True
            self._set(forced)


def _compile_around(original: Call, stance: _Stance) -> Call:
    """Have torch's own higher-order ops (`torch.cond`) compile what they are given.

    They fail where they can't: such a call is one op, in which nothing is observed.
    """

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        compiled = original(*args, **kwargs)
        asks = sys._getframe(1)
        if not _thread.observers or not asks.f_globals["__name__"].startswith(_HIGHER_ORDER):
            return compiled

        def closed(*args: Any, **kwargs: Any) -> Any:
            with stance.as_chosen():
                return _around("around_compiled", compiled)(*args, **kwargs)

        return closed

    return replacement


_HIGHER_ORDER: Final = ("torch._higher_order_ops", "torch.nn.attention.flex_attention")


class _Imports(importlib.abc.MetaPathFinder):
    """Does something once a module was imported. Finds nothing by itself."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then: Callable[[], None] | None = then
        self._asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module as all others find it, and have its loader tell when it is done."""
        if name != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            loader = vars(spec.loader)
            loader["exec_module"] = functools.partial(self._execute, loader, spec.loader)
        return spec

    def _execute(self, replaced: dict[str, Any], loader: Any, module: ModuleType) -> None:
        del replaced["exec_module"]
        loader.exec_module(module)
        if self._then is not None:
            self._then()
        self.close()

    def close(self) -> None:
        """Watch no longer."""
        self._then = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _go_on_in_child() -> None:
    """A forked worker inherits the mode but records nothing."""
    for observer in _thread.observers:
        observer.stop_in_child()  # type: ignore[attr-defined]  # recorders have it
    _replacements.in_child(_thread.observers)
    _thread.observers.clear()


os.register_at_fork(after_in_child=_go_on_in_child)
