"""Lines of a file of examples: which tokens are read, which are trained, and what is refused by its number."""

import json
from itertools import islice

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tests.support.tiny import CHAT_TEMPLATE, TURN_END, tiny_tokenizer
from verax.errors import InvalidParameterError
from verax.text.tokens.tokenizer import Tokenizer
from verax.train.finetune.data import Example, read_examples, shuffled_batches, validation_batches

USER = {"role": "user", "content": "a fox"}
ANSWER = {"role": "assistant", "content": "the river"}
CALL = {"type": "function", "function": {"name": "cross", "arguments": {}}}

FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}(thought){% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template that drops what only the last answer has, as templates of reasoning models do."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def read(tmp_path, tokenizer):
    def read(*lines, template=CHAT_TEMPLATE, max_length=200):
        file = tmp_path / "data.jsonl"
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return read_examples(file, tokenizer.with_chat_template(template), max_length=max_length)

    return read


def parts(tokenizer, example):
    """Texts of an example: the whole, and what of it is trained."""
    whole = tokenizer.decode(example.tokens.tolist(), skip_special_tokens=False)
    return whole, tokenizer.decode(example.tokens[example.trained].tolist(), skip_special_tokens=False)


def test_only_the_assistants_answers_of_a_conversation_are_trained_with_their_ends(read, tokenizer):
    system = {"role": "system", "content": "small"}
    (example,) = read({"messages": [system, USER, ANSWER, USER, {**ANSWER, "content": "once"}]}).items
    whole, trained = parts(tokenizer, example)
    assert whole == (
        "<|im_start|>system\nsmall<|im_end|>\n<|im_start|>user\na fox<|im_end|>\n<|im_start|>assistant\nthe river"
        "<|im_end|>\n<|im_start|>user\na fox<|im_end|>\n<|im_start|>assistant\nonce<|im_end|>\n"
    )
    assert trained == "the river<|im_end|>once<|im_end|>"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, FORGETFUL])
def test_an_answer_of_weight_zero_is_only_read(read, tokenizer, template):
    answers = [ANSWER | {"weight": 0}, ANSWER | {"content": "once", "weight": 1}, ANSWER | {"weight": None}]
    examples = read({"messages": [m for answer in answers for m in (USER, answer)]}, template=template).items
    trained = "".join(parts(tokenizer, example)[1] for example in examples)
    assert trained.replace("(thought)", "") == "once<|im_end|>the river<|im_end|>"
    assert all("a fox" in parts(tokenizer, example)[0] for example in examples)


def test_the_prompt_has_the_tokens_that_the_engine_reads(read, tokenizer):
    (example,) = read({"messages": [USER, ANSWER]}).items
    prompt = tokenizer.encode(tokenizer.apply_chat_template([USER]), add_special_tokens=False)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert not example.trained[: len(prompt)].any()
    assert example.trained[len(prompt)]


def test_of_a_prompt_and_a_completion_of_messages_the_completion_is_trained(read, tokenizer):
    line = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER | {"content": "once"}]}
    (example,) = read(line).items
    whole, trained = parts(tokenizer, example)
    assert whole == parts(tokenizer, read({"messages": line["prompt"] + line["completion"]}).items[0])[0]
    assert trained == "once<|im_end|>"


