"""Encoders against transformers' models on random weights: vectors, in bfloat16 too.

Prompts and poolings are in test_sentence_transformers.py, scores in test_rerankers.py, and models that transformers
has no class for in test_encoder_code.py.
"""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.parity import test_causal_lm as causal_lm
from tests.support import tiny
from tests.support.tiny_encoder import (
    ROBERTA_PAIR,
    ROBERTA_SPECIAL,
    SIZES,
    qwen_tokenizer,
    random_sentences,
    sentence_files,
    tiny_tokenizer,
)
from verax import Encoder
from verax.errors import UnsupportedModelError
from verax.models import encoder
from verax.models.rotary_bert import _NOMIC_KEYS

SENTENCES = random_sentences(45, seed=3)
LONG = random_sentences(20, seed=3) + random_sentences(2, seed=4, most=190)
LONGEST = 24

QWEN = dict(
    vocab_size=330,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_id=1,
    bos_token_id=None,
)
MODERN = {name: SIZES[name] for name in SIZES if name not in ("type_vocab_size", "hidden_act", "layer_norm_eps")}
MODERN |= dict(
    # A window of 5 tokens on each side, in sentences of up to 24.
    local_attention=10,
    global_attn_every_n_layers=2,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
)


PLAIN = dict(vocab_size=60, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4)
DEBERTA = dict(PLAIN, max_position_embeddings=300, relative_attention=True, pos_att_type=["p2c", "c2p"])
V3 = dict(position_buckets=16, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False)
FAMILIES = {
    "Bert": SIZES,
    "XLMRoberta": dict(SIZES, type_vocab_size=1, max_position_embeddings=66, layer_norm_eps=1e-5),
    "ModernBert": MODERN,
    "Qwen3": dict(QWEN, tie_word_embeddings=False),
    "DebertaV2": dict(DEBERTA, **V3),
    "MPNet": dict(PLAIN, max_position_embeddings=300),
    "Electra": dict(SIZES, embedding_size=32, max_position_embeddings=300),
    "Camembert": dict(SIZES, type_vocab_size=1, max_position_embeddings=302),
    "DistilBert": dict(vocab_size=60, dim=48, hidden_dim=80, n_layers=3, n_heads=4, max_position_embeddings=300),
    "NomicBert": PLAIN,
    "Gte": PLAIN,
    "JinaEmbeddingsV3": PLAIN,
    "EuroBert": dict(PLAIN, num_key_value_heads=2, max_position_embeddings=300, pad_token_id=0),
}
"""Settings of transformers' configurations, by the beginnings of their names."""

COMPARED = ("Bert", "XLMRoberta", "ModernBert", "Qwen3")
"""Families that are compared in all of the ways below."""


def filled(model):
    """A model with weights of real spread, biases and norms included."""
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        norm = "norm" in key.lower() and key.endswith("weight")
        weight.data = 1.5 * noise * weight.shape[1] ** -0.5 if weight.ndim == 2 else 0.3 * noise + norm
    return model.eval()


def save(folder, family, kind="Model", **changes):
    """Save a random model of a family with its tokenizer, and return it."""
    if family == "Qwen3":
        assert qwen_tokenizer(folder, appends_end=True) <= QWEN["vocab_size"]
    else:
        roberta = (
            family in ("XLMRoberta", "Camembert", "MPNet", "Gte", "JinaEmbeddingsV3")
            and "type_vocab_size" not in changes
        )
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


POOLED = {"cls": lambda x: x[0], "lasttoken": lambda x: x[-1], "mean": lambda x: x.mean(axis=0)}


def embed(model, folder, *, mode, normalize=True, max_length=LONGEST):
    """Vectors as sentence-transformers makes them."""
    rows = states(model, folder, SENTENCES, truncation=True, max_length=max_length)
    vectors = np.stack([POOLED[mode](row) for row in rows])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors


