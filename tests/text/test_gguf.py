"""Tokenizers of GGUF files give the ids, texts and prompts of the tokenizer.json that they were made from."""

import json
import random
import re
import unicodedata
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from tests.support import gguf as files
from tests.support.published import gemma_file, llama_cpp_source, published_tokenizer, tekken, vocabulary
from tests.support.tiny import END, TURN_END, TURN_START, tiny_checkpoint, tiny_tokenizer
from verax.checkpoint import Checkpoint
from verax.checkpoint.formats.gguf import GGUFFile
from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import read_value
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams
from verax.text.tokens import gguf as tokens_gguf
from verax.text.tokens.gguf import ENDS, FILLS, read_gguf_tokenizer
from verax.text.tokens.tokenizer import IncrementalDetokenizer, Tokenizer

TEXTS = [
    "once upon a time there was a small fox",
    "  two   spaces\n\n\nlines\r\n\ttab ",
    "I'll, I'LL, don't; he'S 1234567 + 30 = 42!!",
    "cafe\u0301 naïve 日本 🦊 \u200d",
    f"{TURN_START}user\nhi{TURN_END}\n<think>hm</think>{END}",
    "<thin k>[PAD] fox",
    "\u0915\u093e\u0928 a\u0301\u0323b .\u0301, \u2167\u00bd",
    "",
]
# The pre-tokenisers as the published tokenizer.json files of these models have them.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+[", r"[^\s\p{L}\p{M}\p{N}]+[")
SEED_CODER = QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
SPLITS = {"seed-coder": SEED_CODER, "qwen2": QWEN2, "llama-bpe": LLAMA3, "qwen35": QWEN35}


def published(folder, family):
    """Make a folder's tokenizer.json as a family has it, with a token of a user as its last one."""
    tiny_tokenizer(folder, vocab_size=322)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if family in SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(SPLITS[family]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if family == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if family in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    if family == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": END}))
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    content = json.loads((folder / "tokenizer.json").read_text())
    if family == "llama-bpe":
        content["model"]["ignore_merges"] = True
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def both(tmp_path, family, **options):
    folder = published(tiny_checkpoint(tmp_path / "folder", vocab_size=323), family)
    files.write(folder, tmp_path / "a.gguf", **{"pre": family, **options})
    return Tokenizer.from_folder(folder), Tokenizer.from_checkpoint(Checkpoint.open(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("family", "pre"),
    [
        *((name, name) for name in ("gpt-2", "qwen2", "qwen35", "llama-bpe", "smollm", "seed-coder")),
        *(("gpt-2", "mellum"), ("smollm", "minerva-7b"), ("llama-bpe", "midm-2.0")),
    ],
)
def test_ids_and_texts_equal_tokenizer_json(family, pre, tmp_path):
    theirs, ours = both(tmp_path, family, pre=pre)
    for text in TEXTS:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add), text
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.vocab_size == theirs.vocab_size


def test_a_text_ends_at_the_families_end_tokens_and_at_those_that_the_file_names(tmp_path):
    _, ours = both(tmp_path, "qwen2", metadata=[("tokenizer.ggml.eot_token_id", "add_uint32", 7)])
    assert ours.eos_token_ids == {0, 1, 7}


@pytest.mark.parametrize("listed", [["tool_use"], ["rag"]])  # llama.cpp finds named templates by their keys alone
def test_conversations_are_rendered_by_the_files_template(tmp_path, listed):
    named = [
        ("tokenizer.chat_templates", "add_array", listed),
        ("tokenizer.chat_template.tool_use", "add_string", "tools: {{ messages[0].content }}"),
    ]
    theirs, ours = both(tmp_path, "qwen2", metadata=named)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.apply_chat_template(messages, tools=[{}]) == "tools: hi"


def test_files_of_early_converters_go_by_their_architecture(tmp_path):
    theirs, ours = both(tmp_path, "qwen2", pre="default")
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_a_file_generates_like_its_folder(tmp_path):
    folder = published(tiny_checkpoint(tmp_path / "folder", vocab_size=323), "qwen2")
    files.write(folder, tmp_path / "a.gguf", pre="qwen2")
    sizes = dict(max_num_seqs=2, max_model_len=128, max_num_batched_tokens=32)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    theirs, ours = (LLM(path, dtype="float32", use_tqdm=False, **sizes) for path in (folder, tmp_path / "a.gguf"))
    prompts = ["once upon a", "12 + 30"]
    expected = theirs.generate(prompts, greedy, use_tqdm=False)
    got = ours.generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]
    assert [o.outputs[0].text for o in got] == [o.outputs[0].text for o in expected]


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


