"""A chat with the built-in model, over the real server: an answer, the probabilities of its tokens, charts."""

import re

import pytest

from tests.support.chat_run import running
from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.text.engine.async_llm import AsyncLLM

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'verax[test-all]'").expect


def test_a_chat_with_the_built_in_model(browser):
    llm = AsyncLLM(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, use_tqdm=False)
    with running(create_app(Server(llm)), "auto") as address, browser.new_page() as page:
        page.goto(address)
        answer = page.get_by_role("article", name="Answer").last
        page.get_by_label("Message", exact=True).fill("What is 47 + 38?")
        page.keyboard.press("Enter")
        expect(answer).to_contain_text("85")
        expect(answer.locator(".stats")).to_contain_text("tokens/s")
        answer.get_by_role("button", name="Token probabilities").click()
        answer.locator(".token", has_text="8").first.hover()
        expect(answer.locator(".tip .chosen")).to_contain_text("8")
        page.get_by_role("navigation").get_by_role("link", name="Server").click()
        expect(page.locator(".tiles")).to_contain_text(re.compile(r"Tokens generated\s*[1-9]"))
