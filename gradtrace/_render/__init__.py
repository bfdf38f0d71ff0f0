"""Graph -> pictures and text: the table from suffix to renderer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypedDict, Unpack, cast

import networkx as nx

from gradtrace._errors import ExportError, LayoutError, nearest
from gradtrace._flow import Flow
from gradtrace._render.dot import DIRECTIONS, scene_to_dot
from gradtrace._render.html import page
from gradtrace._render.layout import TIMEOUT, lay_out, warn_of_long_work
from gradtrace._render.palette import THEMES
from gradtrace._render.passes import of_passes
from gradtrace._render.scene import LIMIT, Scene, build_scene
from gradtrace._render.selection import Analysis
from gradtrace._render.text import summary
from gradtrace._render.wording import passes_phrase

__all__ = ["SUFFIXES", "Analysis", "Options", "render", "render_page", "summary", "to_dot"]

_COARSE_LIMIT: Final = 40  # boxes that any layout program arranges in a second
_LIMITS: Final = (LIMIT, 60, 40, 25)
_DETAILS: Final = frozenset({"full", "depth", "limit"})
_LOOKS: Final = frozenset({"direction", "theme", "transparent"})


class Options(TypedDict, total=False):
    """What can be asked of a picture; `scene.build_scene` and `dot.scene_to_dot` say more.

    Attributes:
        full: Draw every node in a box of its own.
        depth: Levels of modules to draw open.
        only: Name of a tensor: draw only its ways to the roots.
        passes: Draw as if only these backward passes had run.
        gradient_graph_only: Leave out what no gradient can come to.
        limit: Number of boxes above which modules collapse and repeats fold.
        direction: "TB" or "LR".
        theme: "light" or "dark".
        transparent: Leave the background out.
    """

    full: bool
    depth: int | None
    only: str | None
    passes: Sequence[int] | None
    gradient_graph_only: bool
    limit: int
    direction: str
    theme: str
    transparent: bool


def to_dot(graph: nx.MultiDiGraph, analysis: Analysis, /, **options: Unpack[Options]) -> str:
    """Return the picture of a graph in the DOT language.

    Raises:
        ExportError: There is no such option, or it is none of the values that it can be.
        UnknownNameError: `only` names nothing in this graph.
    """
    _check(options, Options.__annotations__)
    return _written(_scene(graph, analysis, options), options)


def _scene(
    graph: nx.MultiDiGraph, analysis: Analysis, options: Options, *, notes: Sequence[str] = ()
) -> Scene:
    asked: dict[str, Any] = {key: value for key, value in options.items() if key not in _LOOKS}
    passes = asked.pop("passes", None)
    if passes is not None:
        total = len(analysis.passes)
        graph = of_passes(graph, passes)
        analysis = Flow.of(graph)
        ran = passes_phrase([done.index for done in analysis.passes], total)
        notes = (*notes, f"Drawn as if only {ran} of {total} had run.")
    return build_scene(graph, analysis, notes=notes, **asked)


def _written(scene: Scene, options: Options) -> str:
    looks: dict[str, Any] = {key: value for key, value in options.items() if key in _LOOKS}
    return scene_to_dot(scene, **looks)


def render(
    graph: nx.MultiDiGraph,
    analysis: Analysis,
    suffix: str,
    /,
    *,
    timeout: float | None = None,
    **options: Unpack[Options],
) -> bytes:
    """Return the picture of a graph as the content of a file.

    Args:
        graph: The whole graph.
        analysis: Of the same graph.
        suffix: One of `SUFFIXES`, such as ".svg".
        timeout: Seconds that the layout program may take; then a coarser picture is tried. None
            for a minute, and for any time where `full` asks for all.
        **options: What to draw.

    Raises:
        ExportError: There is no such suffix or option, or this machine cannot write it.
        LayoutError: The layout program is missing, failed, or took too long even so.
        UnknownNameError: `only` names nothing in this graph.
    """
    if suffix not in _RENDERERS:
        raise ExportError(
            f"no picture has the suffix {suffix!r}. Pictures are {', '.join(SUFFIXES)}; choose "
            "one of these as the end of the file's name."
        )
    _check({**options, "timeout": timeout}, _VALUES)
    patience = None if options.get("full") else TIMEOUT
    return _RENDERERS[suffix](graph, analysis, timeout or patience, options)


def render_page(
    flow: Flow, title: str, /, *, timeout: float | None = None, **options: Any
) -> bytes:
    """Return a trace as one self-contained page, see `html.page`.

    Args:
        flow: Of the whole graph.
        title: What the page calls the trace.
        timeout: As for `render`.
        **options: As for `render`, but for those of `_NOT_OF_PAGES`: what to draw first.

    Raises:
        ExportError: There is no such option, or it is none of the values that it can be.
        LayoutError: The layout program is missing, failed, or took too long.
        UnknownNameError: `only` names nothing in this graph.
    """
    _check({**options, "timeout": timeout}, _VALUES)
    for name, why in _NOT_OF_PAGES.items():
        if given := options.pop(name, None):
            raise ExportError(
                f"{name}={given!r} was given for a page, and {why}. Leave it out, or export a "
                f"picture: {', '.join(SUFFIXES)}."
            )
    patience = None if options.get("full") else TIMEOUT
    return page(flow, title, coarse_limit=_COARSE_LIMIT, timeout=timeout or patience, **options)


_NOT_OF_PAGES: Final[Mapping[str, str]] = {
    "passes": "a page holds all passes, with a switch for one at a time",
    "transparent": "a page has a background of its own",
}


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


def _is_passes(value: object) -> bool:
    whole = isinstance(value, list | tuple | range | set | frozenset) and len(value) > 0
    return whole and all(_is_whole(index, 0) for index in value)  # type: ignore[attr-defined]


def _is_seconds(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_one_of(known: Collection[str]) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: isinstance(value, str) and value in known,
        " or ".join(map(repr, known)),
    )


_VALUES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "full": (lambda value: isinstance(value, bool), "True or False"),
    "depth": (lambda value: value is None or _is_whole(value, 0), "None or a number of levels"),
    "only": (lambda value: value is None or isinstance(value, str), "None or a tensor's name"),
    "passes": (
        lambda value: value is None or _is_passes(value),
        "None or a list of backward passes' numbers, such as [0]",
    ),
    "gradient_graph_only": (lambda value: isinstance(value, bool), "True or False"),
    "limit": (lambda value: _is_whole(value, 1), "a number of boxes, 1 or more"),
    "direction": _is_one_of(DIRECTIONS),
    "theme": _is_one_of(THEMES),
    "transparent": (lambda value: isinstance(value, bool), "True or False"),
    "timeout": (_is_seconds, "None or a number of seconds above 0"),
}


def _write(graph: nx.MultiDiGraph, analysis: Analysis, _: float | None, options: Options) -> bytes:
    return to_dot(graph, analysis, **options).encode()


def _draw(
    form: str, graph: nx.MultiDiGraph, analysis: Analysis, timeout: float | None, options: Options
) -> bytes:
    """Return the picture as asked, or where that takes too long a coarser one that says so."""
    note = ""
    for attempt, last in _attempts(options):
        scene = _scene(graph, analysis, attempt)
        warn_of_long_work(len(scene.boxes), len(scene.arrows))
        try:
            return _laid_out(scene, form, timeout, options, any_size=last)
        except OverflowError:
            continue
        except TimeoutError as error:
            note = f"Drawn coarser than asked: for the finer picture {error}."
            break
    scene = _scene(graph, analysis, _coarse(options), notes=(note,))
    try:
        return _laid_out(scene, form, timeout, options)
    except TimeoutError as error:
        raise LayoutError(
            f"{error} to lay out even a coarse picture of these {len(graph):,} nodes. Draw one "
            "tensor's story (only=), allow more time (timeout=), or export to .dot or .json."
        ) from None


def _laid_out(
    scene: Scene, form: str, timeout: float | None, options: Options, *, any_size: bool = True
) -> bytes:
    text, boxes = _written(scene, options), len(scene.boxes)
    return lay_out(text, form, boxes=boxes, timeout=timeout, any_size=any_size)


def _attempts(options: Options) -> Iterator[tuple[Options, bool]]:
    """Yield what to try until the picture can be read in 4,000 pixels, and whether it is the last.

    Whoever asks for a detail gets it in any size.
    """
    if options.get("full") or options.get("depth") is not None or "limit" in options:
        yield options, True
        return
    for limit in _LIMITS:
        yield {**options, "limit": limit}, limit == _LIMITS[-1]


def _coarse(options: Options) -> Options:
    kept = {key: value for key, value in options.items() if key not in _DETAILS}
    return cast("Options", {**kept, "limit": _COARSE_LIMIT})


Renderer = Callable[[nx.MultiDiGraph, Analysis, float | None, Options], bytes]
_RENDERERS: Final[Mapping[str, Renderer]] = {
    ".dot": _write,
    ".svg": partial(_draw, "svg"),
    ".png": partial(_draw, "png"),
    ".pdf": partial(_draw, "pdf"),
}
SUFFIXES: Final = tuple(_RENDERERS)
