"""A browser, and the page in it. Tests are skipped where playwright or Chromium is missing."""

import shutil

import pytest

from tests.serve.page.fake import Fake
from tests.support.chat_run import running
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

TIMEOUT = 20_000
"""Milliseconds for which a test waits for the page, on a machine that runs other tests too."""


@pytest.fixture(scope="module")
def browser():
    """Chromium. One for each file: while it lives, its thread has an event loop, and asyncio.run has none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'verax[test-all]'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian, Ubuntu: apt install chromium)")
    sync_api.expect.set_options(timeout=TIMEOUT)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The fake server's state; `fake.address` is where its page is."""
    reports = tmp_path_factory.mktemp("reports")
    fill(reports)
    not_loaded = LazyModel("small", lambda: None)
    server = Server(NoEngine(), encoder=not_loaded, videos=not_loaded, settings=ServerSettings(reports=reports))
    fake = Fake(server)
    with running(fake.app(), "auto") as fake.address:
        yield fake


def fill(reports):
    """A folder as `verax compare` and `verax bench` write it."""
    run = reports / "run"
    run.mkdir()
    (run / "compare.md").write_text("# qwen3, bfloat16\n\n**equal**\n\n| layer | error |\n|---|---|\n| 0 | 1e-6 |\n")
    (run / "compare.html").write_text("<!doctype html><title>r</title><style>p{color:red}</style><p>equal</p>")
    (reports / "bench.json").write_text('{"tokens_per_second": 123}')


class NoEngine:
    """A text engine that is not needed: the fake answers by itself."""

    def __init__(self):
        self.chat_sampling = {}

    async def shutdown(self, timeout):
        pass


class Visit:
    """A page that notes what must not happen: errors, violations of the policy, requests to other machines."""

    def __init__(self, page, address):
        self.page = page
        self.wrong = []
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", lambda line: self.wrong.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: self.check(request.url, address))

    def check(self, url, address):
        if not url.startswith((address, "blob:", "data:")):
            self.wrong.append(f"a request to {url}")


@pytest.fixture
def page(browser, fake):
    """The page, opened in a fresh browser profile. After the test, nothing may have gone wrong."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(TIMEOUT)
    visit = Visit(context.new_page(), fake.address)
    visit.page.goto(fake.address)
    yield visit.page
    context.close()
    assert visit.wrong == []
