"""The tab Chat in a browser, against canned answers, and against the built-in model over the real server."""

import json
import re

import pytest

from tests.support.chat_run import running
from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.text.engine.async_llm import AsyncLLM

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'verax[test-all]'")
expect = sync_api.expect


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page):
    return page.get_by_role("article", name="Answer")


def finished(page, count=1):
    """Wait until this many answers are there and whole; the last one."""
    expect(page.locator("chat-message[data-role=assistant][aria-busy=false]")).to_have_count(count)
    page.get_by_role("button", name="Send").wait_for()
    return answers(page).last


def test_an_answer_is_rendered_with_its_speed_and_its_code_is_copied(page, fake):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "rich please")
    answer = finished(page)
    answer.get_by_role("heading", name="Two sums").wait_for()
    expect(answer.locator("span.k", has_text="def")).to_have_count(1)
    expect(answer.get_by_role("cell", name="42")).to_have_count(2)
    stats = answer.locator(".stats").inner_text()
    assert "first token" in stats
    assert "tokens/s" in stats
    assert fake.requests[-1]["messages"] == [{"role": "user", "content": "rich please"}]
    answer.get_by_label("Copy the code").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def add(a: int")


def test_stop_ends_the_answer_on_the_server_and_regenerate_makes_a_second_version(page, fake):
    aborted = fake.aborted
    ask(page, "slow one")
    answers(page).get_by_text("word5").wait_for()
    page.get_by_role("button", name="Stop").click()
    answer = finished(page)
    expect(answer.locator(".stats")).to_contain_text("stopped")
    assert "word599" not in answer.inner_text()
    for _ in range(200):
        if fake.aborted > aborted:
            break
        page.wait_for_timeout(50)  # the page continues meanwhile
    assert fake.aborted == aborted + 1
    answer.get_by_label("Regenerate").click()
    page.keyboard.press("Escape")  # stops, too
    answer = finished(page)
    answer.get_by_text("2 / 2").wait_for()
    answer.get_by_label("Previous version").click()
    answers(page).get_by_text("1 / 2").wait_for()
    expect(answers(page)).to_contain_text("word5")


def test_an_edited_message_begins_a_branch(page, fake):
    ask(page, "first")
    finished(page)
    ask(page, "second")
    finished(page, 2)
    question = page.get_by_role("article", name="You").first
    question.get_by_label("Edit").click()
    page.get_by_label("Edit the message").fill("first, but other")
    page.keyboard.press("Enter")
    finished(page, 1)
    assert fake.requests[-1]["messages"] == [{"role": "user", "content": "first, but other"}]
    page.get_by_role("article", name="You").get_by_label("Previous version").click()
    page.get_by_text("second", exact=True).wait_for()
    expect(answers(page)).to_have_count(2)


def test_the_conversation_and_the_settings_are_sent(page, fake):
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Stop texts").fill("END\n\n###")
    page.get_by_label("Token probabilities").uncheck()
    ask(page, "one")
    finished(page)
    ask(page, "two")
    finished(page, 2)
    body = fake.requests[-1]
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["model"], body["temperature"], body["stop"]) == ("verax-text", 0.5, ["END", "###"])
    assert not {"logprobs", "top_p"} & set(body)


def test_settings_that_cannot_be_read_are_an_error_and_no_request(page, fake):
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_text("Structured answers and tools").click()
    page.get_by_label("Tools").fill("[{")
    before = len(fake.requests)
    ask(page, "one")
    expect(answers(page).last).to_contain_text("Tools: this is not JSON yet")
    assert len(fake.requests) == before
    page.get_by_label("Tools").fill("")
    answers(page).last.get_by_label("Regenerate").click()
    finished(page)


BELOW = "log => Math.round(log.scrollHeight - log.scrollTop - log.clientHeight)"
"""Pixels of the log below what is in sight."""


def test_the_end_of_an_answer_stays_in_sight_unless_the_reader_scrolls_up(page):
    log = page.get_by_role("log")
    page.set_viewport_size({"width": 900, "height": 400})
    for count, (kind, last) in enumerate({"rich": ".code", "tools": ".call input"}.items(), start=1):
        ask(page, f"{kind} please")
        finished(page, count).locator(last).wait_for()
        assert log.evaluate(BELOW) <= 1
    ask(page, "slow enough to scroll")
    answers(page).last.get_by_text("word9").wait_for()
    log.evaluate("log => log.scrollTo(0, 0)")
    answers(page).last.get_by_text("word150").wait_for(timeout=30_000)
    assert log.evaluate("log => log.scrollTop") == 0
    page.get_by_role("button", name="Stop").click()
    finished(page, 3)


