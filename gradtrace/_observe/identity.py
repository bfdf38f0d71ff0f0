"""Which tensor is which: from tensors that pass by to the values on the tape.

# NOTE [ Telling tensors apart ]
`id()` of a tensor is reused at once, so every entry holds a weak reference beside it. A tensor that
was changed in place has the same identity and another value: its version counter tells, and where
that is blind (`.data`, inference tensors) the log of writes to its storage does. A tensor that
nobody recorded is recognised by its `grad_fn`, which carries the value's number in its metadata, by
its storage while a known holder of that storage lives, or by walking back from its `grad_fn`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace._observe import sites
from gradtrace._tape import (
    INSIDE,
    OUTPUT_BITS,
    OUTPUT_MASK,
    Input,
    Node,
    Output,
    Tape,
    new_output,
    value_of,
)

_functorch = torch._C._functorch
_UNVERSIONED = -1  # inference tensors keep no version counter


class Entry(NamedTuple):
    """What is known of one tensor object."""

    ref: weakref.ref[Tensor]
    value: int
    version: int


new_entry = partial(tuple.__new__, Entry)


def version_of(tensor: Tensor) -> int:
    """Return the version counter, or a constant where the tensor has none."""
    try:
        return tensor._version
    except RuntimeError:
        return _UNVERSIONED


def storage_of(tensor: Tensor) -> int:
    """Return what tells the tensor's memory apart, or 0 where it has none (sparse, wrapped)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside functorch's wrappers (vmap, grad), or the tensor itself."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def grad_fn_of(tensor: Tensor) -> Any:
    """Return autograd's node, or None; also where torch refuses to say (a stale view)."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf_node(grad_fn: Any) -> bool:
    """Whether an autograd node accumulates into a leaf; asking for `.variable` is slower."""
    return type(grad_fn).__name__ == "AccumulateGrad"


def describe(tensor: Tensor) -> Output:
    """Return the plain facts of a tensor."""
    return facts_of(tensor)[0]


def facts_of(tensor: Tensor) -> tuple[Output, Any]:
    """Return the plain facts of a tensor, and autograd's node for it."""
    grad_fn = grad_fn_of(tensor) if tensor.requires_grad else None
    name = None if grad_fn is None else type(grad_fn).__name__
    facts = (shape_of(tensor), tensor.dtype, tensor.device, tensor.requires_grad, name)
    return new_output(facts), grad_fn


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape: () for a nested tensor, which has none, and -1 for a symbolic size."""
    try:
        shape = tensor.shape
    except RuntimeError:
        return ()
    if tensor._has_symbolic_sizes_strides:
        return tuple(size if isinstance(size, int) else -1 for size in shape)
    return shape


class Identity:
    """The table of known tensors of one recording. Holds weak references and numbers only."""

    def __init__(self, tape: Tape, name_leaf: Callable[[Tensor], str | None]) -> None:
        self._tape = tape
        self._name_leaf = name_leaf
        self.key = f"gradtrace.{tape.number}"
        self.table: dict[int, Entry] = {}
        self._storages: dict[int, Entry] = {}
        self._leaf_storages: dict[int, Entry] = {}
        self._exported: dict[int, Entry] = {}
        self._writes: dict[int, int] = {}
        self.silent_writes = False
        self.without_history: set[int] = set()  # values made while grad mode was off
        self.on_leaf: Callable[[Tensor, int], None] = lambda tensor, node: None

    # -- looking up ------------------------------------------------------------------------------

    def known(self, tensor: Tensor) -> int | None:
        """Return the value of a tensor met before, or None. Adds nothing."""
        entry = self.table.get(id(tensor))
        if entry is not None and entry.ref() is tensor:
            return entry.value
        return self._by_grad_fn(tensor)

    def met(self, tensor: Tensor) -> int | None:
        """Return the value of a tensor or of one on the same memory, or None. Adds nothing."""
        value = self.known(tensor)
        return self._holder(tensor) if value is None else value

    def value_before(self, tensor: Tensor) -> int:
        """Return the value that a tensor had before it was written to just now."""
        entry = self.table.get(id(tensor))
        return self.value(tensor) if entry is None or entry.ref() is not tensor else entry.value

    def value(self, tensor: Tensor) -> int:
        """Return the value of a tensor as it is now, meeting it first where it is new."""
        entry = self.table.get(id(tensor))
        if (
            entry is not None
            and entry.ref() is tensor
            and (entry.version == _UNVERSIONED or entry.version == tensor._version)
            and not self.silent_writes
            and (entry.value not in self.without_history or not tensor.requires_grad)
        ):
            return entry.value
        return self._meet(tensor, entry)

    def input(self, tensor: Tensor) -> Input:
        """Return a tensor as the input of an op."""
        value = self.value(tensor)
        plain = unwrapped(tensor)
        return Input(value, plain.requires_grad)

    def _meet(self, tensor: Tensor, entry: Entry | None) -> int:
        plain = unwrapped(tensor)
        if plain is not tensor:
            return self.remember(tensor, self.value(plain))
        if entry is not None and entry.ref() is tensor:
            return self._changed(tensor, entry)
        value = self._by_grad_fn(tensor)
        if value is not None:
            return self.remember(tensor, value)
        return self._new(tensor)

    def _by_grad_fn(self, tensor: Tensor) -> int | None:
        plain = unwrapped(tensor)
        grad_fn = grad_fn_of(plain) if plain.requires_grad else None
        return None if grad_fn is None else self.at_edge(grad_fn, plain.output_nr)

    def at_edge(self, grad_fn: Any, output_nr: int) -> int | None:
        """Return the value that autograd's (grad_fn, output_nr) stands for, or None."""
        mark = grad_fn.metadata.get(self.key)
        return mark.get(output_nr) if isinstance(mark, dict) else mark

    def _changed(self, tensor: Tensor, entry: Entry) -> int:
        """Give a tensor that somebody wrote to its new value."""
        node = entry.value >> OUTPUT_BITS
        if tensor.requires_grad and grad_fn_of(tensor) is None and not self._is_made(node):
            return self.remember(tensor, entry.value)
        write = self._writes.get(storage_of(tensor), -1)
        if write > node:
            number = len(self._tape.aliased_outputs) % (INSIDE - 2**10) + 2**10
            value = value_of(write, number)
            self._tape.aliased_outputs[value] = describe(tensor)
            self._tape.previous[value] = entry.value
            grad_fn = grad_fn_of(tensor)
            self.mark_unmarked(tensor, grad_fn, self._behind_view(grad_fn, entry, write, value))
            return self.remember(tensor, value)
        found = self._by_grad_fn(tensor)
        grad_fn = grad_fn_of(tensor) if found is None else None
        if grad_fn is not None and entry.value in self.without_history:
            # A Function that was not seen made it of what it had inside.
            return self._made_unseen(tensor, self._tape.nodes[node])
        if found is None:
            found = entry.value
            self.mark_unmarked(tensor, grad_fn, found)
        return self.remember(tensor, found)

    def _behind_view(self, grad_fn: Any, entry: Entry, write: int, value: int) -> int:
        """Return the value to which a view's new grad_fn leads: from a write, or from before it."""
        following = None if grad_fn is None else grad_fn.next_functions
        base, output_nr = following[0] if following else (None, 0)
        mark = None if base is None else self.at_edge(base, output_nr)
        node = -1 if mark is None else mark >> OUTPUT_BITS
        if node == write:
            return value
        return entry.value if node <= entry.value >> OUTPUT_BITS else value_of(node)

    def mark_unmarked(self, tensor: Tensor, grad_fn: Any, value: int) -> None:
        """Write a value's number on a grad_fn that autograd made anew for a view."""
        if grad_fn is not None and self.at_edge(grad_fn, tensor.output_nr) is None:
            self._mark_node(grad_fn, tensor.output_nr, self._past_writes(value))

    def _past_writes(self, value: int) -> int:
        """Return the value to which autograd leads past the writes that it did not see."""
        tape = self._tape
        while True:
            node = tape.nodes[value >> OUTPUT_BITS]
            targets = tape.targets.get(value >> OUTPUT_BITS, ())
            if node is None or node.grad_mode == "grad":
                return value
            if value in tape.previous:
                value = tape.previous[value]
            elif value & OUTPUT_MASK < len(targets):
                value = targets[value & OUTPUT_MASK]
            else:
                return value

    def _is_made(self, node: int) -> bool:
        """Whether an op made a tensor, though a view taken under no_grad calls itself a leaf."""
        made_by = self._tape.nodes[node]
        return made_by is not None and made_by.kind == "op"

    # -- meeting for the first time --------------------------------------------------------------

    def _new(self, tensor: Tensor) -> int:
        if tensor.requires_grad and grad_fn_of(tensor) is not None:
            return self._made_unseen(tensor)
        holder = self._holder(tensor)
        if holder is not None and self._has_story(holder):
            return self._made_by_aliasing(tensor, holder)
        return self.add_source(tensor)

    def _holder(self, tensor: Tensor) -> int | None:
        """Return the value of a living tensor on the same memory, or None."""
        storage = storage_of(tensor)
        entry = self._storages.get(storage)
        owner = None if entry is None else entry.ref()
        if entry is not None and owner is not None and storage_of(owner) == storage:
            return entry.value
        if self._exported and tensor.device.type == "cpu":  # NumPy's memory has other storages
            entry = self._exported.get(tensor.data_ptr())
            owner = None if entry is None else entry.ref()
            if entry is not None and owner is not None and owner.data_ptr() == tensor.data_ptr():
                return entry.value
        return None

    def _has_story(self, value: int) -> bool:
        """Whether a value came out of an op or is a leaf; memory of mere data explains nothing."""
        node = self._tape.nodes[value >> OUTPUT_BITS]
        return node is None or node.kind != "input" or value >> OUTPUT_BITS in self._tape.required

    def add_source(self, tensor: Tensor, *, name: str | None = None, flavour: str = "") -> int:
        """Put a leaf, or data that needs no gradient, on the tape."""
        kind = "leaf" if tensor.requires_grad else "input"
        if name is None:
            name = self._name_of(tensor)
            known = self.known(tensor)
            if known is not None:  # with its name its owner was found, who made it known
                return known
        if not flavour and isinstance(tensor, torch.nn.Parameter):
            flavour = "parameter"
        node = self._tape.add(
            Node(kind, None, None, None, "", "grad", (), (describe(tensor),), flavour)
        )
        if name is not None:
            self._tape.names[node] = name
        return self._settle_source(tensor, node)

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a leaf; that of mere data is read from the source text later."""
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
            return self._name_leaf(tensor)
        return None

    def _settle_source(self, tensor: Tensor, node: int) -> int:
        value = self.register(tensor, value_of(node))
        storage = storage_of(tensor)
        if storage:
            self._leaf_storages[storage] = self.table[id(tensor)]
        if tensor.requires_grad:
            self.on_leaf(tensor, node)
        return value

    def leaf_made_by_op(self, tensor: Tensor, made_by: int, site: sites.Sites) -> int:
        """Put a leaf on the tape that an op's result became."""
        flavour = "parameter" if isinstance(tensor, torch.nn.Parameter) else ""
        node = self._tape.add(
            Node(
                "leaf", None, *site, "grad", (Input(made_by, False),), (describe(tensor),), flavour
            )
        )
        name = self._name_leaf(tensor)
        if name is not None:
            self._tape.names[node] = name
        return self._settle_source(tensor, node)

    def came_to_require(self, tensor: Tensor, node: int) -> None:
        """Note that data that was met before came to require a gradient."""
        self._tape.required.add(node)
        self._tape.edits += 1
        name = self._name_leaf(tensor)
        if name is not None:
            self._tape.names.setdefault(node, name)
        self.on_leaf(tensor, node)

    def _made_by_aliasing(self, tensor: Tensor, holder: int) -> int:
        entry = Input(holder, False)
        output = describe(tensor)
        node = self._tape.add(
            Node("op", "shared storage", None, None, "", "grad", (entry,), (output,), "unseen")
        )
        value = self.register(tensor, value_of(node))
        if tensor.requires_grad:
            return self.leaf_made_by_op(tensor, value, sites.NOWHERE)
        return value

    def _made_unseen(self, tensor: Tensor, inside: Node | None = None) -> int:
        """Stand in for ops that were not observed, by the leaves and values that feed them.

        Args:
            tensor: What they made.
            inside: What was seen of them, for its place; None for nothing.
        """
        grad_fn: Any = tensor.grad_fn
        name, inputs = grad_fn.name(), tuple(Input(v, True) for v in self.sources([grad_fn]))
        where = (None, None, "") if inside is None else inside[2:5]
        node = self._tape.add(
            Node("op", name, *where, "grad", inputs, (describe(tensor),), "unseen")
        )
        return self.register(tensor, value_of(node))

    def sources(self, grad_fns: Iterable[Any]) -> Iterator[int]:
        """Yield the values at which the unseen graph behind some grad_fns begins."""
        seen = set(grad_fns)
        found: dict[int, None] = {}
        waiting = list(seen)
        while waiting:
            for following, output_nr in waiting.pop().next_functions:
                value = None if following is None else self.at_node(following, output_nr)
                if value is not None:
                    found[value] = None
                elif following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        yield from found

    def at_node(self, grad_fn: Any, output_nr: int, *, known_only: bool = False) -> int | None:
        """Return the value behind an edge of autograd's graph: a known op's result or a leaf."""
        value = self.at_edge(grad_fn, output_nr)
        if value is not None:
            return value
        if not is_leaf_node(grad_fn):
            return None
        return self.known(grad_fn.variable) if known_only else self.value(grad_fn.variable)

    # -- registering -----------------------------------------------------------------------------

    def remember(self, tensor: Tensor, value: int) -> int:
        """Note under which value a tensor is known from now on."""
        self.table[id(tensor)] = Entry(weakref.ref(tensor), value, version_of(tensor))
        return value

    def register(self, tensor: Tensor, value: int) -> int:
        """Make a tensor known by identity, by storage and by its grad_fn."""
        plain = unwrapped(tensor)
        self.settle(tensor, plain, value, grad_fn_of(plain) if plain.requires_grad else None)
        return value

    def settle(self, tensor: Tensor, plain: Tensor, value: int, grad_fn: Any) -> None:
        """Do what `register` does, where the tensor was unwrapped and asked for its grad_fn."""
        entry = new_entry((weakref.ref(tensor), value, version_of(tensor)))
        self.table[id(tensor)] = entry
        storage = storage_of(plain)
        if storage:
            self._storages[storage] = entry
        if grad_fn is not None:
            if self._is_new(grad_fn, plain.output_nr):
                self._mark_node(grad_fn, plain.output_nr, value)
        elif not torch.is_grad_enabled() and (not plain.requires_grad or plain._is_view()):
            self.without_history.add(value)

    def _is_new(self, grad_fn: Any, output_nr: int) -> bool:
        """Whether a result's grad_fn is its maker's: a write under no_grad leaves an older one."""
        return torch.is_grad_enabled() or self.at_edge(grad_fn, output_nr) is None

    def mark(self, tensor: Tensor, value: int) -> None:
        """Write a value's number on the autograd node that made a tensor."""
        grad_fn = grad_fn_of(tensor)
        if grad_fn is not None:
            self._mark_node(grad_fn, tensor.output_nr, value)

    def _mark_node(self, grad_fn: Any, output_nr: int, value: int) -> None:
        metadata = grad_fn.metadata
        before = metadata.get(self.key)
        if before is None and not output_nr and not value & OUTPUT_MASK:
            metadata[self.key] = value
        elif isinstance(before, dict):
            before[output_nr] = value
        else:
            marks = {} if before is None else {0: before}
            metadata[self.key] = {**marks, output_nr: value}

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether a tensor is known and nobody wrote to it since."""
        entry = self.table.get(id(tensor))
        return entry is not None and entry.ref() is tensor and entry.version == version_of(tensor)

    def untouched(self, tensor: Tensor) -> bool:
        """Whether a call that may write to a tensor did not, as `dropout_` in eval mode."""
        grad_fn = grad_fn_of(tensor)
        if grad_fn is None or version_of(tensor) == _UNVERSIONED or not self.unchanged(tensor):
            return False
        return self.at_edge(grad_fn, tensor.output_nr) == self.table[id(tensor)].value

    # -- writes ----------------------------------------------------------------------------------

    def written_leaf(self, tensor: Tensor) -> int | None:
        """Return the node of the leaf or parameter whose memory this tensor is, or None."""
        entry = self._leaf_storages.get(storage_of(tensor))
        leaf = None if entry is None else entry.ref()
        if entry is None or leaf is None or storage_of(leaf) != storage_of(tensor):
            return None
        if not leaf.is_leaf:  # data that an op wrote to since
            return None
        node = self._tape.nodes[entry.value >> OUTPUT_BITS]
        is_leaf = node is not None and node.kind == "leaf"  # perhaps one that is frozen now
        if is_leaf or leaf.requires_grad or isinstance(leaf, torch.nn.Parameter):
            return entry.value >> OUTPUT_BITS
        return None

    def wrote(self, tensor: Tensor, node: int, *, silent: bool) -> None:
        """Note that an op wrote to a tensor's memory; `silent` where no version counter tells."""
        storage = storage_of(tensor)
        if storage:
            before = self._writes.get(storage)
            if before is not None:
                self._tape.earlier[node] = before
            self._writes[storage] = node
            self.silent_writes |= silent
        base = tensor._base if tensor._is_view() and torch.is_grad_enabled() else None
        if base is not None and base.requires_grad:
            self.mark(base, node << OUTPUT_BITS)  # autograd makes of it a write to the base

    def exported(self, tensor: Tensor) -> None:
        """Note that memory was handed out of torch's sight, as to NumPy."""
        entry = self.table.get(id(tensor))
        if entry is not None and tensor.device.type == "cpu":
            self._exported[tensor.data_ptr()] = entry

    def moved(self, tensor: Tensor) -> None:
        """Note that a leaf has other memory now (`.data = ...`)."""
        entry = self.table.get(id(tensor))
        if entry is not None and entry.ref() is tensor:
            self.remember(tensor, entry.value)
            self._leaf_storages[storage_of(tensor)] = self.table[id(tensor)]

    def living(self) -> Iterable[tuple[Tensor, int]]:
        """Yield the known tensors that are still alive, with their values."""
        for entry in list(self.table.values()):
            tensor = entry.ref()
            if tensor is not None:
                yield tensor, entry.value
