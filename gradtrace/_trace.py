"""Trace: what users hold. Each method is a line or two that calls a module above."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import networkx as nx

from gradtrace import _assertions, _explain, _files, _render
from gradtrace._errors import (
    ExportError,
    ForeignTensorError,
    NoMatchError,
    NotATensorError,
    UnknownNameError,
    nearest,
)
from gradtrace._explain import Explanation
from gradtrace._flow import Flow, Spot
from gradtrace._records import BackwardPass, Cut, CutKind, Gradient, Leaf, Op


class Unmet(NamedTuple):
    """A tensor that no op in the recording took."""

    name: str
    requires_grad: bool
    leaf: bool


class Live(Protocol):
    """What a trace asks of a recording in this process."""

    def stamp(self) -> object:
        """Return something that changes whenever the graph would."""

    def graph(self) -> nx.MultiDiGraph:
        """Return the graph of what was recorded up to now."""

    def find(self, thing: object) -> list[Spot | Unmet] | None:
        """Return the nodes of a tensor, or of a module's parameters; None for anything else."""


class Trace:
    """What one recording saw. Readable at any time; final when the recording has ended.

    A trace that was loaded from a file answers as the live one did, except that it knows tensors by
    their names only.
    """

    def __init__(self, live: Live | None, graph: nx.MultiDiGraph | None = None) -> None:
        self._live = live
        self._stamp: object = None
        self._flow: Flow | None = None if graph is None else Flow(graph)

    # -- the graph -------------------------------------------------------------------------------

    @property
    def _now(self) -> Flow:
        """The flow of gradients up to now; built again only where more was recorded."""
        if self._live is not None:
            stamp = self._live.stamp()
            if self._flow is None or stamp != self._stamp:
                self._flow, self._stamp = Flow.of(self._live.graph()), stamp
        assert self._flow is not None
        return self._flow

    @property
    def graph(self) -> nx.MultiDiGraph:
        """The whole recording as a networkx graph with plain attributes."""
        return self._now.graph

    # -- records ---------------------------------------------------------------------------------

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every leaf and parameter that was met, with its status."""
        return self._now.leaves

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every recorded op, in the order of the program."""
        return self._now.ops

    @property
    def clones(self) -> tuple[Op, ...]:
        """Every `clone`."""
        return tuple(op for op in self.ops if op.op == "clone")

    @property
    def detaches(self) -> tuple[Op, ...]:
        """Every `detach` and `detach_`."""
        return tuple(op for op in self.ops if op.op in ("detach", "detach_"))

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every op at which a leaf loses a way to a root, in the order of the program."""
        return self._now.cuts

    @property
    def backward_passes(self) -> tuple[BackwardPass, ...]:
        """Every run of the autograd engine, in the order in which they started."""
        return self._now.passes

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Every gradient that arrived at a leaf, in order."""
        return self._now.gradients

    # -- questions -------------------------------------------------------------------------------

    def explain(self, x: object) -> Explanation:
        """Say what became of the gradient of one tensor, and why.

        Args:
            x: A tensor, or a name as in `trace.leaves`, or the name of a result's variable.

        Raises:
            UnknownNameError: No tensor has this name; the message gives the nearest.
            NotATensorError: `x` is neither a tensor nor a name.
            ForeignTensorError: A tensor was given to a trace that was loaded from a file.
        """
        return self._explained(self._named(x) if isinstance(x, str) else self._one(x))

    def reached(self, *xs: object) -> bool:
        """Whether a gradient arrived at every one of these, zeros included.

        Args:
            *xs: Tensors, names, patterns of leaves' names ("encoder.*"), modules (their
                parameters).

        Raises:
            NoMatchError: A pattern matches no leaf; so a misspelt one never passes.
        """
        return all(_assertions.arrived(each) for each in self._all(xs))

    def paths(self, x: object, *, limit: int = 100) -> tuple[tuple[int, ...], ...]:
        """Return ways from a tensor to a root, reached or not, as nodes of `graph`.

        Args:
            x: A tensor or a name.
            limit: The most ways to return: their number can grow exponentially with the graph.
        """
        found = self._named(x) if isinstance(x, str) else self._one(x)
        return () if isinstance(found, Unmet) else tuple(self._now.paths(found, limit))

    def summary(self) -> str:
        """Return one screen of text: counts, passes, leaves, cuts."""
        return _render.summary(self.graph, self._now)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        flow = self._now
        counts = {
            "op": flow.ops,
            "leaf": flow.leaves,
            "backward pass": flow.passes,
            "cut": flow.cuts,
        }
        return f"<gradtrace.Trace: {', '.join(starmap(_counted, counts.items()))}>"

    # -- files and pictures ----------------------------------------------------------------------

    def export(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the trace to a file, in the form that its suffix names.

        Args:
            path: .json and .graphml hold the graph; .dot, .svg, .png and .pdf draw it.
            **options: For pictures: `full=True` draws every node, `depth=2` opens modules so far,
                `focus="name"` draws one leaf's story.

        Returns:
            The path. The file is written whole or not at all.

        Raises:
            ExportError: No form has this suffix, or it can't be written here.
            LayoutError: The layout program is missing, failed or took too long.
        """
        target = Path(path)
        _files.write_atomically(target, self._content(target, options))
        return target

    def _content(self, target: Path, options: dict[str, Any]) -> bytes:
        suffix = target.suffix.lower()
        writers = {".json": _files.json_bytes, ".graphml": _files.graphml_bytes}
        if suffix in writers:
            if options:
                raise ExportError(
                    f"{', '.join(options)} can't be given for {target.name!r}: a {suffix} file"
                    " holds the whole graph. Leave them out, or export a picture."
                )
            return writers[suffix](self.graph)
        if suffix not in _render.SUFFIXES:
            known = ", ".join([*_render.SUFFIXES, *writers])
            raise ExportError(
                f"can't tell from {target.name!r} what to write. A trace can be written as"
                f" {known}; end the file's name in one of these."
            )
        return _render.render(self.graph, self._now, suffix, **options)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace as .json, whatever the path's suffix; `gradtrace.load` reads it again."""
        target = Path(path)
        _files.write_atomically(target, _files.json_bytes(self.graph))
        return target

    def to_dot(self, **options: Any) -> str:
        """Return the picture in the DOT language; options as for `export`."""
        return _render.to_dot(self.graph, self._now, **options)

    # -- assertions ------------------------------------------------------------------------------

    def assert_reached(self, *xs: object) -> None:
        """Fail, and explain, unless a gradient arrived at every one of these (see `reached`)."""
        _assertions.assert_reached(self._with_backward(xs))

    def assert_not_reached(self, *xs: object) -> None:
        """Fail, and explain, if a gradient arrived at any of these (see `reached`)."""
        _assertions.assert_not_reached(self._with_backward(xs))

    def assert_cut(self, *xs: object, by: str | None = None, at: str | None = None) -> None:
        """Fail, and explain, unless every one of these is cut.

        Args:
            *xs: As for `reached`.
            by: A kind of cut that must be among each one's cuts, such as "detach".
            at: Where: "train.py:42", "train.py", or a piece of the expression's text.
        """
        if by is not None and by not in set(CutKind):
            kinds = ", ".join(CutKind)
            raise UnknownNameError(
                f"{by!r} is no kind of cut. {nearest(by, CutKind)}The kinds are {kinds}."
            )
        _assertions.assert_cut(self._with_backward(xs), by, at)

    def _with_backward(self, xs: tuple[object, ...]) -> list[Explanation]:
        if not self._now.passes:
            raise AssertionError(
                "no backward pass was started while recording, so nothing can be said of gradients."
                " Call backward() inside the `with gradtrace.record()` block."
            )
        return self._all(xs)

    # -- finding ---------------------------------------------------------------------------------

    def _all(self, xs: Iterable[object]) -> list[Explanation]:
        explained = [each for x in xs for each in self._each(x)]
        if not explained:
            raise NoMatchError(
                "nothing to look at: no tensors, names, patterns or modules with parameters were"
                ' given. Name at least one, such as "encoder.*".'
            )
        return explained

    def _each(self, x: object) -> list[Explanation]:
        if not isinstance(x, str):
            return [self._explained(found) for found in self._found(x)]
        flow = self._now
        if x in flow.by_name:
            return [_explain.explain(flow, flow.by_name[x])]
        if any(sign in x for sign in "*?["):
            nodes = flow.matching(x)
            if not nodes:
                raise NoMatchError(f"no leaf's name matches {x!r}. {self._known(x)}")
            return [_explain.explain(flow, Spot(node)) for node in nodes]
        return [_explain.explain(flow, self._named(x))]

    def _explained(self, found: Spot | Unmet) -> Explanation:
        if isinstance(found, Unmet):
            return _explain.explain_unmet(
                self._now, found.name, requires_grad=found.requires_grad, leaf=found.leaf
            )
        return _explain.explain(self._now, found)

    def _named(self, name: str) -> Spot:
        try:
            return self._now.by_name[name]
        except KeyError:
            if any(sign in name for sign in "*?["):
                raise UnknownNameError(
                    f"{name!r} is a pattern, and one tensor is asked for. Patterns fit reached()"
                    f" and the assertions; here give a name. {self._known(name)}"
                ) from None
            raise UnknownNameError(
                f"this trace has no tensor named {name!r}. {self._known(name)}"
            ) from None

    def _known(self, name: str) -> str:
        names = list(self._now.by_name)
        return (
            f"{nearest(name, names)}All {len(names)} names are in trace.leaves and trace.ops;"
            " record(names={...}) gives others."
        )

    def _one(self, x: object) -> Spot | Unmet:
        found = self._found(x)
        if len(found) != 1 or hasattr(x, "parameters"):
            raise NotATensorError(
                f"one tensor or its name is needed here, not {type(x).__name__}. For a module use"
                " trace.summary(), or ask for one of its parameters."
            )
        return found[0]

    def _found(self, x: object) -> list[Spot | Unmet]:
        found = None if self._live is None else self._live.find(x)
        if found is not None:
            return found
        if self._live is None and type(x).__module__.split(".")[0] == "torch":
            raise ForeignTensorError(
                f"a trace that was loaded from a file knows no {type(x).__name__} of this process."
                " Give its name instead: all names are in trace.leaves."
            )
        raise NotATensorError(
            f"{type(x).__name__} is neither a tensor nor a name. Give a tensor, a name as in"
            ' trace.leaves, a pattern such as "encoder.*", or a module.'
        )


def _counted(noun: str, things: Sequence[object]) -> str:
    plural = {"leaf": "leaves", "backward pass": "backward passes"}.get(noun, f"{noun}s")
    return f"{len(things)} {noun if len(things) == 1 else plural}"


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace that was saved as .json.

    Raises:
        FileFormatError: The file is no trace, or one that this version can't understand.
        OSError: It can't be opened.
    """
    return Trace(None, _files.load_graph(Path(path)))


for _public in (Trace, load):
    _public.__module__ = "gradtrace"
