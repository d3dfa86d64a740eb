"""Harmony, gpt-oss's format of answers: what its channels become, and the grammars of its tool calls."""

import json

import pytest
import tokenizers

from tests.support.answers import read_cut
from tests.support.grammar import accepts
from tests.support.published import llama_cpp_source
from verax.text.features.chat_format import ChatFormat, chat_format, tool_grammar
from verax.text.features.harmony import TAGS
from verax.text.tokens.tokenizer import Tokenizer

TURN = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Which <city>?\nOslo.<|end|>"
FINAL = "<|channel|>final<|message|>It rains: a < b."
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
TOOLS = [
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}, "required": ["city"]}},
    {"name": "clock", "parameters": {"type": "object", "properties": {}}},
]
FORM = ChatFormat("harmony", True, special_tokens=frozenset(TAGS))


def parse(answer, *, prompt=TURN, **options):
    return read_cut(answer, FORM, TOOLS, prompt, **options)


CITY = '{"city": "Oslo"}'


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (THOUGHT + TURN + FINAL, ("It rains: a < b.", "Which <city>?\nOslo.", [])),
        (FINAL + "<|return|>", ("It rains: a < b.", "", [])),
        (THOUGHT + TURN + CALL, ("", "Which <city>?\nOslo.", [("weather", CITY)])),
        (THOUGHT + TURN + CALL + "<|call|>", ("", "Which <city>?\nOslo.", [("weather", CITY)])),
        (f" to=functions.weather<|channel|>commentary json<|message|>{CITY}", ("", "", [("weather", CITY)])),
        ("<|channel|>commentary<|message|>I look.<|end|>" + TURN + CALL, ("I look.", "", [("weather", CITY)])),
        (
            THOUGHT + TURN + THOUGHT + TURN + FINAL,
            ("It rains: a < b.", "Which <city>?\nOslo.\nWhich <city>?\nOslo.", []),
        ),
        ("<|channel|>analysis<|message|>Well.<|channel|>final<|message|>Yes.", ("Yes.", "Well.", [])),
        ("<|channel|>commentary to=python<|message|>1", ("<|channel|>commentary to=python<|message|>1", "", [])),
        (THOUGHT + FINAL, ("It rains: a < b.", "Which <city>?\nOslo.", [])),
        (THOUGHT + "\nassistant" + CALL, ("", "Which <city>?\nOslo.", [("weather", CITY)])),
        ("<|channel|>??<|end|>" + TURN + THOUGHT + TURN + FINAL, ("It rains: a < b.", "Which <city>?\nOslo.", [])),
        ("<|channel|>analysis<|message|>Cut sho", ("", "Cut sho", [])),
        (THOUGHT + TURN + "<|channel|>fin", ("", "Which <city>?\nOslo.", [])),
        ("Hello < there", ("Hello < there", "", [])),
        (THOUGHT + "\nHi < you.", ("Hi < you.", "Which <city>?\nOslo.", [])),
        (THOUGHT + "Hm. " + TURN + FINAL, ("Hm.\nIt rains: a < b.", "Which <city>?\nOslo.", [])),
        (FINAL + "<|end|>So.", ("It rains: a < b.\nSo.", "", [])),
        (
            THOUGHT + f"assistant to=functions.weather<|channel|>commentary<|message|>{CITY}",
            ("", "Which <city>?\nOslo.", [("weather", CITY)]),
        ),
        (CALL.replace("functions.", ""), ("", "", [("weather", CITY)])),
    ],
)
def test_channels_become_reasoning_content_and_calls_however_the_text_arrives(answer, expected):
    assert parse(answer) == expected


def test_what_is_not_parsed_is_content():
    assert parse(THOUGHT + TURN + FINAL, parse_reasoning=False)[:2] == ("Which <city>?\nOslo.\nIt rains: a < b.", "")
    content, _, calls = parse(CALL, parse_tool_calls=False)
    assert (content, calls) == (CALL, [])


@pytest.mark.parametrize(
    ("opened", "expected"),
    [("<|channel|>final<|message|>It", ("s cold.", "", [])), ("<|channel|>analysis<|message|>", ("", "s cold.", []))],
)
def test_an_answer_continues_the_prompts_last_message(opened, expected):
    assert parse("s cold.", prompt=f"<|start|>user<|message|>Hi<|end|>{TURN}{opened}") == expected


def test_a_form_begins_with_the_message_to_the_user():
    assert FORM.structured_after(f"<|start|>user<|message|>Hi<|end|>{TURN}") == "<|channel|>final<|message|>"
    assert FORM.structured_after(f"{TURN}<|channel|>final<|message|>") is None


