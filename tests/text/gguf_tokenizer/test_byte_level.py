"""Byte-level BPE of a GGUF file gives the ids, texts and prompts of the tokenizer.json that it was made from."""

import json

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors

from tests.support import gguf as files
from tests.support.tiny import END, TURN_END, TURN_START, tiny_checkpoint, tiny_tokenizer
from verax.checkpoint import Checkpoint
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams
from verax.text.tokens.tokenizer import Tokenizer

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
SPLITS = {"qwen2": QWEN2, "llama-bpe": LLAMA3, "qwen35": QWEN35}


def published(folder, family):
    """Make a folder's tokenizer.json like that of a family, with a token of a user as its last one."""
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
    files.write(folder, tmp_path / "a.gguf", pre=family, **options)
    return Tokenizer.from_folder(folder), Tokenizer.from_checkpoint(Checkpoint.open(tmp_path / "a.gguf"))


@pytest.mark.parametrize("family", ["gpt-2", "qwen2", "qwen35", "llama-bpe", "smollm"])
def test_ids_and_texts_are_those_of_tokenizer_json(family, tmp_path):
    theirs, ours = both(tmp_path, family)
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


def test_the_beginning_token_can_be_switched(tmp_path):
    _, ours = both(tmp_path, "llama-bpe", metadata=[("tokenizer.ggml.add_bos_token", "add_bool", False)])
    assert ours.encode("fox") == ours.encode("fox", add_special_tokens=False)


def test_conversations_are_rendered_by_the_files_template(tmp_path):
    named = [
        ("tokenizer.chat_templates", "add_array", ["tool_use"]),
        ("tokenizer.chat_template.tool_use", "add_string", "tools: {{ messages[0].content }}"),
    ]
    theirs, ours = both(tmp_path, "qwen2", metadata=named)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.apply_chat_template(messages, tools=[{}]) == "tools: hi"


def test_files_of_early_converters_go_by_their_architecture(tmp_path):
    folder = published(tiny_checkpoint(tmp_path / "folder", vocab_size=323), "qwen2")
    files.write(folder, tmp_path / "a.gguf", pre="default")
    ours = Tokenizer.from_checkpoint(Checkpoint.open(tmp_path / "a.gguf"))
    assert [ours.encode(text) for text in TEXTS] == [Tokenizer.from_folder(folder).encode(text) for text in TEXTS]


def test_a_file_generates_like_its_folder(tmp_path):
    folder = published(tiny_checkpoint(tmp_path / "folder", vocab_size=323), "qwen2")
    files.write(folder, tmp_path / "a.gguf", pre="qwen2")
    options = dict(dtype="float32", max_num_seqs=2, max_model_len=128, use_tqdm=False)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    theirs, ours = LLM(folder, **options), LLM(tmp_path / "a.gguf", **options)
    prompts = ["once upon a", "12 + 30"]
    expected = theirs.generate(prompts, greedy, use_tqdm=False)
    got = ours.generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]
    assert [o.outputs[0].text for o in got] == [o.outputs[0].text for o in expected]
