"""Format of a checkpoint's answers, from its chat template and vocabulary; reasoning, from the end of the prompt."""

import pytest
import tokenizers

from verax.text.features.chat_format import ChatFormat, chat_format
from verax.text.tokens.tokenizer import Tokenizer

HERMES = """{%- if tools %}For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call>{%- endif %}<|im_start|>"""
CODER = "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + key + '>' }} call.arguments"
LLAMA = """<|eot_id|>Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{%- if message.tool_calls %}{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{%- endif %}"""
GLM = "<tool_call>{{ call.name }}<arg_key>{{ key }}</arg_key> arguments"
PLAIN = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def made(templates, special=(), added=()):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return Tokenizer(backend, chat_templates=templates)


@pytest.mark.parametrize(
    ("template", "expected"),
    [(HERMES, "hermes"), (CODER, "qwen3_coder"), (LLAMA, "llama3_json"), (GLM, "none"), (PLAIN, "none")],
)
def test_the_template_shows_the_syntax_of_tool_calls(template, expected):
    assert chat_format(made({"default": template})).tools == expected


def test_a_template_for_tools_is_read_before_the_default_one():
    assert chat_format(made({"default": PLAIN, "tool_use": HERMES})).tools == "hermes"
    assert chat_format(made({})) == ChatFormat()


def test_reasoning_shows_in_the_template_or_in_the_vocabulary():
    assert chat_format(made({"default": PLAIN + "</think>"})).reasoning
    assert chat_format(made({"default": PLAIN}, added=["<think>", "</think>"])).reasoning
    assert not chat_format(made({"default": PLAIN}, added=["<think>"])).reasoning


def test_special_tags_are_kept_in_the_text_and_others_need_nothing():
    found = chat_format(made({"default": LLAMA}, special=["<|python_tag|>", "<|eot_id|>"]))
    assert found.sampling_overrides == {"skip_special_tokens": False}
    assert found.turn_tokens == ("<|eot_id|>",)
    assert chat_format(made({"default": HERMES}, added=["<tool_call>"])).sampling_overrides == {}


TURN = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        (TURN, "open"),
        (f"{TURN}<think>\n", "inside"),
        (f"{TURN}<think>\n\n</think>\n\n", "over"),
        (f"{TURN}<think>\nWhat if", "inside"),
        (f"{TURN}<think>\nSo.\n</think>\n\nThe answ", "over"),
        (f"<|im_start|>user\nWhat is <think>?<|im_end|>\n{TURN}", "open"),
        ("", "open"),
    ],
)
def test_the_state_of_the_reasoning_is_that_of_the_last_turn(prompt, state):
    found = ChatFormat("hermes", True, turn_tokens=("<|im_end|>", "<|im_start|>"))
    assert found.reasoning_state(prompt) == state
    assert found.structured_after(prompt) == ("</think>" if state == "inside" else None)
    assert ChatFormat("hermes").reasoning_state(prompt) == "none"


def test_without_turn_tokens_only_the_very_end_of_the_prompt_counts():
    found = ChatFormat(reasoning=True)
    assert found.reasoning_state("What is <think>? Say so.") == "open"
    assert found.reasoning_state("Assistant: <think>\n") == "inside"
    assert found.reasoning_state("Assistant: <think>\n\n</think>\n\n") == "over"
