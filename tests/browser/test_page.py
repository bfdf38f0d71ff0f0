"""What a page does when it is clicked, typed at and listened to. Needs Chromium: `-m browser`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pages
import pytest
import torch

import gradtrace

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

Open = Callable[..., "Page"]


@pytest.fixture
def page(open_page: Open) -> Page:
    """Return the page of a step with two passes."""
    return open_page(pages.net_trace())


def drawn(page: Page, what: str) -> Locator:
    """Return elements of the picture that is shown."""
    return page.locator(f"#stage svg.picture:not([hidden]) {what}")


def box(page: Page, label: str) -> Locator:
    """Return the box whose label begins so."""
    return drawn(page, f'[data-box][aria-label^="{label}"]')


def middle(element: Locator) -> tuple[float, float]:
    """Return the middle of an element in the window; a hovered one has a wider border."""
    bounds = element.bounding_box()
    assert bounds
    return bounds["x"] + bounds["width"] / 2, bounds["y"] + bounds["height"] / 2


def title(page: Page) -> str:
    """Return the heading of the details, "" where there are none."""
    heading = page.locator("#details-title")
    return heading.inner_text() if heading.count() else ""


def view(page: Page) -> list[float]:
    """Return the part of the picture that is seen: x, y, width, height."""
    return [float(x) for x in drawn(page, "").get_attribute("viewBox").split()]  # type: ignore[union-attr]


def names(page: Page) -> list[str]:
    """Return the names in the table of leaves, as it stands."""
    return page.locator("#panel-leaves tbody th .name").all_inner_texts()


def focused(page: Page) -> str:
    """Return what the focus is on: a box by its label, others by id, label or text."""
    found: str = page.evaluate(
        "() => { const e = document.activeElement;"
        " return (!e.dataset.box && e.id) || e.getAttribute('aria-label') || e.textContent }"
    )
    return found


# -- clicks ----------------------------------------------------------------------------------------


def test_clicking_a_leaf_explains_it_and_lights_its_ways(page: Page) -> None:
    """The text is that of `explain`, and only what lies on its ways stays bright."""
    trace = pages.net_trace()
    box(page, "leaf, weight, [8 × 4]").click()
    assert title(page) == "encoder.0.weight"
    verdict = page.locator("#details .explanation .verdict").inner_text()
    assert verdict in " ".join(str(trace.explain("encoder.0.weight")).split())
    assert "self.encoder(x).detach()" in page.locator("#details .line.here").first.inner_text()
    assert box(page, "leaf, weight, [8 × 4]").get_attribute("aria-current") == "true"
    lit = drawn(page, ".lit[data-box]").evaluate_all("all => all.map(e => e.ariaLabel)")
    assert any(label.startswith("cut, detach") for label in lit)
    assert not any("[2 × 2]" in label for label in lit)  # the spare layer
    assert any(re.match(r"op, loss = add", label) for label in lit)


def test_clicking_an_op_tells_what_is_known_of_it(page: Page) -> None:
    """Module, grad_fn, shape, passes and the lines around its own are shown."""
    box(page, "op, relu").first.click()
    details = page.locator("#details")
    text = details.inner_text()
    assert "ReluBackward0" in text
    assert "[3 × 8] float32" in text
    assert "encoder" in text
    here = details.locator(".line.here")
    assert here.get_attribute("aria-current") == "true"
    assert details.locator(".line").count() > 3


def test_clicking_an_arrow_tells_of_its_tensor(page: Page) -> None:
    """An edge has name, shape and the passes that reached it."""
    arrow = drawn(page, '[data-arrow][aria-label^="arrow from weight to linear"]').first
    spot = arrow.evaluate(  # where no other arrow lies above it
        """arrow => {
          const path = arrow.querySelector("path");
          for (let part = 0.05; part < 1; part += 0.05) {
            const at = path.getPointAtLength(path.getTotalLength() * part);
            const p = new DOMPoint(at.x, at.y).matrixTransform(path.getScreenCTM());
            if (arrow.contains(document.elementFromPoint(p.x, p.y))) return [p.x, p.y];
          }
        }"""
    )
    page.mouse.click(*spot)
    assert title(page) == "weight → linear"
    assert "weight" in page.locator("#details dl").nth(1).inner_text()
    assert "reached by backward" in page.locator("#details").inner_text()


def test_clicking_a_cut_in_the_list_leads_to_it(page: Page) -> None:
    """The list of cuts names line and leaves; a click centres the cut and says what to do."""
    page.click("#tab-cuts")
    card = page.locator("#panel-cuts .card")
    assert card.count() == 1
    assert "blocks encoder.0.weight" in card.inner_text()
    card.click()
    assert title(page).startswith("detach")
    assert "If it should learn along this way" in page.locator("#details").inner_text()
    assert box(page, "cut, detach").get_attribute("aria-current") == "true"
    x, y, width, height = view(page)
    at = box(page, "cut, detach").evaluate(
        "e => { const b = e.getBBox(), t = e.parentNode.parentNode.transform.baseVal[0].matrix;"
        " return [b.x + t.e, b.y + t.f] }"
    )
    assert x < at[0] < x + width
    assert y < at[1] < y + height


def test_a_click_beside_everything_lets_go(page: Page) -> None:
    """What was selected is given up, and the picture is whole again."""
    box(page, "leaf, weight, [8 × 4]").click()
    assert drawn(page, "").get_attribute("class") == "picture lit-up"
    page.mouse.click(30, 160)
    assert title(page) == ""
    assert drawn(page, "").get_attribute("class") == "picture"


def test_terms_hazards_and_passes_are_listed(page: Page) -> None:
    """The tables agree with the trace."""
    page.click("#tab-terms")
    table = page.locator("#panel-terms table")
    assert table.locator("thead th").all_inner_texts() == ["Leaf", "fit", "penalty"]
    rows = [
        [row.locator("th").inner_text(), *row.locator("td").all_inner_texts()]
        for row in table.locator("tbody tr").all()
    ]
    assert rows == [["head.weight", "● yes", "● yes"], ["head.bias", "● yes", "–"]]
    page.click("#tab-hazards")
    assert "does nothing" in page.locator("#panel-hazards").inner_text()
    page.click("#tab-runs")
    passes = page.locator("#panel-runs tbody tr").all_inner_texts()
    assert len(passes) == 2
    assert "loss" in passes[0]
    assert "direct" in passes[1]


# -- switches --------------------------------------------------------------------------------------


def solid(page: Page) -> set[str]:
    """Return the arrows that are drawn solid, by their computed style."""
    found: list[str] = drawn(page, "[data-arrow]").evaluate_all(
        "all => all.filter(e => getComputedStyle(e.querySelector('path')).strokeDasharray =="
        " 'none').map(e => e.dataset.arrow)"
    )
    return set(found)


def test_the_switch_of_passes_draws_what_one_pass_reached(page: Page) -> None:
    """Solid are exactly the arrows that this pass reached; all together are those of any pass."""
    arrows = page.evaluate("JSON.parse(document.getElementById('facts').text).pictures[0].arrows")
    reached = [{str(n) for n, arrow in enumerate(arrows) if i in arrow[2]} for i in (0, 1)]
    assert reached[0]
    assert reached[1]
    assert solid(page) == reached[0] | reached[1]
    for index in (0, 1):
        page.select_option("#pass", str(index))
        assert solid(page) == reached[index]
    assert "pass 1" in page.locator("#said").inner_text()
    assert "off" in (box(page, "op, fit").get_attribute("class") or "")
    page.select_option("#pass", "all")
    assert solid(page) == reached[0] | reached[1]
    assert drawn(page, ".off").count() == 0


def test_the_table_of_leaves_follows_the_pass(page: Page) -> None:
    """With one pass chosen, the norms are those of that pass."""
    page.select_option("#pass", "1")
    row = page.locator("#panel-leaves tr", has_text="head.bias")
    assert row.locator("td.number").first.inner_text() == ""
    page.select_option("#pass", "0")
    assert float(row.locator("td.number").first.inner_text()) > 0
    page.click("#tab-runs")
    page.locator("#panel-runs tbody button").nth(1).click()
    assert page.locator("#pass").input_value() == "1"


def test_the_switch_of_detail_changes_the_picture_and_keeps_the_selection(open_page: Open) -> None:
    """What was selected is found again, alone or inside the box of its module."""
    page = open_page(pages.deep_trace(3))
    labels = page.locator("#depth option").all_inner_texts()
    assert "Every op" in labels
    assert "1 level of modules" in labels
    page.fill("#search", "layers.1.linear1.weight")
    page.keyboard.press("Enter")
    for label in ("1 level of modules", "Every op", labels[0]):
        page.select_option("#depth", label=label)
        assert page.locator("#stage svg.picture:not([hidden])").count() == 1
        assert title(page) == "layers.1.linear1.weight"
        assert drawn(page, "[aria-current=true]").count() == 1
    page.select_option("#depth", label="1 level of modules")
    assert "Drawn inside the box" in page.locator("#details").inner_text()
    coarse = drawn(page, "[data-box]").count()
    page.select_option("#depth", label="Every op")
    assert drawn(page, "[data-box]").count() > coarse
    assert "Picture: Every op" in page.locator("#said").inner_text()


def test_a_box_of_several_nodes_lists_them(open_page: Open) -> None:
    """A click on a module shows what is inside, and leads on to each."""
    page = open_page(pages.deep_trace(3), export={"depth": 1})
    drawn(page, ".box.group").first.click()
    inside = page.locator("#details .links .link")
    assert inside.count() > 5
    inside.first.click()
    assert page.locator("#details dl").count() > 0


# -- tables and search -----------------------------------------------------------------------------


def test_leaves_sort_by_each_column(page: Page) -> None:
    """A click on a heading sorts, a second one turns the order over, and both are announced."""
    first = page.locator("#panel-leaves thead th")
    assert first.first.get_attribute("aria-sort") == "ascending"
    assert names(page)[:2] == ["spare.weight", "spare.bias"]  # the most urgent status
    page.get_by_role("button", name="Name", exact=True).click()
    assert names(page) == sorted(names(page))
    page.get_by_role("button", name="Name", exact=True).click()
    assert names(page) == sorted(names(page), reverse=True)
    assert first.nth(1).get_attribute("aria-sort") == "descending"
    assert first.first.get_attribute("aria-sort") == "none"
    page.get_by_role("button", name="Norm", exact=True).click()
    texts = page.locator("#panel-leaves tbody tr td:nth-of-type(2)").all_inner_texts()
    norms = [float(text) for text in texts if text]
    assert norms == sorted(norms, reverse=True)


def test_leaves_are_filtered_by_status_and_by_name(page: Page) -> None:
    """Chips take statuses away, words narrow the names, and the caption counts."""
    everything = names(page)
    chip = page.locator(".chip.unused")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert names(page) == [name for name in everything if not name.startswith("spare")]
    page.fill("#panel-leaves input", "BIAS")
    assert set(names(page)) == {"encoder.0.bias", "encoder.2.bias", "head.bias"}
    assert "3 leaves of 8" in page.locator("#panel-leaves caption").inner_text()
    chip.click()
    assert "spare.bias" in names(page)


def test_search_finds_names_modules_and_source(page: Page) -> None:
    """What fits is listed with its place, the best first; arrows and Enter choose."""
    page.keyboard.press("/")
    assert focused(page) == "search"
    page.keyboard.type("head")
    found = page.locator("#found li")
    assert found.first.inner_text().startswith("head.")
    page.keyboard.press("ArrowDown")
    assert page.locator("#search").get_attribute("aria-activedescendant") == "found-1"
    assert found.nth(1).get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert title(page) == "head.weight"
    page.fill("#search", "square().mean()")
    assert "fit" in found.first.inner_text()
    page.fill("#search", "nothing of this kind")
    assert "Nothing has this" in found.inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#found").is_visible()
    page.fill("#search", "relu")
    found.first.click()
    assert "relu" in title(page)


# -- keyboard --------------------------------------------------------------------------------------


def test_the_keyboard_goes_everywhere(page: Page) -> None:
    """Tab comes to switches, boxes, details and tables, and the focus can be seen."""
    met = []
    for _ in range(70):
        page.keyboard.press("Tab")
        met.append(focused(page))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline not in {"", "none"}, met[-1]
        if met[-1] == "head.bias":
            break
    wanted = ["search", "theme", "depth", "pass", "out", "in", "fit", "stage", "tab-leaves"]
    assert [name for name in wanted if name in met] == wanted
    assert met[0] == "Skip the picture"
    assert any(label.startswith("cut, detach") for label in met)
    assert "head.bias" in met


def test_enter_opens_details_and_escape_comes_back(page: Page) -> None:
    """The focus goes to the heading of the details, and returns to the box."""
    for key in ("Enter", "Space"):
        box(page, "cut, detach").focus()
        page.keyboard.press(key)
        assert focused(page) == "details-title"
        page.keyboard.press("Escape")
        assert title(page) == ""
        assert focused(page).startswith("cut, detach")


def test_arrow_keys_move_the_picture(page: Page) -> None:
    """Arrows pan, plus and minus zoom, 0 shows all."""
    page.focus("#stage")
    before = view(page)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    after = view(page)
    assert after[0] > before[0]
    assert after[1] > before[1]
    page.keyboard.press("+")
    assert view(page)[2] < after[2]
    page.keyboard.press("-")
    assert view(page)[2] == pytest.approx(after[2])
    page.keyboard.press("0")
    x, y, width, height = view(page)
    size = [
        *map(
            float,
            page.evaluate(
                "[...document.querySelectorAll('svg.picture')]"
                ".map(e => e.getBBox()).map(b => [b.x, b.y, b.width, b.height])[0]"
            ),
        )
    ]
    assert x <= size[0]
    assert y <= size[1]
    assert x + width >= size[0] + size[2]
    assert y + height >= size[1] + size[3]


def test_tabs_are_walked_by_arrow_keys(page: Page) -> None:
    """One tab is in the order of Tab; arrows, Home and End go to the others."""
    page.focus("#tab-leaves")
    page.keyboard.press("ArrowRight")
    assert focused(page) == "tab-cuts"
    assert page.locator("#panel-cuts").is_visible()
    assert not page.locator("#panel-leaves").is_visible()
    page.keyboard.press("End")
    assert focused(page) == "tab-runs"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "tab-leaves"
    assert page.locator("[role=tab][tabindex='0']").count() == 1


# -- mouse and fingers -----------------------------------------------------------------------------


def test_the_wheel_zooms_where_the_pointer_is(page: Page) -> None:
    """What lies under the pointer stays there."""
    leaf = box(page, "leaf, weight, [8 × 4]")
    before = leaf.bounding_box()
    assert before
    at = middle(leaf)
    page.mouse.move(*at)
    page.mouse.wheel(0, -200)
    page.wait_for_function(
        "w => document.querySelector('[aria-label^=\"leaf, weight, [8\"]')"
        ".getBoundingClientRect().width > w * 1.1",
        arg=before["width"],
    )
    assert middle(leaf) == pytest.approx(at, abs=1)


def test_dragging_moves_the_picture_and_selects_nothing(page: Page) -> None:
    """A drag that begins on a box is no click on it."""
    leaf = box(page, "leaf, weight, [8 × 4]")
    x, y = middle(leaf)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 30, y + 50, steps=10)
    page.mouse.up()
    assert middle(leaf) == pytest.approx((x + 30, y + 50), abs=1)
    assert title(page) == ""
    leaf.click()
    assert title(page) == "encoder.0.weight"
    page.mouse.move(30, 160)
    page.mouse.down()
    page.mouse.move(60, 190, steps=5)
    page.mouse.up()
    assert title(page) == "encoder.0.weight"
    box(page, "op, relu").first.dispatch_event("click")  # as a screen reader clicks
    assert title(page) == "relu"


def test_two_fingers_zoom(open_page: Open) -> None:
    """A pinch makes the picture larger; a tap selects."""
    page = open_page(
        pages.net_trace(), has_touch=True, is_mobile=True, viewport={"width": 390, "height": 800}
    )
    before = view(page)[2]
    session = page.context.new_cdp_session(page)
    for kind, gap in (("touchStart", 20), ("touchMove", 40), ("touchMove", 80), ("touchEnd", 0)):
        points = [{"x": 195 - gap, "y": 380, "id": 0}, {"x": 195 + gap, "y": 380, "id": 1}]
        given = {"type": kind, "touchPoints": points if gap else []}
        session.send("Input.dispatchTouchEvent", given)
    assert view(page)[2] < before / 2
    page.click("#fit")
    box(page, "cut, detach").tap()
    assert title(page).startswith("detach")


def test_a_narrow_page_needs_no_sideways_scrolling(open_page: Open) -> None:
    """On a telephone the page is as wide as the screen."""
    page = open_page(pages.net_trace(), viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box(page, "cut, detach").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


# -- looks and reading aloud -----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_system_and_its_own_switch(open_page: Open, scheme: str) -> None:
    """Dark colours come with the system's setting, and the button turns them over."""
    page = open_page(pages.net_trace(), color_scheme=scheme)

    def is_dark() -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour))) < 200

    assert is_dark() == (scheme == "dark")
    assert page.locator("#theme").get_attribute("aria-pressed") == str(scheme == "dark").lower()
    page.click("#theme")
    assert is_dark() == (scheme == "light")
    fill = box(page, "cut, detach").locator("polygon").first
    assert fill.evaluate("e => getComputedStyle(e).fill") != "rgb(0, 0, 0)"


