"""Trace -> one self-contained page: pictures to click through, tables, explanations.

It opens from the disk and asks the network for nothing. `page.css` and `page.js` lie beside this
file and are put into the page.

# NOTE [ Nothing in a page runs but page.js ]
Names, sources and paths come from the traced program. They reach the page in two ways only: as text
and attributes of SVG elements that ElementTree writes, and as JSON in a script that is data, with
every `<`, `>` and `&` escaped. page.js makes elements with `textContent`. Should any of this fail,
the page's content security policy lets only the one style and the one script run whose hashes it
names, forbids all requests, and refuses text where the browser expects markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any, Final

from gradtrace._errors import LayoutError
from gradtrace._flow import Flow
from gradtrace._records import CutKind, Status
from gradtrace._render.dot import _LEGEND
from gradtrace._render.layout import warn_of_long_work
from gradtrace._render.page_colours import colour_rules
from gradtrace._render.page_facts import page_facts
from gradtrace._render.page_picture import Picture, draw
from gradtrace._render.palette import BOX_SIGNS, CUT_SIGN, SIGNS, THEMES
from gradtrace._render.scene import Kind, Sample, Scene, build_scene
from gradtrace._render.wording import printable

_DETAILS: Final = frozenset({"full", "depth", "limit"})  # of the first picture alone
# What bounds the pictures that nobody asked for.
_DEPTHS: Final = 6
_MOST_BOXES: Final = 250
_MOST_NODES: Final = 600  # of which each has a box
_MOST_TEXT: Final = 1_100_000  # characters, all pictures together
_PATIENCE: Final = 10.0  # seconds for each

_PAGE = """<!DOCTYPE html>
<html lang="en"{theme}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title} – gradtrace</title>
<link rel="icon" href="{icon}">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#side">Skip the picture</a>
<header>
<h1><span class="brand">gradtrace</span> <span id="name">{title}</span></h1>
<p id="counts"></p>
<div class="search" role="search">
<input id="search" type="search" autocomplete="off" spellcheck="false" role="combobox"
 aria-label="Search tensors, ops, modules and source" aria-expanded="false"
 aria-controls="found" aria-autocomplete="list" placeholder="Search  ( / )">
