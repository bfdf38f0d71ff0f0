"""The backward pass: what the autograd engine did, seen from hooks that live as long as it runs.

# NOTE [ Telling passes apart ]
All passes that Python starts go through `Variable._execution_engine.run_backward`, which is
replaced for the time of a recording (`patches.py`). Before the engine runs, the graph is walked
from the roots, with a loop, and every node gets a hook; after it, also when it raised, all hooks
come off. So nothing is left on graphs that outlive the recording, and each hook belongs to one
pass. A pass inside a pass (re-entrant checkpointing) is observed in the same way. A pass that C++
starts by itself (TorchScript) is noticed by the hooks on leaves only, and marked as not observed.

# NOTE [ Whose node is it ]
The nodes that made an op's results carry its number in their metadata. A node without one, met on
the way from such a node, is an inner node of that op. So each edge of autograd's graph either lies
inside an op or leads from an op to a value; the latter are the links that are put on the tape.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace._observe import sites
from gradtrace._observe.anchors import BEGIN, EVERY
from gradtrace._observe.forward import Forward
from gradtrace._observe.identity import Identity, grad_fn_of, is_leaf_node, shape_of
from gradtrace._observe.norms import norm_of
from gradtrace._tape import (
    Arrival,
    Input,
    Node,
    Output,
    Overwrite,
    Pass,
    Tape,
    new_link,
    node_of,
    value_of,
)


class _Edge(NamedTuple):
    """One edge of autograd's graph: slot `slot` of node `of` leads to node `to`."""

    of: int
    slot: int
    to: int
    value: int | None  # None inside an op


_new_edge = partial(tuple.__new__, _Edge)