def test_a_screen_reader_finds_names_and_landmarks(page: Page) -> None:
    """Landmarks, headings, table, tabs and boxes have roles and names."""
    for role, name in [
        ("banner", None),
        ("main", None),
        ("search", None),
        ("complementary", "Details and lists"),
        ("region", "Picture"),
        ("tablist", "Lists"),
        ("combobox", "Search tensors, ops, modules and source"),
        ("status", None),
    ]:
        found = page.get_by_role(role, name=name) if name else page.get_by_role(role)  # type: ignore[arg-type]
        assert found.count() == 1, (role, name)
    assert page.get_by_role("heading", level=1).inner_text() == "gradtrace page0"
    assert page.get_by_role("columnheader").all_inner_texts() == ["Status", "Name", "Norm", "Cuts"]
    assert page.get_by_role("rowheader").count() == 8
    group = page.get_by_role("group", name="Picture: Automatic")
    assert group.get_by_role("button", name="cut, detach").count() == 1
    box(page, "cut, detach").click()
    assert "detach" in page.locator("#said").inner_text()
    assert page.get_by_role("heading", level=2, name="detach").count() == 1


# -- odd and hostile traces ------------------------------------------------------------------------


def is_hacked(page: Page) -> bool:
    """Return whether any text of a trace was run."""
    return bool(
        page.evaluate("window.hacked !== undefined || document.querySelector('iframe, img')")
    )