def tokens(ours, text):
    return [ours.token(i) for i in ours.encode(text, add_special_tokens=False)]


def test_tokens_of_users_and_controls_are_found_before_merges():
    ours = tokenizer(add_space_prefix=False)
    assert tokens(ours, "in\n\n\nin<table>in") == ["in", "\n\n", "\n", "in", "<table>", "in"]
    assert tokens(ours, "in<start_of_turn> in") == ["in", "<start_of_turn>", "▁in"]
    assert tokens(ours, "<unk>in") == ["<unk>", "in"]
    # A byte's name is text.
    assert tokens(ours, "<0x41>") == [BYTES[byte] for byte in b"<0x41>"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_every_text_comes_back_whole_and_in_pieces(ours, prefix, text):
    text = text.replace("▁", "_")
    if prefix:  # after a token of users there is a prefix too, which stays
        text = text.replace("\n", "")
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == text
    running = IncrementalDetokenizer(ours, skip_special_tokens=False)
    pieces = []
    for token in ids:
        running.append(token)
        pieces.append(running.delta())
    assert "".join([*pieces, running.finish()]) == text


BYTE_LEVEL = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1]}
SENTENCEPIECE = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "▁a"],
    "scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0],
    "token_type": [2, 3, 3, 1, 1, 1],
}


def read(sound, changes=None):
    given = {f"tokenizer.ggml.{key}": value for key, value in {**sound, **(changes or {})}.items() if value is not None}
    return read_gguf_tokenizer({"general.architecture": "qwen3", **given}, "a.gguf")


@pytest.mark.parametrize(
    ("sound", "changes", "error", "says"),
    [
        (BYTE_LEVEL, {"model": None}, CheckpointError, "has no tokenizer"),
        (BYTE_LEVEL, {"model": "no_vocab"}, CheckpointError, "has no tokenizer"),
        (BYTE_LEVEL, {"model": "t5"}, UnsupportedModelError, r"tokenizer\.ggml\.model 't5' is not supported"),
        (BYTE_LEVEL, {"pre": "bloom"}, UnsupportedModelError, r"tokenizer\.ggml\.pre 'bloom' is not supported in GGUF"),
        (BYTE_LEVEL, {"tokens": None}, CheckpointError, r"tokenizer\.ggml\.tokens is missing"),
        (BYTE_LEVEL, {"merges": None}, CheckpointError, r"tokenizer\.ggml\.merges is missing"),
        (BYTE_LEVEL, {"merges": ["a q"]}, CheckpointError, "its vocabulary is damaged"),
        (BYTE_LEVEL, {"token_type": [1]}, CheckpointError, "its vocabulary is damaged: 1 types for 3 tokens"),
        (BYTE_LEVEL, {"eos_token_id": 9}, CheckpointError, r"eos_token_id 9 is not a token"),
        (BYTE_LEVEL, {"add_bos_token": True}, CheckpointError, r"add_bos_token needs tokenizer\.ggml\.bos_token_id"),
        (SENTENCEPIECE, {"tokens": []}, CheckpointError, "its vocabulary is damaged: it has no tokens"),
        (SENTENCEPIECE, {"scores": None}, CheckpointError, r"tokenizer\.ggml\.scores is missing"),
        (SENTENCEPIECE, {"scores": [0.0]}, CheckpointError, "its vocabulary is damaged: 1 scores for 6 tokens"),
        (SENTENCEPIECE, {"scores": ["a"] * 6}, CheckpointError, r"tokenizer\.ggml\.scores"),
        (SENTENCEPIECE, {"unknown_token_id": 6}, CheckpointError, r"unknown_token_id 6 is not a token"),
    ],
)
def test_other_kinds_and_damage_are_refused_with_the_reason(sound, changes, error, says):
    with pytest.raises(error, match=says):
        read(sound, changes)


def test_more_tokens_than_the_embeddings_have_rows_are_refused():
    metadata = {f"tokenizer.ggml.{key}": value for key, value in SENTENCEPIECE.items()}
    opened = SimpleNamespace(metadata=metadata, folder="a.gguf", config={"vocab_size": 5})
    with pytest.raises(CheckpointError, match=r"a\.gguf: its vocabulary has 6 tokens, its embeddings 5 rows"):
        Tokenizer.from_checkpoint(opened)


def test_sentencepiece_files_that_name_no_special_tokens_have_llama_s():
    parts = read(SENTENCEPIECE)
    assert parts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert parts.eos_token_ids == {2}
    assert parts.backend.encode("a").ids == [1, 5]