def test_an_array_and_rows_of_parquet_are_read_as_lines_are(read, tokenizer, tmp_path):
    """In Parquet each object of a column has the names that any of them has, with nulls."""
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    template = CHAT_TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("a", "b")]
    rows = [{"messages": [USER, ANSWER | {"tool_calls": [call]}]} for call in calls] + [{"text": "a fox"}]
    expected = [parts(tokenizer, example) for example in read(*rows, template=template).items]
    assert '{"a": 1}' in expected[0][1]
    (tmp_path / "data.json").write_text(json.dumps(rows, indent=1))
    table = pyarrow.Table.from_pylist([{"messages": None, "text": None, **row} for row in rows])
    parquet.write_table(table, tmp_path / "data.parquet")
    for name in ("data.json", "data.parquet"):
        found = read_examples(tmp_path / name, tokenizer.with_chat_template(template), max_length=200)
        assert [parts(tokenizer, example) for example in found.items] == expected


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("data.json", b'[{"text": "a"}, 3]', r"data\.json, item 2: expected an object"),
        ("data.json", b'[{"text": "a"}', r"data\.json: cannot be read: Expecting"),
        ("data.parquet", b'{"text": "a"}', r"data\.parquet: cannot be read: .*Parquet"),
        ("data.jsonl.gz", b"\x1f\x8b\x08", r"data\.jsonl\.gz: cannot be read: it is packed"),
    ],
)
def test_a_file_of_another_format_than_its_name_says_is_refused(name, content, problem, tmp_path, tokenizer):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidParameterError, match=problem):
        read_examples(tmp_path / name, tokenizer, max_length=200)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_no_space_comes_before_an_answer_whose_tokenizer_puts_one_before_each_text(scheme, tmp_path):
    backend = tokenizers.Tokenizer(
        models.BPE({"</s>": 0, "▁": 1, "a": 2, "b": 3, "\n": 4, ":": 5, "▁a": 6}, [("▁", "a")])
    )
    backend.add_special_tokens(["</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    template = (
        "{% for m in messages %}b:\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}b:\n{% endif %}"
    )
    end = {"eos_token": "</s>"}
    tokenizer = Tokenizer(
        backend, special_tokens=end, eos_token_ids=frozenset([0]), chat_templates={"default": template}
    )
    answer = {"role": "assistant", "content": "aa"}
    lines = {"messages": [USER | {"content": "b"}, answer] * 2}, {"prompt": "b ", "completion": "a"}
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat, pair = read_examples(path, tokenizer, max_length=100).items
    whole = tokenizer.apply_chat_template(lines[0]["messages"], add_generation_prompt=False)
    assert chat.tokens.tolist() == tokenizer.encode(whole)
    assert chat.tokens[chat.trained].tolist() == [2, 2, 0] * 2
    assert pair.tokens.tolist() == [*tokenizer.encode("b "), 2, 0]  # together, "▁a" is one token


def test_answers_that_the_template_renders_otherwise_later_become_examples_of_their_own(read, tokenizer):
    first, second = read({"messages": [USER, ANSWER, USER, ANSWER]}, template=FORGETFUL).items
    assert parts(tokenizer, first)[1] == parts(tokenizer, second)[1] == "(thought)the river<|im_end|>"
    assert parts(tokenizer, first)[0].count("a fox") == 1
    assert parts(tokenizer, second)[0].count("a fox") == 2
    assert parts(tokenizer, second)[0].count("(thought)") == 1


def test_a_completion_or_all_of_a_text_is_trained_with_its_end_and_blank_lines_are_skipped(read, tokenizer):
    pair, text = read("", {"prompt": "once upon ", "completion": "a time"}, "   ", {"text": "once upon"}).items
    assert parts(tokenizer, pair) == ("once upon a time<|im_end|>", "a time<|im_end|>")
    assert parts(tokenizer, text) == ("once upon<|im_end|>",) * 2


def test_long_examples_are_cut_and_those_with_nothing_to_learn_left_out(read):
    long = {"prompt": "once upon a time " * 3, "completion": "a fox"}
    found = read({"text": "once upon a time there was a small fox"}, long, {"text": "a fox"}, max_length=6)
    assert len(found.items[0].tokens) == 6
    assert (len(found), found.cut, found.left_out) == (2, 2, 1)
    with pytest.raises(InvalidParameterError, match="no example to learn from: what is to be learned comes after 6"):
        read(long, max_length=6)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not valid JSON"),
        ("[1]", r'expected an object with "messages".*got \[1\]'),
        ({"question": "?", "answer": "!"}, "got the keys question, answer"),
        ({"prompt": "a"}, "got the keys prompt"),
        ({"text": "a", "prompt": "a", "completion": "b"}, "got the keys text, prompt, completion"),
        ({"text": 3}, "text: expected a text, got 3"),
        ({"prompt": "a", "completion": ""}, "completion: it is empty"),
        ({"messages": "a"}, "messages: expected a list"),
        ({"messages": [{"content": "a"}]}, "expected a dictionary with a role"),
        ({"messages": [USER]}, "expected an answer of the assistant"),
        ({"messages": [ANSWER]}, "expected an answer of the assistant after another message"),
        ({"messages": [USER, ANSWER | {"content": ""}]}, r"messages\[1\]: the answer is empty"),
        (
            {"messages": [USER, ANSWER | {"content": [{"type": "text", "text": "a"}]}]},
            r"messages\[1\].content: expected",
        ),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, r"messages\[1\].weight: expected 0 or 1, got 0.5"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, "each answer has the weight 0"),
        ({"messages": [USER, ANSWER | {"loss": False}]}, r'messages\[1\].loss: False is not supported; .*"weight" 0'),
        ({"messages": [USER | {"train": True}, ANSWER]}, r"messages\[0\].train: True is not supported"),
        ({"messages": [USER, ANSWER | {"content": " \n"}]}, r"messages\[1\]: the answer is empty"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, r"messages\[1\].tool_calls: .* leaves out"),
        (
            {"messages": [USER, ANSWER | {"tool_calls": ["cross"]}]},
            r"messages\[1\].tool_calls: expected a list of calls",
        ),
        ({"messages": [USER, {"role": "Model", "content": "a"}, USER, ANSWER]}, r"messages\[1\].role: 'Model' is not"),
        ({"messages": [USER, ANSWER], "tools": "[]"}, r"tools: expected a list of objects, got '\[\]'"),
        ({"messages": [USER, ANSWER], "system": "be brief"}, "system: it is not supported"),
        ({"messages": [USER, ANSWER], "enable_thinking": False}, "enable_thinking: it is not supported"),
        ({"messages": [USER, ANSWER], "train": False}, "train: false is not supported"),
        ({"messages": [USER, ANSWER], "weight": 0}, "weight: 0 is not supported"),
        ({"prompt": "a", "completion": "b", "rejected": "c"}, "rejected: it is not supported"),
        ({"prompt": "a", "completion": "b", "completion_mask": [0]}, "completion_mask: it is not supported"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs: it"),
        ({"prompt": "a", "completion": "b", "label": False}, "label: false marks an answer to avoid"),
        ('{"text": "\\ud83e"}', "not valid JSON"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(read, line, problem):
    with pytest.raises(InvalidParameterError, match=rf"data.jsonl, line 3: .*{problem}"):
        read({"text": "a fox"}, "", line)


@pytest.mark.parametrize("line", [{"text": "<s>ab"}, {"prompt": "<s>a", "completion": "b"}])
def test_a_beginning_that_the_tokenizer_adds_is_refused_in_the_text(line, tmp_path):
    """Texts that a chat template rendered, for example."""
    backend = tokenizers.Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2}, []))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer, path = Tokenizer(backend, special_tokens={"bos_token": "<s>"}), tmp_path / "data.jsonl"
    path.write_text(json.dumps({name: text.replace("<s>", "") for name, text in line.items()}))
    assert read_examples(path, tokenizer, max_length=9).items[0].tokens.tolist() == [0, 1, 2]
    path.write_text(json.dumps(line))
    with pytest.raises(
        InvalidParameterError, match=r"line 1: (text|prompt): it begins with '<s>', which the tokenizer"
    ):
        read_examples(path, tokenizer, max_length=9)


