"""Tiny random encoders and rerankers with their own tokenizers, laid out as transformers and its relatives do."""

import json
from pathlib import Path

import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from recipes.text.words import words
from tests.support import tiny
from verax import checkpoint
from verax.models import cross_encoder, encoder

SIZES = dict(
    vocab_size=60,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    type_vocab_size=2,
    hidden_act="gelu",
    layer_norm_eps=1e-12,
)

WORDS = words("a the cat dog fox sat ran slept on in under mat river house red blue quick lazy and . ?")


BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
ROBERTA_SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")
"""Special tokens in the order of their ids. RoBERTa's padding token is 1."""

BERT_PAIR = "[CLS] $A [SEP] $B:1 [SEP]:1"
ROBERTA_PAIR = "[CLS] $A [SEP] [SEP] $B [SEP]"


def tiny_tokenizer(folder, special=BERT_SPECIAL, pair=BERT_PAIR):
    """Save a WordPiece tokenizer as BERT's: whole words, otherwise letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*special, *WORDS, *(letter for letter in letters if letter not in WORDS)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **named}
    types = ["token_type_ids"] if special == BERT_SPECIAL else []
    config["model_input_names"] = ["input_ids", *types, "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def qwen_tokenizer(folder, *, appends_end=False, **options):
    """Save a byte-level tokenizer with the tokens of Qwen3-Reranker's answers.

    Args:
        folder: the checkpoint's.
        appends_end: end each text with <|endoftext|>, as Qwen3-Embedding does.
        options: arguments of `tiny.tiny_tokenizer`.
    """
    tiny.tiny_tokenizer(folder, **options)
    path = str(Path(folder) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens(["yes", "no"])
    if appends_end:
        end = (tiny.END, tokenizer.token_to_id(tiny.END))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {tiny.END}", special_tokens=[end])
    tokenizer.save(path)
    return tokenizer.get_vocab_size(with_added_tokens=True)


def sentence_files(folder, *, mode="mean", max_seq_length=None, prompts=None):
    """Write modules.json and the files that it names, as in all-MiniLM-L6-v2."""
    folder = Path(folder)
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{step}" if i else "", "type": f"sentence_transformers.models.{step}"}
        for i, step in enumerate(("Transformer", "Pooling", "Normalize"))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    flags = {f"pooling_mode_{name}": name.startswith(mode) for name in names}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))
    tokens = {"max_seq_length": max_seq_length, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(tokens))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))


def random_weights(config, find=encoder):
    """Random weights of the model of a config.json."""
    architecture, sizes = find(config)
    return tiny.weights_of(nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0))))


def tiny_encoder(folder, *, rename=lambda key: key, **changes):
    """A folder that `Encoder(folder)` loads; `changes` go to config.json, `rename` to the keys of the weights."""
    config = {"model_type": "bert", **SIZES, **changes}
    weights = {rename(key): weight for key, weight in random_weights(config).items()}
    checkpoint.save(weights, folder, config=config)
    tiny_tokenizer(folder)
    return folder


def tiny_reranker(folder, **changes):
    """A cross-encoder that `Reranker(folder)` loads; `changes` go to config.json."""
    architecture = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    config = {"model_type": "bert", **SIZES, **architecture, **changes}
    checkpoint.save(random_weights(config, find=cross_encoder), folder, config=config)
    tiny_tokenizer(folder)
    return folder


def random_sentences(count, seed=0, most=40):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, most))) for _ in range(count)]