@pytest.mark.parametrize(("begin", "end"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_beginning_and_the_end_token_can_be_switched(begin, end):
    backend = read(SENTENCEPIECE, {"add_bos_token": begin, "add_eos_token": end}).backend
    assert backend.encode("a").ids == [1] * begin + [5] + [2] * end
    assert backend.encode("a", add_special_tokens=False).ids == [5]


NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def ending(*tokens, kind=CONTROL, sound=BYTE_LEVEL, **changes):
    """Parts of a vocabulary with further tokens of one type."""
    extended = {
        name: [*sound[name], *more] for name, more in (("tokens", tokens), ("token_type", [kind] * len(tokens)))
    }
    if "scores" in sound:
        extended["scores"] = [*sound["scores"], *[0.0] * len(tokens)]
    return read(sound, extended | changes)


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL])
@pytest.mark.parametrize("end", sorted(ENDS))
def test_a_token_that_ends_a_turn_is_one_token_and_ends_a_text_whatever_its_type(end, kind):
    parts = ending(end, kind=kind)
    assert parts.eos_token_ids == {3}
    assert parts.backend.encode(f"ab{end}").ids == [2, 3]
    parts = ending("<|eot_id|>", kind=kind, sound=SENTENCEPIECE)
    assert parts.eos_token_ids == {2, 6}
    assert parts.backend.encode("a<|eot_id|>", add_special_tokens=False).ids == [5, 6]


@pytest.mark.parametrize(("name", "ids"), [("Phi 3 mini", [6, 3, 5]), ("Phi-3-mini", [6, 5]), ("my phi3", [6, 5])])
def test_special_tokens_of_a_phi_3_take_the_white_space_on_their_right(name, ids):
    more = {"tokens": "<|end|>", "token_type": CONTROL, "scores": 0.0}
    vocabulary = {key: [*SENTENCEPIECE[key], more[key]] if key in more else SENTENCEPIECE[key] for key in SENTENCEPIECE}
    given = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    backend = read_gguf_tokenizer({"general.architecture": "phi3", "general.name": name, **given}, "a.gguf").backend
    assert backend.encode("<|end|> a", add_special_tokens=False).ids == ids
    assert backend.encode("<s> a", add_special_tokens=False).ids == [1, 3, 5]


def test_rules_of_a_llama_3_are_taken_for_its_vocabulary_alone():
    given = {f"tokenizer.ggml.{key}": value for key, value in BYTE_LEVEL.items() if key != "pre"}
    llama = {"general.architecture": "llama", **given}
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre 'default' is not supported"):
        read_gguf_tokenizer(llama, "a.gguf")
    llama |= {"tokenizer.ggml.tokens": ["a", "b", "ab", "<|begin_of_text|>"], "tokenizer.ggml.token_type": [1, 1, 1, 3]}
    assert read_gguf_tokenizer(llama, "a.gguf").backend.encode("ab").ids == [2]


def test_a_separator_ends_the_texts_of_a_bert_alone():
    changes = {"add_sep_token": True, "seperator_token_id": 1, "add_eos_token": True, "eos_token_id": 0}
    assert read(BYTE_LEVEL, changes).backend.encode("ab").ids == [2, 0]


def test_a_text_ends_at_each_token_of_a_list():
    assert read(BYTE_LEVEL, {"eos_token_id": 0, "eos_token_ids": [0, 2]}).eos_token_ids == {0, 2}


def test_tokens_between_files_end_a_text_too():
    assert ending("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>").eos_token_ids == {3, 4, 5}
    assert ending("pad", fim_pad_token_id=3).eos_token_ids == {3}
    assert ending("<|fim_pad|>", fim_pad_token_id=0).eos_token_ids == {0}


def test_tokens_around_parts_of_files_are_one_token_whatever_their_type():
    first = [texts[0] for texts in FILLS.values()]
    for kind in (CONTROL, USER_DEFINED, NORMAL):
        assert ending(*first, kind=kind).backend.encode("".join(first)).ids == [3, 4, 5, 6, 7, 8]


def test_ids_that_are_no_tokens_count_as_not_given_where_nothing_depends_on_them():
    idle = {f"{role}_token_id": 128 for role in ("padding", "cls", "seperator", "mask", "fim_pad")}
    parts = ending("<|fim_pad|>", **idle, bos_token_id=2**32 - 1)
    assert (parts.eos_token_ids, parts.special_tokens) == ({3}, {})
    assert read(SENTENCEPIECE, {"eos_token_id": 2**32 - 1}).eos_token_ids == {2}


