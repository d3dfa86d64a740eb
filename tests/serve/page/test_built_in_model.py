"""A whole chat with the built-in model, over the real server: answer, stop, regenerate, reload, charts."""

import re
import time

import pytest

from tests.support.chat_run import running
from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.text.engine.async_llm import AsyncLLM
from verax.text.step.runner import ModelRunner

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'verax[test-all]'").expect


ENDLESS = 900
"""Tokens of an answer that lasts for some seconds."""

STEP_SECONDS = 0.006
"""Least seconds of a step: the model alone would end that answer before a busy browser presses Stop."""


@pytest.fixture(scope="module")
def address():
    run = ModelRunner.run

    def run_slowly(self, schedule):
        time.sleep(STEP_SECONDS)
        return run(self, schedule)

    llm = AsyncLLM(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=1024, use_tqdm=False)
    with pytest.MonkeyPatch.context() as patch, running(create_app(Server(llm)), "auto") as address:
        patch.setattr(ModelRunner, "run", run_slowly)
        yield address


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_chat_with_the_built_in_model(browser, address):
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    answer = page.get_by_role("article", name="Answer").last
    send, stop = page.get_by_role("button", name="Send"), page.get_by_role("button", name="Stop")

    ask(page, "What is 47 + 38?")
    expect(answer).to_contain_text("85")
    expect(answer.locator(".stats")).to_contain_text("tokens/s")
    answer.get_by_role("button", name="Token probabilities").click()
    answer.locator(".token", has_text="8").first.hover()
    expect(answer.locator(".tip .chosen")).to_contain_text("8")

    # The model ends its stories after some lines. Without that, this one continues until it is stopped.
    page.route("**/v1/chat/completions", endless)
    ask(page, "Tell me a story about a brave fox.")
    expect(answer.locator(".content")).to_contain_text(re.compile(r"\w"))
    stop.click()
    send.wait_for()
    expect(answer.locator(".stats")).to_contain_text("stopped")
    answer.get_by_label("Regenerate").click()
    answer.get_by_text("2 / 2").wait_for()
    expect(answer.locator(".content")).to_contain_text(re.compile(r"\w"))
    page.reload()
    send.wait_for()
    expect(answer.locator(".stats")).to_contain_text(f"{ENDLESS} tokens")
    page.unroute("**/v1/chat/completions")

    answer.get_by_label("Regenerate").click()
    send.wait_for()
    answer.get_by_text("3 / 3").wait_for()
    expect(answer.locator(".content")).to_contain_text("fox")

    page.get_by_role("navigation").get_by_role("link", name="Server").click()
    expect(page.locator(".tiles")).to_contain_text(re.compile(r"Tokens generated\s*[1-9]"))
    context.close()


def endless(route):
    """Send the page's request with an answer as long as the context allows, whatever the model would stop at."""
    body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": ENDLESS}
    route.continue_(post_data=body)
