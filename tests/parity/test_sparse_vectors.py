"""SPLADE's sparse vectors against sentence-transformers' SparseEncoder and transformers' masked language models."""

import json

import numpy as np
import pytest
import safetensors.torch
import scipy.sparse

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sparse_encoder = pytest.importorskip("sentence_transformers.sparse_encoder")

from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from tests.parity.test_encoders import LONG as SENTENCES
from tests.parity.test_encoders import relative, save
from verax import Encoder
from verax.errors import InvalidParameterError, UnsupportedModelError

RELU = {"hidden_act": "relu"}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(("Bert", RELU), ("DistilBert", {}), ("XLMRoberta", {}), ("XLMRoberta", RELU), ("MPNet", RELU)),
        *(("ModernBert", {}), ("ModernBert", dict(decoder_bias=False, classifier_bias=True))),
    ],
)
def test_weights_are_the_largest_of_the_masked_language_model(family, changes, tmp_path):
    theirs = save(tmp_path, family, "ForMaskedLM", max_position_embeddings=300, **changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for text in SENTENCES:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            expected.append(torch.log1p(torch.relu(theirs(**inputs).logits[0])).amax(dim=0).numpy())
    encoder = Encoder(tmp_path, output="sparse")
    for batch_size in (None, 3):
        ours = encoder.encode(SENTENCES, batch_size=batch_size)
        assert isinstance(ours, scipy.sparse.csr_array)
        assert ours.dtype == np.float32
        assert relative(ours.toarray(), np.stack(expected)) < 1e-6
    assert 0 < ours.nnz < ours.shape[0] * ours.shape[1]
    (best,) = encoder.decode(ours[[0]], top_k=1)
    token = tokenizer.convert_ids_to_tokens(int(expected[0].argmax())) or ""
    assert best == [(token, pytest.approx(expected[0].max()))]


HEADS = {
    "Bert": "cls.predictions.decoder",
    **dict.fromkeys(("XLMRoberta", "MPNet"), "lm_head.decoder"),
    "DistilBert": "vocab_projector",
    "ModernBert": "decoder",
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", HEADS)
def test_a_head_that_differs_from_the_embeddings_is_used(family, tied, tmp_path):
    theirs = save(tmp_path, family, "ForMaskedLM", tie_word_embeddings=tied)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name in ("weight", "bias"):
        like = theirs.get_parameter(f"{HEADS[family]}.{name}")
        weights[f"{HEADS[family]}.{name}"] = torch.randn(like.shape, generator=torch.Generator().manual_seed(1))
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = type(theirs).from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = theirs(**tokenizer("the cat sat", return_tensors="pt", return_token_type_ids=False)).logits[0]
    ours = Encoder(tmp_path, output="sparse").encode("the cat sat")
    assert relative(ours.toarray()[0], torch.log1p(torch.relu(logits)).amax(dim=0).numpy()) < 1e-6


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Transformer", dict(pooling_strategy="sum", activation_function="log1p_relu")),
        ("MLMTransformer", dict(pooling_strategy="max", activation_function="relu")),
    ],
)
def test_folders_are_those_of_sentence_transformers(kind, options, tmp_path):
    save(tmp_path / "base", "Bert", "ForMaskedLM", max_position_embeddings=300)
    modules = [Transformer(str(tmp_path / "base"), transformer_task="fill-mask"), SpladePooling(**options)]
    theirs = sparse_encoder.SparseEncoder(modules=modules, prompts={"query": "the cat "}, max_active_dims=7)
    theirs.save_pretrained(str(tmp_path / "whole"))
    if kind == "MLMTransformer":  # as older releases wrote it
        path = tmp_path / "whole" / "modules.json"
        entries = json.loads(path.read_text())
        entries[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
        path.write_text(json.dumps(entries))
    theirs = sparse_encoder.SparseEncoder(str(tmp_path / "whole"))
    ours = Encoder(tmp_path / "whole", output="sparse")
    for name in ("encode_query", "encode_document"):
        expected = getattr(theirs, name)(SENTENCES, convert_to_sparse_tensor=False).cpu().numpy()
        assert relative(getattr(ours, name)(SENTENCES).toarray(), expected) < 1e-6
    with pytest.raises(UnsupportedModelError, match="output='sparse'"):
        Encoder(tmp_path / "whole")
    with pytest.raises(InvalidParameterError, match="pooling"):
        Encoder(tmp_path / "whole", output="sparse", pooling="mean")
