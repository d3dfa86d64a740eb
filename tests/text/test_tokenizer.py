"""The tokenizer and its chat template, as files of a checkpoint."""

import json

import pytest
import tokenizers

from tests.support import tiny_encoder
from tests.support.tiny import TURN_END, TURN_START, tiny_tokenizer
from verax.errors import CheckpointError, InvalidParameterError, TemplateError
from verax.text.tokens.chat_template import render
from verax.text.tokens.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("text", ["", "the café, 12 + 30", "  two  spaces\n\ttab ", "🦊日本\u0301", "\x00\x7f"])
def test_every_text_comes_back(tmp_path, text):
    tokenizer = Tokenizer.from_folder(tiny_tokenizer(tmp_path))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_one_token_and_can_be_left_out(tmp_path):
    tokenizer = Tokenizer.from_folder(tiny_tokenizer(tmp_path))
    ids = tokenizer.encode(f"{TURN_START}a{TURN_END}")
    assert (ids[0], ids[-1]) == (2, 1)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{TURN_START}a{TURN_END}"
    assert tokenizer.token(1) == TURN_END
    assert tokenizer.token(10**6) is None


def test_ends_of_text_are_gathered_from_every_file(tmp_path):
    tiny_tokenizer(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {1}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {1, 7, 9}


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"half": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_file_goes_before_the_configured_one(tmp_path):
    tiny_tokenizer(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(HELLO) == "new Hello"


def test_named_templates_are_chosen_by_use(tmp_path):
    tiny_tokenizer(tmp_path)
    named = [{"name": "default", "template": "reference"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(HELLO) == "reference"
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "f"


def test_no_template_is_an_error_that_says_what_to_do(tmp_path):
    tokenizer = Tokenizer.from_folder(tiny_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="give a prompt as text"):
        tokenizer.apply_chat_template(HELLO)


def test_json_in_templates_is_not_escaped():
    assert render("{{ messages[0].content | tojson }}", [{"role": "user", "content": "<é>"}]) == '"<é>"'


def test_generation_tags_pass_their_words_through():
    template = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert render(template, HELLO) == "[Hello]"


def test_a_template_can_refuse_in_its_own_words():
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", HELLO)


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% if %}", "{{ 1 / messages }}"]
)
def test_templates_live_in_a_sandbox_and_fail_in_one_error(template):
    if "class" in template:
        with pytest.raises(TemplateError):
            render(template + "{{ ''.__class__.__mro__[1].__subclasses__() }}", HELLO)
    else:
        with pytest.raises(TemplateError):
            render(template, HELLO)


@pytest.mark.parametrize(
    "messages",
    [[], "Hello", {"role": "user", "content": "x"}, [{"content": "x"}], [{"role": "user"}], [3], [{"role": 1}]],
)
def test_what_is_no_conversation_is_refused_before_rendering(messages):
    with pytest.raises(InvalidParameterError, match="messages"):
        render("", messages)


def test_truncation_that_the_file_asks_for_is_not_applied(tmp_path):
    tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({**json.loads(path.read_text()), "truncation": truncation}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("abc def abc def")) == "abc def abc def"


def test_a_special_token_that_only_the_configuration_knows_is_one(tmp_path):
    tiny_tokenizer(tmp_path)
    size = Tokenizer.from_folder(tmp_path).vocab_size
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|done|>"}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<|done|>") == [size]
    assert tokenizer.eos_token_ids == {size}
    assert tokenizer.decode([size]) == ""


def test_special_tokens_are_variables_of_the_template(tmp_path):
    tiny_tokenizer(tmp_path, chat_template="{{ eos_token }}{{ bos_token is defined }}{{ documents is none }}")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(HELLO) == f"{TURN_END}FalseTrue"


def test_variables_reach_the_template(tmp_path):
    tokenizer = Tokenizer.from_folder(tiny_tokenizer(tmp_path, chat_template="{{ enable_thinking }}"))
    assert tokenizer.apply_chat_template(HELLO, enable_thinking=False) == "False"


def test_a_continued_message_is_not_followed_by_a_turn(tmp_path):
    tokenizer = Tokenizer.from_folder(tiny_tokenizer(tmp_path))
    prompt = tokenizer.apply_chat_template(HELLO, continue_final_message=True)
    assert prompt == f"{TURN_START}user\nHello"


def test_templates_in_a_folder_are_found_by_name(tmp_path):
    tiny_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "tools"
    with pytest.raises(TemplateError, match="no default chat template"):
        tokenizer.apply_chat_template(HELLO)


@pytest.mark.parametrize("damaged", [{"chat_template": [{"name": "default"}]}, {"added_tokens_decoder": {"1": {}}}])
def test_a_damaged_configuration_is_named(tmp_path, damaged):
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(damaged))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("max_length", [5, 6, 9, 16, 17, 40])
@pytest.mark.parametrize("pair", [tiny_encoder.BERT_PAIR, tiny_encoder.ROBERTA_PAIR])
def test_pairs_are_cut_as_the_library_cuts_them(tmp_path, pair, max_length):
    tiny_encoder.tiny_tokenizer(tmp_path, pair=pair)
    if max_length < pair.count("[") + 2:
        with pytest.raises(InvalidParameterError, match="tokens leave none for each text"):
            Tokenizer.from_folder(tmp_path).encode_pairs([("a cat", "a dog")], max_length=max_length)
        return
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.enable_truncation(max_length, strategy="longest_first")
    sizes = [0, 1, 2, 3, 5, 7, 8, 12, 25]
    pairs = [(" ".join(["cat"] * first), " ".join(["dog"] * second)) for first in sizes for second in sizes]
    found = Tokenizer.from_folder(tmp_path).encode_pairs(pairs, max_length=max_length)
    expected = reference.encode_batch(pairs)
    assert [(ids, types) for ids, types, _ in found] == [(one.ids, one.type_ids) for one in expected]
    special = reference.num_special_tokens_to_add(True)
    words = [first.count("cat") + second.count("dog") for first, second in pairs]
    assert [left_out for *_, left_out in found] == [max(0, count + special - max_length) for count in words]