def relative(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def atol(family):
    return 1e-5 if family == "Bert" else 2e-6


@pytest.mark.parametrize(
    ("family", "mode", "normalize"),
    [("Bert", "mean", False), ("XLMRoberta", "mean", True), ("ModernBert", "cls", True), ("Qwen3", "lasttoken", True)],
)
def test_float32_vectors_of_cut_sentences_match_transformers(family, mode, normalize, tmp_path):
    theirs = save(tmp_path, family)
    sentence_files(tmp_path, mode=mode, max_seq_length=LONGEST)
    encoder = Encoder(tmp_path)
    expected = embed(theirs, tmp_path, mode=mode, normalize=normalize)
    for batch_size in (None, 8):
        ours = encoder.encode(SENTENCES, normalize=normalize, batch_size=batch_size)
        assert encoder.truncated > 0
        np.testing.assert_allclose(ours, expected, atol=atol(family))


CHANGES = [
    ("DebertaV2", dict(V3, share_att_key=False, norm_rel_ebd="none", position_biased_input=True, type_vocab_size=2)),
    ("DebertaV2", dict(relative_attention=False, position_buckets=-1)),
    ("DebertaV2", dict(position_buckets=-1, max_relative_positions=7, pos_att_type="c2p")),
    ("NomicBert", dict(hidden_act="gelu_new")),
    ("Gte", dict(type_vocab_size=0)),
]


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in FAMILIES if family not in COMPARED), *CHANGES]
)
def test_float32_vectors_match_transformers(family, changes, tmp_path):
    theirs = save(tmp_path, family, **changes)
    sentence_files(tmp_path)
    expected = np.stack([hidden.mean(axis=0) for hidden in states(theirs, tmp_path, LONG)])
    encoder = Encoder(tmp_path)
    for batch_size in (None, 3):
        ours = encoder.encode(LONG, normalize=False, batch_size=batch_size)
        assert relative(ours, expected) < 1e-6


@pytest.mark.parametrize(("family", "padding"), [("XLMRoberta", 1), ("XLMRoberta", 3), ("MPNet", 1), ("Bert", 0)])
def test_padding_tokens_of_a_text_are_counted_as_in_transformers(family, padding, tmp_path):
    theirs = save(tmp_path, family, pad_token_id=padding)
    texts = ["[PAD] the cat", "the [PAD] [PAD] cat [UNK] [PAD] sat on", "a fox", "[UNK]"]
    sentence_files(tmp_path)
    expected = np.stack([hidden.mean(axis=0) for hidden in states(theirs, tmp_path, texts)])
    assert relative(Encoder(tmp_path).encode(texts, normalize=False), expected) < 1e-6


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu_new"}, {"hidden_act": "relu", "num_attention_heads": 3}])
def test_other_activations_and_heads(changes, tmp_path):
    theirs = save(tmp_path, "Bert", **changes)
    expected = embed(theirs, tmp_path, mode="mean", max_length=64)
    np.testing.assert_allclose(Encoder(tmp_path).encode(SENTENCES), expected, atol=atol("Bert"))


