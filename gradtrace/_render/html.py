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
from gradtrace._render import dot
from gradtrace._render.page_facts import page_facts
from gradtrace._render.page_picture import Picture, draw
from gradtrace._render.scene import Kind, Sample, Scene, build_scene
from gradtrace._render.wording import printable

# What bounds the pictures that nobody asked for.
_DEPTHS: Final = 6
_MOST_BOXES: Final = 250
_MOST_NODES: Final = 600  # of which each has a box
_MOST_TEXT: Final = 1_100_000  # characters, all pictures together
_PATIENCE: Final = 10.0  # seconds for each

_PAGE = """<!DOCTYPE html>
<html lang="en">
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
    timeout: float,
    coarse_limit: int,
    full: bool = False,
    depth: int | None = None,
    focus: str | None = None,
    **options: Any,
) -> bytes:
    """Return a trace as a page.

    Args:
        flow: Of the whole graph.
        title: What the page calls the trace.
        timeout: Seconds that the layout program may take for the first picture; then a coarser
            one takes its place.
        coarse_limit: Boxes of that one.
        full: Show the picture of every node first.
        depth: Show the picture with so many levels of modules first.
        focus: Name of a tensor: draw only what its data flows into.
        **options: More of `scene.build_scene`.

    Raises:
        LayoutError: The layout program is missing, failed, or took too long even so.
        UnknownNameError: `focus` names nothing in this graph.
    """
    asked = {"full": full, "depth": depth, "focus": focus, **options}
    artist = _Artist(flow, asked, timeout, coarse_limit)
    pictures = artist.pictures()
    style = f"{_colours(artist.colours)}{_part('page.css')}"
    script = _part("page.js")
    facts = {"looks": _looks(), **page_facts(flow, pictures)}
    text = _PAGE.format(
        policy=_POLICY.format(style=_digest(style), script=_digest(script)),
        title=escape(printable(title)),
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
    ink, cut = _REACHED_INK[1:], dot._CUT_INK[1:]
    return (
        "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath"
        f" d='M8 1v5M8 10v5' stroke='%23{ink}' stroke-width='2.5'/%3E%3Cpath d='M3 10l4-4M9 10l4-4'"
        f" stroke='%23{cut}' stroke-width='2'/%3E%3C/svg%3E"
    )


# -- pictures --------------------------------------------------------------------------------------


class _Artist:
    """Draws one trace in several ways."""

    def __init__(
        self, flow: Flow, asked: Mapping[str, Any], timeout: float, coarse_limit: int
    ) -> None:
        self._flow = flow
        self._asked = asked
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
        try:
            return self._drawn(scene, "p0", self._label(), self._timeout)
        except TimeoutError as error:
            note = f"Drawn coarser than asked: for the finer picture {error}."
        focus = self._asked["focus"]
        scene = self._scene({"focus": focus, "limit": self._coarse_limit, "notes": (note,)})
        try:
            return self._drawn(scene, "p0", "Coarse", self._timeout)
        except TimeoutError as error:
            raise LayoutError(
                f"{error} to lay out even a coarse picture of these {len(self._flow.nodes):,}"
                " nodes. Draw one tensor's story (focus=), allow more time (timeout=), or export"
                " to .json."
            ) from None

    def _label(self) -> str:
        if self._asked["full"]:
            return _EVERYTHING
        return "Automatic" if self._asked["depth"] is None else _levels(self._asked["depth"])

    def _others(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield other ways to draw, the most useful first: number, label, options."""
        story = {name: self._asked[name] for name in ("focus", "limit") if self._asked.get(name)}
        deepest = max((len(facts["module"].split(".")) for facts in self._modules()), default=0)
        if self._asked["full"] or self._asked["depth"] is not None:
            yield 1, "Automatic", story
        if len(self._flow.nodes) <= _MOST_NODES:
            yield 2, _EVERYTHING, {**story, "full": True}
        for depth in range(1, min(deepest, _DEPTHS) + 1):
            options = {**story, "depth": depth, "limit": _MOST_BOXES}
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
            picture = self._drawn(scene, key, label, min(self._timeout, _PATIENCE))
        except TimeoutError:
            return
        if len(picture.svg) <= room:
            yield picture

    def _drawn(self, scene: Scene, key: str, label: str, timeout: float) -> Picture:
        picture, colours = draw(self._flow.graph, scene, key, label, timeout=timeout)
        self.colours |= colours
        return picture


