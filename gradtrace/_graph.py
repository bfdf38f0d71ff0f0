"""Tape -> networkx graph with plain attributes. Linear in the size of the tape.

Edges run in the direction of the forward pass. What a backward pass did on an edge is taken from
the links that were observed; an edge that autograd has and no call showed (double backward,
scripted code) is added. Which ops are cuts is decided in `_flow.py`, from this graph alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final

import networkx as nx

from gradtrace import _source
from gradtrace._cuts import STOPS, writes
from gradtrace._records import CutKind
from gradtrace._tape import (
    OUTPUT_MASK,
    Input,
    LinkState,
    Node,
    Output,
    Overwrite,
    Pass,
    Site,
    Tape,
    node_of,
    output_of,
    plain_name,
    value_of,
)
from gradtrace._version import __version__

FORMAT_VERSION: Final = 1
_EMPTY: Final = Output((), None, None, False, None)

Attributes = dict[str, Any]
ByPass = dict[int, list[LinkState]]
Held = list[tuple[int, CutKind | None]]  # values, and what parts each from who holds it


def build(tape: Tape) -> nx.MultiDiGraph:
    """Return the graph of all that a tape holds."""
    return _Builder(tape).build()


def _torch_word(thing: object) -> str:
    return str(thing).removeprefix("torch.")


class _Builder:
    """The names and links that building needs at hand."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._bare = len(tape.roots) <= 1 and not tape.models_given
        self._links = _links_by_edge(tape)
        outer = (done for done in tape.passes if not done.internal)
        self._walked = {link.op for done in outer for link in done.links}
        self._known_held: dict[int, Held] = {}
        self._known_origin: dict[int, int] = {}
        self._known_around: dict[int, Held] = {}
        self._known_requiring: dict[int, bool] = {}
        self._names = self._result_names()
        for write in sorted(tape.targets):  # each asks for those before it: so nothing recurses far
            self._takes_all(write)

    def build(self) -> nx.MultiDiGraph:
        graph = nx.MultiDiGraph()
        for number, node in enumerate(self._tape.nodes):
            if node is not None:
                graph.add_node(number, **self._node_attributes(number, node))
        for number, node in enumerate(self._tape.nodes):
            if node is not None:
                for producer, attributes in self._edges(number, node):
                    graph.add_edge(producer, number, **attributes)
        self._mark_reached(graph)
        graph.graph.update(self._graph_attributes())
        return graph

    # -- names -----------------------------------------------------------------------------------

    def _word(self, text: str) -> str:
        return plain_name(text, self._tape.roots, bare=self._bare)

    def _result_names(self) -> dict[int, str]:
        """Return names of values: leaves as named, results by the assignment on their line."""
        names: dict[int, str] = {}
        following: Site | None = None
        for number in range(len(self._tape.nodes) - 1, -1, -1):
            node = self._tape.nodes[number]
            if node is None or node.kind == "escape":
                continue
            last_here = node.site is not None and node.site != following
            following = node.site or following
            given = self._tape.names.get(number)
            if given is not None:
                names[value_of(number)] = self._word(given)
            elif node.site is not None and self._is_assigned(node, last_here):
                for output in range(len(node.outputs)):
                    found = _source.assigned_name(node.site.code, node.site.lasti, output)
                    if found is not None:
                        names[value_of(number, output)] = found
        self._name_by_use(names)
        return names

    def _is_assigned(self, node: Node, last_here: bool) -> bool:
        """Whether the variable on a node's line holds its result."""
        if node.kind == "op":
            return last_here or is_direct(node)
        if node.kind == "leaf" and node.inputs:
            maker = self._tape.nodes[node_of(node.inputs[0].value)]
            made_by = None if maker is None else maker.op
            return is_direct(node, "requires_grad_") or is_direct(node, made_by)
        return is_direct(node)

    def _name_by_use(self, names: dict[int, str]) -> None:
        """Name what has no name yet as the expression that took it does."""
        for node in self._tape.nodes:
            if node is None or node.site is None or not is_direct(node):
                continue
            unnamed = [given.value not in names for given in node.inputs]
            if not any(unnamed):
                continue
            words = _source.argument_names(node.site.code, node.site.lasti)
            if len(words) == len(node.inputs):
                for given, word in zip(node.inputs, words, strict=True):
                    if word is not None:
                        names.setdefault(given.value, word)

    # -- nodes -----------------------------------------------------------------------------------

    def _node_attributes(self, number: int, node: Node) -> Attributes:
        first = node.outputs[0] if node.outputs else _EMPTY
        return {
            "kind": node.kind,
            "name": self._names.get(value_of(number)),
            "op": node.op,
            "grad_fn": first.grad_fn,
            "module": self._word(node.module),
            **_place(node.site, node.called_from),
            "requires_grad": self._requires_grad(value_of(number)),
            "shape": tuple(map(int, first.shape)) if node.outputs else None,
            "dtype": None if first.dtype is None else _torch_word(first.dtype),
            "device": None if first.device is None else str(first.device),
            "cut": None,
            "reached": (),
            "root_of": (),
            "shares_storage_with": node.alias_of,
            "grad_mode": node.grad_mode,
            "flavour": node.flavour,
            "writes_to": node.writes_to,
            "filled_unseen": number in self._tape.filled_unseen,
            "dropped": _is_dropped(node),
            **self._results(number, node),
        }

    def _results(self, number: int, node: Node) -> Attributes:
        """Return what tells an op's results apart; nothing where there is one."""
        outputs = node.outputs if len(node.outputs) > 1 else ()
        names = (self._names.get(value_of(number, at)) for at in range(len(outputs)))
        return {
            "result_names": tuple(names),
            "result_shapes": tuple(tuple(map(int, output.shape)) for output in outputs),
            "result_requires_grad": tuple(output.requires_grad for output in outputs),
        }

    # -- writes ----------------------------------------------------------------------------------
    #
    # NOTE [ What a tensor holds after writes ]
    # Where a tensor is read after writes to its memory, it holds what the writes brought and, as
    # far as autograd or the data lead past them, what it held before. A write through autograd
    # into the reader's own family (a base and its views) takes in all that was there; one under
    # no_grad, or through a `detach` or `.data`, does not: the reader has an edge from it and
    # another one from before it. Where `detach` or `.data` stands between writer and reader, the
    # edge says so: no gradient comes along it.

    def _taken(self, number: int, node: Node) -> Iterator[tuple[Input, CutKind | None, bool]]:
        """Yield what an op took, what parts it from its maker, and whether it is as given."""
        for given in node.inputs:
            if node_of(given.value) == number or (given.target and self._goes_past(number)):
                continue
            for value, apart in self._held(given.value):
                if value == given.value:
                    yield given, apart, True
                else:
                    requires_grad = given.requires_grad and self._output(value).requires_grad
                    held = given._replace(value=value, requires_grad=requires_grad)
                    yield held, apart, False
        for value, apart in self._around(number, node):
            yield Input(value, self._output(value).requires_grad), apart, False

    def _held(self, value: int) -> Held:
        """Return the values whose data a value holds."""
        if value not in self._known_held:
            self._known_held[value] = self._find_held(value)
        return self._known_held[value]

    def _find_held(self, value: int) -> Held:
        tape = self._tape
        if value in tape.previous:
            return self._held_since(tape.previous[value], node_of(value), value)
        target = self._target(value)
        if target is None or not self._goes_past(node_of(value)):
            return [(value, None)]
        if not self._keeps(node_of(value)) and not self._output(target).requires_grad:
            return [(value, None)]
        return [(value, None), *self._held(target)]

    def _held_since(self, before: int, write: int | None, latest: int | None = None) -> Held:
        """Return what a tensor holds that held `before` until a row of writes to its memory."""
        found: Held = []
        kept = False  # whether a write took in what others, parted from the tensor, wrote before
        while write is not None and write > node_of(before):
            apart = self._parted(before, self._tape.targets[write][0])
            value = value_of(write) if latest is None else latest
            if apart is None or not kept:
                found.append((value, apart))
            if apart is None and self._takes_all(write):
                return found
            kept = kept or self._keeps_all(write)
            write, latest = self._tape.earlier.get(write), None
        return found + [held for held in self._held(before) if held[1] is None or not kept]

    def _keeps(self, write: int) -> bool:
        """Whether a write has what was in its target as an input."""
        node = self._tape.nodes[write]
        return node is not None and any(given.target for given in node.inputs)

    def _keeps_all(self, write: int) -> bool:
        """Whether a write has what was in the whole of its memory as an input."""
        return self._keeps(write) and not self._is_view(self._tape.targets[write][0])

    def _around(self, number: int, node: Node) -> Held:
        """Return what stays around a view that a write fills, and that autograd takes in too."""
        if number not in self._known_around:
            self._known_around[number] = self._find_around(number, node)
        return self._known_around[number]

    def _find_around(self, number: int, node: Node) -> Held:
        target = next(iter(self._tape.targets.get(number, ())), None)
        if target is None or self._goes_past(number):
            return []
        if node.grad_mode != "grad" or not self._is_view(target):
            return []
        root, earlier = self._root(target), self._tape.earlier.get(number)
        if not (self._output(root).requires_grad or self._wrote_gradients(earlier)):
            return []
        held = self._held_since(root, earlier)
        return [(value, apart) for value, apart in held if self._output(value).requires_grad]

    def _wrote_gradients(self, write: int | None) -> bool:
        """Whether a result of a write, or of one before it on its memory, required grad."""
        row: list[int] = []
        while write is not None and write not in self._known_requiring:
            row.append(write)
            write = self._tape.earlier.get(write)
        requires = write is not None and self._known_requiring[write]
        for each in reversed(row):
            node = self._tape.nodes[each]
            outputs = () if node is None else node.outputs
            requires = requires or any(output.requires_grad for output in outputs)
            self._known_requiring[each] = requires
        return requires

    def _takes_all(self, write: int) -> bool:
        """Whether a write takes in all that was in its family's memory."""
        node = self._tape.nodes[write]
        if node is None:
            return False
        if self._goes_past(write) and (self._keeps(write) or node.grad_mode != "grad"):
            return False
        return not self._is_view(self._tape.targets[write][0]) or bool(self._around(write, node))

    def _target(self, value: int) -> int | None:
        """Return what the tensor held to which a write gave this value, or None."""
        targets = self._tape.targets.get(node_of(value), ())
        return targets[output_of(value)] if output_of(value) < len(targets) else None

    def _goes_past(self, write: int) -> bool:
        """Whether a write goes past what its target held, to which autograd leads all the same."""
        node = self._tape.nodes[write]
        targets = self._tape.targets.get(write, ())
        if node is None or len(targets) != 1:
            return False
        required = self._output(targets[0]).requires_grad
        if required:
            return node.grad_mode != "grad"
        return self._parent(targets[0]) is not None

    def _origin(self, value: int) -> int:
        """Return what a tensor was before all writes."""
        row: list[int] = []
        while value not in self._known_origin:
            before = self._tape.previous.get(value, self._target(value))
            if before is None:
                self._known_origin[value] = value
            else:
                row.append(value)
                value = before
        origin = self._known_origin[value]
        self._known_origin.update(dict.fromkeys(row, origin))
        return origin

    def _is_view(self, value: int) -> bool:
        node = self._tape.nodes[node_of(self._origin(value))]
        return node is not None and node.alias_of is not None and node.op not in STOPS

    def _root(self, value: int) -> int:
        """Return the base of a view, as autograd sees it, before all writes."""
        while True:
            value = self._origin(value)
            node = self._tape.nodes[node_of(value)]
            if node is None or node.alias_of is None or node.op in STOPS or not node.inputs:
                return value
            value = node.inputs[0].value

    def _parent(self, value: int) -> tuple[int, CutKind] | None:
        """Return what a detached tensor shares its memory with, and the kind that parts them."""
        node = self._tape.nodes[node_of(self._root(value))]
        if node is None or node.alias_of is None or node.op not in STOPS or not node.inputs:
            return None
        return node.inputs[0].value, STOPS[node.op]

    def _parted(self, reader: int, writer: int) -> CutKind | None:
        """Return what stands between two tensors on one memory, or None within one family."""
        families: dict[int, CutKind | None] = {}
        value, kind = reader, None
        while True:
            families[node_of(self._root(value))] = kind
            parent = self._parent(value)
            if parent is None:
                break
            value, kind = parent[0], kind or parent[1]
        value, kind = writer, None
        while node_of(self._root(value)) not in families:
            parent = self._parent(value)
            if parent is None:
                return kind or CutKind.COPY
            value, kind = parent[0], kind or parent[1]
        return kind or families[node_of(self._root(value))]

    # -- edges -----------------------------------------------------------------------------------

    def _edges(self, number: int, node: Node) -> Iterator[tuple[int, Attributes]]:
        """Yield the producer and the facts of each edge into a node."""
        inputs = list(self._taken(number, node))
        uses = Counter(given.value for given, _, _ in inputs)
        links = dict(self._links.get(number, {}))
        nth: dict[int, int] = defaultdict(int)
        for slot, (given, apart, own) in enumerate(inputs):
            found = self._found_links(given.value, links)
            states = _states(found, nth[given.value], uses[given.value])
            nth[given.value] += 1
            moved = given.target or (node.alias_of is not None and node.op not in STOPS)
            moved = moved and own and apart is None
            weak = (node.kind == "op" and not node.outputs) or (
                moved and not found and self._is_rebased(given.value, links)
            )
            facts = self._edge_attributes(number, slot, given, states, weak=weak, apart=apart)
            yield node_of(given.value), facts
        for slot, value in enumerate(self._unseen_links(links, uses), len(inputs)):
            states = _states(links[value], 0, 1)
            unseen = Input(value, True)
            yield node_of(value), self._edge_attributes(number, slot, unseen, states, weak=False)

    def _found_links(self, value: int, links: dict[int, ByPass]) -> ByPass:
        """Return an input's links. Writes give one tensor several values; any of them will do."""
        if value in links:
            return links[value]
        node = node_of(value)
        twins = (v for v in links if node_of(v) == node)
        return next((links[v] for v in twins if self._is_written(v) or self._is_written(value)), {})

    def _unseen_links(self, links: dict[int, ByPass], uses: Counter[int]) -> list[int]:
        """Return the values to which autograd leads though no call took them."""
        written = {node_of(value) for value in uses if self._is_written(value)}
        return [
            value
            for value in links
            if value not in uses and not (node_of(value) in written or self._is_twin(value, uses))
        ]

    def _is_twin(self, value: int, uses: Counter[int]) -> bool:
        node = node_of(value)
        return self._is_written(value) and any(node_of(used) == node for used in uses)

    def _is_written(self, value: int) -> bool:
        return value in self._tape.aliased_outputs

    def _is_rebased(self, value: int, links: dict[int, ByPass]) -> bool:
        """Whether autograd links what a view was taken of, in place of the view.

        A write to a view becomes a write to its base: the way through the view is no other one.
        """
        node = self._tape.nodes[node_of(value)]
        if node is None or (node_of(value) in self._tape.targets and node.grad_mode != "grad"):
            return False
        root = node_of(self._root(value))
        return any(node_of(self._root(linked)) == root for linked in links)

    def _edge_attributes(
        self,
        number: int,
        slot: int,
        given: Input,
        links: list[tuple[int, LinkState]],
        *,
        weak: bool,
        apart: CutKind | None = None,
    ) -> Attributes:
        output = self._output(given.value)
        reached = _passes(links, "reached")
        return {
            "tensor": self._names.get(given.value),
            "output": output_of(given.value),
            "input": slot,
            "shape": tuple(map(int, output.shape)),
            "dtype": _torch_word(output.dtype),
            "device": str(output.device),
            "requires_grad": given.requires_grad,
            "reached": reached,
            "undefined": tuple(p for p in _passes(links, "undefined") if p not in reached),
            "not_requested": tuple(p for p in _passes(links, "not_requested") if p not in reached),
            "missed": tuple(p for p in _passes(links, "missed") if p not in reached),
            "linked": bool(links) if links or number in self._walked else None,
            "captured": given.captured,
            "norms": tuple((index, link.norm) for index, link in links if link.norm is not None),
            "weak": weak,
            "apart": None if apart is None else str(apart),
        }

    def _output(self, value: int) -> Output:
        node = self._tape.nodes[node_of(value)]
        if value in self._tape.aliased_outputs:
            return self._tape.aliased_outputs[value]
        output = value & OUTPUT_MASK
        return node.outputs[output] if node is not None and output < len(node.outputs) else _EMPTY

    # -- the whole -------------------------------------------------------------------------------

    def _mark_reached(self, graph: nx.MultiDiGraph) -> None:
        reached: dict[int, set[int]] = defaultdict(set)
        for producer, _, passes in graph.edges(data="reached"):
            reached[producer].update(passes)
        for done in self._tape.passes:
            for value in done.captured:
                reached[node_of(value)].add(done.index)
            for root in done.roots:
                node = graph.nodes[node_of(root)]
                node["root_of"] = (*node["root_of"], done.index)
                if done.error is None and self._requires_grad(root):
                    reached[node_of(root)].add(done.index)
        for arrival in self._tape.arrivals:
            reached[arrival.leaf].add(arrival.backward_pass)
        for number, passes in reached.items():
            graph.nodes[number]["reached"] = tuple(sorted(passes))

    def _requires_grad(self, value: int) -> bool:
        node = node_of(value)
        if node in self._tape.frozen:
            return False
        return self._output(value).requires_grad or node in self._tape.required

    def _graph_attributes(self) -> Attributes:
        tape = self._tape
        return {
            "version": FORMAT_VERSION,
            "gradtrace": __version__,
            "torch": tape.torch_version,
            "when": tape.when,
            "values": tape.values,
            "ops_seen": sum(node is not None and node.kind == "op" for node in tape.nodes),
            "troubles": tuple(tape.troubles),
            "passes": tuple(tuple(self._pass(done).items()) for done in tape.passes),
            "gradients": tuple(tuple(g.items()) for g in self._gradients()),
            "overwrites": tuple(tuple(self._overwrite(o).items()) for o in tape.overwrites),
        }

    def _pass(self, done: Pass) -> Attributes:
        place = _place(done.site, done.called_from)
        return {
            "index": done.index,
            "kind": done.kind,
            "roots": tuple(map(node_of, done.roots)),
            "root_outputs": tuple(map(output_of, done.roots)),
            "root_names": tuple(map(self._value_name, done.roots)),
            "transformed": tuple(map(node_of, done.transformed)),
            **place,
            "inputs": None if done.inputs is None else tuple(map(self._value_name, done.inputs)),
            "create_graph": done.create_graph,
            "retain_graph": done.retain_graph,
            "error": done.error,
            "inside": done.inside,
            "internal": done.internal,
            "observed": done.observed,
            "captured": tuple((node_of(value), output_of(value)) for value in done.captured),
        }

    def _overwrite(self, found: Overwrite) -> Attributes:
        return {
            "op": found.op,
            **_place(found.site, found.called_from),
            "module": self._word(found.module),
            "tensor": None if found.value is None else self._value_text(found.value),
            "needed_by": found.needed_by,
            "backward_pass": found.backward_pass,
            "silent": found.silent,
        }

    def _value_text(self, value: int) -> str:
        """Return a value's name, or the expression that made it."""
        node = self._tape.nodes[node_of(value)]
        site = None if node is None else node.site
        return self._names.get(value) or _place(site, None)["source"] or self._value_name(value)

    def _value_name(self, value: int) -> str:
        node = self._tape.nodes[node_of(value)]
        op = None if node is None else node.op
        return self._names.get(value) or op or f"tensor {node_of(value)}"

    def _gradients(self) -> Iterator[Attributes]:
        for order, arrival in enumerate(self._tape.arrivals):
            place = _place(arrival.cleared, None)
            yield {
                "node": arrival.leaf,
                "backward_pass": arrival.backward_pass,
                "shape": tuple(map(int, arrival.shape)),
                "dtype": _torch_word(arrival.dtype),
                "norm": arrival.norm,
                "order": order,
                "cleared_file": place["file"],
                "cleared_line": place["line"],
                "cleared_function": place["function"],
            }


