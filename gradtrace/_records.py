"""The vocabulary: small frozen records in which a trace is read.

Nothing here knows torch or networkx. Where a field can be None, its comment says what None means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """What became of the gradient of one tensor, over the whole recording."""

    REACHED = "reached"
    ZERO = "zero"
    NONFINITE = "nonfinite"
    CUT = "cut"
    UNUSED = "unused"
    FROZEN = "frozen"
    NO_BACKWARD = "no_backward"
    UNKNOWN = "unknown"


class CutKind(StrEnum):
    """What stopped a gradient."""

    DETACH = "detach"
    DETACH_ = "detach_"
    DATA = "data"
    NO_GRAD = "no_grad"
    INFERENCE_MODE = "inference_mode"
    COPY = "copy"
    ESCAPE = "escape"
    NON_DIFFERENTIABLE = "non_differentiable"
    NO_GRADIENT = "no_gradient"
    NOT_REQUESTED = "not_requested"
    NOT_REQUIRED = "not_required"
    FIRST_ORDER = "first_order"


class HazardKind(StrEnum):
    """What a program does that it likely does not mean."""

    SILENT_WRITE = "silent_write"
    WRITE = "write"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a program.

    Attributes:
        file: As the code object has it; not made absolute.
        line: Counted from 1.
        function: Qualified name of the function, "<module>" at the top level.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor with `requires_grad=True` and no `grad_fn`, met or registered while recording.

    Attributes:
        name: Dotted path of a parameter, or the variable that holds it.
        node: Its node in `trace.graph`.
        shape: Elements a dimension.
        dtype: As torch prints it without "torch.", such as "float32".
        device: As torch prints it, such as "cpu" or "cuda:0".
        requires_grad: False for a frozen parameter.
        status: The verdict over the whole recording.
    """

    name: str
    node: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    status: Status


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded call that took or returned tensors.

    Attributes:
        node: Its node in `trace.graph`.
        op: Its name, such as "mul" or "Rasterize.apply".
        name: The variable that its result was assigned to on that line, or None.
        location: The innermost line outside torch, or None where there was none.
        source: The text of the expression, or None where the source can't be read.
        module: Dotted path of the module whose forward was running, "" outside any.
        grad_fn: Name of autograd's node for its result, or None where it has none.
        cut: The kind of cut that it is for at least one leaf, or None.
        reached: Backward passes in which a gradient arrived at it.
    """

    node: int
    op: str
    name: str | None
    location: Location | None
    source: str | None
    module: str
    grad_fn: str | None
    cut: CutKind | None
    reached: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """An op, on a data path from a leaf to a root, at which the gradient stops for one input.

    Attributes:
        kind: What did it.
        op: Name of the op.
        node: Its node in `trace.graph`.
        location: The line to blame: the innermost one outside torch; for `not_requested` the
            line that called backward. None where no line was seen.
        called_from: Where `location` is in a library: the innermost line of the user's own code.
            None where `location` is the user's own already.
        source: The text of the expression, or None where the source can't be read.
        module: Dotted path of the module whose forward was running, "" outside any.
        blocked: Names of the leaves that lose a way to a root here.
        passes: For what was seen in a backward pass (`no_gradient`, `not_requested`): which ones.
    """

    kind: CutKind
    op: str
    node: int
    location: Location | None
    called_from: Location | None
    source: str | None
    module: str
    blocked: tuple[str, ...]
    passes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient that arrived at one leaf in one backward pass.

    Attributes:
        leaf: Name of the leaf.
        node: The leaf's node in `trace.graph`.
        backward_pass: Index of the pass that brought it.
        shape: Elements a dimension.
        dtype: As torch prints it without "torch.".
        norm: Euclidean norm, in units of the root per unit of the leaf; NaN and infinity show.
            None where values were not looked at (`values="none"`, a meta tensor).
        order: Position among all arrivals of the recording, from 0.
        cleared: Where it was cleared afterwards (`zero_grad`), or None.
    """

    leaf: str
    node: int
    backward_pass: int
    shape: tuple[int, ...]
    dtype: str
    norm: float | None
    order: int
    cleared: Location | None = None


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """One run of the autograd engine.

    Attributes:
        index: Counted from 0 in the order in which the passes start.
        kind: "backward" (accumulates into `.grad`) or "grad" (returns gradients).
        roots: Names of the tensors that it starts from, or their ops where they have no name.
        location: The line that called it, or None where it was not seen.
        inputs: Names of the tensors that gradients were asked for; None where all leaves were.
        create_graph: Whether the gradients can be differentiated again.
        retain_graph: Whether the graph was kept for another pass.
        error: "RuntimeError: ..." where the pass raised, else None.
        inside: Index of the pass that it ran inside of (re-entrant checkpointing), or None.
        observed: False for a pass that was started outside torch's Python API: then only
            arrivals at leaves were seen, neither its roots nor its edges.
    """

    index: int
    kind: str
    roots: tuple[str, ...]
    location: Location | None
    inputs: tuple[str, ...] | None
    create_graph: bool
    retain_graph: bool
    error: str | None = None
    inside: int | None = None
    observed: bool = True


