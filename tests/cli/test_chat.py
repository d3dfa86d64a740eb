"""`verax chat` from a script, and its commands as a person at a terminal gives them."""

import errno
import io
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.tiny import tiny_checkpoint
from verax import cli
from verax.cli.chat import Conversation
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("few_programs")

QUICK = ("--dtype", "float32", "--max-tokens", "5", "--temperature", "0")


def test_a_message_is_answered_once(run, folder):
    done = run("chat", "-m", folder, "--message", "abc", *QUICK)
    assert done.status == 0
    record = json.loads(run("chat", "-m", folder, "--message", "abc", "--json", *QUICK).out)
    assert done.out == record["outputs"][0]["text"] + "\n"
    assert record["prompt"] == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"


def test_each_line_of_a_pipe_is_a_turn_and_is_remembered(run, folder):
    done = run("chat", "-m", folder, "--system", "fox", "--json", *QUICK, stdin="abc\ndef\n")
    first, second = (json.loads(line) for line in done.out.splitlines())
    assert first["prompt"].startswith("<|im_start|>system\nfox<|im_end|>")
    answer = first["outputs"][0]["text"]
    turn = "<|im_end|>\n<|im_start|>user\ndef<|im_end|>\n<|im_start|>assistant\n"
    assert second["prompt"] == first["prompt"] + answer + turn


def test_bytes_of_another_encoding_are_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verax", "chat", "-m", folder, *QUICK])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("verax: error: prompt: ")


def test_instructions_begin_the_user_s_text_where_the_template_has_no_system(run, tmp_path):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system!') }}{% endif %}"
    template = refusing + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    folder = tiny_checkpoint(tmp_path, chat_template=template)
    done = run("chat", "-m", folder, "--system", "fox", "--json", *QUICK, stdin="abc\ndef\n")
    prompts = [json.loads(line)["prompt"] for line in done.out.splitlines()]
    assert [prompt.startswith("user: fox\n\nabc\n") for prompt in prompts] == [True, True]
    assert prompts[1].endswith("user: def\n")


HARMONY = """{% for m in messages %}<|start|>{{ m.role }}{% if m.role == "assistant" %}<|channel|>final{% endif -%}
<|message|>
{{- m.content }}<|end|>{% endfor %}<|start|>assistant"""
THOUGHT = "<|channel|>analysis<|message|>It rains.<|end|><|start|>assistant"


def test_reasoning_is_shown_between_tags_and_kept_apart_from_the_answer(tmp_path, capsys):
    folder = tiny_checkpoint(tmp_path, chat_template=HARMONY)
    llm = LLM(folder, dtype="float32", max_num_seqs=1, max_model_len=384, use_tqdm=False, structured_outputs=True)
    said = {"choice": [f"{THOUGHT}<|channel|>final<|message|>Yes."]}
    talk = Conversation(llm, SamplingParams(max_tokens=200, structured_outputs=said), None, show=True)
    talk.say("Rain?")
    assert capsys.readouterr().out == "<think>\nIt rains.\n</think>\n\nYes.\n"
    assert talk.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "It rains."}
    assert talk.say("Snow?").prompt.count("analysis") == 0


def test_a_model_that_recommends_no_sampling_begins_with_some_and_says_so(run, tmp_path, monkeypatch):
    folder, chosen, stream = tiny_checkpoint(tmp_path), [], LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda llm, text, *more: chosen.append(more[0]) or stream(llm, text, *more))
    ask = ("chat", "-m", folder, "--message", "abc", "--max-tokens", "2", "--dtype", "float32")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert "recommends no sampling: temperature 0.7, top_p 0.95\n" in run(*ask).err
    assert "recommends" not in run(*ask, "--temperature", "1").err
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    assert "recommends" not in run(*ask).err
    assert [(params.temperature, params.top_p) for params in chosen] == [(0.7, 0.95), (1.0, 1.0), (1.0, 1.0)]


def test_a_template_of_a_file_goes_before_the_checkpoint_s(run, folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }} =>")
    done = run("chat", "-m", folder, "--message", "abc", "--json", "--chat-template", template, *QUICK)
    assert json.loads(done.out)["prompt"] == "abc =>"
    template.write_bytes(b"\xff")
    done = run("chat", "-m", folder, "--message", "abc", "--chat-template", template, *QUICK)
    assert done.status == 2
    assert "is not UTF-8 text" in done.err
    assert "nowhere.jinja" in run("chat", "-m", folder, "--chat-template", "nowhere.jinja").err


@pytest.fixture
def at_terminal(run, monkeypatch):
    """Type lines at the prompt, and return both outputs."""

    def call(*arguments, lines):
        monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError]))
        done = run("chat", *arguments, terminal=True)
        assert done.status == 0
        return done

    return call


def test_commands_reset_save_and_leave(at_terminal, folder, tmp_path):
    saved = tmp_path / "talk.json"
    lines = ["/help", "abc", KeyboardInterrupt(), "/reset", "/system fox", "def", f"/save {saved}", "/exit", "unread"]
    shown = at_terminal("-m", folder, *QUICK, lines=lines)
    assert "/reset" in shown.err
    talk = json.loads(saved.read_text())
    assert [message["role"] for message in talk] == ["system", "user", "assistant"]
    assert talk[1]["content"] == "def"
    assert talk[2]["content"] == shown.out.split("\n", 1)[1].removesuffix("\n")


def test_a_conversation_is_saved_in_the_home_and_whole_or_not_at_all(at_terminal, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    at_terminal("-m", folder, *QUICK, lines=["abc", "/save ~/talk.json"])
    before = (tmp_path / "talk.json").read_text()
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    shown = at_terminal("-m", folder, *QUICK, lines=["def", "/save ~/talk.json"])
    assert "No space left" in shown.err
    assert (tmp_path / "talk.json").read_text() == before


def test_a_folder_that_cannot_be_written_does_not_end_the_conversation(at_terminal, folder):
    shown = at_terminal("-m", folder, *QUICK, lines=["abc", "/save /no/such/folder/x", "def"])
    assert "cannot write" in shown.err


def test_a_message_that_does_not_fit_leaves_the_conversation_as_it_was(at_terminal, folder, tmp_path):
    saved = tmp_path / "talk.json"
    shown = at_terminal("-m", folder, *QUICK, lines=["abc", "def " * 300, f"/save {saved}"])
    assert "error: prompt: " in shown.err
    assert "dropped" not in shown.err
    assert [message["role"] for message in json.loads(saved.read_text())] == ["user", "assistant"]


def test_the_oldest_turns_are_dropped_when_the_context_is_full(folder, capsys):
    llm = LLM(folder, dtype="float32", max_num_seqs=1, max_model_len=96, use_tqdm=False)
    talk = Conversation(llm, SamplingParams(temperature=0, max_tokens=4), "fox", show=False)
    for i in range(8):
        assert talk.say(f"abc def {i}") is not None
    assert talk.messages[0] == {"role": "system", "content": "fox"}
    assert talk.messages[-2]["content"] == "abc def 7"
    assert len(talk.messages) < 17
    assert "oldest turns dropped" in capsys.readouterr().err
