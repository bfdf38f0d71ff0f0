"""The page: parsed and asked. What it does when it is clicked stands in `tests/browser`."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pages
import pytest
import torch

import gradtrace
from gradtrace import ExportError, Status, UnknownNameError
from gradtrace._render import html, page_colours
from gradtrace._render.page_facts import page_facts
from gradtrace._render.page_picture import draw
from gradtrace._render.palette import THEMES, Theme

Make = Callable[[], gradtrace.Trace]

ELEMENTS = set(
    """
    a article aside body button desc details div ellipse figure footer g h1 head header html input
    label li link main meta noscript option p path polygon polyline script section select span
    style summary svg text title ul
    """.split()
)


PAPERS = ("paper", "panel")


def digest(text: str) -> str:
    """Return what a content security policy calls a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    """No element of a page names an address outside it."""
    page = pages.parsed(pages.net_trace(), tmp_path)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert name not in {"src", "srcset", "xlink:href", "style", "srcdoc"}, (tag, name)
            assert not name.startswith("on"), (tag, name)
            assert name != "href" or value.startswith(("#", "data:image/svg+xml,")), value
    assert "url(" not in page.texts["style"][0]
    assert "@import" not in page.texts["style"][0]


@pytest.mark.parametrize(
    "make", [pages.net_trace, pages.hostile_trace, pages.empty_trace, pages.forward_trace]
)
def test_the_policy_names_the_one_script_and_the_one_style(make: Make, tmp_path: Path) -> None:
    """The hashes are those of what stands in the page, and all else is forbidden."""
    page = pages.parsed(make(), tmp_path)
    data, script = page.texts["script"]
    assert [each.get("type") for each in page.of("script")] == ["application/json", None]
    assert data
    assert page.policy == {
        "default-src": ["'none'"],
        "script-src": [digest(script)],
        "style-src": [digest(page.texts["style"][0])],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    """Names, paths and sources add no element to a page, and no text that can't be seen."""
    page = pages.parsed(pages.hostile_trace(), tmp_path)
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    assert len(page.texts["script"]) == 2
    data = page.texts["script"][0]
    assert not set(data) & set("<>&\u2028\u2029\u202e\x00\x1b")
    assert data.isascii()
    names = {leaf["name"] for leaf in page.facts["leaves"]}
    assert {"</script><script>window.hacked=1</script>", "__proto__", "]]>"} <= names
    assert "window.hacked=1" in names  # U+2028 is a space
    assert "\\u202egnp.exe\\x00\\x1b[31m" in names


def test_the_title_is_escaped(tmp_path: Path) -> None:
    """The name of the file is text as well."""
    path = tmp_path / "<b>&x.html"
    text = pages.empty_trace().export(path).read_text(encoding="utf-8")
    assert "&lt;b&gt;&amp;x" in text
    assert "<b>" not in text


def test_facts_agree_with_the_trace(tmp_path: Path) -> None:
    """A page tells what the trace tells."""
    trace = pages.net_trace()
    facts = pages.parsed(trace, tmp_path).facts
    told = {leaf["name"]: leaf["status"] for leaf in facts["leaves"]}
    assert told == {leaf.name: leaf.status for leaf in trace.leaves}
    assert told["spare.weight"] == Status.UNUSED
    explained = {leaf["name"]: leaf["text"] for leaf in facts["leaves"]}
    for name, text in explained.items():
        assert text == str(trace.explain(name))
    assert [(cut["kind"], cut["count"]) for cut in facts["cuts"]] == [("detach", 4)]
    blocked = {facts["leaves"][number]["name"] for number in facts["cuts"][0]["blocked"]}
    assert blocked == {name for name in told if name.startswith("encoder.")}
    (table,) = facts["terms"]
    assert [term["name"] for term in table["terms"]] == [term.name for term in trace.terms(0)]
    assert [hazard["kind"] for hazard in facts["hazards"]] == ["dropped"]
    assert [done["roots"] for done in facts["passes"]] == [["loss"], ["direct"]]


@pytest.mark.parametrize("make", [pages.net_trace, pages.deep_trace])
def test_each_arrow_stands_for_the_edges_between_its_boxes(make: Make, tmp_path: Path) -> None:
    """In every picture, arrows and edges agree on ends and on passes, and no edge is lost."""
    facts = pages.parsed(make(), tmp_path).facts
    assert len(facts["pictures"]) >= 2
    for picture in facts["pictures"]:
        boxes, copies = picture["boxes"], picture["copies"]
        told = set()
        for tail, head, reached, _, edges in picture["arrows"]:
            assert edges
            for tail_node, head_node, more in (facts["edges"][number] for number in edges):
                assert tail_node in boxes[str(copies.get(str(tail), tail))]["nodes"]
                assert head_node in boxes[str(head)]["nodes"]
                assert set(more.get("reached", ())) <= set(reached)
            told.update(edges)
            union = {index for n in edges for index in facts["edges"][n][2].get("reached", ())}
            assert union == set(reached)
        owner = {node: name for name, box in boxes.items() for node in box.get("nodes", ())}
        for number, (tail, head, more) in enumerate(facts["edges"]):
            drawn = tail in owner and head in owner and owner[tail] != owner[head]
            assert (number in told) == drawn or more.get("weak")


class Turns(torch.autograd.Function):
    """Gives its gradient to one input, and in the next backward pass to the other."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        ctx.passes = 0
        return one + other

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return a gradient for the first input in the first pass, then for the second."""
        ctx.passes += 1
        return (gradient, None) if ctx.passes == 1 else (None, gradient)


def test_parallel_arrows_keep_their_own_edges(tmp_path: Path) -> None:
    """Where two edges join the same two nodes, each arrow tells the passes of its own."""
    w = torch.ones(2, requires_grad=True)
    with gradtrace.record(names={"w": w}) as trace:
        k = w * 2
        loss = Turns.apply(k, k).sum()  # type: ignore[no-untyped-call]
        loss.backward(retain_graph=True)
        loss.backward()
    facts = pages.parsed(trace, tmp_path, full=True).facts
    arrows = facts["pictures"][0]["arrows"]
    pair = [arrow for arrow in arrows if facts["nodes"][str(arrow[1])]["op"] == "Turns.apply"]
    assert sorted(arrow[2] for arrow in pair) == [[0], [1]]
    for arrow in pair:
        assert [facts["edges"][number][2]["reached"] for number in arrow[4]] == [arrow[2]]


def test_a_busy_leaf_that_is_drawn_again_is_the_same_leaf(tmp_path: Path) -> None:
    """The copies of a leaf with many uses lead back to it."""
    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    with gradtrace.record(names={"w": w}) as trace:
        sum((w * x * number).sum() for number in range(25)).backward()  # type: ignore[union-attr]
    picture = pages.parsed(trace, tmp_path, full=True).facts["pictures"][0]
    node = next(leaf.node for leaf in trace.leaves)
    again = {box for box, facts in picture["boxes"].items() if facts["title"] == "w (again)"}
    assert again
    assert {picture["copies"][box] for box in again} == {node}
    edges = [edge for arrow in picture["arrows"] for edge in arrow[4]]
    assert len(edges) == len(set(edges)) == trace.graph.number_of_edges()


def test_lines_of_source_are_those_that_ran(tmp_path: Path) -> None:
    """The line of a cut stands in the page with the lines around it."""
    trace = pages.net_trace()
    facts = pages.parsed(trace, tmp_path).facts
    file, line, function, source, seen = facts["places"][facts["cuts"][0]["place"]]
    assert (function, source, seen) == ("Net.forward", "self.encoder(x).detach()", 1)
    lines = facts["lines"][file]
    assert lines[str(line)] == "        scores: Tensor = self.head(self.encoder(x).detach())"
    assert lines[str(line - 2)] == "    def forward(self, x: Tensor) -> Tensor:"


def test_a_loaded_trace_opens_no_file(tmp_path: Path) -> None:
    """Whatever a file says where its source stands, no line of that place gets into the page."""
    secret = tmp_path / "secret.py"
    secret.write_text("token = 'xyzzy'\nw.detach()\n")
    text = pages.net_trace().save(tmp_path / "x.json").read_text()
    forged = text.replace(str(Path(pages.__file__)), str(secret)).replace("pages.py", "secret.py")
    forged = re.sub(r'"line": ?\d+', '"line":2', forged)
    forged = forged.replace("self.encoder(x).detach()", "w.detach()")
    (tmp_path / "x.json").write_text(forged)
    page = pages.parsed(gradtrace.load(tmp_path / "x.json"), tmp_path)
    assert any("secret.py" in file for file in page.facts["files"])
    assert "xyzzy" not in page.texts["script"][0]
    assert not any(page.facts["lines"])


def test_a_loaded_trace_has_the_same_page_but_for_the_lines(tmp_path: Path) -> None:
    """The graph is all that a page needs."""
    trace = pages.net_trace()
    live = pages.parsed(trace, tmp_path).facts
    loaded = pages.parsed(gradtrace.load(trace.save(tmp_path / "x.json")), tmp_path).facts
    assert loaded == live  # this process knows the lines still


@pytest.mark.parametrize("make", [pages.empty_trace, pages.forward_trace, pages.hostile_trace])
def test_odd_traces_have_pages(make: Make, tmp_path: Path) -> None:
    """A page can be had of every trace."""
    trace = make()
    facts = pages.parsed(trace, tmp_path).facts
    assert len(facts["leaves"]) == len(trace.leaves)
    assert facts["about"]["passes"] == len(trace.backward_passes)


def test_a_page_of_a_deep_model_stays_small(tmp_path: Path) -> None:
    """Twelve layers of a transformer, drawn at every depth, take less than 2 MB."""
    path = pages.deep_trace().export(tmp_path / "deep.html")
    assert path.stat().st_size < 2_000_000
    page = pages.Page(path.read_text(encoding="utf-8"))
    sizes = [len(picture["boxes"]) for picture in page.facts["pictures"]]
    assert len(sizes) >= 4
    assert sizes[1:] == sorted(sizes[1:])


@pytest.mark.long
def test_a_page_of_a_long_recording_stays_small(tmp_path: Path) -> None:
    """Ten thousand nodes are told in part, and the page says what it leaves out."""
    leaves = {f"w{number}": torch.ones(2, requires_grad=True) for number in range(3_500)}
    with gradtrace.record(names=leaves) as trace:
        torch.stack([(w * 2).tanh() for w in leaves.values()]).sum().backward()  # type: ignore[no-untyped-call]
    path = trace.export(tmp_path / "long.html")
    assert path.stat().st_size < 4_000_000
    facts = pages.Page(path.read_text(encoding="utf-8")).facts
    assert facts["about"]["leaves"] == 3_500 > len(facts["leaves"])
    assert not facts["complete"]


def test_every_box_has_a_name_and_a_place_in_the_order(tmp_path: Path) -> None:
    """A screen reader finds each box by the text that it shows, and the keyboard reaches it."""
    page = pages.parsed(pages.net_trace(), tmp_path)
    boxes = [each for each in page.of("g") if "data-box" in each]
    assert boxes
    for box in boxes:
        assert (box["role"], box["tabindex"]) == ("button", "0")
        assert box["aria-label"]
    labels = " / ".join(box["aria-label"] for box in boxes)
    assert "leaf, weight, [8 × 4], reached, pass 1" in labels
    assert re.search(r"cut, detach, pages\.py:\d+, self\.encoder\(x\)\.detach\(\)", labels)
    for svg in page.of("svg"):
        ids = {each.get("id") for _, each in page.elements}
        assert {svg["aria-labelledby"], svg["aria-describedby"]} <= ids


def test_ids_are_unique(tmp_path: Path) -> None:
    """Each picture has ids of its own."""
    page = pages.parsed(pages.net_trace(), tmp_path)
    ids = [each["id"] for _, each in page.elements if "id" in each]
    assert len(ids) == len(set(ids))


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2.2 defines it."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(map(float.__mul__, (0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def part(name: str) -> str:
    """Return a file of the package that stands inside each page."""
    return resources.files("gradtrace._render").joinpath(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
def test_texts_stand_out_by_day_and_by_night(theme: Theme) -> None:
    """Every text beside the picture has the contrast that WCAG 2.2 asks of small print (4.5)."""
    named = page_colours.named_colours(theme)
    pairs = {(ink, paper) for ink in ("ink", "grey", "is-reached-grey") for paper in PAPERS}
    for rule in re.findall(r"\{(.*?)\}", part("page.css")):
        inks = re.findall(r"(?:^|\s)color: var\(--(.*?)\)", rule)
        pairs |= {
            (ink, fill) for fill in re.findall(r"background: var\(--(.*?)\)", rule) for ink in inks
        }
    assert ("is-cut-grey", "is-cut-fill") in pairs
    for ink, fill in pairs:
        assert contrast(named[ink], named[fill]) >= 4.5, (ink, fill)


def test_each_colour_of_a_picture_is_known_by_its_name() -> None:
    """The theme in which a page's pictures are laid out has no two colours alike."""
    marked = page_colours.named_colours(page_colours.MARKED)
    assert {mark: name for name, mark in marked.items()} == page_colours.NAMES
    assert list(marked) == list(page_colours.named_colours(THEMES["dark"]))


def test_a_picture_has_classes_for_its_colours(tmp_path: Path) -> None:
    """Every class of a colour has a rule, and boxes have the colours of their verdicts."""
    page = pages.parsed(pages.net_trace(), tmp_path)
    shapes = [each["class"] for tag in ("path", "polygon", "text") for each in page.of(tag)]
    used = {word for classes in shapes for word in classes.split() if word[:2] in {"f-", "s-"}}
    assert {"f-is-reached-fill", "s-is-unused-line", "f-cut-fill", "f-cut-ink", "f-panel"} <= used
    style = page.texts["style"][0]
    assert all(f".{name}{{" in style for name in used - {"f-none"})


def test_what_stands_in_the_page_lies_in_the_package() -> None:
    """The style and the script are files of the package, fit to stand inside a page."""
    for name in ("page.css", "page.js"):
        text = part(name)
        assert "</" not in text
        assert "<!--" not in text
        assert "\r" not in text
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_options_choose_the_first_picture(tmp_path: Path) -> None:
    """`depth`, `full` and `only` do for a page what they do for a picture."""
    trace = pages.net_trace()
    first: dict[str, dict[str, Any]] = {
        "Automatic": {},
        "1 level of modules": {"depth": 1},
        "Every op": {"full": True},
    }
    for label, options in first.items():
        page = pages.parsed(trace, tmp_path, **options)
        assert page.facts["pictures"][0]["label"] == label
    story = pages.parsed(trace, tmp_path, only="head.bias").facts
    for picture in story["pictures"]:
        titles = {box["title"] for box in picture["boxes"].values()}
        assert "direct = sum" not in titles
    with pytest.raises(UnknownNameError):
        trace.export(tmp_path / "x.html", only="head.bais")
    with pytest.raises(ExportError, match="depht"):
        trace.export(tmp_path / "x.html", depht=1)
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("options", [{"passes": [0]}, {"transparent": True}])
def test_what_a_page_has_no_use_for_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """A page says so where it can't do what a picture can."""
    trace = pages.net_trace()
    with pytest.raises(ExportError, match="given for a page, and a page h"):
        trace.export(tmp_path / "x.html", **options)
    assert not (tmp_path / "x.html").exists()


def test_options_of_all_pictures_of_a_page(tmp_path: Path) -> None:
    """`gradient_graph_only` and `direction` hold for every picture, `theme` for the page."""
    plain = pages.parsed(pages.net_trace(), tmp_path)
    options: dict[str, Any] = {"gradient_graph_only": True, "direction": "LR", "theme": "dark"}
    page = pages.parsed(pages.net_trace(), tmp_path, **options)
    assert [next(each.of("html")).get("data-theme") for each in (plain, page)] == [None, "dark"]
    for picture in page.facts["pictures"]:
        assert "input" not in {box["kind"] for box in picture["boxes"].values()}
    sizes = [[float(n) for n in svg["viewbox"].split()[2:]] for svg in page.of("svg")]
    assert all(width > height for width, height in sizes)


def test_modules_that_are_alike_are_told_of(tmp_path: Path) -> None:
    """A box that stands for repeats holds the nodes of all of them; its frame names them."""
    page = pages.parsed(pages.deep_trace(), tmp_path)
    boxes = page.facts["pictures"][0]["boxes"].values()
    (box,) = (
        box for box in boxes if box.get("frame") == "layers.1.norm1" and box["kind"] == "leaf"
    )
    assert (box["times"], box["count"]) == (11, 22)
    names = {page.facts["nodes"][str(node)]["label"] for node in box["nodes"]}
    ends = ("weight", "bias")
    assert names == {f"layers.{number}.norm1.{end}" for number in range(1, 12) for end in ends}
    assert "layers.1–11 × 11" in page.texts["text"]
    labels = [each["aria-label"] for each in page.of("g") if "data-box" in each]
    assert any("leaf, weight, bias, 11 times, [16], reached" in label for label in labels)


def test_a_page_that_takes_too_long_is_drawn_coarser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first picture that can be drawn in time is shown, and says so."""
    calls = []

    def slow_once(*given: object, **named: object) -> object:
        calls.append(given)
        if len(calls) == 1:
            raise TimeoutError("dot took more than 1 s")
        return draw(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(html, "draw", slow_once)
    picture = pages.parsed(pages.net_trace(), tmp_path).facts["pictures"][0]
    assert picture["label"] == "Coarse"
    assert "dot took more than 1 s" in picture["notes"][0]


def test_facts_say_zero() -> None:
    """Node 0 and pass 0 are not taken for nothing."""
    trace = pages.net_trace()
    facts = page_facts(trace._now, [])
    assert facts["leaves"][0]["node"] == trace.leaves[0].node
    assert all("node" in leaf for leaf in facts["leaves"])
    assert facts["terms"][0]["pass"] == 0