def test_a_template_that_ends_no_answer_is_refused(read):
    unended = CHAT_TEMPLATE.replace(TURN_END, "<|turn|>")
    with pytest.raises(InvalidParameterError, match=r"line 1: .*no token that ends a text \('<\|im_end\|>'\)"):
        read({"messages": [USER, ANSWER]}, template=unended)


SELECTIVE = """{% for m in messages %}{% if m.role != 'system' or loop.first %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% for call in (m.tool_calls or [])[:1] %}{{ call.function.name }}{% endfor %}
{{ (m.content or '').split('</think>')[-1] | trim }}{% else %}{{ m.content | tojson }}{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Template that leaves out what published ones do: later instructions, all calls but one, tools, and thoughts."""


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ({"messages": [USER, ANSWER | {"content": "<think>abc</think>def"}]}, r"messages\[1\].content"),
        ({"messages": [USER, ANSWER | {"reasoning": "abc"}]}, r"messages\[1\].reasoning"),
        ({"messages": [USER, ANSWER | {"tool_calls": [CALL, CALL]}]}, r"messages\[1\].tool_calls"),
        ({"messages": [USER, ANSWER, {"role": "system", "content": "abc"}, USER, ANSWER]}, r"messages\[2\]"),
        ({"messages": [USER, ANSWER], "tools": [CALL]}, "tools"),
    ],
)
def test_what_the_template_leaves_out_of_a_conversation_is_refused(read, line, part):
    with pytest.raises(InvalidParameterError, match=rf"line 1: {part}: the chat template leaves out"):
        read(line, template=SELECTIVE)