def test_what_ends_a_message_or_is_a_tag_does_not_end_a_text_where_llama_cpp_knows():
    parts = ending("<|end|>", "<|return|>", "<|call|>", "<|channel|>")
    assert parts.eos_token_ids == {4, 5}
    added = sorted(parts.backend.get_added_tokens_decoder().items())
    assert [token.special for _, token in added] == [False, True, True, False]
    assert ending("<|end|>", "<|flush|>", "<|calls|>").eos_token_ids == {4, 5}
    assert ending("<|tool_response>", "</s>", "<eos>", eos_token_id=5).eos_token_ids == {3, 5}
    assert ending("<end_of_turn>", "</s>").eos_token_ids == {3}


def test_gemma_4_s_merges_are_of_characters_and_bytes_and_its_texts_begin():
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\u2581", "a", "\u2581a", "\n", "\n\n", "<0xC3>", "<0xA9>"]
    types = [CONTROL] * 4 + [NORMAL] * 5 + [6] * 2
    vocabulary = {"tokens": tokens, "token_type": types, "merges": ["\u2581 a", "\n \n"]}
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_bos_token": False}
    for kind in ({"model": "gemma4"}, {"model": "gpt2", "pre": "gemma4"}, {"model": "llama", "pre": "gemma4"}):
        parts = read({**kind, **vocabulary, **ids})
        assert parts.backend.encode("a a\n\n\u00e9").ids == [2, 5, 6, 8, 9, 10]
        assert parts.backend.decode([5, 6, 8, 9, 10]) == "a a\n\n\u00e9"


def test_a_bert_s_words_are_cut_into_the_longest_tokens_between_its_own():
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2581un", "\u2581ab", "able", "\u2581!", "\u2581cafe"]
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4}
    sound = {"model": "bert", "tokens": tokens, "token_type": [CONTROL] * 5 + [NORMAL] * 5, **ids}
    parts = read(sound)
    assert parts.backend.encode("Unable caf\u00e9! xyz").ids == [2, 5, 7, 9, 8, 1, 3]
    assert parts.backend.decode([5, 7, 8]) == "unable!"
    assert read(sound, {"normalizer.lowercase": False}).backend.encode("Unable").ids == [2, 1, 3]


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
    texts = texts_of(vocabulary("llama-bpe"))
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


WITHOUT_EFFECT = frozenset(
    {
        *("token_type_count", "prefix_token_id", "suffix_token_id", "middle_token_id"),
        *("remove_extra_whitespaces", "precompiled_charsmap"),
    }
)
"""Keys without effect on the kinds of tokenizers that are read: the segments of a BERT, old names of tokens around
parts of files, which are known by their texts, and what normalises texts for T5."""


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
    with_the_sampling = "suppress_tokens"  # GGUFWeights.generation_config
    expected = {f"tokenizer.ggml.{name}" for name in (*WITHOUT_EFFECT, with_the_sampling)}
    assert read_by_llama_cpp - asked == expected


@pytest.fixture(scope="module")
def gemma_ours():
    return Tokenizer.from_checkpoint(Checkpoint.open(gemma_file()))


@pytest.fixture(scope="module")
def gemma_theirs():
    return published_tokenizer("gemma3")


PIECES = [
    *" \n\t\r\u2581abé日本語🦊👩‍👩‍👧\u200d\u0301\x00\x01\x7f\ue000\ufffd<>/{}()=_-+*0123456789",
    *"…ﬀⅧ𝔹\u3000\xa0\u0600ไทยहिन्दी",
    *("the", " is", "ing", "   ", "\n\n\n", "\t\t", "http://", "def f(x):\n    return x", "<bos>", "<0x0A>", "</s>"),
    *("<table>", "<start_of_turn>user\n", "<unused5>", "[multimodal]"),
]


@settings(max_examples=500, deadline=None)
@given(text=st.one_of(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), st.text(max_size=60)))
def test_gemma_s_ids_and_texts_equal_its_tokenizer_json(gemma_ours, gemma_theirs, text):
    ids = gemma_theirs.encode(text)
    assert gemma_ours.encode(text) == ids
    assert gemma_ours.decode(ids, skip_special_tokens=False) == gemma_theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("piece", [" ", "\n", "\t", "\u2581", "a", "=", "ab", "-", "😀", "\u0301", "\r\n"])
def test_long_runs_are_cut_as_in_gemma_s_tokenizer_json(gemma_ours, gemma_theirs, piece):
    for count in range(1, 100):
        for text in (piece * count, f"x{piece * count}y"):
            assert gemma_ours.encode(text) == gemma_theirs.encode(text), text
