"""Graph -> pictures and text: the table from suffix to renderer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, TypedDict, Unpack

import networkx as nx

from gradtrace._errors import ExportError, LayoutError, nearest
from gradtrace._flow import Flow
from gradtrace._render.dot import scene_to_dot
from gradtrace._render.html import page
from gradtrace._render.layout import TIMEOUT, lay_out
from gradtrace._render.scene import build_scene
from gradtrace._render.selection import Analysis
from gradtrace._render.text import summary

__all__ = ["SUFFIXES", "Analysis", "Options", "render", "render_page", "summary", "to_dot"]

_COARSE_LIMIT: Final = 40  # boxes that any layout program arranges in a second


class Options(TypedDict, total=False):
    """What can be asked of a picture; `scene.build_scene` says more.

    Attributes:
        full: Draw every node in a box of its own.
        depth: Levels of modules to draw open.
        focus: Name of a tensor: draw only what its data flows into.
        limit: Number of boxes above which modules collapse and repeats fold.
    """

    full: bool
    depth: int | None
    focus: str | None
    limit: int


def to_dot(graph: nx.MultiDiGraph, analysis: Analysis, /, **options: Unpack[Options]) -> str:
    """Return the picture of a graph in the DOT language.

    Raises:
        ExportError: There is no such option, or it is none of the values that it can be.
        UnknownNameError: `focus` names nothing in this graph.
    """
    _check(options, Options.__annotations__)
    return scene_to_dot(build_scene(graph, analysis, **options))


def render(
    graph: nx.MultiDiGraph,
    analysis: Analysis,
    suffix: str,
    /,
    *,
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> bytes:
    """Return the picture of a graph as the content of a file.

    Args:
        graph: The whole graph.
        analysis: Of the same graph.
        suffix: One of `SUFFIXES`, such as ".svg".
        timeout: Seconds that the layout program may take; then a coarser picture is tried.
        **options: What to draw.

    Raises:
        ExportError: There is no such suffix or option, or this machine cannot write it.
        LayoutError: The layout program is missing, failed, or took too long even so.
        UnknownNameError: `focus` names nothing in this graph.
    """
    if suffix not in _RENDERERS:
        raise ExportError(
            f"no picture has the suffix {suffix!r}. Pictures are {', '.join(SUFFIXES)}; choose "
            "one of these as the end of the file's name."
        )
    _check({**options, "timeout": timeout}, _VALUES)
    return _RENDERERS[suffix](graph, analysis, timeout, options)


def render_page(flow: Flow, title: str, /, **options: Any) -> bytes:
    """Return a trace as one self-contained page, see `html.page`.

    Args:
        flow: Of the whole graph.
        title: What the page calls the trace.
        **options: As for `render`: what to draw first, and `timeout`.

    Raises:
        ExportError: There is no such option, or it is none of the values that it can be.
        LayoutError: The layout program is missing, failed, or took too long.
        UnknownNameError: `focus` names nothing in this graph.
    """
    _check(options, _VALUES)
    return page(flow, title, coarse_limit=_COARSE_LIMIT, **{"timeout": TIMEOUT, **options})


def _check(options: Mapping[str, Any], known: Collection[str]) -> None:
    names = ", ".join(known)
    for name, value in options.items():
        if name not in known:
            raise ExportError(
                f"a picture has no option {name!r} (given: {name}={value!r}). "
                f"{nearest(name, known)}The options are {names}; give one of these, or none."
            )
        fits, wanted = _VALUES[name]
        if not fits(value):
            raise ExportError(
                f"{name}={value!r} was given for a picture. {name} is {wanted}; give that, or "
                f"leave it out. The options are {names}."
            )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


_VALUES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "full": (lambda value: isinstance(value, bool), "True or False"),
    "depth": (lambda value: value is None or _is_whole(value, 0), "None or a number of levels"),
    "focus": (lambda value: value is None or isinstance(value, str), "None or a tensor's name"),
    "limit": (lambda value: _is_whole(value, 1), "a number of boxes, 1 or more"),
    "timeout": (_is_seconds, "a number of seconds above 0"),
}


def _write(graph: nx.MultiDiGraph, analysis: Analysis, _: float, options: Options) -> bytes:
    return to_dot(graph, analysis, **options).encode()


def _draw(
    form: str, graph: nx.MultiDiGraph, analysis: Analysis, timeout: float, options: Options
) -> bytes:
    """Return the picture as asked, or where that takes too long a coarser one that says so."""
    try:
        return lay_out(to_dot(graph, analysis, **options), form, timeout=timeout)
    except TimeoutError as error:
        coarse = _coarser(graph, analysis, options, because=str(error))
    try:
        return lay_out(coarse, form, timeout=timeout)
    except TimeoutError as error:
        raise LayoutError(
            f"{error} to lay out even a coarse picture of these {len(graph):,} nodes. Draw one "
            "tensor's story (focus=), allow more time (timeout=), or export to .dot or .json."
        ) from None


def _coarser(graph: nx.MultiDiGraph, analysis: Analysis, options: Options, *, because: str) -> str:
    note = f"Drawn coarser than asked: for the finer picture {because}."
    focus = options.get("focus")
    scene = build_scene(graph, analysis, focus=focus, limit=_COARSE_LIMIT, notes=(note,))
    return scene_to_dot(scene)


_RENDERERS: Final[Mapping[str, Callable[[nx.MultiDiGraph, Analysis, float, Options], bytes]]] = {
    ".dot": _write,
    ".svg": partial(_draw, "svg"),
    ".png": partial(_draw, "png"),
    ".pdf": partial(_draw, "pdf"),
}
SUFFIXES: Final = tuple(_RENDERERS)