@pytest.mark.parametrize("family", COMPARED)
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both.
    rounded = save(tmp_path, family).to(torch.bfloat16)
    rounded.save_pretrained(tmp_path)
    sentence_files(tmp_path, max_seq_length=LONGEST)
    truth, theirs = (
        embed(type(rounded).from_pretrained(tmp_path, dtype=dtype), tmp_path, mode="mean")
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = Encoder(tmp_path, dtype="bfloat16").encode(SENTENCES)
    assert np.linalg.norm(ours - truth) <= 0.8 * np.linalg.norm(theirs - truth)


HEADS = dict.fromkeys(("Bert", "ModernBert", "MPNet", "DistilBert", "NomicBert", "Gte", "DebertaV2"), "ForMaskedLM")


@pytest.mark.parametrize(
    ("family", "kind"),
    [*HEADS.items(), ("Qwen3", "ForCausalLM"), ("EuroBert", "ForMaskedLM"), ("Gte", "ForTokenClassification")],
)
def test_a_language_model_or_a_model_with_a_head_is_an_encoder_without_it(family, kind, tmp_path):
    theirs = save(tmp_path, family, kind)
    ours = Encoder(tmp_path, pooling="lasttoken", max_length=LONGEST).encode(SENTENCES)
    np.testing.assert_allclose(ours, embed(theirs.base_model, tmp_path, mode="lasttoken"), atol=atol(family))


HEADLESS = {**QWEN, "hidden_size": 64, "intermediate_size": 64, "pad_token_id": 0, "num_hidden_layers": 2}
DELTA = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4)
DELTA |= dict(linear_key_head_dim=8, linear_value_head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
WINDOW = dict(sliding_window=4)
BOTH_WAYS = dict(is_causal=False)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {}),
        ("Llama", {}),
        ("Qwen3Moe", EXPERTS),
        ("Gemma2", WINDOW),
        ("Gemma3Text", WINDOW),
        ("Qwen3_5Text", DELTA),
        ("Qwen3Next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}),
        ("Qwen2", BOTH_WAYS),
        ("Qwen3", BOTH_WAYS),
        ("Mistral", {**BOTH_WAYS, **WINDOW}),
        ("Gemma2", {**BOTH_WAYS, **WINDOW}),
        ("Gemma3Text", {"use_bidirectional_attention": True, "sliding_window": 6}),
    ],
)
def test_language_models_without_heads_and_with_attention_both_ways_match(family, changes, tmp_path):
    qwen_tokenizer(tmp_path, appends_end=True)
    config = getattr(transformers, f"{family}Config")(**{**HEADLESS, **changes})
    theirs = filled(getattr(transformers, f"{family}Model")(config))
    theirs.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    got = Encoder(tmp_path).encode(SENTENCES[:3])
    for sentence, vector in zip(SENTENCES[:3], got, strict=True):
        with torch.no_grad():
            states = theirs(**tokenizer([sentence], return_tensors="pt", return_token_type_ids=False)).last_hidden_state
        expected = torch.nn.functional.normalize(states[0].mean(0), dim=0)
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_short_texts_have_the_rotation_of_short_contexts(tmp_path):
    """Of LongRoPE, as in transformers."""
    theirs = causal_lm.reference("phi3-long", tmp_path).model
    tiny.tiny_tokenizer(tmp_path, causal_lm.SIZES["vocab_size"])
    encoder = Encoder(tmp_path, max_length=60, pooling="mean")
    texts = ["a fox by the river", "12 + 30"]
    with torch.no_grad():
        expected = [theirs(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids, _ in encoder.tokenize(texts)]
    assert relative(encoder.encode(texts, normalize=False), torch.stack(expected).numpy()) < 2e-6


def test_files_of_nomics_and_gtes_own_code_are_read_without_the_code(tmp_path):
    theirs = save(tmp_path, "NomicBert")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    old = {_NOMIC_KEYS[key]: config.pop(key) for key in _NOMIC_KEYS if key in config}
    old |= dict(activation_function="swiglu", rotary_emb_base=rope["rope_theta"], prenorm=False, qkv_proj_bias=False)
    path.write_text(json.dumps({**config, **old}))
    (expected,) = states(theirs, tmp_path, LONG[:1])
    assert relative(Encoder(tmp_path, pooling="cls").encode(LONG[0], normalize=False), expected[0]) < 2e-6
    for key, value in (("prenorm", True), ("num_experts", 8), ("rotary_scaling_factor", 2)):
        with pytest.raises(UnsupportedModelError, match=key):
            encoder({**config, **old, key: value})


def test_gtes_fixed_ntk_scaling_has_the_frequencies_of_the_published_code():
    scaling = {"type": "ntk", "factor": 8.0}
    config = {"model_type": "new", **PLAIN, "rope_theta": 20000, "rope_scaling": scaling, "type_vocab_size": 1}
    frequencies, factor = encoder(config)[1].rotary.frequencies(12)
    np.testing.assert_allclose(frequencies, 160_000.0 ** (-np.arange(6) / 6) / 8 ** (2 / 12), rtol=1e-6)
    assert factor == 1
    with pytest.raises(UnsupportedModelError, match="mixed_b"):
        encoder({**config, "rope_scaling": {**scaling, "mixed_b": 0.5}})


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
        expected = getattr(theirs, f"encode_{kind}")(LONG)
        assert relative(getattr(ours, f"encode_{kind}")(LONG), expected) < 2e-6