def test_a_tool_call_is_shown_and_its_result_continues_the_chat(page, fake):
    ask(page, "tools please")
    answer = finished(page)
    answer.get_by_text("weather").wait_for()
    expect(answer).to_contain_text('"city": "Paris"')
    answer.get_by_label("Result of weather").fill("sunny")
    page.keyboard.press("Enter")
    finished(page, 2)
    call, result = fake.requests[-1]["messages"][-2:]
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert call["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert result == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    expect(page.get_by_label("Result of weather")).to_have_count(0)  # it is answered


def test_thinking_is_folded_and_token_probabilities_appear_at_the_pointer(page):
    ask(page, "think first")
    answer = finished(page)
    expect(answer.get_by_text("Six by seven")).to_be_hidden()
    answer.get_by_text("Thought").click()
    expect(answer.get_by_text("Six by seven")).to_be_visible()
    answer.get_by_role("button", name="Token probabilities").click()
    answer.locator(".token").first.hover()
    answer.get_by_text("81.9%").wait_for()
    expect(answer.get_by_text("15.0%")).to_be_visible()


WATCH_LENGTH = """
let longest = 0;
window.shrank = false;
new MutationObserver(() => {
  const length = document.querySelector("chat-message[data-role=assistant] .content")?.innerText.length ?? 0;
  window.shrank ||= length < longest;
  longest = Math.max(longest, length);
}).observe(document, { childList: true, subtree: true, characterData: true });
"""
"""Script that notes whether the text of an answer ever gets shorter."""


def test_an_answer_survives_a_reload_in_mid_stream(page, fake):
    aborted = fake.aborted
    ask(page, "slow please")
    answers(page).get_by_text("word70").wait_for()  # 1.4 seconds: the page has saved a part by now
    page.add_init_script(WATCH_LENGTH)
    page.reload()
    answers(page).get_by_text("word100").wait_for()
    expect(answers(page)).to_have_text(re.compile("^word0 word1 word2"))
    assert not page.evaluate("window.shrank")
    assert fake.aborted == aborted
    page.get_by_role("button", name="Stop").click()
    finished(page)
    assert len([body for body in fake.requests if body["messages"][-1]["content"] == "slow please"]) == 1


def test_conversations_are_kept_searched_and_deleted(page):
    ask(page, "about apples")
    finished(page)
    page.get_by_role("button", name="New chat").click()
    ask(page, "about pears")
    finished(page)
    page.reload()
    titles = page.locator(".conversations .title")
    page.get_by_text("about apples").wait_for()
    assert titles.all_inner_texts() == ["about pears", "about apples"]
    page.get_by_label("Search the conversations").fill("APPLE")
    expect(titles).to_have_count(1)
    titles.first.click()
    page.get_by_role("article", name="You").get_by_text("about apples").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_label("Delete about apples").click()
    page.get_by_text("Nothing found").wait_for()


def test_conversations_are_exported_and_imported(page, fake, tmp_path):
    ask(page, "keep this")
    finished(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "export.json"
    download.value.save_as(file)
    kept = json.loads(file.read_text())["conversations"][0]
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_label("Delete keep this").click()
    page.get_by_text("No conversations yet").wait_for()
    page.get_by_label("File to import").set_input_files(file)
    page.get_by_role("button", name="keep this", exact=True).click()
    answers(page).get_by_text("keep this").wait_for()
    file.write_text(json.dumps({"format": "verax-conversations", "conversations": [kept | {"id": "../x"}]}))
    page.get_by_label("File to import").set_input_files(file)
    page.get_by_text("A conversation of this file is broken").wait_for()


@pytest.mark.parametrize("kind", ["hostile", "line"])
def test_a_hostile_answer_does_nothing(page, kind):
    ask(page, f"{kind} please")
    answer = finished(page)
    # Markdown is rendered after the answer has ended.
    expect(answer.locator(".content")).to_contain_text("click me" if kind == "hostile" else "x" * 1_000_000)
    assert page.evaluate("window.hacked") is None
    assert answer.locator("img, script, iframe, style, svg[onload], .content a").count() == (kind == "hostile")
    if kind == "hostile":
        link = answer.get_by_role("link", name="pixel")  # the picture's address, which nothing loads
        assert link.get_attribute("rel") == "noopener noreferrer"
        answer.get_by_text("click me").click()
    else:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ask(page, "still there?")
    finished(page, 2).get_by_text("still there?").wait_for()


def test_an_error_in_mid_stream_is_shown_next_to_what_came(page):
    ask(page, "fail please")
    answer = finished(page)
    expect(answer).to_contain_text("engine: it stopped")
    answer.get_by_text("It begins,").wait_for()


def test_the_whole_chat_works_with_the_keyboard(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("one line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two lines")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Send"
    page.keyboard.press("Enter")
    finished(page)
    expect(page.get_by_role("article", name="You")).to_have_text(
        re.compile("^one line\ntwo lines"), use_inner_text=True
    )


def test_a_chat_with_the_built_in_model(browser):
    llm = AsyncLLM(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, use_tqdm=False)
    with running(create_app(Server(llm)), "auto") as address, browser.new_page() as page:
        page.goto(address)
        ask(page, "What is 47 + 38?")
        answer = finished(page)
        expect(answer).to_contain_text("85")
        expect(answer.locator(".stats")).to_contain_text("tokens/s")
        answer.get_by_role("button", name="Token probabilities").click()
        answer.locator(".token", has_text="8").first.hover()
        expect(answer.locator(".tip .chosen")).to_contain_text("8")
        page.get_by_role("navigation").get_by_role("link", name="Server").click()
        expect(page.locator(".tiles")).to_contain_text(re.compile(r"Tokens generated\s*[1-9]"))
