"""Tiny random BERT checkpoints with their own tokenizer, as transformers and sentence-transformers lay them out."""

import json
from pathlib import Path

import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from verax import checkpoint
from verax.models import BertConfig, BertModel
from verax.train.text.words import words

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


def tiny_tokenizer(folder):
    """Save a WordPiece tokenizer as BERT's: whole words, otherwise letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *(letter for letter in letters if letter not in WORDS)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def sentence_files(folder, *, mode="mean", max_seq_length=None, steps=("Transformer", "Pooling", "Normalize")):
    """Write modules.json and the files that it names, as in all-MiniLM-L6-v2."""
    folder = Path(folder)
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{step}" if i else "", "type": f"sentence_transformers.models.{step}"}
        for i, step in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": name.startswith(mode) for name in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))
    tokens = {"max_seq_length": max_seq_length, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(tokens))


def random_weights(config, seed=0):
    """Random weights: matrices that preserve the scale of their inputs, biases and norms that differ from 0 and 1."""
    abstract = nnx.eval_shape(lambda: BertModel(BertConfig.from_hf(config), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    weights = {}
    for path, leaf in nnx.to_flat_state(nnx.state(abstract)):
        key, noise = ".".join(map(str, path)), rng.standard_normal(leaf.shape).astype(np.float32)
        scale = 1.5 * leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 0.3
        weights[key] = scale * noise + key.endswith("LayerNorm.weight")
    return weights


def tiny_encoder(folder, *, rename=lambda key: key, seed=0, **changes):
    """A folder that `Encoder(folder)` loads; `changes` go to config.json, `rename` to the keys of the weights."""
    config = {"model_type": "bert", **SIZES, **changes}
    weights = {rename(key): weight for key, weight in random_weights(config, seed).items()}
    checkpoint.save(weights, folder, config=config)
    tiny_tokenizer(folder)
    return folder


def random_sentences(count, seed=0, most=40):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, most))) for _ in range(count)]