<ul id="found" role="listbox" aria-label="Found" hidden></ul>
</div>
<button id="theme" type="button" aria-pressed="false" title="Dark colours">Dark</button>
</header>
<main>
<section id="picture" aria-label="Picture">
<div id="bar" role="toolbar" aria-label="Picture">
<label id="depths">Detail <select id="depth"></select></label>
<label id="passes">Pass <select id="pass"></select></label>
<span class="gap"></span>
<button id="out" type="button" aria-label="Zoom out" title="Zoom out ( - )">&minus;</button>
<button id="in" type="button" aria-label="Zoom in" title="Zoom in ( + )">+</button>
<button id="fit" type="button" title="Show all of it ( 0 )">Fit</button>
</div>
<div id="stage" tabindex="0" role="group"
 aria-label="Picture. Arrow keys move it, plus and minus zoom, 0 shows all of it.">
{pictures}
</div>
<div id="foot"><details id="key" open><summary>Legend</summary><ul id="legend"></ul></details>
<ul id="notes"></ul></div>
</section>
<aside id="side" aria-label="Details and lists" tabindex="-1">
<section id="details" aria-labelledby="details-title" hidden></section>
<section id="lists" aria-label="Lists">
<div id="tabs" role="tablist" aria-label="Lists"></div>
<div id="panels"></div>
</section>
<footer id="about"></footer>
</aside>
</main>
<p id="said" role="status" aria-live="polite"></p>
<noscript><p class="noscript">The picture stands above; the lists and details need JavaScript.</p>
</noscript>
<script type="application/json" id="facts">{facts}</script>
<script>{script}</script>
</body>
</html>
"""
_POLICY = (
    "default-src 'none'; style-src '{style}'; script-src '{script}'; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def page(
    flow: Flow,
    title: str,
    *,
    timeout: float | None,
    coarse_limit: int,
    theme: str | None = None,
    direction: str = "TB",
    **options: Any,
) -> bytes:
    """Return a trace as a page.

    Args:
        flow: Of the whole graph.
        title: What the page calls the trace.
        timeout: Seconds that the layout program may take for the first picture; then a coarser
            one takes its place. None for any time.
        coarse_limit: Boxes of that one.
        theme: "light" or "dark"; None for what the system prefers.
        direction: As for `dot.scene_to_dot`.
        **options: Of `scene.build_scene`: `full`, `depth` and `limit` for the first picture, the
            others for all of them.

    Raises:
        LayoutError: The layout program is missing, failed, or took too long even so.
        UnknownNameError: `only` names nothing in this graph.
    """
    artist = _Artist(flow, options, direction, timeout, coarse_limit)
    pictures = artist.pictures()
    style = f"{colour_rules(artist.colours)}{_part('page.css')}"
    script = _part("page.js")
    facts = {"looks": _looks(direction), **page_facts(flow, pictures)}
    text = _PAGE.format(
        policy=_POLICY.format(style=_digest(style), script=_digest(script)),
        title=escape(printable(title)),
        theme=f' data-theme="{theme}"' if theme else "",
        icon=_icon(),
        style=style,
        pictures="\n".join(picture.svg for picture in pictures),
        facts=_data(facts),
        script=script,
    )
    return text.encode()


@cache
def _part(name: str) -> str:
    """Return one of the files beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _data(facts: Mapping[str, Any]) -> str:
    """Return JSON that no reader of HTML takes for anything else; json escapes U+2028 itself."""
    text = json.dumps(facts, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _icon() -> str:
    """Return a small picture for the browser's tab: an arrow that was cut."""
    theme = THEMES["light"]
    ink, cut = theme.ink[1:], theme.cut_ink[1:]
    return (
        "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath"
        f" d='M8 1v5M8 10v5' stroke='%23{ink}' stroke-width='2.5'/%3E%3Cpath d='M3 10l4-4M9 10l4-4'"
        f" stroke='%23{cut}' stroke-width='2'/%3E%3C/svg%3E"
    )


# -- pictures --------------------------------------------------------------------------------------


class _Artist:
    """Draws one trace in several ways."""

    def __init__(
        self,
        flow: Flow,
        asked: Mapping[str, Any],
        direction: str,
        timeout: float | None,
        coarse_limit: int,
    ) -> None:
        self._flow = flow
        self._asked = asked
        self._part = {key: value for key, value in asked.items() if key not in _DETAILS}
        self._direction = direction
        self._timeout = timeout
        self._coarse_limit = coarse_limit
        self._seen: set[object] = set()
        self.colours: set[str] = set()

    def pictures(self) -> list[Picture]:
        """Return the picture that was asked for, then those that differ from it, coarse to fine."""
        first = self._first()
        others: list[Picture] = []
        for rank, label, options in self._others():
            scene = self._scene(options)
            most = _MOST_NODES if options.get("full") else _MOST_BOXES
            if len(scene.boxes) <= most and self._is_new(scene):
                room = _MOST_TEXT - sum(len(picture.svg) for picture in (first, *others))
                others += self._tried(scene, f"p{rank}", label, room)
        return [first, *sorted(others, key=lambda picture: len(picture.scene.boxes))]

    def _first(self) -> Picture:
        scene = self._scene(self._asked)
        self._is_new(scene)
        warn_of_long_work(len(scene.boxes), len(scene.arrows))
        try:
            return self._drawn(scene, "p0", self._label(), self._timeout)
        except TimeoutError as error:
            note = f"Drawn coarser than asked: for the finer picture {error}."
        scene = self._scene({**self._part, "limit": self._coarse_limit, "notes": (note,)})
        try:
            return self._drawn(scene, "p0", "Coarse", self._timeout)
        except TimeoutError as error:
            raise LayoutError(
                f"{error} to lay out even a coarse picture of these {len(self._flow.nodes):,}"
                " nodes. Draw one tensor's story (only=), allow more time (timeout=), or export"
                " to .json."
            ) from None

    def _label(self) -> str:
        if self._asked.get("full"):
            return _EVERYTHING
        depth = self._asked.get("depth")
        return "Automatic" if depth is None else _levels(depth)

    def _others(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield other ways to draw, the most useful first: number, label, options."""
        deepest = max((len(facts["module"].split(".")) for facts in self._modules()), default=0)
        if self._label() != "Automatic":
            limit = {"limit": self._asked["limit"]} if "limit" in self._asked else {}
            yield 1, "Automatic", {**self._part, **limit}
        if len(self._flow.nodes) <= _MOST_NODES:
            yield 2, _EVERYTHING, {**self._part, "full": True}
        for depth in range(1, min(deepest, _DEPTHS) + 1):
            options = {**self._part, "depth": depth, "limit": _MOST_BOXES}
            yield 2 + depth, _levels(depth), options

    def _modules(self) -> Iterator[Mapping[str, Any]]:
        return (facts for facts in self._flow.nodes.values() if facts["module"])

    def _scene(self, options: Mapping[str, Any]) -> Scene:
        return build_scene(self._flow.graph, self._flow, **options)

    def _is_new(self, scene: Scene) -> bool:
        """Whether no picture before had the same boxes; then this one is remembered."""
        boxes = frozenset(box.nodes for box in scene.boxes)
        new = boxes not in self._seen
        self._seen.add(boxes)
        return new

    def _tried(self, scene: Scene, key: str, label: str, room: int) -> Iterator[Picture]:
        """Yield a picture that was not asked for, unless it takes too much time or room."""
        try:
            picture = self._drawn(scene, key, label, min(self._timeout or _PATIENCE, _PATIENCE))
        except TimeoutError:
            return
        if len(picture.svg) <= room:
            yield picture

    def _drawn(self, scene: Scene, key: str, label: str, timeout: float | None) -> Picture:
        graph, direction = self._flow.graph, self._direction
        picture, colours = draw(graph, scene, key, label, direction=direction, timeout=timeout)
        self.colours |= colours
        return picture


_EVERYTHING: Final = "Every op"


def _levels(depth: int) -> str:
    return f"{depth} level of modules" if depth == 1 else f"{depth} levels of modules"


# -- looks -----------------------------------------------------------------------------------------


def _looks(direction: str) -> dict[str, Any]:
    """Return signs and words that the script takes from the tables of the other formats."""
    return {
        "direction": direction,
        "signs": {str(status): SIGNS[status] for status in Status},
        "words": {str(status): status.replace("_", " ") for status in Status},
        "cut": CUT_SIGN,
        "escape": BOX_SIGNS[Kind.ESCAPE],
        "legend": {str(sample): _LEGEND[sample] for sample in Sample},
        "kinds": {str(kind): kind.replace("_", " ").strip() for kind in CutKind},
    }
