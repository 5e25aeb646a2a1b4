"""A browser, and pages made by the library that must not make it complain."""

import shutil
from collections.abc import Iterator

import pytest
from made_pages import make
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

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


@pytest.fixture(scope="session")
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