def test_what_the_template_writes_in_another_way_is_not_refused(read, tokenizer):
    user, answer = (
        {"role": "user", "content": 'a "fox"'},
        {"role": "assistant", "content": " once \n", "tool_calls": [CALL]},
    )
    (example,) = read({"messages": [{"role": "system", "content": "abc"}, user, answer]}, template=SELECTIVE).items
    assert parts(tokenizer, example)[1] == "crossonce<|im_end|>"


def test_an_answer_follows_the_empty_reasoning_of_the_prompt_that_asks_for_it(read, tokenizer):
    """Though the template writes none into answers, as Gemma 4's."""
    thoughtless = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<|channel>thought\n<channel|>{% endif %}")
    first, second = read({"messages": [USER, ANSWER, USER, ANSWER]}, template=thoughtless).items
    for example in (first, second):
        whole, trained = parts(tokenizer, example)
        assert whole.endswith("assistant\n<|channel>thought\n<channel|>the river<|im_end|>\n")
        assert whole.count("thought") == 1
        assert trained == "the river<|im_end|>"


def test_a_template_that_puts_an_answer_elsewhere_is_refused(read):
    turned = "{{ messages[-1].content }}{% if add_generation_prompt %}assistant:{% endif %}"
    with pytest.raises(InvalidParameterError, match=r"line 1: messages\[1\]: the chat template does not render"):
        read({"messages": [USER, ANSWER]}, template=turned)


def test_a_file_that_is_empty_or_missing_is_refused(read, tmp_path, tokenizer):
    with pytest.raises(InvalidParameterError, match="no example to learn from: it is empty"):
        read("")
    with pytest.raises(InvalidParameterError, match=r"none\.jsonl: cannot be read"):
        read_examples(tmp_path / "none.jsonl", tokenizer, max_length=10)


def example(length, trained):
    """Tokens 1, 2, ... of which the last `trained` are trained."""
    return Example(np.arange(1, length + 1, dtype=np.int32), np.arange(length) >= length - trained)


EXAMPLES = [example(length, trained) for length, trained in ((5, 2), (9, 9), (40, 1), (12, 4), (3, 1))]


def take(count, rows=2):
    return list(islice(shuffled_batches(EXAMPLES, seed=0, rows=rows, parts=1, max_length=50, start=0), count))


def test_each_trained_token_has_the_same_weight_and_a_steps_weights_add_up_to_one():
    (batch,) = take(1, rows=5)
    weights = batch["weights"]
    assert np.count_nonzero(weights) == 2 + 8 + 1 + 4 + 1  # nothing predicts a first token
    np.testing.assert_allclose(weights[weights > 0], 1 / 16)
    row = batch["lengths"].tolist().index(4)
    assert batch["tokens"][row, :5].tolist() == [1, 2, 3, 4, 0]
    assert batch["targets"][row, :5].tolist() == [2, 3, 4, 5, 0]
    assert np.flatnonzero(weights[row]).tolist() == [2, 3]


def test_rows_have_a_length_of_a_short_list():
    assert {batch["tokens"].shape[1] for batch in take(20)} == {32, 50}


def test_every_example_comes_once_before_any_comes_again():
    lengths = np.concatenate([batch["lengths"] for batch in take(5)])
    assert sorted(lengths[:5]) == sorted(lengths[5:]) == [2, 4, 8, 11, 39]
    assert lengths[:5].tolist() != lengths[5:].tolist()


def test_validation_takes_every_example_once_and_fills_up_with_empty_rows():
    batches = list(validation_batches(EXAMPLES, rows=2, max_length=50))
    assert sorted(np.concatenate([batch["lengths"] for batch in batches])) == [0, 2, 4, 8, 11, 39]
    np.testing.assert_allclose(sum(batch["weights"].sum() for batch in batches), 1, rtol=1e-6)