def plain_grammar(*arguments):
    """A grammar in which tags are texts, as the test's vocabulary of bytes needs."""
    return tool_grammar(ChatFormat("harmony", True), *arguments)["grammar"]


def test_required_lets_the_model_think_and_demands_a_call():
    grammar = plain_grammar(TOOLS, "required")
    for text in (CALL, THOUGHT + TURN + CALL, " to=functions.clock<|channel|>commentary json<|message|>{}"):
        assert accepts(grammar, text)
    for text in (FINAL, THOUGHT, CALL.replace("city", "town"), CALL.replace("weather", "storm"), "", CALL + FINAL):
        assert not accepts(grammar, text)
    named = plain_grammar(TOOLS, {"type": "function", "function": {"name": "clock"}})
    assert not accepts(named, CALL)


def test_auto_checks_strict_functions_and_leaves_answers_free():
    strict = [{**tool, "strict": True} for tool in TOOLS]
    grammar = plain_grammar(strict)
    for text in (CALL, THOUGHT + TURN + FINAL, FINAL):
        assert accepts(grammar, text)
    assert not accepts(grammar, CALL.replace("city", "town"))
    assert "<|channel|> " in tool_grammar(FORM, strict)["grammar"]


def test_auto_with_a_form_takes_calls_or_a_message_of_the_form():
    grammar = tool_grammar(ChatFormat("harmony", True), TOOLS, form={"json_object": True})["grammar"]
    message = f"{FINAL.partition('<|message|>')[0]}<|message|>{{}}"
    for text in (CALL, THOUGHT + TURN + CALL, message, THOUGHT + TURN + message):
        assert accepts(grammar, text)
    assert not accepts(grammar, FINAL)


def test_an_answer_ends_at_a_call_too_whatever_the_files_name(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens([*TAGS, "<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|return|>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert {tokenizer.token(number) for number in tokenizer.eos_token_ids} == {"<|return|>", "<|call|>"}


@pytest.fixture(scope="module")
def published():
    """A tokenizer with gpt-oss' own template."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens([*TAGS, "<|endoftext|>"])
    template = llama_cpp_source("models/templates/openai-gpt-oss-120b.jinja").read_text()
    return Tokenizer(backend, chat_templates={"default": template})


def call_of(name, number, **arguments):
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_each_call_of_an_answer_comes_back_with_its_own_result(request):
    calls = [call_of("weather", 1, city="Oslo"), call_of("clock", 2)]
    answer = {"role": "assistant", "reasoning_content": "Where?", "content": "I look.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": text} for i, text in ((2, "noon"), (1, "5 mm"))]
    question = {"role": "user", "content": "Rain?"}
    told = FORM.history([question, answer, *results])
    assert [message.get("content") for message in told] == ["Rain?", "Where?\nI look.", "5 mm", "", "noon"]
    assert [message.get("tool_calls") for message in told] == [None, calls[:1], None, calls[1:], None]
    later = [{"role": "tool", "content": "no id"}, {"role": "tool", "tool_call_id": "other", "content": "?"}]
    assert FORM.history([question, answer, *later])[-2:] == later
    prompt = request.getfixturevalue("published").apply_chat_template(told)
    assert prompt.partition("Rain?<|end|>")[2] == (
        f"{TURN}<|channel|>analysis<|message|>Where?\nI look.<|end|>"
        f"{TURN} to=functions.weather<|channel|>commentary json<|message|>{CITY}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"5 mm"<|end|>'
        f"{TURN} to=functions.clock<|channel|>commentary json<|message|>{{}}<|call|>"
        '<|start|>functions.clock to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
        f"{TURN}"
    )


def test_the_published_template_makes_what_the_parser_reads(published):
    tokenizer = published
    form = chat_format(tokenizer)
    assert (form.tools, form.reasoning, form.sampling_overrides) == ("harmony", True, {"skip_special_tokens": False})
    tools = FORM.functions([{"type": "function", "function": tool} for tool in TOOLS])  # without descriptions
    question = [{"role": "user", "content": "What is the weather?"}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    for answer, expected in (
        ({"tool_calls": [call], "reasoning_content": "Where?"}, ("", "Where?", [("weather", {"city": "Oslo"})])),
        ({"content": "It rains.", "reasoning_content": "Where?"}, ("It rains.", "Where?", [])),
    ):
        prompt = tokenizer.apply_chat_template(question, tools=tools)
        messages = [*question, {"role": "assistant", **answer}]
        whole = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=False)
        assert prompt.endswith(TURN)
        assert whole.startswith(prompt)
        content, reasoning, calls = parse(whole[len(prompt) :], prompt=prompt)
        assert (content, reasoning, [(name, json.loads(given)) for name, given in calls]) == expected
