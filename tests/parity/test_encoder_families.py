"""Encoders of further families against transformers' models on random weights: states of every token, and vectors."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.parity.test_sentence_models import HEADLESS, filled
from tests.support.tiny_encoder import (
    ROBERTA_PAIR,
    ROBERTA_SPECIAL,
    qwen_tokenizer,
    random_sentences,
    sentence_files,
    tiny_tokenizer,
)
from verax import Encoder, Reranker
from verax.errors import UnsupportedModelError
from verax.models import encoder
from verax.models.rotary_bert import _NOMIC_KEYS

SIZES = dict(vocab_size=60, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4)
SENTENCES = random_sentences(20, seed=3) + random_sentences(2, seed=4, most=190)

DEBERTA = dict(SIZES, max_position_embeddings=300, relative_attention=True, pos_att_type=["p2c", "c2p"])
V3 = dict(position_buckets=16, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False)
FAMILIES = {
    "DebertaV2": dict(DEBERTA, **V3),
    "MPNet": dict(SIZES, max_position_embeddings=300),
    "DistilBert": dict(vocab_size=60, dim=48, hidden_dim=80, n_layers=3, n_heads=4, max_position_embeddings=300),
    "NomicBert": SIZES,
    "Gte": SIZES,
    "JinaEmbeddingsV3": SIZES,
}


def save(folder, family, kind="Model", **changes):
    """Save a random model of a family with its tokenizer, and return it."""
    roberta = family in ("MPNet", "Gte", "JinaEmbeddingsV3")
    tiny_tokenizer(folder, *((ROBERTA_SPECIAL, ROBERTA_PAIR) if roberta else ()))
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **changes})
    model = filled(getattr(transformers, f"{family}{kind}")(config))
    model.save_pretrained(folder)
    return model


def states(model, folder, sentences, **options):
    """transformers' states of each sentence's tokens, from a padded batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    inputs = tokenizer(sentences, padding=True, return_tensors="pt", return_token_type_ids=False, **options)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    return [row[: mask.sum()].float().numpy() for row, mask in zip(hidden, inputs["attention_mask"], strict=True)]


def relative(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


CHANGES = [
    ("DebertaV2", dict(V3, share_att_key=False, norm_rel_ebd="none", position_biased_input=True, type_vocab_size=2)),
    ("DebertaV2", dict(relative_attention=False, position_buckets=-1)),
    ("DebertaV2", dict(position_buckets=-1, max_relative_positions=7, pos_att_type="c2p")),
    ("NomicBert", dict(hidden_act="gelu_new")),
    ("Gte", dict(type_vocab_size=0)),
]


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), *CHANGES])
def test_float32_vectors_match_transformers(family, changes, tmp_path):
    theirs = save(tmp_path, family, **changes)
    sentence_files(tmp_path)
    expected = np.stack([hidden.mean(axis=0) for hidden in states(theirs, tmp_path, SENTENCES)])
    encoder = Encoder(tmp_path)
    for batch_size in (None, 3):
        ours = encoder.encode(SENTENCES, normalize=False, batch_size=batch_size)
        assert relative(ours, expected) < 1e-6


@pytest.mark.parametrize("family", ["MPNet", "DistilBert", "NomicBert", "Gte", "DebertaV2"])
def test_a_model_with_a_head_is_an_encoder_without_it(family, tmp_path):
    theirs = save(tmp_path, family, "ForMaskedLM")
    (expected,) = states(theirs.base_model, tmp_path, SENTENCES[:1])
    ours = Encoder(tmp_path, pooling="cls").encode(SENTENCES[0], normalize=False)
    assert relative(ours, expected[0]) < 2e-6


def test_files_of_nomics_and_gtes_own_code_are_read_without_the_code(tmp_path):
    theirs = save(tmp_path, "NomicBert")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    old = {_NOMIC_KEYS[key]: config.pop(key) for key in _NOMIC_KEYS if key in config}
    old |= dict(activation_function="swiglu", rotary_emb_base=rope["rope_theta"], prenorm=False, qkv_proj_bias=False)
    path.write_text(json.dumps({**config, **old}))
    (expected,) = states(theirs, tmp_path, SENTENCES[:1])
    assert relative(Encoder(tmp_path, pooling="cls").encode(SENTENCES[0], normalize=False), expected[0]) < 2e-6
    for key, value in (("prenorm", True), ("num_experts", 8), ("rotary_scaling_factor", 2)):
        with pytest.raises(UnsupportedModelError, match=key):
            encoder({**config, **old, key: value})


def test_gtes_fixed_ntk_scaling_has_the_frequencies_of_the_published_code():
    scaling = {"type": "ntk", "factor": 8.0}
    config = {"model_type": "new", **SIZES, "rope_theta": 20000, "rope_scaling": scaling, "type_vocab_size": 1}
    frequencies, factor = encoder(config)[1].rotary.frequencies(12)
    np.testing.assert_allclose(frequencies, 160_000.0 ** (-np.arange(6) / 6) / 8 ** (2 / 12), rtol=1e-6)
    assert factor == 1
    with pytest.raises(UnsupportedModelError, match="mixed_b"):
        encoder({**config, "rope_scaling": {**scaling, "mixed_b": 0.5}})


@pytest.mark.parametrize(("family", "options"), [("DebertaV2", dict(type_vocab_size=2)), ("Gte", {})])
def test_scores_of_cross_encoders_match_transformers(family, options, tmp_path):
    theirs = save(tmp_path, family, "ForSequenceClassification", num_labels=1, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    types = family == "DebertaV2"
    pairs = [("who sat on the mat ?", document) for document in SENTENCES]
    inputs = tokenizer(pairs, padding=True, return_tensors="pt", return_token_type_ids=types)
    with torch.no_grad():
        expected = torch.sigmoid(theirs(**inputs).logits[:, 0]).numpy()
    assert expected.std() > 0.02
    np.testing.assert_allclose(Reranker(tmp_path).score("who sat on the mat ?", SENTENCES), expected, atol=3e-6)


def test_embeddinggemma_runs_end_to_end_as_in_sentence_transformers(tmp_path):
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer

    assert qwen_tokenizer(tmp_path / "base", appends_end=True) <= 330
    path = tmp_path / "base" / "tokenizer_config.json"
    path.write_text(json.dumps({key: v for key, v in json.loads(path.read_text()).items() if key != "chat_template"}))
    config = transformers.Gemma3TextConfig(**{**HEADLESS, "use_bidirectional_attention": True, "sliding_window": 12})
    filled(transformers.Gemma3TextModel(config)).save_pretrained(tmp_path / "base")
    dense = [Dense(a, b, bias=False, activation_function=torch.nn.Identity()) for a, b in ((64, 96), (96, 64))]
    modules = [Transformer(str(tmp_path / "base")), parts.Pooling(64, "mean"), *dense, Normalize()]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    SentenceTransformer(modules=modules, prompts=prompts).save_pretrained(str(tmp_path / "whole"))
    theirs, ours = SentenceTransformer(str(tmp_path / "whole")), Encoder(tmp_path / "whole")
    for kind in ("query", "document"):
        expected = getattr(theirs, f"encode_{kind}")(SENTENCES)
        assert relative(getattr(ours, f"encode_{kind}")(SENTENCES), expected) < 2e-6
