"""The other tabs, the frame, access by key, narrow screens and accessibility, in a browser."""

import re

import pytest

from tests.serve.page.conftest import NoEngine
from tests.serve.page.fake import Fake
from tests.support.chat_run import running
from tests.support.pictures import saved
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: pip install 'verax[test-all]'")
expect = pytest.importorskip("playwright.sync_api").expect

TABS = ["chat", "clips", "sentences", "server", "reports"]


def open_tab(page, name):
    page.get_by_role("navigation").get_by_role("link", name=name).click()


def test_a_clip_from_prompt_to_download(page, fake, tmp_path):
    open_tab(page, "Clips")
    page.get_by_label("Prompt").fill("A red ball rolls")
    page.get_by_label("Seed").fill("7")
    picture = tmp_path / "first.png"
    picture.write_bytes(saved("PNG"))
    page.get_by_label("First picture").set_input_files(picture)
    page.get_by_role("button", name="Create the clip").click()
    card = page.get_by_role("article", name="A red ball rolls")
    card.get_by_role("progressbar").wait_for()
    card.get_by_label("Download").wait_for()
    with page.expect_download() as download:
        card.get_by_label("Download").click()
    assert download.value.path().read_bytes() == b"a clip"
    card.get_by_text("Settings").click()
    assert card.get_by_role("definition").all_inner_texts() == ["7"]
    page.get_by_label("Prompt").fill("")
    page.get_by_label("Frames", exact=True).fill("33")
    card.get_by_label("Use these settings").click()
    assert page.get_by_label("Prompt").input_value() == "A red ball rolls"
    assert page.get_by_label("Seed").input_value() == "7"
    assert page.get_by_label("Frames", exact=True).input_value() == ""  # another clip's
    card.get_by_label("Delete").click()
    card.wait_for(state="detached")


def test_a_clip_has_recipe_cache_and_loras_and_says_how_long_it_takes_and_why_it_failed(page, fake):
    fake.server.video_loras = ("style.safetensors:0.8",)
    page.reload()
    open_tab(page, "Clips")
    expect(page.get_by_text("LoRA: style.safetensors:0.8")).to_be_visible()
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Step cache").select_option("magcache")
    page.get_by_label("Recipe").select_option("lightx2v")
    page.get_by_label("Prompt").fill("fail, please")
    page.get_by_role("button", name="Create the clip").click()
    card = page.get_by_role("article", name="fail, please")
    expect(card.get_by_text("90 s left")).to_be_visible()
    expect(card.locator("img")).to_be_visible()
    expect(card.get_by_text("more memory than there is")).to_be_visible()
    (video,) = [video for video in fake.videos.values() if video["prompt"] == "fail, please"]
    assert (video["cache"], video["recipe"]) == ("magcache", "lightx2v")
    page.get_by_label("Step cache").select_option("")
    card.get_by_label("Use these settings").click()
    assert page.get_by_label("Step cache").input_value() == "magcache"
    card.get_by_label("Delete").click()
    card.wait_for(state="detached")
    fake.server.video_loras = ()


def test_sentences_are_compared(page):
    open_tab(page, "Sentences")
    page.get_by_label("One sentence on each line").fill("the cat sleeps\nthe cat is here\nrain tomorrow")
    page.get_by_role("button", name="Compare").click()
    cells = page.locator(".matrix tbody td")
    cells.first.wait_for()
    values = [float(text) for text in cells.all_inner_texts()]
    assert [values[0], values[4], values[8]] == [1.0, 1.0, 1.0]
    assert values[1] > values[2]
    nearest = page.locator(".nearest > li").first.locator("li").first
    expect(nearest).to_contain_text("the cat is here")


def test_the_charts_show_the_metrics(page):
    open_tab(page, "Server")
    page.get_by_role("img", name="Requests: running 3, waiting 1").wait_for()
    page.get_by_role("img", name="Cache use: KV cache 25%").wait_for()
    expect(page.locator(".tiles")).to_contain_text("80 ms")
    expect(page.locator(".tiles")).to_contain_text("42")
    expect(page.locator(".line.series-0").first).to_have_attribute("d", re.compile(r"^M[0-9]"))


