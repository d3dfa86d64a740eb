"""Settings of tokenizer_config.json and its relatives, with transformers as the oracle: ids of texts and of pairs."""

import inspect
import json

import pytest

transformers = pytest.importorskip("transformers")

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.tiny import tiny_tokenizer
from tests.support.tiny_encoder import tiny_tokenizer as bert_tokenizer
from verax.text.tokens import tokenizer as ours
from verax.text.tokens.gguf import RULES

TEXTS = ["", "The CAT sat", "a ćat 猫 on THE mat", "fox " * 9 + "river", "<s>[SEP]<|endoftext|> 12 <new>  it's"]
TEXTS += ["  café\n\n🦊", "<s>once</s> <tool>upon <extra>"]


def llama(folder, **parts):
    """Save a BPE of characters with bytes for others, as a Llama's."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, special_tokens=tokens, show_progress=False))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    content = {**json.loads(backend.to_str()), **parts}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def old_llama(folder):
    """Save the same with a space after each special token, as files of 2023 have it."""
    prefix = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    parts = [json.loads(part.__getstate__()) for part in prefix]
    llama(folder, normalizer={"type": "Sequence", "normalizers": parts}, pre_tokenizer=None)


def qwen(folder):
    """Save a byte-level BPE that cuts words first, as Qwen2's class does."""
    tiny_tokenizer(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(RULES["qwen2"].patterns[0]), "isolated"), last]
    )
    backend.save(str(folder / "tokenizer.json"))


def saved(folder):
    """Have transformers save a tokenizer with a token that it has added."""
    llama(folder)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    theirs.add_tokens(["<tool>"])
    theirs.save_pretrained(folder)


BYTE_LEVEL = ("GPT2Tokenizer", "PreTrainedTokenizerFast", None)
LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None)
BERT = ("BertTokenizer", "DistilBertTokenizer", "PreTrainedTokenizerFast", None)
KINDS = [
    *((make, kind) for make in (llama, old_llama) for kind in LLAMA),
    *((tiny_tokenizer, kind) for kind in BYTE_LEVEL),
    *((bert_tokenizer, kind) for kind in BERT),
    (saved, "PreTrainedTokenizerFast"),
]
QWEN = [(qwen, kind) for kind in ("Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast")]
"""Classes that make all special tokens again, without their flags."""

MODEL_TYPES = {bert_tokenizer: "bert", llama: "llama", old_llama: "llama", tiny_tokenizer: "llama"}
MODEL_TYPES |= {saved: "llama", qwen: "qwen3"}
TOKEN = {"content": "<new>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
END = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0}
PADDING |= {"pad_token": "</s>"}
OTHER_FILES = [
    {"added_tokens.json": {"<new>": 5000, "猫": 4000}},
    {"added_tokens.json": {"<new>": 5000}, "special_tokens_map.json": {"mask_token": "<new>"}},
    {"tokenizer_config.json": {"added_tokens_decoder": {"9": TOKEN}}, "added_tokens.json": {"12": 5000}},
    {"special_tokens_map.json": {"mask_token": TOKEN}},
    {"tokenizer_config.json": {"eos_token": "<|im_end|>"}},
    {"tokenizer_config.json": {"eos_token": END, "extra_special_tokens": ["<extra>"], "mask_token": "[UNK]"}},
    {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<extra>"}, "mask_token": "[UNK]"}},
    {"tokenizer.json": {"truncation": TRUNCATION, "padding": PADDING}},  # which are not applied
]


@pytest.fixture(params=[*KINDS, *QWEN], ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def folder(request, tmp_path):
    """A folder with a tokenizer and the class that its tokenizer_config.json names."""
    make, kind = request.param
    make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[make]}))
    change(tmp_path, "tokenizer_config.json", {"tokenizer_class": kind} if kind else {})
    if kind is None:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config.pop("tokenizer_class", None)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def change(folder, name, values):
    """Change values of a JSON file that may be missing."""
    path = folder / name
    present = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**present, **values}))


def assert_same(folder, changed):
    """Ids of texts, and texts of ids, are transformers' after a change of the folder's files."""
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), ours.Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == len({*theirs.get_vocab()} - {"[MASK]"})  # which some classes add
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=special) == ids, (changed, text)
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, (changed, text)


def settings():
    """True and false of each setting that a class of transformers reads."""
    names = {"split_special_tokens", "clean_up_tokenization_spaces", "add_bos_token", "add_eos_token"}
    for name in ("LlamaTokenizer", "GPT2Tokenizer", "BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer"):
        parameters = inspect.signature(getattr(transformers, name).__init__).parameters.values()
        names |= {p.name for p in parameters if isinstance(p.default, bool) or p.name == "add_prefix_space"}
    return sorted(names)


def each_change(folder, changes):
    """Each of the changes of a folder's files in turn, made and then undone."""
    for files in changes:
        before = {name: path.read_bytes() for name in files if (path := folder / name).exists()}
        for name, values in files.items():
            change(folder, name, values)
        yield files
        for name in files:
            (folder / name).write_bytes(before[name]) if name in before else (folder / name).unlink()