def _links_by_edge(tape: Tape) -> dict[int, dict[int, ByPass]]:
    """Return links by op, by value, by pass, in autograd's order.

    Of a pass that lies inside an op only what it reached says something about the op.
    """
    found: dict[int, dict[int, ByPass]] = {}
    for done in tape.passes:
        for link in done.links:
            if done.internal and link.state != "reached":
                continue
            by_pass = found.setdefault(link.op, {}).setdefault(link.value, {})
            by_pass.setdefault(done.index, []).append(link)
    return found


def _states(links: ByPass, use: int, uses: int) -> list[tuple[int, LinkState]]:
    """Return what each pass did on the `use`-th of `uses` edges from a value to an op.

    Autograd lists its edges in the order of the arguments. Where it has as many as the op took the
    tensor, each belongs to one; where not, they are not told apart.
    """
    found = []
    for index, several in links.items():
        each = several[use : use + 1] if len(several) == uses else several
        found += [(index, link) for link in each]
    return found


def _passes(links: list[tuple[int, LinkState]], state: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(index for index, link in links if link.state == state))


def _place(site: Site | None, called_from: Site | None) -> Attributes:
    place = None if site is None else _source.location(site.code, site.lasti)
    own = None if called_from is None else _source.location(called_from.code, called_from.lasti)
    return {
        "file": None if place is None else place.file,
        "line": None if place is None else place.line,
        "function": None if place is None else place.function,
        "source": None if site is None else _source.expression(site.code, site.lasti),
        "called_from_file": None if own is None else own.file,
        "called_from_line": None if own is None else own.line,
        "called_from_function": None if own is None else own.function,
    }


def _is_dropped(node: Node) -> bool:
    """Whether a line of the user's own makes a result that nothing takes: `x.detach()` alone."""
    if node.kind != "op" or node.site is None or node.called_from is not None or node.flavour:
        return False
    if not node.outputs or writes(node.op or ""):
        return False
    called = _source.dropped_call(*node.site)
    if called is None or "out=" in (_source.expression(*node.site) or ""):
        return False
    return bool((node.op or "").startswith(called))


def is_direct(node: Node, op: str | None = None) -> bool:
    """Whether the line of source calls this very op, and not something that calls it inside."""
    op = op or node.op
    if node.site is None or op is None:
        return False
    text = _source.expression(node.site.code, node.site.lasti) or ""
    if not text.endswith(")"):
        return True
    # A function's own op can have a longer name: `F.cross_entropy` calls `cross_entropy_loss`.
    called = re.findall(r"(\w+)\(", text)
    return any(op.removesuffix(" =").startswith(name) for name in called)