class _Graph:
    """Autograd's graph as one pass finds it."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.nodes: list[Any] = []
        self.owners: list[int] = []
        self.edges: list[_Edge] = []
        self.shared: list[_Edge] = []  # into another op's inner node, as autocast's cached casts

    def number(self, grad_fn: Any, owner: int) -> tuple[int, bool]:
        """Return a node's number in this walk, and whether it is new."""
        known = self.numbers.get(grad_fn)
        if known is not None:
            return known, False
        self.numbers[grad_fn] = at = len(self.nodes)
        self.nodes.append(grad_fn)
        self.owners.append(owner)
        return at, True

    def behind(self, edge: _Edge, out_of: dict[int, list[_Edge]]) -> Iterator[_Edge]:
        """Yield the edges that lead from an inner node, or those behind it, to values."""
        seen, waiting = {edge.to}, [edge.to]
        while waiting:
            for following in out_of.get(waiting.pop(), ()):
                if following.value is not None:
                    yield following
                elif following.to not in seen:
                    seen.add(following.to)
                    waiting.append(following.to)

    def out_of(self) -> dict[int, list[_Edge]]:
        """Return the edges by the node that they lead from."""
        found: dict[int, list[_Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.of, []).append(edge)
        return found

    def executed(self, inputs: Sequence[int]) -> set[int]:
        """Return the nodes that a pass which is asked for these nodes only goes to."""
        into: dict[int, list[int]] = {}
        for edge in self.edges:
            into.setdefault(edge.to, []).append(edge.of)
        found, waiting = set(inputs), list(inputs)
        while waiting:
            for of in into.get(waiting.pop(), ()):
                if of not in found:
                    found.add(of)
                    waiting.append(of)
        return found


def walk(identity: Identity, roots: Sequence[tuple[Any, int]], *, inner: bool) -> _Graph:
    """Walk autograd's graph from (grad_fn, value) pairs.

    Args:
        identity: Tells to which op a node belongs.
        roots: Where to begin.
        inner: Whether the pass lies inside an op, whose own leaves are nobody else's.
    """
    graph = _Graph()
    waiting = [graph.number(grad_fn, node_of(value))[0] for grad_fn, value in roots]
    waiting = list(dict.fromkeys(waiting))
    while waiting:
        at = waiting.pop()
        owner = graph.owners[at]
        for slot, (following, output_nr) in enumerate(graph.nodes[at].next_functions):
            if following is None:
                continue
            value = identity.at_node(following, output_nr, known_only=inner)
            leads_out = value is not None and node_of(value) != owner
            to, new = graph.number(following, owner if value is None else node_of(value))
            edge = _new_edge((at, slot, to, value if leads_out else None))
            graph.edges.append(edge)
            if new:
                waiting.append(to)
            elif value is None and graph.owners[to] != owner:
                graph.shared.append(edge)
    return graph


class Backward:
    """Watches the backward passes of one recording."""

    def __init__(self, tape: Tape, identity: Identity, forward: Forward) -> None:
        self._tape = tape
        self._identity = identity
        self._forward = forward
        self._running: list[Pass] = []
        self._watching: list[_Watched] = []
        self._announced: list[Pass] = []
        self._uncleared: dict[int, list[int]] = {}
        self._pending: list[tuple[Arrival, Tensor]] = []
        self._pending_links: list[tuple[Pass, int, Tensor]] = []
        self._pass_nodes: dict[int, int] = {}
        self._leaf_hooks: list[tuple[weakref.ref[Tensor], object]] = []
        self._stray: tuple[int, int] | None = None
        forward.run_backward = self.called
        forward.cleared = self.cleared
        forward.pass_node = self.pass_node
        identity.on_leaf = self.watch_leaf

    # -- how a pass starts -----------------------------------------------------------------------

    def called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType | None
    ) -> Any:
        """Run `backward` or `grad` as the user called it, so that a failed attempt is seen too."""
        announced, depth = None, len(self._announced)
        try:
            announced = self._forward.silently(self._announce, func, args, kwargs, frame)
        except BaseException as error:
            del self._announced[depth:]
            self._forward.missed("backward", error)
        try:
            return func(*args, **kwargs)
        except BaseException as error:
            if announced is not None and announced.error is None:
                announced.error = f"{type(error).__name__}: {error}"
                if announced in self._announced:  # it raised before the engine ran
                    self._number(announced)
            raise
        finally:
            del self._announced[depth:]

    def _announce(
        self, func: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType | None
    ) -> Pass | None:
        if self._forward.function is not None:
            return None
        kind = "grad" if func.__name__ == "grad" else "backward"
        names = ("outputs", "tensors", "self")
        given = args[0] if args else next((kwargs[n] for n in names if n in kwargs), ())
        roots = given if isinstance(given, (tuple, list)) else (given,)
        asked = args[1] if kind == "grad" and len(args) > 1 else kwargs.get("inputs")
        site, called_from = sites.find(frame)
        announced = Pass(
            index=-1,
            kind=kind,
            roots=tuple(self._identity.value(root) for root in roots if isinstance(root, Tensor)),
            site=site,
            called_from=called_from,
            inputs=None if asked is None else self._values(asked),
            create_graph=bool(kwargs.get("create_graph")),
            retain_graph=bool(kwargs.get("retain_graph")),
        )
        self._announced.append(announced)
        return announced

    def _values(self, tensors: Any) -> tuple[int, ...]:
        several = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        return tuple(self._identity.value(t) for t in several if isinstance(t, Tensor))

    def _number(self, started: Pass) -> Pass:
        started.index = len(self._tape.passes)
        self._tape.passes.append(started)
        return started

    def run(
        self,
        engine: Callable[..., Any],
        frame: FrameType | None,
        roots: Sequence[Any],
        grad_tensors: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        """Run the engine once and watch it. Takes what `run_backward` takes, behind the frame."""
        call = partial(
            engine,
            roots,
            grad_tensors,
            retain_graph,
            create_graph,
            inputs,
            allow_unreachable=allow_unreachable,
            accumulate_grad=accumulate_grad,
        )
        depth = len(self._running)
        try:
            watched = self._forward.silently(
                self._start, frame, roots, retain_graph, create_graph, inputs, accumulate_grad
            )
        except BaseException as error:
            self._unwatch()
            self._forward.missed("backward", error)
            return call()
        result = None
        try:
            self._forward.paused += 1
            self._running.append(watched.record)
            result = call()
            return result
        except BaseException as error:
            watched.record.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._forward.paused -= 1
            del self._running[depth:]
            if accumulate_grad:
                self._forward.latest_pass = watched.record.index
            try:
                self._finish(watched, inputs, result)
            except BaseException as error:
                self._forward.missed("backward", error)
            finally:
                self._unwatch()

    def _finish(self, watched: _Watched, inputs: Sequence[Any], result: Any) -> None:
        self._forward.anchors.release()
        self._forward.silently(watched.finish)
        if result is not None:
            self._forward.silently(self._returned, watched, inputs, result)

    def _unwatch(self) -> None:
        """Take off the hooks of all passes but those that run."""
        while len(self._watching) > len(self._running):
            self._watching[-1].take_off()
            self._watching.pop()

    def _start(
        self,
        frame: FrameType | None,
        roots: Sequence[Any],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        accumulate_grad: bool,
    ) -> _Watched:
        record = self._announced.pop() if self._announced else None
        inside = self._running[-1] if self._running else None
        inner = inside is not None or self._is_inner()
        if record is None:
            site, called_from = sites.find(frame)
            record = Pass(
                index=-1,
                kind="backward" if accumulate_grad else "grad",
                roots=() if inner else self._values(list(roots)),
                site=site,
                called_from=called_from,
                inputs=self._values(list(inputs)) if inputs else None,
                create_graph=create_graph,
                retain_graph=retain_graph,
            )
        record.create_graph, record.retain_graph = bool(create_graph), bool(retain_graph)
        record.internal = inner
        if inner:
            record.roots = ()
            if torch._C._functorch.peek_interpreter_stack() is not None:
                record.transformed = self._values(list(roots))
        if inside is not None:
            record.inside = inside.index
            record.inside_op = self._current_op()
            if record.inside_op is None:  # inside what was recomputed, which belongs to its op
                record.inside_op = inside.inside_op
        self._number(record)
        starts = [self._start_of(root, record) for root in roots]
        graph = walk(self._identity, [start for start in starts if start is not None], inner=inner)
        self._notice_overwrites(graph, record)
        watched = _Watched(self, record, graph, inputs, accumulate_grad)
        self._watching.append(watched)
        watched.put_on()
        return watched

    def _notice_overwrites(self, graph: _Graph, record: Pass) -> None:
        """Note what the nodes of a pass need and somebody wrote to."""
        for found in self._forward.writes.overwritten(graph.nodes, graph.owners):
            site, called_from, module = found.write.where
            value = self._identity.met(found.kept)
            if value is None and found.is_result:
                value = value_of(found.needed_by)
            overwrite = Overwrite(
                found.write.op,
                site,
                called_from,
                module,
                value,
                found.needed_by,
                record.index,
                found.silent,
            )
            self._tape.overwrites[overwrite] = None

    def _is_inner(self) -> bool:
        """Whether this pass lies inside something that owns it: a Function, torch.func.grad."""
        if self._forward.function is not None:
            return True
        return torch._C._functorch.peek_interpreter_stack() is not None

    def _current_op(self) -> int | None:
        node = torch._C._current_autograd_node()
        value = None if node is None else self._identity.at_edge(node, 0)
        return None if value is None else node_of(value)

    def _start_of(self, root: Any, record: Pass) -> tuple[Any, int] | None:
        if not isinstance(root, Tensor):  # a GradientEdge
            value = self._identity.at_node(root.node, root.output_nr)
            return None if value is None else (root.node, value)
        if not root.requires_grad:
            return None
        grad_fn = grad_fn_of(root)
        if grad_fn is None:
            with torch._C._DisableTorchDispatch():  # it makes a view
                grad_fn = torch.autograd.graph.get_gradient_edge(root).node
        if grad_fn is None:
            return None
        owner = record.inside_op
        if owner is not None:
            return grad_fn, value_of(owner)
        return grad_fn, self._identity.value(root)

    # -- what came of it -------------------------------------------------------------------------

    def arrived(self, record: Pass, leaf: int, gradient: Tensor) -> None:
        """Put the arrival of one gradient at one leaf on the tape."""
        arrival = Arrival(
            leaf,
            record.index,
            tuple(shape_of(gradient)),
            gradient.dtype,
            None,
        )
        if record.kind == "backward":
            self._uncleared.setdefault(leaf, []).append(len(self._tape.arrivals))
            self._forward.backward_of[leaf] = record.index
        self._tape.arrivals.append(arrival)
        norm = None if self._tape.values == "none" else norm_of(gradient)
        if norm is not None:
            self._settle(arrival, norm)

    def _settle(self, arrival: Arrival, norm: float | Tensor) -> None:
        if isinstance(norm, Tensor):  # reading it now would wait for the device
            self._pending.append((arrival, norm))
        else:
            arrival.norm = norm

    def waits(self, record: Pass, link: int, norm: Tensor) -> None:
        """Note the norm of a link that is read later."""
        self._pending_links.append((record, link, norm))

    def settle(self) -> None:
        """Read the norms that wait on devices. Called when the recording ends or is read."""
        pending, self._pending = self._pending, []
        for arrival, norm in pending:
            arrival.norm = norm.item()
        links, self._pending_links = self._pending_links, []
        for record, link, norm in links:
            record.links[link] = record.links[link]._replace(norm=norm.item())

    def _returned(self, watched: _Watched, inputs: Sequence[Any], result: Sequence[Any]) -> None:
        """Take down what `torch.autograd.grad` returned."""
        record = watched.record
        if watched.accumulates or record.internal:
            return
        returned = []
        for given, gradient in zip(inputs, result, strict=False):
            if not isinstance(gradient, Tensor):
                continue
            returned.append(gradient)
            value = self._identity.known(given) if isinstance(given, Tensor) else None
            if value is None:
                continue
            node = self._tape.nodes[node_of(value)]
            # Asked for twice, it arrives once.
            if node is not None and node.kind in ("leaf", "input") and value not in record.captured:
                self.arrived(record, node_of(value), gradient)
            record.captured.append(value)
        if returned:
            node_number = self.pass_node(record.index)
            self._fill(node_number, returned)

    def _fill(self, number: int, returned: list[Tensor]) -> None:
        node = self._tape.nodes[number]
        assert node is not None
        outputs = tuple(
            Output(tuple(shape_of(t)), t.dtype, t.device, t.requires_grad, _grad_fn_name(t))
            for t in returned
        )
        inputs = node.inputs
        if node.outputs[0].requires_grad:  # create_graph: what the gradients depend on
            grad_fns = [fn for fn in map(grad_fn_of, returned) if fn is not None]
            inputs = tuple(Input(value, True) for value in self._identity.sources(grad_fns))
        self._tape.nodes[number] = node._replace(inputs=inputs, outputs=outputs)
        for at, tensor in enumerate(returned):
            self._identity.register(tensor, value_of(number, at))

    def pass_node(self, index: int) -> int:
        """Return the node that stands for a pass as the maker of gradients."""
        known = self._pass_nodes.get(index)
        if known is not None:
            return known
        record = self._tape.passes[index]
        inputs = () if record.create_graph else tuple(Input(root, True) for root in record.roots)
        name = "autograd.grad" if record.kind == "grad" else "backward"
        output = Output((), None, None, record.create_graph, None)
        number = self._tape.add(
            Node(
                "op",
                name,
                record.site,
                record.called_from,
                "",
                "grad" if record.create_graph else "no_grad",
                inputs,
                (output,),
                "pass",
            )
        )
        self._pass_nodes[index] = number
        return number

    def cleared(self, leaf: int, where: sites.Sites) -> None:
        """Note that a leaf's gradient was cleared."""
        for arrival in self._uncleared.pop(leaf, ()):
            self._tape.arrivals[arrival].cleared = where[1] or where[0]
            self._tape.edits += 1

    # -- passes that nobody announced ------------------------------------------------------------

    def watch_leaf(self, tensor: Tensor, node: int) -> None:
        """Put a hook on a leaf that notices passes started outside torch's Python API."""
        if not tensor.is_leaf or not tensor.requires_grad:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        # The hook holds numbers only: one that held its tensor could never be freed.
        hook = partial(self._stray_arrival, node)
        self._leaf_hooks.append((weakref.ref(tensor), hook))
        register: Callable[..., Any] = tensor.register_post_accumulate_grad_hook
        register(hook)

    def _stray_arrival(self, leaf: int, tensor: Tensor) -> None:
        try:
            if (self._running and _is_accumulating()) or tensor.grad is None:
                return
            with torch._C.DisableTorchFunction():
                running = self._running[-1] if self._running else self._stray_pass()
                self.arrived(running, leaf, tensor.grad)
        except BaseException as error:
            self._forward.missed("backward", error)

    def _stray_pass(self) -> Pass:
        task = torch._C._current_graph_task_id()
        if self._stray is not None and self._stray[0] == task:
            return self._tape.passes[self._stray[1]]
        record = self._number(
            Pass(-1, "backward", (), None, None, None, False, False, observed=False)
        )
        self._stray = (task, record.index)
        return record

    def take_off(self) -> None:
        """Take off the hooks that are still on. Can be repeated where it was interrupted."""
        self._running.clear()
        self._unwatch()
        while self._leaf_hooks:
            ref, hook = self._leaf_hooks[-1]
            with torch._C.DisableTorchFunction():
                _remove_hook(ref(), hook)
            self._leaf_hooks.pop()


def _remove_hook(tensor: Any, hook: object) -> None:
    """Take a hook off a leaf, and leave not even an empty dictionary of hooks."""
    hooks = None if tensor is None else tensor._post_accumulate_grad_hooks
    if hooks is not None:
        for key in [key for key, each in hooks.items() if each is hook]:
            del hooks[key]
        if not hooks:
            tensor._post_accumulate_grad_hooks = None


def _is_accumulating() -> bool:
    """Whether the engine is at a leaf, as when it calls its hooks; FSDP2 calls them by hand."""
    node = torch._C._current_autograd_node()
    return node is not None and is_leaf_node(node)


def _grad_fn_name(tensor: Tensor) -> str | None:
    grad_fn = grad_fn_of(tensor) if tensor.requires_grad else None
    return None if grad_fn is None else type(grad_fn).__name__


class _Watched:
    """One pass while the engine runs: its hooks and what they saw."""

    def __init__(
        self,
        backward: Backward,
        record: Pass,
        graph: _Graph,
        inputs: Sequence[Any],
        accumulates: bool,
    ) -> None:
        self._backward = backward
        self.record = record
        self.accumulates = accumulates
        self._graph = graph
        self._task: int | None = None
        self._thread = threading.get_ident()
        self._fired: dict[int, tuple[bool, ...]] = {}
        self._norms: dict[tuple[int, int], float | Tensor] = {}
        self._edges_wanted = backward._tape.values == "edges"
        self._targets = self._nodes_of(inputs) if inputs else None
        self._hooks: list[Any] = []

    def put_on(self) -> None:
        """Put a hook on every node."""
        nodes = self._graph.nodes
        put_on = [self._hook(at, node) for at, node in enumerate(nodes)]
        # A loop in C: no interrupt comes between a hook and its handle.
        self._hooks.extend(map(operator.call, put_on, nodes))

    def take_off(self) -> None:
        """Take the hooks off, and let go of the graph. Can be repeated where it was interrupted."""
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()
        self._graph = _Graph()

    def _nodes_of(self, inputs: Sequence[Any]) -> list[int]:
        graph = self._graph
        # `get_gradient_edge` makes a view of a leaf, which somebody's dispatch mode would see.
        leaves = {id(n.variable): at for at, n in enumerate(graph.nodes) if is_leaf_node(n)}
        found = []
        for given in inputs:
            node = grad_fn_of(given) if isinstance(given, Tensor) else given.node
            at = leaves.get(id(given)) if node is None else graph.numbers.get(node)
            if at is not None:
                found.append(at)
        return found

    def _hook(self, at: int, node: Any) -> Callable[[Any], Any]:
        """Return what puts a hook on a node."""
        if is_leaf_node(node):
            return operator.methodcaller("register_prehook", partial(self._at_leaf, at))
        return operator.methodcaller("register_hook", partial(self._at_node, at))

    def _at_node(self, at: int, grad_inputs: Any, grad_outputs: Any) -> None:
        try:
            if self._task is None:
                self._task = torch._C._current_graph_task_id()
            self._fired[at] = tuple([gradient is not None for gradient in grad_inputs])
            if self._edges_wanted:
                with torch._C.DisableTorchFunction():
                    self._note_norms(at, grad_inputs)
        except BaseException as error:
            self._backward._forward.missed("backward", error)

    def _note_norms(self, at: int, grad_inputs: Any) -> None:
        for slot, gradient in enumerate(grad_inputs):
            norm = norm_of(gradient) if isinstance(gradient, Tensor) else None
            if norm is not None:
                self._norms[at, slot] = norm

    def _at_leaf(self, at: int, grad_outputs: Any) -> None:
        try:
            gradient = grad_outputs[0]
            if gradient is not None and self.accumulates and self._is_running():
                with torch._C.DisableTorchFunction():
                    self._backward.arrived(self.record, self._graph.owners[at], gradient)
        except BaseException as error:
            self._backward._forward.missed("backward", error)

    def _is_running(self) -> bool:
        """Whether the engine calls a leaf's hook in this pass.

        A leaf is on the ways of other passes too, which can run inside this one (re-entrant
        checkpointing) or in another thread meanwhile.
        """
        if self._task is not None:
            return self._task == torch._C._current_graph_task_id()
        # A leaf that is a root. The engine's own threads, one for each device, are not Python's.
        thread = threading.get_ident()
        return thread == self._thread or all(thread != each.ident for each in threading.enumerate())

    def finish(self) -> None:
        """Put what the hooks saw on the tape."""
        graph = self._graph
        executed = None if self._targets is None else graph.executed(self._targets)
        for edge in graph.edges:
            if edge.value is not None:
                self._add_link(graph.owners[edge.of], edge, self._state(edge, executed))
        out_of = graph.out_of() if graph.shared else {}
        for shared in graph.shared:
            state = self._state(shared, executed)
            for edge in graph.behind(shared, out_of):
                further = self._state(edge, executed) if state == "reached" else state
                self._add_link(graph.owners[shared.of], edge, further)
        self._anchor(graph.nodes)

    def _anchor(self, nodes: list[Any]) -> None:
        """Hold every so many nodes of a deep graph, most of which may be new to Python."""
        anchors = self._backward._forward.anchors
        if len(nodes) > BEGIN:
            for grad_fn in nodes[::EVERY]:
                anchors.hold(grad_fn)

    def _add_link(self, op: int, edge: _Edge, state: str) -> None:
        links = self.record.links
        norm = self._norms.get((edge.of, edge.slot))
        if isinstance(norm, Tensor):
            self._backward.waits(self.record, len(links), norm)
            norm = None
        links.append(new_link((op, edge.value, state, norm)))

    def _state(self, edge: _Edge, executed: set[int] | None) -> str:
        if executed is not None and edge.to not in executed:
            return "not_requested"
        fired = self._fired.get(edge.of)
        if fired is None:
            return (
                "missed" if self.record.error is not None or executed is None else "not_requested"
            )
        return "reached" if edge.slot < len(fired) and fired[edge.slot] else "undefined"
