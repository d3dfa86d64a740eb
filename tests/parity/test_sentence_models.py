"""Sentence encoders against transformers' models: BERT, RoBERTa, ModernBERT, Qwen3 and other language models.

Prompts and poolings are in test_sentence_transformers.py.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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

SENTENCES = random_sentences(45, seed=3)
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


def filled(model):
    """A model with weights of real spread, biases and norms included."""
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        norm = "norm" in key.lower() and key.endswith("weight")
        weight.data = 1.5 * noise * weight.shape[1] ** -0.5 if weight.ndim == 2 else 0.3 * noise + norm
    return model.eval()


def bert(folder, kind="Model", **changes):
    tiny_tokenizer(folder)
    return filled(getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**{**SIZES, **changes})))


def roberta(folder, kind="Model", **changes):
    tiny_tokenizer(folder, ROBERTA_SPECIAL, ROBERTA_PAIR)
    sizes = {**SIZES, "type_vocab_size": 1, "max_position_embeddings": 66, "layer_norm_eps": 1e-5, **changes}
    return filled(getattr(transformers, f"XLMRoberta{kind}")(transformers.XLMRobertaConfig(**sizes)))


def modernbert(folder, kind="Model", **changes):
    tiny_tokenizer(folder)
    return filled(getattr(transformers, f"ModernBert{kind}")(transformers.ModernBertConfig(**{**MODERN, **changes})))


def qwen3(folder):
    assert qwen_tokenizer(folder, appends_end=True) <= QWEN["vocab_size"]
    return filled(transformers.Qwen3Model(transformers.Qwen3Config(**QWEN, tie_word_embeddings=False)))


FAMILIES = {"bert": bert, "roberta": roberta, "modernbert": modernbert, "qwen3": qwen3}


def embed(model, folder, *, mode, normalize=True, max_length=LONGEST):
    """Vectors as sentence-transformers makes them: padded batches, masked pooling."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    inputs = tokenizer(SENTENCES, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    if mode == "cls":
        vectors = hidden[:, 0]
    elif mode == "lasttoken":
        vectors = hidden[torch.arange(len(ids)), mask.sum(1) - 1]
    else:
        weights = mask[..., None].to(hidden.dtype)
        vectors = (hidden * weights).sum(1) / weights.sum(1)
    return (torch.nn.functional.normalize(vectors) if normalize else vectors).float().numpy()


def atol(family):
    return 1e-5 if family == "bert" else 2e-6


@pytest.mark.parametrize(
    ("family", "mode", "normalize"),
    [("bert", "mean", False), ("roberta", "mean", True), ("modernbert", "cls", True), ("qwen3", "lasttoken", True)],
)
def test_float32_vectors_match_transformers(family, mode, normalize, tmp_path):
    theirs = FAMILIES[family](tmp_path)
    theirs.save_pretrained(tmp_path)
    sentence_files(tmp_path, mode=mode, max_seq_length=LONGEST)
    encoder = Encoder(tmp_path)
    expected = embed(theirs, tmp_path, mode=mode, normalize=normalize)
    for batch_size in (None, 8):
        ours = encoder.encode(SENTENCES, normalize=normalize, batch_size=batch_size)
        assert encoder.truncated > 0
        np.testing.assert_allclose(ours, expected, atol=atol(family))


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu_new"}, {"hidden_act": "relu", "num_attention_heads": 3}])
def test_other_activations_and_heads(changes, tmp_path):
    theirs = bert(tmp_path, **changes)
    theirs.save_pretrained(tmp_path)
    expected = embed(theirs, tmp_path, mode="mean", max_length=64)
    np.testing.assert_allclose(Encoder(tmp_path).encode(SENTENCES), expected, atol=atol("bert"))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both.
    rounded = FAMILIES[family](tmp_path).to(torch.bfloat16)
    rounded.save_pretrained(tmp_path)
    sentence_files(tmp_path, max_seq_length=LONGEST)
    truth, theirs = (
        embed(type(rounded).from_pretrained(tmp_path, dtype=dtype), tmp_path, mode="mean")
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = Encoder(tmp_path, dtype="bfloat16").encode(SENTENCES)
    assert np.linalg.norm(ours - truth) <= 1.1 * np.linalg.norm(theirs - truth)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_a_language_model_or_a_model_with_a_head_is_an_encoder_without_it(family, tmp_path):
    theirs = FAMILIES[family](tmp_path)
    heads = {"bert": transformers.BertForMaskedLM, "modernbert": transformers.ModernBertForMaskedLM}
    heads["qwen3"] = transformers.Qwen3ForCausalLM
    whole = filled(heads[family](theirs.config))
    whole.save_pretrained(tmp_path)
    ours = Encoder(tmp_path, pooling="lasttoken", max_length=LONGEST).encode(SENTENCES)
    np.testing.assert_allclose(ours, embed(whole.base_model, tmp_path, mode="lasttoken"), atol=atol(family))


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
