"""Tool calls as models write them, and what the parser makes of an answer that arrives in pieces."""

import json

from verax.text.features.chat_format import parser_for
from verax.text.features.tool_calls import join

_BEFORE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}"""
_AFTER = """{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_CALLS = {
    "hermes": """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>""",
    "qwen3_coder": """{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\n' }}
{{- value | tojson if value is mapping else value | string }}
{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}""",
    "llama3_json": """{{- '{"name": "' + call.function.name + '", ' }}
{{- '"parameters": ' }}{{- call.function.arguments | tojson }}{{- "}" }}""",
    "none": "",
}
"""Text of a call in each syntax."""

SYNTAXES = tuple(_CALLS)
TEMPLATES = {syntax: _BEFORE + call + _AFTER for syntax, call in _CALLS.items()}
"""A chat template of each syntax of tool calls."""


def written(syntax, name, **arguments):
    """A call as a model writes it."""
    if syntax == "qwen3_coder":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    text = json.dumps({"name": name, "arguments" if syntax == "hermes" else "parameters": arguments})
    return f"<tool_call>\n{text}\n</tool_call>" if syntax == "hermes" else text


def new_parser(form, tools, prompt="", *, parse_tool_calls=True, parse_reasoning=True):
    """A parser of an answer to a prompt."""
    return parser_for(
        form, tools=tools, prompt=prompt, parse_tool_calls=parse_tool_calls, parse_reasoning=parse_reasoning
    )


def read(pieces, *arguments, **options):
    """The whole answer that the pieces of a text are, by a new parser."""
    parser = new_parser(*arguments, **options)
    deltas = [parser.feed(piece) for piece in pieces]
    return join([*deltas, parser.finish()], parser.text)


def read_cut(text, *arguments, **options):
    """Content, reasoning and calls of a text, which are the same whole and in pieces of a few characters."""
    results = {}
    for size in (len(text) or 1, 1, 2, 3, 5):
        whole = read([text[i : i + size] for i in range(0, len(text), size)], *arguments, **options)
        results[size] = whole.content, whole.reasoning, [(call.name, call.arguments) for call in whole.tool_calls]
    assert all(result == results[1] for result in results.values()), results
    return results[1]
