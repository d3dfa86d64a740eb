"""Tokenizers of checkpoints, and texts that grow token by token: pieces equal the whole, and stop strings are found."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.support import tiny_encoder
from tests.support.tiny import TEXT, TURN_END, TURN_START, tiny_checkpoint, tiny_tokenizer
from verax.errors import CheckpointError, InvalidParameterError, TemplateError
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams
from verax.text.tokens.tokenizer import IncrementalDetokenizer, Tokenizer

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
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 8}}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {1, 8, 9}


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


def test_no_template_is_an_error_that_says_what_to_do(tmp_path):
    tokenizer = Tokenizer.from_folder(tiny_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="give a prompt as text"):
        tokenizer.apply_chat_template(HELLO)


def test_special_tokens_are_variables_of_the_template(tmp_path):
    tiny_tokenizer(tmp_path, chat_template="{{ eos_token }}{{ bos_token is defined }}{{ documents is none }}")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(HELLO) == f"{TURN_END}FalseTrue"


def test_templates_in_a_folder_are_found_by_name_before_the_configured_one(tmp_path):
    tiny_tokenizer(tmp_path, chat_template="old")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "tools"
    with pytest.raises(TemplateError, match="no default chat template"):
        tokenizer.apply_chat_template(HELLO)
    (tmp_path / "chat_template.jinja").write_text("new {{ variable }}", encoding="utf-8-sig")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(HELLO, variable=False) == "new False"


def test_the_template_of_a_processor_stands_in_where_no_other_is(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    tiny_tokenizer(tmp_path, chat_template=None)
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(HELLO) == "of the processor"
    tiny_tokenizer(tmp_path, chat_template="own")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(HELLO) == "own"


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
    results = Tokenizer.from_folder(tmp_path).encode_pairs(pairs, max_length=max_length)
    expected = reference.encode_batch(pairs)
    assert [(ids, types) for ids, types, _ in results] == [(one.ids, one.type_ids) for one in expected]
    special = reference.num_special_tokens_to_add(True)
    words = [first.count("cat") + second.count("dog") for first, second in pairs]
    assert [left_out for *_, left_out in results] == [max(0, count + special - max_length) for count in words]


def byte_fallback_tokenizer():
    """As Llama 2 and Gemma have it: spaces as a mark, a leading one stripped, unknown characters as byte tokens."""
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    # The byte tokens must be ordinary ones: special ones would be skipped.
    state = tokenizer.to_str()
    parsed = json.loads(state)
    parsed["added_tokens"] = [t for t in parsed["added_tokens"] if t["content"] == "<unk>"]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(parsed)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer.from_folder(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def stream(tokenizer, ids, **options):
    """The pieces shown, and the detokenizer."""
    running, pieces = IncrementalDetokenizer(tokenizer, **options), []
    for token in ids:
        stopped = running.append(token)
        pieces.append(running.delta())
        if stopped is not None:
            break
    pieces.append(running.finish())
    return pieces, running


def test_a_character_of_several_tokens_is_shown_when_it_is_whole(byte_level):
    ids = byte_level.encode("a🐍b")
    pieces, _ = stream(byte_level, ids)
    assert "".join(pieces) == "a🐍b"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > 3


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab c\n🦊", max_size=30),
    st.lists(st.text(alphabet="ab c\n🦊", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_stop_string_ends_the_text_at_its_first_occurrence(byte_level, text, stops, include):
    pieces, running = stream(byte_level, byte_level.encode(text), stop=tuple(stops), include_stop_str_in_output=include)
    results = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    shown = "".join(pieces)
    assert shown == running.text
    if not results:
        assert shown == text
        return
    cuts = {text[: at + len(stop) if include else at] for _, at, stop in results}
    assert shown in cuts
    if not include:
        assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize(("include", "shown"), [(False, "ab é"), (True, "ab é<|im_start|>")])
@pytest.mark.parametrize("skip", [False, True])
def test_a_special_token_ends_the_text_by_its_name(byte_level, include, shown, skip):
    ids = byte_level.encode("ab é<|im_start|>c")
    options = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    pieces, running = stream(byte_level, ids, stop=("x", "<|im_start|>"), **options)
    assert ("".join(pieces), running.text) == (shown, shown)
    pieces, _ = stream(byte_level, ids, stop=("<|im_start|>",), min_tokens=len(ids), **options)
    assert "".join(pieces) == ("ab éc" if skip else "ab é<|im_start|>c")


NOT_A_TOKEN = 100_000


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def any_tokenizer(request, byte_level):
    return byte_level if request.param == "byte level" else byte_fallback_tokenizer()


def odd_tokens(tokenizer):
    """More than their share of what is hard to decode: single letters, bytes, special tokens, ids without a token."""
    short = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token(i) or "") == 1 or i in tokenizer.byte_tokens]
    odd = [*short, *tokenizer.special_token_ids, NOT_A_TOKEN]
    return st.lists(st.one_of(st.sampled_from(odd), st.integers(0, tokenizer.vocab_size - 1)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_add_up_whatever_the_decoder_and_the_tokens(any_tokenizer, data, skip):
    ids = data.draw(odd_tokens(any_tokenizer))
    pieces, running = stream(any_tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == running.text == any_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_beyond_a_stop_string_is_shown(any_tokenizer, data):
    ids = data.draw(odd_tokens(any_tokenizer))
    whole = any_tokenizer.decode(ids)
    places = st.integers(0, max(len(whole) - 1, 0))
    stops = tuple(whole[at : at + 3] for at in data.draw(st.lists(places, min_size=1, max_size=2)) if whole) or ("x",)
    pieces, running = stream(any_tokenizer, ids, stop=stops)
    assert "".join(pieces) == running.text
    assert whole.startswith(running.text) or "\ufffd" in whole
    if "\ufffd" not in whole:
        assert not any(stop in running.text for stop in stops)


def test_text_continues_where_the_prompt_ends():
    tokenizer = byte_fallback_tokenizer()
    prompt, ids = tokenizer.encode("once upon"), tokenizer.encode("a time")
    assert tokenizer.decode(ids) == "a time"
    running = IncrementalDetokenizer(tokenizer, after=prompt)
    for token in ids:
        running.append(token)
    running.finish()
    assert running.text == tokenizer.decode(ids, after=prompt) == " a time"
    assert tokenizer.decode([*prompt, *ids]) == "once upon a time"
    cut = [*prompt, tokenizer.token_id("<0xE2>")]  # a character's first byte, which is not the answer's
    assert tokenizer.decode(ids, after=cut) == "a time"


def test_an_answer_goes_on_where_a_prompt_ends_and_begins_anew_in_a_chat(tmp_path):
    tokenizer = byte_fallback_tokenizer()
    tiny_checkpoint(tmp_path, vocab_size=400)
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(tmp_path, dtype="float32", max_model_len=64, use_tqdm=False)
    [time] = tokenizer.encode("time")
    chat = [{"role": "user", "content": "once upon a"}]
    continued = [*chat, {"role": "assistant", "content": "once upon a"}]
    for stop in ((), ("!",)):  # decoded at once, and token by token
        params = SamplingParams(temperature=0, max_tokens=1, logit_bias={time: 100.0}, stop=stop)
        outputs = llm.generate(["once upon a", tokenizer.encode("once upon a")], params) + llm.chat(chat, params)
        assert [output.outputs[0].text for output in outputs] == [" time", " time", "time"]
        assert "".join(llm.stream("once upon a", params)) == " time"
        (output,) = llm.chat(continued, params, continue_final_message=True)
        assert output.outputs[0].text == "".join(llm.stream(continued, params, continue_final_message=True)) == " time"


def test_the_work_for_a_token_does_not_grow(byte_level, monkeypatch):
    [broken] = [i for i in range(3, 260) if byte_level.token(i) == "ÿ"]
    lengths = []
    decode = byte_level.decode
    monkeypatch.setattr(byte_level, "decode", lambda ids, **options: lengths.append(len(ids)) or decode(ids, **options))
    for token in (broken, 0, NOT_A_TOKEN, byte_level.encode(" ")[0]):
        running = IncrementalDetokenizer(byte_level)
        for _ in range(200):
            running.append(token)
        assert max(lengths, default=0) < 20


def bytes_as_tokens(tokenizer, data):
    numbers = {byte: token for token, byte in tokenizer.byte_tokens.items()}
    return [numbers[byte] for byte in data]


def test_a_stop_string_in_byte_tokens_is_found_at_once():
    tokenizer = byte_fallback_tokenizer()
    running = IncrementalDetokenizer(tokenizer, stop=("\n\n", "é"))
    results = [running.append(token) for token in [*tokenizer.encode("abc"), *bytes_as_tokens(tokenizer, b"\n\n")]]
    assert (results[-1], running.text) == ("\n\n", "abc")
    assert not any(results[:-1])
    running = IncrementalDetokenizer(tokenizer, stop=("\n\n", "é"))
    assert [running.append(token) for token in bytes_as_tokens(tokenizer, "é".encode())] == [None, "é"]


def test_a_stop_string_spelt_before_min_tokens_does_not_count_later():
    tokenizer = byte_fallback_tokenizer()
    ids = [*bytes_as_tokens(tokenizer, b"\n\n"), *tokenizer.encode("abc")]
    running = IncrementalDetokenizer(tokenizer, stop=("\n",), min_tokens=2)
    assert [running.append(token) for token in ids] == [None] * len(ids)
    assert running.append(bytes_as_tokens(tokenizer, b"\n")[0]) == "\n"
    assert running.text == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text("ab ", min_size=1, max_size=6), min_size=1, max_size=3), data=st.data())
def test_just_what_may_become_a_stop_string_is_held_back(byte_level, stops, data):
    ids = byte_level.encode(data.draw(st.text("ab ", max_size=30)))
    running, shown = IncrementalDetokenizer(byte_level, stop=tuple(stops)), ""
    for token in ids:
        if running.append(token) is not None:
            break
        shown += running.delta()
        ends = [i for i in range(len(running.text) + 1) if any(stop.startswith(running.text[i:]) for stop in stops)]
        assert shown == running.text[: ends[0]]
