"""SentencePiece vocabularies of GGUF files: ids as llama.cpp's loop gives them, and texts that come back whole."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verax.text.tokens.detokenizer import IncrementalDetokenizer
from verax.text.tokens.gguf import read_gguf_tokenizer
from verax.text.tokens.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁t", "in", "▁a", "on", "re", "▁the", "▁th", "th", "he", "ing", "▁in", "er", "tion", "ti", "ab", "aba", "bab"]
LETTERS = list("▁tinaoreghb.é日")
USERS = ["\n", "\n\n", "  ", "   ", "<table>"]
CONTROLS = ["<pad>", "<s>", "</s>", "<start_of_turn>"]


def metadata(**changes):
    """A vocabulary with scores in the order of its words, without two equal ones."""
    pieces = [*WORDS, *LETTERS]
    tokens = ["<unk>", *CONTROLS, *USERS, *BYTES, *pieces]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-1000.0] * (1 + len(CONTROLS) + len(USERS)) + [0.0] * 256 + [-float(i) for i in range(len(pieces))],
        "token_type": [2] + [3] * len(CONTROLS) + [4] * len(USERS) + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 2,
        "eos_token_id": 3,
        "unknown_token_id": 0,
        **changes,
    }


def tokenizer(**changes):
    given = {f"tokenizer.ggml.{key}": value for key, value in metadata(**changes).items()}
    parts = read_gguf_tokenizer({"general.architecture": "gemma3", **given}, "a.gguf")
    return Tokenizer(parts.backend, special_tokens=parts.special_tokens, eos_token_ids=parts.eos_token_ids)


@pytest.fixture(scope="module", params=[False, True], ids=["no prefix", "space prefix"])
def prefix(request):
    return request.param


@pytest.fixture(scope="module")
def ours(prefix):
    return tokenizer(add_space_prefix=prefix)


def merged(text):
    """Ids of a text without special tokens, by llama.cpp's `llm_tokenizer_spm_session`."""
    given = metadata()
    score = {
        token: score
        for token, score, kind in zip(given["tokens"], given["scores"], given["token_type"], strict=True)
        if kind == 1
    }
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    number = {token: i for i, token in enumerate(given["tokens"])}
    return [
        i
        for symbol in symbols
        for i in ([number[symbol]] if symbol in number else [number[BYTES[byte]] for byte in symbol.encode()])
    ]


# Words, letters of no word, a character of no token; no run of spaces, which are tokens of users.
fragments = st.lists(st.sampled_from([*"tinaoreghb.é日x🦊", " the", " a", "ing", "tion", "aba"]), max_size=30).map(
    "".join
)


@settings(max_examples=300, deadline=None)
@given(text=fragments)
def test_the_best_score_is_merged_first_and_what_has_no_token_is_bytes(ours, prefix, text):
    text = text.lstrip()  # two spaces would be a token of users
    expected = merged(" " * prefix + text) if text else []
    assert ours.encode(text, add_special_tokens=False) == expected


def test_texts_begin_with_the_beginning_token(ours):
    assert ours.encode("") == [2]
    assert ours.encode("in")[0] == 2


def tokens(ours, text):
    return [ours.token(i) for i in ours.encode(text, add_special_tokens=False)]


def test_tokens_of_users_and_controls_are_found_before_merges():
    ours = tokenizer(add_space_prefix=False)
    assert tokens(ours, "in\n\n\nin<table>in") == ["in", "\n\n", "\n", "in", "<table>", "in"]
    assert tokens(ours, "in<start_of_turn> in") == ["in", "<start_of_turn>", "▁in"]
    assert tokens(ours, "<unk>in") == ["<unk>", "in"]
    # A byte's name is text.
    assert tokens(ours, "<0x41>") == [BYTES[byte] for byte in b"<0x41>"]


def test_runs_of_spaces_are_tokens_of_users_before_words_begin_with_one():
    ours = tokenizer(add_space_prefix=False)
    assert tokens(ours, " in") == ["▁in"]
    assert tokens(ours, "  in") == ["▁▁", "in"]
    assert tokens(ours, "   in") == ["▁▁▁", "in"]


def test_the_prefix_is_put_before_a_text_and_behind_special_tokens():
    ours = tokenizer(add_space_prefix=True)
    assert tokens(ours, "in") == ["▁in"]
    assert tokens(ours, "<start_of_turn>in") == ["<start_of_turn>", "▁in"]
    assert tokens(ours, " the") == ["▁▁", "th", "e"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_every_text_comes_back_whole_and_in_pieces(ours, prefix, text):
    text = text.replace("▁", "_")
    if prefix:  # behind a token of users there is a prefix too, which stays
        text = text.replace("\n", "")
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == text
    running = IncrementalDetokenizer(ours, skip_special_tokens=False)
    pieces = []
    for token in ids:
        running.append(token)
        pieces.append(running.delta())
    assert "".join([*pieces, running.finish()]) == text


def test_an_answer_behind_a_prompt_keeps_its_first_space(ours):
    prompt, answer = ours.encode("in"), [ours.token_id("▁the"), ours.token_id("▁in")]
    running = IncrementalDetokenizer(ours, prompt)
    for token in answer:
        running.append(token)
    assert running.finish() == " the in"
