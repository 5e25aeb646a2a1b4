"""The site of the documents as a reader meets it; `make test-browser` builds it first."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.test_report_page import CHROMIUM, QUIET
from tests.support.documents import ROOT

SITE = ROOT / "site"
PAGES = sorted(set(SITE.rglob("*.html")) - {SITE / "index.html"})  # without the page that leads to the first one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert shutil.which(CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(QUIET))
        yield browser
        browser.close()


def opened(browser: Browser, path: Path, width: int = 1280, **options: str) -> Page:
    page = browser.new_context(viewport={"width": width, "height": 900}, **options).new_page()
    page.goto(path.as_uri())
    return page


def test_the_site_has_a_page_for_every_document_and_every_program_of_the_gallery():
    made = {page.relative_to(SITE).with_suffix("").as_posix() for page in PAGES}
    documents = {path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md")}
    programs = {f"docs/gallery/{path.stem}" for path in (ROOT / "examples" / "gallery").glob("*.py")}
    assert documents <= made
    assert len(programs) >= 10
    assert programs <= made


@pytest.mark.parametrize("width", [375, 1280])
def test_no_page_of_the_site_is_wider_than_its_window_or_asks_another_server(browser, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    wide = {}
    for path in PAGES:
        page.goto(path.as_uri())
        found, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        if found > window:
            wide[path.relative_to(SITE).as_posix()] = found
    context.close()
    assert wide == {}
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_every_picture_of_the_site_is_there_and_says_what_it_shows(browser):
    page = browser.new_context().new_page()
    wrong = {}
    for path in PAGES:
        page.goto(path.as_uri())
        found = page.evaluate(
            """[...document.querySelectorAll('.content img')].filter(
                img => !img.naturalWidth || !(img.alt || img.closest('.sphx-glr-thumbcontainer'))  // which has a title
            ).map(img => img.src)"""
        )
        if found:
            wrong[path.relative_to(SITE).as_posix()] = found
    assert wrong == {}


def test_pictures_and_pages_are_dark_in_the_dark(browser):
    front = SITE / "docs" / "index.html"
    filters, backgrounds = [], []
    for scheme in ("light", "dark"):
        page = opened(browser, front, color_scheme=scheme)
        filters.append(page.locator(".content img").first.evaluate("img => getComputedStyle(img).filter"))
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert filters[0] == "none"
    assert "invert" in filters[1]
    assert backgrounds[0] == "rgb(255, 255, 255)"
    assert backgrounds[1] != backgrounds[0]


def test_code_can_be_copied_and_tabs_have_a_picture(browser):
    page = opened(browser, SITE / "docs" / "tutorial.html")
    assert page.locator("button.copybtn").count() >= 5
    page.locator("div.highlight-python").first.hover()
    assert page.locator("button.copybtn").first.is_visible()
    icon = page.locator("link[rel~=icon]").first.evaluate("link => link.href")
    assert Path(icon.removeprefix("file://").partition("?")[0]).exists()


def test_the_front_page_leads_to_the_first_steps_and_the_gallery(browser):
    page = opened(browser, SITE / "index.html")
    page.wait_for_url("**/docs/index.html")
    page.locator(".content a", has_text="Gallery").first.click()
    page.wait_for_url("**/docs/gallery/index.html")
    assert page.locator(".sphx-glr-thumbcontainer").count() >= 10
    page.locator(".sphx-glr-thumbcontainer a").first.click()
    page.wait_for_url("**/docs/gallery/*.html")
    page.locator(".content h1").wait_for()
    assert page.locator(".content img").count() >= 1
    assert page.locator("div.highlight-Python, div.highlight-python, div.highlight-default").count() >= 1
