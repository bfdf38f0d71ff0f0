"""The log of what was observed: numbers, strings, code objects and small tuples, never a tensor.

Observers append; `_graph.py` reads. Nothing is judged here. A tensor is known by its *value*: the
number of the node that made it and which of the node's outputs it is, in one int.

# NOTE [ Paths and their roots ]
Parameters are named by their path from the outermost module that is called. Whether the outermost
module's own name has to stand before it (a GAN has two) is known only at the end, so that a path is
kept together with the number of its root, a NUL before each; `plain_name` words it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, Final, NamedTuple

OUTPUT_BITS: Final = 20
OUTPUT_MASK: Final = (1 << OUTPUT_BITS) - 1
INSIDE: Final = OUTPUT_MASK  # the output number of tensors that live inside a custom Function

_traces = itertools.count()


def value_of(node: int, output: int = 0) -> int:
    """Return the number by which output `output` of node `node` is known."""
    return node << OUTPUT_BITS | output


def node_of(value: int) -> int:
    """Return the number of the node that made a value."""
    return value >> OUTPUT_BITS


def output_of(value: int) -> int:
    """Return which output of its node a value is; 0 for what lives inside a Function."""
    output = value & OUTPUT_MASK
    return 0 if output == INSIDE else output


_SEPARATOR: Final = "\0"


def rooted_prefix(root: int) -> str:
    """Return what stands before a path from root number `root`."""
    return f"{_SEPARATOR}{root}{_SEPARATOR}"


def plain_name(text: str, roots: list[str], *, bare: bool) -> str:
    """Word a path that is kept with its root.

    Args:
        text: As kept; other names pass through.
        roots: Names of the roots, in the order of their numbers.
        bare: Whether the root's name is left out.
    """
    if not text.startswith(_SEPARATOR):
        return text
    _, number, path = text.split(_SEPARATOR, 2)
    if bare:
        return path
    return f"{roots[int(number)]}.{path}" if path else roots[int(number)]


class Site(NamedTuple):
    """A place in a program as the interpreter knows it; text is made when somebody reads it."""

    code: CodeType
    lasti: int


class Output(NamedTuple):
    """One tensor that a node made. `dtype` and `device` are torch's objects, worded later."""

    shape: tuple[int, ...]
    dtype: object
    device: object
    requires_grad: bool
    grad_fn: str | None


class Input(NamedTuple):
    """One tensor that an op took."""

    value: int
    requires_grad: bool
    captured: bool = False  # a custom Function met it by closure or in a container, not as argument
    target: bool = False  # the op wrote to it


class Node(NamedTuple):
    """One recorded call, leaf, input or escape, in the order in which they were met."""

    kind: str  # "op", "leaf", "input" or "escape"
    op: str | None
    site: Site | None
    called_from: Site | None
    module: str
    grad_mode: str  # "grad", "no_grad" or "inference_mode"
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    flavour: str = ""  # what kind of op or leaf, where it matters; see `_cuts.stop_kind`
    alias_of: int | None = None  # the node whose storage the result shares
    writes_to: tuple[int, ...] = ()  # leaves that it started anew, outside autograd's sight


# On the hot path records are made from ready tuples: a third of the time of a call by keyword.
new_input = partial(tuple.__new__, Input)
new_node = partial(tuple.__new__, Node)
new_output = partial(tuple.__new__, Output)


class LinkState(NamedTuple):
    """What one backward pass did on one of autograd's edges, as seen at the consumer's end."""

    op: int
    value: int
    state: str  # "reached", "undefined", "not_requested" or "missed"
    norm: float | None


new_link = partial(tuple.__new__, LinkState)


class Overwrite(NamedTuple):
    """A write to memory that a backward pass still needed."""

    op: str  # what wrote
    site: Site | None
    called_from: Site | None
    module: str
    value: int | None  # what was written to; None where it is not known
    needed_by: int  # the op whose backward needed it
    backward_pass: int
    silent: bool  # whether torch doesn't notice


@dataclass(slots=True)
class Arrival:
    """One gradient at one leaf."""

    leaf: int
    backward_pass: int
    shape: tuple[int, ...]
    dtype: object
    norm: float | None
    cleared: Site | None = None


@dataclass(slots=True)
class Pass:
    """One run of the engine while it happens and after it."""

    index: int
    kind: str
    roots: tuple[int, ...]  # values; empty where they live inside something else
    site: Site | None
    called_from: Site | None
    inputs: tuple[int, ...] | None  # values; None: all leaves
    create_graph: bool
    retain_graph: bool
    inside: int | None = None
    inside_op: int | None = None
    transformed: tuple[int, ...] = ()  # values that torch.func differentiated
    internal: bool = False
    observed: bool = True
    error: str | None = None
    links: list[LinkState] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)  # values that `grad` returned gradients for


@dataclass(slots=True)
class Tape:
    """Everything that one recording saw."""

    torch_version: str
    when: str
    values: str
    number: int = field(default_factory=lambda: next(_traces))
    nodes: list[Node | None] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    overwrites: dict[Overwrite, None] = field(default_factory=dict)  # as an ordered set
    names: dict[int, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)  # names of the outermost modules
    models_given: bool = False  # whether other names stand beside those from the roots
    required: set[int] = field(default_factory=set)  # nodes that came to require grad later on
    frozen: set[int] = field(default_factory=set)  # leaves that did not require it in the end
    filled_unseen: set[int] = field(default_factory=set)  # leaves whose .grad came unobserved
    aliased_outputs: dict[int, Output] = field(default_factory=dict)
    # Of writes, by node; see NOTE [ What a tensor holds after writes ] in `_graph.py`.
    targets: dict[int, tuple[int, ...]] = field(default_factory=dict)  # values written over
    earlier: dict[int, int] = field(default_factory=dict)  # the write before on this memory
    previous: dict[int, int] = field(default_factory=dict)  # of aliased outputs: the value before
    troubles: list[str] = field(default_factory=list)
    edits: int = 0  # counts changes that no list's length shows

    def add(self, node: Node | None) -> int:
        """Append a node, or a place for one that is filled later, and return its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def stamp(self) -> tuple[Any, ...]:
        """Return what changes whenever the tape does, so that readers know when to read again."""
        return (
            len(self.nodes),
            len(self.passes),
            len(self.arrivals),
            len(self.overwrites),
            len(self.names),
            len(self.required),
            len(self.frozen),
            len(self.filled_unseen),
            self.edits,
        )
