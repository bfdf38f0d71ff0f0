"""Trace: what users hold. Each method is a line or two that calls a module above."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import networkx as nx

from gradtrace import (
    _assertions,
    _diff,
    _explain,
    _files,
    _golden,
    _hazards,
    _render,
    _settings,
    _terms,
)
from gradtrace._diff import TraceDiff
from gradtrace._errors import (
    ExportError,
    ForeignTensorError,
    NoMatchError,
    NotATensorError,
    NotATraceError,
    UnknownNameError,
    nearest,
)
from gradtrace._explain import Explanation
from gradtrace._flow import Flow, Spot
from gradtrace._records import BackwardPass, Cut, CutKind, Gradient, Hazard, Leaf, Op, Status, Term

_FEW = 8  # leaves that a message can name


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

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """Lines that likely do not do what they look like.

        In-place writes to memory that a backward pass still needed (through `.data` torch does not
        notice, and the gradients are wrong; otherwise it raises), and calls whose result was
        dropped, such as `x.detach()` on a line of its own.
        """
        return _hazards.hazards(self._now)

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
        explained = self._all(xs)
        if _settings.keep_answers:
            asked = sys._getframe(1)
            text = _assertions.answer_text(explained)
            answer = _settings.Answer(asked.f_code.co_filename, asked.f_lineno, text)
            _settings.latest_answer[:] = [answer]
        return all(map(_assertions.arrived, explained))

    def trained_by(self, pass_or_root: object = None) -> tuple[Leaf, ...]:
        """Return the leaves at which gradients of one backward pass arrived.

        Args:
            pass_or_root: A `BackwardPass` or its index; or the root that it started from, as a
                tensor or by its name. May be left out where there was one pass.

        Raises:
            UnknownNameError: No such pass, or none that started there.
        """
        reached = [_terms.reached_by(self._now, done.index) for done in self._passes(pass_or_root)]
        return tuple({leaf.node: leaf for leaves in reached for leaf in leaves}.values())

    def passes_reaching(self, x: object) -> tuple[BackwardPass, ...]:
        """Return the backward passes that brought a leaf a gradient: the reverse of `trained_by`.

        Args:
            x: A tensor or a name.
        """
        indices = {gradient.backward_pass for gradient in self.explain(x).gradients}
        return tuple(done for done in self.backward_passes if done.index in indices)

    def terms(self, pass_or_root: object = None) -> tuple[Term, ...]:
        """Return the terms that the root of a backward pass adds up, and what each one reached.

        Args:
            pass_or_root: As for `trained_by`.

        A loss such as `reconstruction + beta * kl` has two; a root that is no sum of scalars is a
        term itself.
        """
        (done, *_) = self._passes(pass_or_root)
        return _terms.terms_of(self._now, done.index)

    def diff(self, other: Trace) -> TraceDiff:
        """Compare with a later trace: what became of the flow of gradients.

        Args:
            other: Another trace, of this process or loaded from a file; of another run, machine or
                version of torch.

        Returns:
            What changed; false, and its text says so, where the flow of gradients is the same.
        """
        if not isinstance(other, Trace):
            raise NotATraceError(
                f"a trace can be compared with a trace, not with a {type(other).__name__}."
                " gradtrace.load(path) reads one from a file."
            )
        return _diff.diff(self._now, other._now)

    def paths(self, x: object, *, limit: int = 100) -> tuple[tuple[int, ...], ...]:
        """Return ways from a tensor to a root, reached or not, as nodes of `graph`.

        Args:
            x: A tensor or a name.
            limit: The most ways to return: their number can grow exponentially with the graph.
        """
        found = self._named(x) if isinstance(x, str) else self._one(x)
        return () if isinstance(found, Unmet) else tuple(self._now.paths(found, limit))

    def summary(self) -> str:
        """Return one screen of text: counts, passes, leaves, cuts, terms of losses, hazards."""
        terms = {done.index: self.terms(done) for done in self.backward_passes}
        sums = {index: several for index, several in terms.items() if len(several) > 1}
        return _render.summary(self.graph, self._now, self.hazards, sums)

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
            path: .json and .graphml hold the graph; .dot, .svg, .png and .pdf draw it; .html is a
                page with pictures and lists to click through.
            **options: For pictures, all of them also for `to_dot` but for `timeout`.
                `depth=2` opens modules so far, `limit=200` allows more boxes, `full=True` draws
                every node. `only="name"` draws one leaf's ways to the roots, `passes=[1]` as if
                only these backward passes had run, `gradient_graph_only=True` leaves out what no
                gradient can come to. `direction="LR"` turns it, `theme="dark"` and
                `transparent=True` change its looks. `timeout=30` ends the layout after so many
                seconds and draws less; without it, a minute, and no limit with `full`. For pages
                they choose the first picture; pages take neither `passes`, between which they
                switch themselves, nor `transparent`, and without `theme` follow the system.

        Warns:
            LongWorkWarning: What was asked for takes long to lay out.

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
        if suffix == ".html":
            return _render.render_page(self._now, target.stem, **options)
        if suffix not in _render.SUFFIXES:
            known = ", ".join([*_render.SUFFIXES, ".html", *writers])
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

    def assert_only_cuts(self, allowed: Iterable[str | tuple[str, ...]]) -> None:
        """Fail if any cut but these stops a gradient.

        Args:
            allowed: What a cut may be: a kind ("detach"), a place ("train.py:42", "train.py"), a
                piece of the expression's text, or a tuple of these, all of which must fit:
                `("no_grad", "teacher(x)")`. One that no cut fits fails as well: it hides nothing,
                or is misspelt.
        """
        self._check_backward()
        _assertions.assert_only_cuts(self.cuts, [*allowed])

    def assert_all_reached(self, *xs: object, but: Iterable[str] = ()) -> None:
        """Fail, and explain, unless a gradient arrived at everything that requires one.

        Args:
            *xs: As for `reached`; without any, all leaves of the trace. What is frozen is left out.
            but: Names and patterns of leaves that need not be reached.

        Raises:
            NoMatchError: Nothing is left to look at, or something in `but` matches no leaf.
        """
        self._check_backward()
        exempt = {node for pattern in but for node in self._exempt(pattern)}
        given = self._all(xs) if xs else [self.explain(leaf.name) for leaf in self.leaves]
        asked = [e for e in given if e.status is not Status.FROZEN and e.node not in exempt]
        if not asked:
            raise NoMatchError(
                "nothing is left that should be reached: all of it is frozen, or named in `but`."
            )
        _assertions.assert_reached(asked)

    def assert_gradient(
        self, *xs: object, norm: object = None, backward_pass: int | None = None
    ) -> None:
        """Fail, and explain, unless each of these got a gradient of this size.

        Args:
            *xs: As for `reached`.
            norm: The Euclidean norm that every arriving gradient should have: a number, up to
                rounding; a pair (low, high) of bounds, either of them None for no bound; or
                anything that compares equal, such as `pytest.approx(3, rel=0.1)`. None asks for a
                finite gradient that is not zero everywhere.
            backward_pass: Look at one pass only, by its index.
        """
        _assertions.assert_gradient(self._with_backward(xs), norm, backward_pass)

    def assert_matches(self, path: str | os.PathLike[str], *, update: bool | None = None) -> None:
        """Fail, and say what changed, unless the flow of gradients is the stored one.

        Args:
            path: A small file for review: one fact a line, with neither lines of source nor norms.
                Under pytest it is looked for from pytest's root folder.
            update: Write the file in place of comparing. None: as `--gradtrace-update` says.

        Raises:
            AssertionError: The flow differs, or there is no file yet.
            FileFormatError: The file is no golden flow.
        """
        self._check_backward()
        write = _settings.update_golden if update is None else update
        _golden.assert_matches(self._now, _settings.folder / path, update=write)

    def _with_backward(self, xs: tuple[object, ...]) -> list[Explanation]:
        self._check_backward()
        return self._all(xs)

    def _check_backward(self) -> None:
        if not self._now.passes:
            raise AssertionError(
                "no backward pass was started while recording, so nothing can be said of gradients."
                " Call backward() inside the `with gradtrace.record()` block."
            )

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

    def _exempt(self, pattern: str) -> tuple[int, ...]:
        nodes = self._now.matching(pattern)
        if not nodes:
            raise NoMatchError(
                f"no leaf's name matches {pattern!r} in `but`. {self._known(pattern)}"
            )
        return nodes

    def _passes(self, pass_or_root: object) -> list[BackwardPass]:
        """Return the passes that are meant; at least one."""
        passes = self.backward_passes
        if pass_or_root is None and len(passes) == 1:
            return [*passes]
        found = [done for done in passes if self._is_meant(done, pass_or_root)]
        if not found:
            known = "; ".join(f"{done.index}: from {', '.join(done.roots)}" for done in passes)
            raise UnknownNameError(
                f"{pass_or_root!r} names none of the {len(passes)} backward passes"
                f" ({known or 'none was recorded'}). Give an index, a BackwardPass, or a root."
            )
        return found

    def _is_meant(self, done: BackwardPass, pass_or_root: object) -> bool:
        if isinstance(pass_or_root, BackwardPass):
            return done == pass_or_root
        if isinstance(pass_or_root, int):
            return done.index == pass_or_root
        if isinstance(pass_or_root, str):
            return pass_or_root in done.roots
        if pass_or_root is None:
            return False
        spot = self._one(pass_or_root)
        return isinstance(spot, Spot) and self._now.starts(done.index, spot)

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
        leaves = [leaf.name for leaf in self.leaves]
        few = len(leaves) <= _FEW
        listed = f"The leaves are {', '.join(map(repr, leaves))}. " if few and leaves else ""
        return (
            f"{nearest(name, names) or listed}All {len(names)} names are in trace.leaves and"
            " trace.ops; record(names={...}) gives others."
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