_EVERYTHING: Final = "Every op"


def _levels(depth: int) -> str:
    return f"{depth} level of modules" if depth == 1 else f"{depth} levels of modules"


# -- looks -----------------------------------------------------------------------------------------

_REACHED_INK: Final = dot._REACHED


def _looks() -> dict[str, Any]:
    """Return signs and words that the script takes from the tables of the other formats."""
    return {
        "signs": {str(status): dot._SIGNS[status] for status in Status},
        "words": {str(status): status.replace("_", " ") for status in Status},
        "cut": dot._CUT_SIGN,
        "escape": dot._BOX_SIGNS[Kind.ESCAPE],
        "legend": {str(sample): dot._LEGEND[sample] for sample in Sample},
        "kinds": {str(kind): kind.replace("_", " ").strip() for kind in CutKind},
    }


def _colours(drawn: set[str]) -> str:
    """Return the palette as a style sheet: what stands light by day stands dark by night."""
    named = _named_colours()
    shades = {f"c-{colour[1:]}": colour for colour in sorted(drawn)} | named
    light = "".join(f"--{name}:{colour};" for name, colour in shades.items())
    dark = "".join(f"--{name}:{_dark(colour)};" for name, colour in shades.items())
    rules = "".join(
        f".f-{colour[1:]}{{fill:var(--c-{colour[1:]})}}.s-{colour[1:]}{{stroke:var(--c-{colour[1:]})}}"
        for colour in sorted(drawn)
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}{rules}{_strokes()}"
    )


def _named_colours() -> dict[str, str]:
    """Return the colours of the page itself, all from the tables of `dot.py`."""
    looks = {"op": dot._LOOKS[Kind.OP], "leaf": dot._LOOKS[Kind.LEAF], "root": dot._ROOT}
    looks |= {str(kind): dot._LOOKS[kind] for kind in Kind}
    looks |= {f"is-{status}": dot._LEAVES.get(status, dot._LOOKS[Kind.LEAF]) for status in Status}
    named: dict[str, str] = {}
    for name, look in looks.items():
        named |= {f"{name}-fill": look.fill, f"{name}-ink": look.ink}
        named |= {f"{name}-grey": look.grey, f"{name}-line": look.line}
    for sample, stroke in dot._STROKES.items():
        named[f"stroke-{sample.replace(' ', '-')}"] = stroke.colour
    return named | {
        "paper": dot._GRAPH["bgcolor"],
        "panel": dot._FRAME_FILL,
        "rule": dot._FRAME_LINE,
        "grey": dot._PAPER_GREY,
        "ink": dot._REACHED,
        "cut-text": dot._CUT_INK,
    }


def _strokes() -> str:
    """Return how arrows are drawn, by class, so that the script can change them."""
    rules = ""
    for sample, stroke in dot._STROKES.items():
        name = sample.replace(" ", "-")
        dashes = "5 3" if stroke.dashed else "none"
        rules += (
            f".{name}{{--stroke:var(--stroke-{name})}}"
            f".{name}>path{{stroke-width:{stroke.width:g};stroke-dasharray:{dashes}}}"
        )
    return rules


def _dark(colour: str) -> str:
    """Return a colour's counterpart on dark paper: its hue, with its lightness turned over.

    Source: B. Ottosson, "A perceptual color space for image processing" (Oklab), 2020.
    """
    lightness, a, b = _to_oklab(colour)
    turned = min(0.96, 1.19 - 1.0 * lightness)
    return _from_oklab(turned, a, b)


def _to_oklab(colour: str) -> tuple[float, float, float]:
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def _from_oklab(lightness: float, a: float, b: float) -> str:
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(c, 0.0), 1.0))):02x}" for c in linear)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _gamma(channel: float) -> float:
    return 12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055