@dataclass(frozen=True, slots=True)
class Term:
    """One addend of a loss, in one backward pass.

    Attributes:
        name: The variable that holds it, or the text of its expression.
        node: Its node in `trace.graph`.
        location: The line that made it, or None where none was seen.
        source: The text of the expression, or None where the source can't be read.
        leaves: Names of the leaves that got a gradient from it.
    """

    name: str
    node: int
    location: Location | None
    source: str | None
    leaves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """Who needed a tensor that was overwritten.

    Attributes:
        op: The op whose backward needed it.
        node: Its node in `trace.graph`.
        location: The line that called the op, or None where no line was seen.
        source: The text of the expression, or None where the source can't be read.
        backward_pass: Index of the pass that found it overwritten.
    """

    op: str
    node: int
    location: Location | None
    source: str | None
    backward_pass: int


@dataclass(frozen=True, slots=True)
class Hazard:
    """A line that likely does not do what its author means. `str()` is what a person reads.

    Attributes:
        kind: `silent_write`: an in-place write, past torch's version counter (`.data` is the usual
            way), to memory that backward still needed: its gradients are wrong, and torch says
            nothing. `write`: a write to such memory that torch notices, and raises. `dropped`: a
            call whose result nothing takes, such as `x.detach()` on a line of its own.
        op: What wrote, or what was dropped.
        location: Its line, the innermost one outside torch. None where no line was seen.
        called_from: Where `location` is in a library: the innermost line of the user's own code.
        source: The text of the expression, or None where the source can't be read.
        module: Dotted path of the module whose forward was running, "" outside any.
        tensor: Name of the tensor that was overwritten, or of the op that made it; None for
            `dropped`, and where it is not known.
        needed_by: Whose backward needed what was overwritten; None for `dropped`.
    """

    kind: HazardKind
    op: str
    location: Location | None
    called_from: Location | None
    source: str | None
    module: str
    tensor: str | None
    needed_by: Need | None

    def __str__(self) -> str:
        text = self.source or self.op
        place = "" if self.location is None else f" at {self.location}"
        caller = "" if self.called_from is None else f" (called from {self.called_from})"
        if self.needed_by is None:
            return f"{text}{place}{caller}: nothing takes its result, so that it does nothing"
        need = self.needed_by
        needed_at = "" if need.location is None else f" at {need.location}"
        outcome = (
            "torch does not notice, and the gradients are wrong"
            if self.kind is HazardKind.SILENT_WRITE
            else "torch raises in backward"
        )
        return (
            f"{text}{place}{caller} overwrites {self.tensor or 'a tensor'}, which the backward of"
            f" {need.source or need.op}{needed_at} needs: {outcome}"
        )
