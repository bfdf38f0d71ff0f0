"""A small language of programs, and a machine that knows what is right about each of them.

A program is a list of steps. `Machine` writes each step down as a line of Python, runs the line in
plain torch, and keeps beside it, by autograd's rules, which data flows where (`Flow`) and which
nodes autograd links (`Link`). What arrives at the leaves is told by torch's own tensor hooks.
Nothing of gradtrace is used here.
"""

# Torch gives no types to `backward`, `apply` and `split`.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Key = tuple[int, str]  # an op of the program: its line, and its name there
Cut = tuple[Key, str]


class Step(NamedTuple):
    """One step; operands are counted back from the latest variable, and round."""

    op: str
    first: int = 0
    second: int = 0
    mode: str = "grad"


# -- Functions that programs call ------------------------------------------------------------------


class _Half(torch.autograd.Function):
    """A product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class _Marked(torch.autograd.Function):
    """Two results, the second of which is marked non-differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return x * 2, rounded

    @staticmethod
    def backward(_: Any, gradient: Tensor, __: Tensor) -> Tensor:
        return gradient * 2


class _Dirty(torch.autograd.Function):
    """Doubles its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _Pair(torch.autograd.Function):
    """Two results of two arguments."""

    @staticmethod
    def forward(_: Any, x: Tensor, y: Tensor) -> Any:
        return x + y, x * 2

    @staticmethod
    def backward(_: Any, total: Tensor, double: Tensor) -> Any:
        return total + double * 2, total


# -- what is kept beside a run ---------------------------------------------------------------------


@dataclass(eq=False)
class Link:
    """One of autograd's nodes: where it leads, and what it makes of gradients.

    `gives` says for each further link whether a Function returns a gradient for it; a Function is
    also the one that makes zeros of gradients that are undefined.
    """

    age: int
    key: Key | None
    following: list[Link | None]
    gives: tuple[bool, ...] | None = None


@dataclass(eq=False)
class State:
    """What one variable held between two writes."""

    requires_grad: bool
    link: Link | None = None
    key: Key | None = None
    leaf: str | None = None


@dataclass(eq=False)
class Flow:
    """Data that flows from one state to another, through an op where `key` is given.

    `kind` is None where autograd connects them, and "" where they are apart but nothing cuts.
    """

    source: State
    target: State
    key: Key | None
    kind: str | None
    link: Link | None = None  # the node of autograd that connects them, and in which place
    slot: int = 0
    faint: bool = False  # no data, but a way that autograd goes
    twice: bool = False  # another flow says the same, and where both are cuts one is enough


@dataclass(eq=False)
class Family:
    """A base and its views, as autograd sees them; `apart` is what parts them from `parent`."""

    base: str
    parent: Family | None = None
    apart: str = ""


@dataclass(eq=False)
class Variable:
    """One variable of the program."""

    name: str
    state: State
    memory: int
    family: Family


@dataclass
class Pass:
    """One backward pass: what it was asked, what came of it."""

    line: int
    kind: str
    roots: list[State]
    asked: list[State] | None
    create_graph: bool = False
    error: bool = False
    arrived: set[Link] = field(default_factory=set)  # nodes into which a gradient went
    reached: set[tuple[Link, int]] = field(default_factory=set)
    undefined: set[tuple[Link, int]] = field(default_factory=set)
    not_requested: set[tuple[Link, int]] = field(default_factory=set)
    walked: set[Link] = field(default_factory=set)  # nodes behind the roots, wherever it went


class Arrival(NamedTuple):
    """One gradient at a leaf, in a pass."""

    at: int
    norm: float
    status: str


_MODES = {
    "grad": "{}",
    "no_grad": "with torch.no_grad(): {}",
    "inference_mode": "with torch.inference_mode(): {}",
}


def namespace() -> dict[str, Any]:
    """Return the variables with which each program starts."""
    torch.manual_seed(0)
    names: dict[str, Any] = {
        name: torch.rand(2, 2, dtype=torch.float64, requires_grad=True) for name in LEAVES
    }
    names["x0"] = torch.rand(2, 2, dtype=torch.float64)
    functions = {kind.__name__: kind for kind in (_Half, _Marked, _Dirty, _Pair)}
    return {**names, **functions, "torch": torch, "nn": nn, "checkpoint": checkpoint}


LEAVES = ("w0", "w1", "w2")
# Torch 2.6 lets a Function write into a view of a leaf; later ones raise.
_LETS_VIEWS_PASS = torch.__version__ < "2.7"


def execute(line: int, text: str, names: dict[str, Any]) -> str | None:
    """Run one line of a program, and return the error where it raises one."""
    try:
        exec(compile("\n" * (line - 1) + text, "<program>", "exec"), names)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# -- the language ----------------------------------------------------------------------------------

# Text of a line, and its ops: each takes operands, or what the ops before it on the line made.
COMPUTE: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "add": ("{v} = {x} + {y}", (("add", "xy", ""),)),
    "mul": ("{v} = {x} * {y}", (("mul", "xy", ""),)),
    "matmul": ("{v} = {x} @ {y}", (("matmul", "xy", ""),)),
    "sin": ("{v} = {x}.sin()", (("sin", "x", ""),)),
    "log": ("{v} = {x}.log()", (("log", "x", ""),)),
    "scale": ("{v} = {x} * 1.5", (("mul", "x", ""),)),
    "times zero": ("{v} = {x} * 0.0", (("mul", "x", ""),)),
    "clone": ("{v} = {x}.clone()", (("clone", "x", ""),)),
    "gather": ("{v} = {x}[[1, 0]]", (("getitem", "x", ""),)),
    "stack": ("{v} = torch.stack([{x}, {y}]).sum(0)", (("stack", "xy", ""), ("sum", "1", ""))),
    "mask": (
        "{v} = {x}.masked_fill({y} > 0.5, 0.25)",
        (("gt", "y", "non_differentiable"), ("masked_fill", "x1", "")),
    ),
    "where": (
        "{v} = torch.where({y} > 0.5, {x}, {y})",
        (("gt", "y", "non_differentiable"), ("where", "1xy", "")),
    ),
    "compare": (
        "{v} = ({x} > 0.5).double()",
        (("gt", "x", "non_differentiable"), ("double", "1", "")),
    ),
    "copy": ("{v} = torch.tensor({x})", (("tensor", "x", "copy"),)),
}
VIEWS = {
    "transpose": ("{v} = {x}.t()", "t"),
    "view": ("{v} = {x}.view(-1)", "view"),
    "row": ("{v} = {x}[0]", "getitem"),
    "slice": ("{v} = {x}[:1]", "getitem"),
    "expand": ("{v} = {x}.expand(2, 2)", "expand"),
}
SPLITS = {
    "unbind": ("{v}, {u} = {x}.unbind()", "unbind"),
    "split": ("{v}, {u} = {x}.split(1)", "split"),
    "chunk": ("{v}, {u} = {x}.chunk(2)", "chunk"),
}
SHARES = {
    "detach": ("{v} = {x}.detach()", "detach"),
    "data": ("{v} = {x}.data", "data"),
}
# Text, the op's name, which operands' values are in the result, and whether one of them is a mask.
WRITES = {
    "add_": ("{x}.add_({y})", "add_", "xy"),
    "mul_": ("{x}.mul_({y})", "mul_", "xy"),
    "scale_": ("{x}.mul_(1.5)", "mul_", "x"),
    "sigmoid_": ("{x}.sigmoid_()", "sigmoid_", "x"),
    "copy_": ("{x}.copy_({y})", "copy_", "y"),
    "zero_": ("{x}.zero_()", "zero_", ""),
    "row =": ("{x}[0] = {y}", "setitem", "xy"),
    "number =": ("{x}[0] = 0.25", "setitem", "x"),
}
FUNCTIONS = {
    "half": ("{v} = _Half.apply({x}, {y})", "_Half.apply", "xy", (True, False)),
    "marked": ("{v}, {u} = _Marked.apply({x})", "_Marked.apply", "x", (True,)),
    "pair": ("{v}, {u} = _Pair.apply({x}, {y})", "_Pair.apply", "xy", (True, True)),
}
DIRTY = {"dirty": "_Dirty.apply({x})"}
LEAF_CHANGES = {
    "thaw": "{x}.requires_grad_()",
    "freeze": "{w}.requires_grad_(False)",
    "parameter": "{v} = nn.Parameter({x} * 1.0)",
    "detach_": "{x}.detach_()",
}
CLEARINGS = {"grad = None": "{w}.grad = None", "grad.zero_": "{w}.grad.zero_()"}
# Torch 2.13 crashes where a view of a changed base is given a hook before its grad_fn is asked for.
HOOKS = {"hook": "{x}.grad_fn; {x}.register_hook(lambda gradient: gradient * 0.0)"}
ESCAPES = {"escape": "{v} = {y} * {x}.sum().item()"}
GRADS = {"grad *": "{v} = {w}.grad * 1.0"}
PASSES = {
    "backward": "{x}.sum().backward(retain_graph=True)",
    "backward once": "{x}.sum().backward()",
    "backward for": "{x}.sum().backward(retain_graph=True, inputs=[{y}])",
    "backward both": "torch.autograd.backward([{x}.sum(), {y}.sum()], retain_graph=True)",
    "grad": "{v}, = torch.autograd.grad({x}.sum(), [{y}], retain_graph=True)",
    "grad again": "{v}, = torch.autograd.grad({x}.sum(), [{y}], create_graph=True)",
    "grad both": (
        "{v}, {u} = torch.autograd.grad("
        "{x}.sum(), [{y}, {z}], retain_graph=True, allow_unused=True)"
    ),
}


class Machine:
    """Runs a program line by line in plain torch, and keeps what is right beside."""

    def __init__(self) -> None:
        self.names = namespace()
        self.lines: list[str] = []
        self.errors: list[str | None] = []
        self.variables: dict[str, Variable] = {}
        self.order: list[str] = []  # the variables that steps count back in
        self.flows: dict[State, list[Flow]] = defaultdict(list)
        self.passes: list[Pass] = []
        self.leaves: dict[str, State] = {}
        self.arrivals: dict[str, list[Arrival]] = defaultdict(list)
        self.escapes: set[State] = set()
        self.sinks: list[tuple[State, Key, str, str]] = []  # what was written into which leaf
        self.cleared: dict[str, list[int | None]] = defaultdict(list)
        self.wrote = False
        self._age = 0
        self._memories = 0
        self._made = 0
        self._hooks: dict[str, Any] = {}
        for name in (*LEAVES, "x0"):
            self._begin(name)

    @property
    def text(self) -> str:
        """The program, for people."""
        return "\n".join(self.lines)

    # -- bookkeeping -----------------------------------------------------------------------------

    @property
    def _line(self) -> int:
        return len(self.lines)

    def _begin(self, name: str) -> None:
        tensor = self.names[name]
        state = State(tensor.requires_grad)
        self._add(name, state)
        if tensor.requires_grad:
            self._become_leaf(name)

    def _become_leaf(self, name: str) -> None:
        state = self.variables[name].state
        state.requires_grad = True
        if name not in self.leaves:
            state.leaf = name
            state.link = self._link(None, [])
            self.leaves[name] = state
        self._watch(name)

    def _watch(self, name: str) -> None:
        """Have torch tell what arrives at a leaf, behind every other hook."""
        if name in self._hooks:
            self._hooks[name].remove()

        def arrived(gradient: Tensor | None) -> None:
            if gradient is not None:
                status = "reached" if bool((gradient != 0).any()) else "zero"
                if not bool(gradient.isfinite().all()):
                    status = "nonfinite"
                norm = float(torch.linalg.vector_norm(gradient.detach()))
                self.arrivals[name].append(Arrival(len(self.passes) - 1, norm, status))

        self._hooks[name] = self.names[name].register_hook(arrived)

    def _add(
        self, name: str, state: State, memory: int | None = None, family: Family | None = None
    ) -> Variable:
        if memory is None:
            self._memories += 1
            memory = self._memories
        variable = Variable(name, state, memory, family or Family(name))
        self.variables[name] = variable
        self.order.append(name)
        return variable

    def _link(
        self, key: Key | None, following: list[Link | None], gives: tuple[bool, ...] | None = None
    ) -> Link:
        self._age += 1
        return Link(self._age, key, following, gives)

    def _follow(
        self,
        source: State,
        target: State,
        key: Key | None,
        kind: str | None,
        link: Link | None,
        slot: int,
        *,
        faint: bool = False,
        twice: bool = False,
    ) -> None:
        if kind and not source.requires_grad:
            kind = "not_required"
        self.flows[source].append(Flow(source, target, key, kind, link, slot, faint, twice))

    def _op(
        self,
        name: str,
        inputs: list[State],
        stop: str,
        mode: str,
        requires: bool,
        gives: tuple[bool, ...] | None = None,
    ) -> State:
        """Take down an op with one result; `requires` is what torch says of the result."""
        key = (self._line, name)
        state = State(requires, key=key)
        if requires and mode == "grad":
            following = [each.link if each.requires_grad else None for each in inputs]
            state.link = self._link(key, following, gives)
        for slot, each in enumerate(inputs):
            self._connect(each, state, key, stop or _of_mode(mode), slot)
        return state

    def _connect(self, source: State, target: State, key: Key, stop: str, slot: int) -> None:
        connected = source.requires_grad and target.requires_grad and not stop
        kind = None if connected else stop or "non_differentiable"
        self._follow(source, target, key, kind, target.link, slot)

    # -- steps -----------------------------------------------------------------------------------

    def run(self, steps: Iterable[Step]) -> None:
        """Run a program."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in steps:
                self.step(step)

    def step(self, step: Step) -> None:
        """Write one step down, run it, and take down what it did."""
        self._drop_stale(self.order)
        x, y, z = (
            self.order[-1 - at % len(self.order)]
            for at in (step.first, step.second, step.first + 1)
        )
        v, u = f"v{self._made}", f"v{self._made + 1}"
        leaves = list(self.leaves)
        words = {"x": x, "y": y, "z": z, "v": v, "u": u, "w": leaves[step.first % len(leaves)]}
        for table, follow in _TABLES:
            if step.op in table:
                entry = table[step.op]
                template = entry if isinstance(entry, str) else entry[0]
                follow(self, step, entry, template, words)
                self._made += 2
                return
        raise ValueError(step.op)

    def _execute(self, template: str, words: dict[str, str], mode: str = "grad") -> bool:
        text = _MODES[mode].format(template.format(**words))
        self.lines.append(text)
        self.errors.append(execute(len(self.lines), text, self.names))
        return self.errors[-1] is None

    def _states(self, *names: str) -> list[State]:
        return [self.variables[name].state for name in names]

    def _compute(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if not self._execute(template, words, step.mode):
            return
        made: list[State] = []
        requires = self.names[words["v"]].requires_grad
        ops = entry[1]
        for at, (name, takes, stop) in enumerate(ops):
            inputs = [
                made[int(each) - 1] if each.isdigit() else self.variables[words[each]].state
                for each in takes
            ]
            last = at == len(ops) - 1
            flows = any(each.requires_grad for each in inputs) and step.mode == "grad"
            made.append(
                self._op(name, inputs, stop, step.mode, requires if last else flows and not stop)
            )
        self._add(words["v"], made[-1])

    def _view(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if not self._execute(template, words, step.mode):
            return
        x = self.variables[words["x"]]
        requires = self.names[words["v"]].requires_grad
        state = self._op(entry[1], [x.state], "", step.mode, requires)
        self._add(words["v"], state, x.memory, x.family)

    def _split(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if not self._execute(template, words, step.mode):
            return
        x = self.variables[words["x"]]
        tensors = [self.names[words[name]] for name in "vu"]
        states = self._several(entry[1], [x.state], [t.requires_grad for t in tensors], step.mode)
        for name, state in zip("vu", states, strict=True):
            self._add(words[name], state, x.memory, x.family)

    def _several(
        self,
        name: str,
        inputs: list[State],
        requires: list[bool],
        mode: str,
        gives: tuple[bool, ...] | None = None,
        stop: str = "",
    ) -> list[State]:
        """Take down an op with several results, which one node of autograd made."""
        key = (self._line, name)
        link = None
        # A view of what requires grad says so of itself, and under no_grad is linked to nothing.
        if any(requires) and mode == "grad":
            following = [each.link if each.requires_grad else None for each in inputs]
            link = self._link(key, following, gives)
        results = [State(each, link if each else None, key) for each in requires]
        for result in results:
            for slot, each in enumerate(inputs):
                connected = each.requires_grad and result.requires_grad and mode == "grad"
                kind = stop or _of_mode(mode) or "non_differentiable"
                self._follow(each, result, key, None if connected else kind, link, slot)
        return results

    def _share(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if not self._execute(template, words, step.mode):
            return
        x = self.variables[words["x"]]
        state = self._op(entry[1], [x.state], entry[1], step.mode, False)
        self._add(words["v"], state, x.memory, Family(words["v"], x.family, entry[1]))

    # -- Functions, leaves, gradients ------------------------------------------------------------

    def _function(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if not self._execute(template, words, step.mode):
            return
        names = [words[name] for name in "vu" if "{" + name + "}" in template]
        requires = [self.names[name].requires_grad for name in names]
        inputs = self._states(*(words[name] for name in entry[2]))
        for name, state in zip(
            names,
            self._several(
                entry[1],
                inputs,
                requires,
                step.mode,
                entry[3],
                _of_mode(step.mode) or "no_gradient",
            ),
            strict=True,
        ):
            self._add(name, state)

    def _dirty(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        x = self.variables[words["x"]]
        base = self.names[x.name]._base
        if _LETS_VIEWS_PASS and base is not None and base.is_leaf:
            return
        if not self._execute(template, words):
            return
        self.wrote = True
        key = (self._line, "_Dirty.apply")
        gives = (True,) if x.family.base == x.name else None  # else autograd's CopySlices gives
        self._written(x, key, [], "grad", keeps=True, gives=gives)

    def _change_leaf(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        name = words["w"] if step.op == "freeze" else words["x"]
        x = self.variables[name]
        if step.op != "parameter" and len(self._on(x.memory)) > 1:
            return  # others on this memory would be views of a leaf, or of none any more
        if step.op == "detach_" and name in self.leaves:
            return
        was = self.names[name].requires_grad
        if not self._execute(template, words):
            return
        if step.op == "parameter":
            product = self._op("mul", [x.state], "", "grad", was)
            copied = self._op("Parameter", [product], "copy", "grad", False)
            self._add(words["v"], State(True))
            self._follow(copied, self.variables[words["v"]].state, None, "", None, 0)
            self._become_leaf(words["v"])
        elif step.op == "detach_":
            old = x.state
            x.state = self._op("detach_", [old], "detach_", "grad", False)
        elif step.op == "freeze":
            x.state.requires_grad = False
        elif not was:
            self._thaw(x)

    def _thaw(self, x: Variable) -> None:
        """Make a leaf of data, or one of an op's result, or thaw one."""
        if x.name not in self.leaves and x.state.key is not None:
            old, x.state = x.state, State(True)
            self._follow(old, x.state, None, "", None, 0)
        self._become_leaf(x.name)

    def _clear(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if self._execute(template, words):
            name = words["w"]
            cleared = self.cleared[name]
            cleared += [self._line] * (len(self.filled(name)) - len(cleared))

    def filled(self, name: str) -> list[Arrival]:
        """Return the gradients that arrived in a leaf's `.grad`."""
        return [a for a in self.arrivals[name] if self.passes[a.at].kind == "backward"]

    def _hook(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if self._execute(template, words) and words["x"] in self._hooks:
            self._watch(words["x"])

    def _escape(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if not self._execute(template, words):
            return
        x, y = self._states(words["x"], words["y"])
        total = self._op("sum", [x], "", "grad", x.requires_grad)
        self.escapes.add(total)
        requires = self.names[words["v"]].requires_grad
        self._add(words["v"], self._op("mul", [y], "", "grad", requires))

    def _read_grad(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        if not self._execute(template, words):
            return
        name = words["w"]
        filled = self.filled(name)[len(self.cleared[name]) :]
        gradient = State(False)
        for done in (self.passes[each.at] for each in filled):
            latest = done is self.passes[filled[-1].at]
            for root in done.roots:
                key = (done.line, "backward")
                self._follow(root, gradient, key, "first_order", None, 0, twice=not latest)
        self._add(words["v"], self._op("mul", [gradient], "", "grad", False))

    # -- writes ----------------------------------------------------------------------------------

    def _write(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        x = self.variables[words["x"]]
        if words["x"] == words["y"]:
            return  # whether that loses anything is a matter of taste
        if step.mode == "grad" and x.name in self.leaves and not x.state.requires_grad:
            return  # a frozen leaf would become a result
        if not self._execute(template, words, step.mode):
            return
        self.wrote = True
        takes = entry[2]
        taken = self._states(words["y"]) if "y" in takes else []
        self._written(x, (self._line, entry[1]), taken, step.mode, keeps="x" in takes)

    def _written(
        self,
        x: Variable,
        key: Key,
        taken: list[State],
        mode: str,
        *,
        keeps: bool,
        gives: tuple[bool, ...] | None = None,
    ) -> None:
        self._drop_stale(each.name for each in self._on(x.memory))
        leaf = self._leaf_of(x, mode)
        if mode != "grad":
            self._renew_views(x)
        if leaf is not None:
            kind = "|".join(filter(None, (_of_mode(mode), x.family.apart)))
            self.sinks += [(each, key, kind, leaf) for each in taken]
            return
        base = self.variables[x.family.base].state
        whole = x.family.base == x.name or not base.requires_grad
        old, before = x.state, {each.name: each.state for each in self._on(x.memory)}
        made, links = self._rebase(x, key, taken, gives) if mode == "grad" else (None, {})
        for other in self._on(x.memory):
            if other.name in self.leaves and mode == "grad":
                kind = self._apart(x.family, other.family)
                self.sinks += [(each, key, kind, other.name) for each in taken]
                continue
            requires = bool(self.names[other.name].requires_grad)
            link = links.get(other.name, before[other.name].link) if requires else None
            other.state = State(requires, link, key)
            mine = other.family is x.family
            kinds = [_of_mode(mode), self._apart(x.family, other.family)]
            if mode != "grad":
                kinds.append(other.family.apart)
            stop = "|".join(filter(None, kinds))
            for slot, each in enumerate(taken, 1):
                self._into(each, other.state, key, stop, made, slot)
            was = before[other.name]
            if other is not x or mode != "grad":
                kept = was.requires_grad and requires
                rebased = made is not None and mine
                if kept or keeps or not (other is x or (x.family.base == x.name and mine)):
                    link, slot = (made, 0) if rebased else (None, -1)
                    faint = rebased and x.family.base == x.name and not keeps
                    gap = None if kept else ""
                    self._follow(was, other.state, None, gap, link, slot, faint=faint)
                if not mine:
                    self._follow(old, other.state, key, stop, None, 0, twice=True)
            else:
                self._into(old, other.state, key, stop, made, 0, faint=whole and not keeps)

    def _drop_stale(self, names: Iterable[str]) -> None:
        """Forget the views that torch lets nobody use after a write to their base."""
        for name in list(names):
            try:
                _ = self.names[name].grad_fn
            except RuntimeError:  # asking raises
                del self.variables[name]
                self.order.remove(name)

    def _leaf_of(self, x: Variable, mode: str) -> str | None:
        """Return the leaf that a write outside autograd's sight starts anew, or None."""
        if x.name in self.variables and self.names[x.name].grad_fn is not None and mode == "grad":
            return None
        return next((each.name for each in self._on(x.memory) if each.name in self.leaves), None)

    def _renew_views(self, x: Variable) -> None:
        """Give views the nodes that autograd makes anew for them after any write."""
        for each in self._on(x.memory):
            base = self.variables.get(each.family.base)
            seen = "data" not in self._apart(x.family, each.family)
            if base is not None and base is not each and each.state.link is not None and seen:
                each.state.link = self._link(each.state.link.key, [base.state.link])

    def _on(self, memory: int) -> list[Variable]:
        return [each for each in self.variables.values() if each.memory == memory]

    def _rebase(
        self, x: Variable, key: Key, taken: list[State], gives: tuple[bool, ...] | None
    ) -> tuple[Link | None, dict[str, Link]]:
        """Return autograd's node for a write, and those through which views lead to it."""
        base = self.variables[x.family.base]
        if not self.names[base.name].requires_grad:
            return None, {}
        following = [each.link if each.requires_grad else None for each in (base.state, *taken)]
        made = self._link(key, following, gives)
        links = {base.name: made}
        for other in self._on(x.memory):
            if other.family is x.family and other is not base:
                links[other.name] = self._link(None, [made])
        return made, links

    def _into(
        self,
        source: State,
        target: State,
        key: Key,
        stop: str,
        link: Link | None,
        slot: int,
        *,
        faint: bool = False,
    ) -> None:
        connected = not stop and source.requires_grad and target.requires_grad
        if faint and not connected:
            return
        kind = None if connected else stop or "non_differentiable"
        self._follow(source, target, key, kind, link, slot, faint=faint)

    def _apart(self, one: Family, other: Family) -> str:
        """Return what parts two families on one memory: the kinds that stand between them."""
        ways = [list(_upwards(family)) for family in (one, other)]
        common = next(each for each in ways[0] if each in ways[1])
        between = [each.apart for way in ways for each in way[: way.index(common)]]
        return "|".join(dict.fromkeys(between))

    # -- passes ----------------------------------------------------------------------------------

    def _pass(self, step: Step, entry: Any, template: str, words: dict[str, str]) -> None:
        roots = ["x", "y"] if step.op == "backward both" else ["x"]
        asked = {"backward for": "y", "grad": "y", "grad again": "y", "grad both": "yz"}.get(
            step.op
        )
        kind = "grad" if step.op.startswith("grad") else "backward"
        if step.op == "grad both" and words["y"] == words["z"]:
            return  # both results could be one tensor
        line = len(self.lines) + 1
        done = Pass(line, kind, [], None, create_graph=step.op == "grad again")
        self.wrote |= done.create_graph  # the edges of a double backward are autograd's own
        self.passes.append(done)
        given = [self.variables[words[each]].state for each in roots]
        fine = self._execute(template, words)
        for each in given:
            flows = each.requires_grad
            done.roots.append(self._op("sum", [each], "", "grad", flows))
        if asked is not None:
            done.asked = self._states(*(words[each] for each in asked))
        done.error = not fine
        self._sweep(done)
        if kind == "grad" and fine:
            self._gradients(done, step, words, asked or "")

    def _gradients(self, done: Pass, step: Step, words: dict[str, str], asked: str) -> None:
        for name, _ in zip("vu", asked, strict=False):
            if self.names[words[name]] is None:
                continue
            state = State(False, None, (done.line, "autograd.grad"))
            if done.create_graph:
                self._depends(self.names[words[name]], state)
                self._add(words[name], state)
                continue
            for root in done.roots:
                self._follow(root, state, state.key, "first_order", None, 0)
            self._add(words[name], state)

    def _depends(self, gradient: Tensor, state: State) -> None:
        """Take down on which leaves a gradient depends that can be differentiated again."""
        if not gradient.requires_grad:
            return
        state.requires_grad = True
        names = {id(self.names[name]): name for name in self.leaves}
        found: dict[str, None] = {}
        waiting, seen = [torch.autograd.graph.get_gradient_edge(gradient).node], set()
        while waiting:
            node: Any = waiting.pop()
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                found[name] = None
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        leaves = [self.leaves[name] for name in found]
        state.link = self._link(state.key, [leaf.link for leaf in leaves])
        for slot, leaf in enumerate(leaves):
            self._follow(leaf, state, None, None, state.link, slot)

    def _sweep(self, done: Pass) -> None:
        """Go through autograd's nodes as the engine does, and see where gradients are defined."""
        goals = None
        if done.asked is not None:
            goals = {each.link for each in done.asked if each.link is not None}
        waiting: dict[Link, bool] = {}
        for root in done.roots:
            if root.link is not None:
                waiting[root.link] = True
        done.arrived.update(waiting)
        done.walked = _behind(waiting)
        needed = None if goals is None else self._needed(waiting, goals)
        while waiting:
            link = max(waiting, key=lambda each: each.age)
            defined = waiting.pop(link)
            for slot, following in enumerate(link.following):
                if following is None:
                    continue
                if needed is not None and following not in needed:
                    done.not_requested.add((link, slot))
                    if (
                        link.key is None and following.key is not None
                    ):  # it only leads a view to the write behind it
                        done.arrived.add(following)
                        done.not_requested |= {
                            (following, at) for at, _ in enumerate(following.following)
                        }
                    continue
                gives = defined if link.gives is None else link.gives[slot]
                (done.reached if gives else done.undefined).add((link, slot))
                if gives:
                    done.arrived.add(following)
                waiting[following] = waiting.get(following, False) or gives

    def _needed(self, starts: Iterable[Link], goals: set[Link]) -> set[Link]:
        """Return the nodes that lead to what was asked for, and that itself."""
        found: set[Link] = set()
        for at in sorted(_behind(starts), key=lambda each: each.age):
            if at in goals or any(each in found for each in at.following if each is not None):
                found.add(at)
        return found


_TABLES: tuple[tuple[dict[str, Any], Callable[..., None]], ...] = (
    (COMPUTE, Machine._compute),
    (VIEWS, Machine._view),
    (SPLITS, Machine._split),
    (SHARES, Machine._share),
    (WRITES, Machine._write),
    (FUNCTIONS, Machine._function),
    (DIRTY, Machine._dirty),
    (LEAF_CHANGES, Machine._change_leaf),
    (CLEARINGS, Machine._clear),
    (HOOKS, Machine._hook),
    (ESCAPES, Machine._escape),
    (GRADS, Machine._read_grad),
    (PASSES, Machine._pass),
)


def _behind(starts: Iterable[Link]) -> set[Link]:
    """Return the nodes to which autograd leads."""
    found, waiting = set(starts), list(starts)
    while waiting:
        for each in waiting.pop().following:
            if each is not None and each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _upwards(family: Family | None) -> Iterator[Family]:
    while family is not None:
        yield family
        family = family.parent


def _of_mode(mode: str) -> str:
    return "" if mode == "grad" else mode


# -- what is right ---------------------------------------------------------------------------------


class Answers:
    """What is right about a program that a machine ran."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.passes = machine.passes
        seen: set[Link] = set().union(*(done.walked for done in self.passes))
        self.into: dict[State, list[Flow]] = defaultdict(list)
        self.out: dict[State, list[Flow]] = defaultdict(list)
        self.twice: dict[State, list[Flow]] = defaultdict(list)
        self.twice_into: dict[State, list[Flow]] = defaultdict(list)
        for flows in machine.flows.values():
            for flow in flows:
                if flow.twice:
                    self.twice[flow.source].append(flow)
                    self.twice_into[flow.target].append(flow)
                elif not flow.faint or flow.link in seen:
                    self.into[flow.target].append(flow)
                    self.out[flow.source].append(flow)
        roots = {root for done in self.passes for root in done.roots}
        self.leading = self._upstream(roots)
        self.maybe = self._upstream(roots, twice=True)
        self.ending = self._upstream({s for s, *_ in machine.sinks} | machine.escapes)

    def _upstream(self, goals: set[State], *, twice: bool = False) -> set[State]:
        found, waiting = set(goals), list(goals)
        while waiting:
            at = waiting.pop()
            for flow in (*self.into[at], *(self.twice_into[at] if twice else ())):
                if flow.source not in found:
                    found.add(flow.source)
                    waiting.append(flow.source)
        return found

    def connected(self, start: State) -> set[State]:
        """Return the states that autograd connects with one."""
        found, waiting = {start}, [start]
        while waiting:
            for flow in self.out[waiting.pop()]:
                if flow.kind is None and flow.target not in found:
                    found.add(flow.target)
                    waiting.append(flow.target)
        return found

    def stops(self, start: State) -> set[Cut]:
        """Return the cuts on a tensor's ways that lie there whatever the passes do."""
        return {
            (flow.key, flow.kind)
            for state in self.connected(start)
            for flow in self.out[state]
            if flow.key is not None and flow.kind and flow.target in self.leading
        }

    def of_passes(self, start: State) -> tuple[set[Cut], set[Cut]]:
        """Return the cuts that passes made: those that no pass went past, and all."""
        never: set[Cut] = set()
        every: set[Cut] = set()
        reached = set().union(*(done.reached for done in self.passes)) if self.passes else set()
        renewed = {
            (link.key, "not_requested")
            for done in self.passes
            for link, _ in done.not_requested
            if link.key is not None
        }
        for state in self.connected(start):
            for flow in (*self.out[state], *self.twice[state]):
                if flow.key and flow.kind and flow.target in self.maybe:
                    every.add((flow.key, flow.kind))
            for flow in self.out[state]:
                if flow.kind is not None or flow.link is None:
                    continue
                every |= renewed & {(flow.key or (0, ""), "not_requested")}
                key = flow.key or flow.link.key
                if key is None:
                    continue
                if flow.target not in self.leading:
                    continue
                at = (flow.link, flow.slot)
                for done in self.passes:
                    if flow.link not in done.arrived:
                        continue
                    if at in done.not_requested:
                        every.add((key, "not_requested"))
                        sure = flow.key is not None and not done.create_graph
                        if at not in reached and not done.error and sure:
                            never.add((key, "not_requested"))
                    if at in done.undefined:
                        every.add((key, "no_gradient"))
                        if not done.error and flow.key is not None:
                            never.add((flow.key, "no_gradient"))
        return never, every

    def said_twice(self, start: State) -> set[Cut]:
        """Return the cuts that may be named beside others that say the same."""
        flows = (flow for state in self.connected(start) for flow in self.twice[state])
        return {(flow.key, flow.kind) for flow in flows if flow.key and flow.kind}

    def last_resort(self, start: State) -> set[Cut]:
        """Return where a leaf with no way to a root left torch, or went into another leaf."""
        found: set[Cut] = set()
        mine = start.leaf
        for state in self.connected(start):
            if state in self.machine.escapes:
                line = state.key[0] if state.key is not None else 0
                found.add(((line, "item"), "escape"))
            found |= {
                (k, kind) for s, k, kind, leaf in self.machine.sinks if s is state and leaf != mine
            }
            for flow in self.out[state]:
                if flow.key is not None and flow.kind and self._ends_elsewhere(flow.target, mine):
                    found.add((flow.key, flow.kind))
        return found

    def _ends_elsewhere(self, state: State, mine: str | None) -> bool:
        goals = {s for s, _, _, leaf in self.machine.sinks if leaf != mine} | self.machine.escapes
        return state in self._upstream(goals)

    def interrupted(self, start: State) -> bool:
        """Whether a pass that raised had this tensor before it."""
        states = self.connected(start)
        return any(done.error and any(r in states for r in done.roots) for done in self.passes)

    def promised(self, start: State) -> bool:
        """Whether a pass that raised would have brought this tensor a gradient."""
        return any(done.error and start.link in done.arrived for done in self.passes)

    def status(self, name: str) -> str:
        """Return a leaf's status; where two are right, with a bar between."""
        # What `grad` does not return since it raises has not arrived, though a hook has seen it.
        arrived = [
            each.status
            for each in self.machine.arrivals[name]
            if not (self.passes[each.at].error and self.passes[each.at].kind == "grad")
        ]
        state = self.machine.leaves[name]
        if arrived:
            for status in ("nonfinite", "reached", "zero"):
                if status in arrived:
                    return status
        if not self.machine.names[name].requires_grad:
            return "frozen"
        if not self.passes:
            return "no_backward"
        if self.promised(state):
            return "unknown"
        if self.interrupted(state):
            return "cut|unknown"
        if state in self.leading:
            return "cut"
        return "cut" if self.last_resort(state) else "unused"

    def edges(self) -> set[tuple[Key | str, Key | str, int]]:
        """Return the edges along which gradients went, for programs without writes."""
        found: set[tuple[Key | str, Key | str, int]] = set()
        for flows in self.out.values():
            for flow in flows:
                producer = flow.source.leaf or flow.source.key
                if flow.kind is not None or producer is None or flow.key is None:
                    continue
                for index, done in enumerate(self.passes):
                    if (flow.link, flow.slot) in done.reached:
                        found.add((producer, flow.key, index))
        return found


# -- programs --------------------------------------------------------------------------------------

OPS = tuple(op for table, _ in _TABLES for op in table)


def random_steps(seed: int) -> list[Step]:
    """Return a random program."""
    draw = random.Random(seed)
    steps = [
        Step(
            draw.choice(OPS),
            min(draw.randrange(9), draw.randrange(9)),
            min(draw.randrange(9), draw.randrange(9)),
            draw.choice(("grad",) * 8 + ("no_grad",) * 2 + ("inference_mode",)),
        )
        for _ in range(draw.randrange(3, 14))
    ]
    return [*steps, Step("backward")]


def shrunk(steps: list[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """Return a smaller program that fails as well."""
    smaller = True
    while smaller:
        smaller = False
        for at in range(len(steps) - 1, -1, -1):
            tries = [steps[:at] + steps[at + 1 :]]
            step = steps[at]
            tries += [
                [*steps[:at], step._replace(**change), *steps[at + 1 :]]
                for change in ({"first": 0}, {"second": 0}, {"mode": "grad"})
                if step != step._replace(**change)
            ]
            for each in tries:
                if fails(each):
                    steps, smaller = each, True
                    break
            if smaller:
                break
    return steps