def test_reports_are_shown_and_html_opens_without_scripts_or_origin(page):
    open_tab(page, "Reports")
    page.get_by_role("button", name="run/compare.md").click()
    page.get_by_role("heading", name="qwen3, bfloat16").wait_for()
    page.get_by_role("button", name="bench.json").click()
    page.locator(".report span.nt", has_text="tokens_per_second").wait_for()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="run/compare.html").click()
    report = opened.value
    report.get_by_text("equal").wait_for()
    assert report.evaluate("window.origin") == "null"
    assert report.evaluate("getComputedStyle(document.querySelector('p')).color") == "rgb(255, 0, 0)"


def test_light_and_dark_are_switched_and_remembered(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Light or dark").click()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    page.get_by_role("button", name="Light or dark").wait_for()
    assert page.evaluate(background) == dark


def test_on_a_narrow_screen_no_tab_is_wider_and_what_is_opened_is_in_sight_and_readable(page):
    page.set_viewport_size({"width": 360, "height": 640})
    for tab in TABS:
        open_tab(page, tab.title())
        if tab == "sentences":
            page.get_by_role("button", name="Compare").click()
            page.locator(".matrix").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(e => e.checkVisibility() && !e.closest('.scroll') "
            "&& e.getBoundingClientRect().right > 361).map(e => e.outerHTML.slice(0, 80))"
        )
        assert wide == [], tab
        if tab == "server":
            page.get_by_role("img", name="Requests: running 3").wait_for()
            texts = page.locator("line-chart text")
            assert min(texts.evaluate_all("all => all.map(text => text.getBoundingClientRect().height)")) >= 9
    page.get_by_role("button", name="run/compare.md").click()
    expect(page.get_by_role("heading", name="qwen3, bfloat16")).to_be_in_viewport()


def fill_tab(page, tab):
    """Something to look at in each tab."""
    open_tab(page, tab.title())
    if tab == "chat":
        page.get_by_role("button", name="Settings", exact=True).click()
        for question in ("rich please", "think first", "tools please"):
            page.get_by_label("Message", exact=True).fill(question)
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Send").wait_for()
        page.get_by_label("Result of weather").wait_for()
        page.get_by_role("button", name="Token probabilities").first.click()
    elif tab == "clips":
        page.get_by_label("Prompt").fill("A ball")
        page.get_by_role("button", name="Create the clip").click()
        page.get_by_role("progressbar").first.wait_for()
    elif tab == "sentences":
        page.get_by_role("button", name="Compare").click()
        page.locator(".matrix").wait_for()
    elif tab == "server":
        page.get_by_role("img", name="Requests: running 3").wait_for()
    else:
        page.get_by_role("button", name="run/compare.md").click()
        page.get_by_role("heading", name="qwen3").wait_for()


def test_axe_finds_nothing_serious_in_light_and_dark(page):
    for tab in TABS:
        fill_tab(page, tab)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(50)
            violations = axe.Axe().run(page).response["violations"]
            serious = [one for one in violations if one["impact"] in ("serious", "critical")]
            assert [(tab, scheme, one["id"], one["nodes"][0]["html"][:120]) for one in serious] == []


def test_the_page_asks_for_the_key_that_the_server_wants_and_keeps_it_for_the_tab(browser):
    fake = Fake(Server(NoEngine(), settings=ServerSettings(api_keys=("open-sesame",))))
    with running(fake.app(), "auto") as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        page.get_by_label("API key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("The key was refused").wait_for()
        page.get_by_label("API key", exact=True).fill("open-sesame")
        page.keyboard.press("Enter")
        page.get_by_label("Message", exact=True).fill("hello")
        page.keyboard.press("Enter")
        page.get_by_text("Answer 1 to: hello").wait_for()
        page.reload()
        page.get_by_text("hello", exact=True).first.wait_for()
        assert page.get_by_label("API key", exact=True).count() == 0
        assert page.evaluate("localStorage.getItem('verax-api-key')") is None
        context.close()