def test_each_setting_is_read_as_in_transformers(folder):
    values = [{name: value} for name in settings() for value in (True, False)]
    for files in each_change(folder, [{"tokenizer_config.json": value} for value in values]):
        assert_same(folder, files)


@pytest.mark.parametrize("folder", KINDS, indirect=True, ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def test_tokens_of_other_files_are_added_as_in_transformers(folder):
    for files in each_change(folder, OTHER_FILES):
        assert_same(folder, files)


@pytest.mark.parametrize("model", ours._UNCHANGED)
@pytest.mark.parametrize(("make", "kind"), [(old_llama, "LlamaTokenizer"), (tiny_tokenizer, "GPT2TokenizerFast")])
def test_the_class_of_some_models_is_not_read(make, kind, model, tmp_path):
    make(tmp_path)
    change(tmp_path, "config.json", {"model_type": model})
    change(tmp_path, "tokenizer_config.json", {"tokenizer_class": kind, "add_prefix_space": True})
    assert_same(tmp_path, model)


@pytest.mark.parametrize("names", [{}, {"transformers_version": "5.1.0"}, {"model_type": "llama"}])
@pytest.mark.parametrize("make", [qwen, tiny_tokenizer])
def test_words_of_mistral_s_old_files_are_corrected_where_they_say_so(make, names, tmp_path):
    make(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"[unused {i}]": len(vocabulary) + i for i in range(100_001)}
    content["model"]["merges"].append(["x", "A"])
    vocabulary["xA"] = len(vocabulary)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral3", "transformers_version": "4.57.1", **names})
    )
    change(tmp_path, "tokenizer_config.json", {"fix_mistral_regex": True})
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), ours.Tokenizer.from_folder(tmp_path)
    text = "xAb CamelCase it's 12"
    assert tokenizer.encode(text) == theirs(text)["input_ids"]
    assert ("xA" in map(tokenizer.token, tokenizer.encode(text))) == bool(names)


OWN = {"tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", None]}}
ENDED = [(make, {"tokenizer_class": kind}) for make in (llama, old_llama) for kind in ours._ENDED]


@pytest.mark.parametrize(("make", "names"), [*ENDED, (qwen, OWN)])
def test_a_text_of_an_encoder_ends_as_transformers_4_ended_it(make, names, tmp_path):
    make(tmp_path)
    change(tmp_path, "config.json", {"model_type": "qwen2" if make is qwen else "mistral"})
    change(tmp_path, "tokenizer_config.json", {**names, "add_eos_token": True})
    plain = ours.Tokenizer.from_folder(tmp_path)
    ending = ours.Tokenizer.from_folder(tmp_path, encodes=True)
    for text in TEXTS:
        assert ending.encode(text) == [*plain.encode(text), plain.eos_token_id]
        assert ending.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)
    ((cut, left_out),) = ending.encode_batch([TEXTS[3]], max_length=6)
    whole = ending.encode(TEXTS[3])
    assert cut == [*whole[:5], whole[-1]]
    assert left_out == len(whole) - 6
    (tmp_path / "tokenizer.json").write_text(ending.to_json())
    assert ours.Tokenizer.from_folder(tmp_path, encodes=True).encode(TEXTS[3]) == whole


@pytest.mark.parametrize("model", [*ours._CLASS_OF, "roberta"])
@pytest.mark.parametrize("lower_case", [True, False, None])
def test_a_class_follows_from_the_model_where_no_file_names_one(model, lower_case, tmp_path):
    bert_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    # transformers would add others.
    tokens = {"bos_token": "[CLS]", "eos_token": "[SEP]", "mask_token": "[UNK]"}
    config = {**config, "do_lower_case": lower_case, **tokens}
    unset = [name for name, value in config.items() if value is None]
    config = {name: value for name, value in config.items() if name not in (*unset, "tokenizer_class")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    change(tmp_path, "config.json", {"model_type": model})
    if model == "roberta":
        change(tmp_path, "config.json", {"tokenizer_class": "BertTokenizer"})
    assert_same(tmp_path, model)


@pytest.mark.parametrize("kind", ["BertTokenizer", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"do_lower_case": False},
        {"tokenize_chinese_chars": False, "strip_accents": False},
        {"truncation_side": "left"},
        {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]},
        {"model_input_names": ["input_ids", "attention_mask"], "padding_side": "left"},
    ],
    ids=str,
)
def test_pairs_are_cut_and_typed_as_in_transformers(kind, changes, tmp_path):
    bert_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    config = {**json.loads((tmp_path / "tokenizer_config.json").read_text()), "tokenizer_class": kind, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), ours.Tokenizer.from_folder(tmp_path)
    pairs = tokenizer.encode_pairs([("the CAT", text) for text in TEXTS[1:]], max_length=9)
    for text, (ids, types, _) in zip(TEXTS[1:], pairs, strict=True):
        expected = theirs("the CAT", text, truncation="longest_first", max_length=9)
        assert ids == expected["input_ids"]
        assert types == expected.get("token_type_ids", [0] * len(ids))
    expected = theirs(TEXTS, truncation=True, max_length=8)["input_ids"]
    assert [ids for ids, _ in tokenizer.encode_batch(TEXTS, max_length=8)] == expected
