"""Prompts against transformers: the same templates, the same folders. Ids are in test_tokenizer_config.py."""

import json
from itertools import product

import pytest

transformers = pytest.importorskip("transformers")

from tests.support.published import BUILD, published_tokenizer
from tests.support.tiny import tiny_tokenizer
from verax.text.tokens.tokenizer import Tokenizer

LLAMA3 = r"""{{- bos_token }}
{%- if documents is defined and documents is not none %}{{- raise_exception('no documents') }}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" + system_message }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}{%- continue %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ (message['content'] or '')|trim }}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

MARKED = """{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}
{{ message.content }}{{ eos_token }}
    {% endgeneration %}
  {% else %}
[{{ message.role }}] {{ message.content }}
  {% endif %}
{% endfor %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <what> it's like & où",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Grüße, <b>& weather</b>?\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny  "},
    {"role": "user", "content": "日本?"},
]
CALLED = [
    *CHAT,
    {
        "role": "assistant",
        "content": "",
        "reasoning": "look it up",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": '{"t": 3}'},
]
AS_TEXT = [*CHAT, {**CALLED[-2], "tool_calls": [{"function": {"name": "weather", "arguments": '{"city":"Köln"}'}}]}]
PREFILLED = [*CHAT, {"role": "assistant", "content": "It is "}]


def both(folder, template):
    """A tokenizer as verax and as transformers load it: a small one with this template, or the published Qwen3's."""
    if template == "qwen3":
        return published_tokenizer("qwen3"), transformers.AutoTokenizer.from_pretrained(BUILD / "tokenizers/qwen3")
    tiny_tokenizer(folder, chat_template=template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|endoftext|>"}))
    return Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)


each_template = pytest.mark.parametrize("template", ["qwen3", LLAMA3, MARKED], ids=["qwen3", "llama3", "marked"])

OPTIONS = [
    *({}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"tools": []}),
    {"enable_thinking": False, "date_string": "1 Jan"},
]


@each_template
def test_prompts_match_transformers(tmp_path, template):
    ours, theirs = both(tmp_path, template)
    for messages, options in product([CHAT[1:2], CHAT, CALLED, AS_TEXT], OPTIONS):
        expected = theirs.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
        assert ours.apply_chat_template(messages, **options) == expected, options
        assert ours.encode(expected, add_special_tokens=False) == theirs.encode(expected, add_special_tokens=False)


@each_template
def test_continued_messages_match_transformers(tmp_path, template):
    ours, theirs = both(tmp_path, template)
    expected = theirs.apply_chat_template(PREFILLED, tokenize=False, continue_final_message=True)
    assert ours.apply_chat_template(PREFILLED, continue_final_message=True) == expected
    assert expected.rstrip().endswith("It is")


def test_named_templates_that_transformers_saves_are_found(tmp_path):
    _, theirs = both(tmp_path / "a", LLAMA3)
    theirs.chat_template = {"default": LLAMA3, "tool_use": MARKED}
    theirs.save_pretrained(tmp_path / "b")
    ours = Tokenizer.from_folder(tmp_path / "b")
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(CHAT, tools=tools) == expected
