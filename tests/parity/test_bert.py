"""BERT encoders against transformers' BertModel: random weights saved by it, loaded from disk, whole sentences."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.tiny_encoder import SIZES, random_sentences, sentence_files, tiny_tokenizer
from verax import Encoder

SENTENCES = random_sentences(45, seed=3)


def reference(folder, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SIZES, **changes})
    model = transformers.BertModel(config).eval()
    for key, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(std=1.5 * weight.shape[1] ** -0.5)
        else:
            weight.data.normal_(mean=1.0 if key.endswith("LayerNorm.weight") else 0.0, std=0.3)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer(folder)
    return model


def embed(model, folder, *, pooling="mean", normalize=True, max_length=64):
    """As sentence-transformers does it: padded batches, masked pooling."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCES, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].to(hidden.dtype)
    vectors = hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)
    return (torch.nn.functional.normalize(vectors) if normalize else vectors).float().numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_float32_vectors_are_those_of_transformers(pooling, normalize, tmp_path):
    theirs = reference(tmp_path)
    sentence_files(tmp_path, mode=pooling, max_seq_length=24)
    expected = embed(theirs, tmp_path, pooling=pooling, normalize=normalize, max_length=24)
    encoder = Encoder(tmp_path)
    ours = encoder.encode(SENTENCES, normalize=normalize, batch_size=8)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert encoder.truncated > 0


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu_new"}, {"hidden_act": "relu", "num_attention_heads": 3}])
def test_other_activations_and_heads(changes, tmp_path):
    expected = embed(reference(tmp_path, **changes), tmp_path)
    np.testing.assert_allclose(Encoder(tmp_path).encode(SENTENCES), expected, atol=1e-5)


def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(tmp_path):
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both.
    rounded = reference(tmp_path, torch.bfloat16)
    theirs = embed(rounded, tmp_path)
    truth = embed(rounded.float(), tmp_path)
    ours = Encoder(tmp_path, dtype="bfloat16").encode(SENTENCES)
    assert np.linalg.norm(ours - truth) <= 1.1 * np.linalg.norm(theirs - truth)


def test_checkpoints_with_a_head_and_a_pooler_load(tmp_path):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path)
    np.testing.assert_allclose(Encoder(tmp_path).encode(SENTENCES), embed(model.bert, tmp_path), atol=1e-5)
