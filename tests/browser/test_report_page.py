"""The report as a reader meets it: in a browser, with a pointer, in the dark, on a phone, on paper."""

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.browser.pages import HOSTILE, make

KINDS = ("plain", "calibrated", "outputs")
WIDEST = "section[id='output-0'] table.sortable"
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:  # each launch has an empty profile of its own
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a file, and at the end of the test fails if the page complained or asked for anything but itself."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def opened(path, **options) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url == path.as_uri() else complaints.append(request.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The files by name, and the intervals and targets of the plain one."""
    return make(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_renders_without_a_complaint_and_asks_for_nothing(pages, open_page, kind):
    page = open_page(pages[0][kind])
    assert page.locator("h1").is_visible()
    assert page.locator("figure > svg").count() >= 3
    for picture in page.locator("figure > svg").all():
        box = picture.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 150


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [375, 768, 1200])
def test_no_page_is_wider_than_its_window(pages, open_page, kind, width):
    page = open_page(pages[0][kind], viewport={"width": width, "height": 800})
    wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= window == width


def test_axes_can_be_read_on_a_phone(pages, open_page):
    page = open_page(pages[0]["plain"], viewport={"width": 375, "height": 800})
    heights = page.evaluate(
        "[...document.querySelectorAll('figure > svg text')].map(text => text.getBoundingClientRect().height)"
    )
    assert min(heights) > 9


def number(text):
    return float(text.replace("−", "-").replace(",", ""))


def pointed_at(page, mark):
    mark.scroll_into_view_if_needed()
    # a scroll hides the tip, and is told to the page a frame later
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = mark.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return page.locator("#tip")


@pytest.mark.parametrize("which", [0, 40, 159])
@pytest.mark.parametrize("figure", ["Intervals by width", "Width against error"])
def test_a_dot_that_is_pointed_at_tells_its_row_prediction_interval_and_target(pages, open_page, figure, which):
    files, intervals, y = pages
    page = open_page(files["plain"])
    picture = page.locator("figure", has_text=figure).locator("svg").first
    tip = pointed_at(page, picture.locator("circle[data-row]").nth(which))
    assert tip.is_visible()
    row = int(re.match(r"row (\d+)", tip.locator("b").inner_text()).group(1))  # of the nearest dot, if they overlap
    told = dict(line.locator("span").all_inner_texts() for line in tip.locator("div").all())
    lower, upper = told["interval"].split(" to ")
    shown = [number(told["prediction"]), number(lower), number(upper), number(told["target"])]
    assert shown == pytest.approx([float(part[row]) for part in (*intervals, y)], abs=0.006)
    missed = not intervals.lower[row] <= y[row] <= intervals.upper[row]
    assert ("missed" in tip.locator("b").inner_text()) == missed


def test_the_tip_goes_when_the_pointer_does(pages, open_page):
    page = open_page(pages[0]["plain"])
    picture = page.locator("figure > svg").nth(0)
    tip = pointed_at(page, picture.locator("circle").nth(9))
    assert "50 % asked for" in tip.inner_text()
    page.mouse.move(5, 5)
    assert tip.is_hidden()


def test_the_tip_stays_within_a_narrow_window(pages, open_page):
    page = open_page(pages[0]["plain"], viewport={"width": 375, "height": 800})
    picture = page.locator("figure > svg").nth(0)
    box = pointed_at(page, picture.locator("circle").last).bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 375


def column(page, head):
    table = page.locator(WIDEST)
    names = [cell.inner_text() for cell in table.locator("thead th").all()]
    k = names.index(head)
    return [row.locator("td").nth(k).inner_text() for row in table.locator("tbody tr").all()]


def click(page, head):
    page.locator(WIDEST).locator("thead th", has_text=re.compile(f"^{re.escape(head)}$")).locator("button").click()


def test_the_widest_rows_come_widest_first(pages, open_page):
    page = open_page(pages[0]["plain"])
    widths = [number(text) for text in column(page, "width")]
    assert widths == sorted(widths, reverse=True)
    assert page.locator(f"{WIDEST} th[aria-sort=descending]").inner_text() == "width"


@pytest.mark.parametrize("head", ["row", "prediction", "width", "target", "number"])
def test_a_click_on_a_head_sorts_numbers_as_numbers_both_ways(pages, open_page, head):
    page = open_page(pages[0]["plain"])
    click(page, "outcome")  # from another order
    for direction in ("descending", "ascending"):
        click(page, head)
        found = [number(text) for text in column(page, head) if text != "missing"]
        assert found == sorted(found, reverse=direction == "descending")
        assert page.locator(f"{WIDEST} th[aria-sort={direction}]").inner_text() == head


def test_text_is_sorted_as_text(pages, open_page):
    page = open_page(pages[0]["plain"])
    click(page, "text")
    assert column(page, "text") == sorted(column(page, "text"), reverse=True)
    click(page, "text")
    assert column(page, "text") == sorted(column(page, "text"))


def test_heads_can_be_used_from_the_keyboard(pages, open_page):
    page = open_page(pages[0]["plain"])
    page.locator(f"{WIDEST} thead button").first.focus()
    page.keyboard.press("Enter")
    rows = [number(text) for text in column(page, "row")]
    assert rows == sorted(rows, reverse=True)


def colours(page):
    return page.evaluate(
        """() => {
          const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
          return [of("body", "backgroundColor"), of("body", "color"), of("figure", "backgroundColor"),
                  of("figure > svg polyline[stroke*=blue]", "stroke"), of("figure > svg polygon", "fill")];
        }"""
    )


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_dark_has_colours_of_its_own(pages, open_page):
    light, dark = (colours(open_page(pages[0]["plain"], color_scheme=scheme)) for scheme in ("light", "dark"))
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert brightness(light[0]) > brightness(light[1])
    assert brightness(dark[0]) < brightness(dark[1])
    assert light[3] == "rgb(0, 114, 178)"


def test_paper_is_white_whatever_the_screen_is(pages, open_page):
    page = open_page(pages[0]["plain"], color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    paper = colours(page)
    assert paper[0] == "rgb(255, 255, 255)"
    assert brightness(paper[1]) < 150


def test_text_that_looks_like_markup_is_text(pages, open_page):
    for kind in ("plain", "outputs"):
        page = open_page(pages[0][kind])
        assert page.title() != "taken"
        assert page.locator("main b").count() == 0
        assert page.locator("main script:not([type='application/json'])").count() == 0
        assert page.get_by_text(HOSTILE).count() > 0


def test_outputs_have_a_section_each_and_links_to_them(pages, open_page):
    page = open_page(pages[0]["outputs"])
    page.locator("a", has_text="torque").click()
    assert page.url.endswith("#output-1")
    assert page.locator("#output-1 h2").inner_text() == "torque"
    tip = pointed_at(page, page.locator("#output-1 circle[data-row]").first)
    assert "prediction" in tip.inner_text()