def test_nothing_in_a_hostile_trace_runs(open_page: Open) -> None:
    """Names, paths and sources full of markup are shown as what they are, wherever one clicks."""
    page = open_page(pages.hostile_trace())
    assert not is_hacked(page)
    for label in page.locator("#depth option").all_inner_texts():
        page.select_option("#depth", label=label)
        drawn(page, ":is([data-box], [data-arrow])").evaluate_all(
            "all => all.forEach(e => e.dispatchEvent(new MouseEvent('click', {bubbles: true})))"
        )
    for tab in page.locator("[role=tab]").all():
        tab.click()
    for words in ("script", "window.hacked", "proto"):
        page.fill("#search", words)
        page.keyboard.press("Enter")
    assert not is_hacked(page)
    page.click("#tab-leaves")
    assert "</script><script>window.hacked=1</script>" in names(page)
    assert page.evaluate("document.scripts.length") == 2


def test_even_markup_that_got_in_could_run_nothing(chromium: Any, tmp_path: Any) -> None:
    """Were a text taken for markup, the policy would still stop scripts, styles and requests."""
    path = pages.net_trace().export(tmp_path / "page.html")
    page = chromium.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]")
    refused = page.evaluate(
        """() => {
          try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); return false; }
          catch (error) { return error instanceof TypeError; }
        }"""
    )
    assert refused
    text = path.read_text(encoding="utf-8")
    bad = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    bad += "<b id=b style='color:red'>"
    path.write_text(text.replace("<main>", f"{bad}</b><main>"), encoding="utf-8")
    requests: list[str] = []
    page.on("requestfinished", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("getComputedStyle(document.getElementById('b')).color") != "rgb(255, 0, 0)"
    assert requests == [path.as_uri()]
    page.close()


@pytest.mark.parametrize("make", [pages.empty_trace, pages.forward_trace])
def test_pages_without_backward_open(make: Callable[[], gradtrace.Trace], open_page: Open) -> None:
    """A trace of nothing, or of a forward pass alone, has a page that says so."""
    page = open_page(make())
    for tab in page.locator("[role=tab]").all():
        tab.click()
    assert "No backward pass was recorded" in page.locator("#picture").inner_text()
    for element in drawn(page, "[data-box]").all():
        element.click()
        assert title(page)
    assert page.locator("#passes").is_hidden()


def test_a_loaded_trace_has_a_page(open_page: Open, tmp_path: Any) -> None:
    """What was saved shows what the live trace showed."""
    page = open_page(gradtrace.load(pages.net_trace().save(tmp_path / "x.json")))
    box(page, "leaf, weight, [8 × 4]").click()
    assert "encoder.0.weight [8 × 4] is reached" in page.locator("#details").inner_text()


@pytest.mark.long
def test_a_long_recording_has_a_page(open_page: Open) -> None:
    """Where not every node is told, the ways of a leaf are lit by boxes."""
    leaves = {f"w{number}": torch.ones(2, requires_grad=True) for number in range(3_500)}
    with gradtrace.record(names=leaves) as trace:
        torch.stack([(w * 2).tanh() for w in leaves.values()]).sum().backward()  # type: ignore[no-untyped-call]
    page = open_page(trace)
    assert "the page leaves out 500" in page.locator("#panel-leaves caption").inner_text()
    page.locator("#panel-leaves .name").first.click()
    assert drawn(page, ".lit[data-box]").count() > 1
    page.get_by_role("button", name="Show all").first.click()
    assert len(names(page)) == 3_000
