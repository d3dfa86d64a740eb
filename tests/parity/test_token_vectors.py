"""Token vectors and MaxSim against sentence-transformers' MultiVectorEncoder, in three layouts of folders."""

import json
import string

import numpy as np
import pytest
import safetensors.torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
multi_vector = pytest.importorskip("sentence_transformers.multi_vector_encoder")

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer

from tests.parity.test_encoders import save
from tests.support.tiny_encoder import random_sentences
from verax import Encoder, Reranker
from verax.checkpoint import Checkpoint
from verax.embed.token_encoder import is_token_model, maxsim
from verax.errors import InvalidParameterError, UnsupportedModelError

DOCUMENTS = [*random_sentences(12, seed=4, most=30), "the cat . ? . sat"]
QUERIES = ["who sat on the mat ?", "a cat", " ".join(random_sentences(2, seed=6, most=40))]
TOKENS = dict(module_input_name="token_embeddings")


def with_markers(folder):
    """Give the tiny tokenizer a mask, and a marker that texts do not spell; no chat template."""
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "mask_token": "[UNK]"}
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "chat_template"}))
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"quick"', '"[unused0]"'))


def assert_same(folder):
    theirs, ours = MultiVectorEncoder(str(folder)), Encoder(folder, output="tokens", show_progress=False)
    for kind, texts in (("query", QUERIES), ("document", DOCUMENTS)):
        expected = getattr(theirs, f"encode_{kind}")(texts, convert_to_numpy=True)
        for batch_size in (None, 2):
            got = getattr(ours, f"encode_{kind}")(texts, batch_size=batch_size)
            assert [v.shape for v in got] == [v.shape for v in expected]
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)
    query, documents = theirs.encode_query(QUERIES[0]), theirs.encode_document(DOCUMENTS)
    scores = theirs.similarity([query], documents)[0].cpu().numpy()
    np.testing.assert_allclose(ours.score(QUERIES[0], DOCUMENTS), scores, rtol=1e-5)
    best = ours.rank(QUERIES[0], DOCUMENTS, top_k=1)[0]
    assert (best.index, best.text) == (int(scores.argmax()), DOCUMENTS[scores.argmax()])
    return ours


WIDE = dict(local_attention=40)
"""A window that reaches from each expansion to the query's tokens, as in published models."""

EXPANSIONS = {
    "none": dict(query_length=10, document_length=20),
    "hidden": dict(query_expansion=dict(strategy="fixed", length=16)),
    "seen": dict(query_expansion=dict(strategy="fixed", length=16, attend=True, token="fox")),
    "floor": dict(query_expansion=dict(strategy="min", length=16), query_length=20),
}


@pytest.mark.parametrize(
    ("family", "changes", "expansion"),
    [*(("Bert", {}, name) for name in EXPANSIONS), ("ModernBert", WIDE, "hidden"), ("Qwen3", {}, "none")],
)
def test_token_vectors_are_those_of_sentence_transformers(family, changes, expansion, tmp_path):
    base = tmp_path / "base"
    save(base, family, **changes)
    with_markers(base)
    torch.manual_seed(0)
    modules = [
        Transformer(str(base), **EXPANSIONS[expansion]),
        Dense(48, 20, bias=False, activation_function=torch.nn.Identity(), **TOKENS),
        multi_vector.modules.MultiVectorMask([".", "?"]),
        Normalize(**TOKENS),
    ]
    options = dict(prompts={"query": "the ", "document": "a "})
    options["similarity_fn_name"] = "meanmaxsim" if expansion == "floor" else None
    MultiVectorEncoder(modules=modules, **options).save_pretrained(str(tmp_path / "saved"))
    assert_same(tmp_path / "saved")


def dense(folder):
    torch.manual_seed(0)
    layer = Dense(48, 20, bias=False, activation_function=torch.nn.Identity())
    folder.mkdir()
    layer.save(str(folder))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in ("in_features", "out_features", "bias")}))


@pytest.mark.parametrize(
    "changes", [{}, {"do_query_expansion": False, "skiplist_words": ["cat"]}, {"model_type": None, "prompts": {}}]
)
def test_folders_of_pylate_are_read(changes, tmp_path):
    save(tmp_path, "Bert")
    with_markers(tmp_path)
    dense(tmp_path / "1_Dense")
    config = json.loads((tmp_path / "1_Dense" / "config.json").read_text())
    config["activation_function"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(config))
    types = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    listed = [{"idx": i, "name": str(i), "path": i * "1_Dense", "type": kind} for i, kind in enumerate(types)]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 31, "do_lower_case": False}))
    model = dict(
        model_type="ColBERT", query_prefix="[unused0] ", document_prefix="[Q] ", query_length=18, document_length=25
    )
    model = {key: value for key, value in {**model, **changes}.items() if value is not None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(model))
    assert_same(tmp_path)
    assert is_token_model(tmp_path, Checkpoint.open(tmp_path))


def test_folders_of_colbert_ir_are_read(tmp_path):
    model = save(tmp_path, "Bert")
    weights = {f"bert.{key}": value.contiguous() for key, value in model.state_dict().items()}
    weights["linear.weight"] = torch.randn(16, 48, generator=torch.Generator().manual_seed(0)) * 0.2
    model.config.architectures = ["HF_ColBERT"]
    model.config.save_pretrained(tmp_path)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with_markers(tmp_path)
    metadata = dict(doc_token_id="dog", query_maxlen=14, doc_maxlen=22, mask_punctuation=True)
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    ours = assert_same(tmp_path)
    assert set(ours._skipped_ids) == {ours._tokenizer.token_id(word) for word in string.punctuation} - {None}
    with pytest.raises(InvalidParameterError, match="pooling: token vectors have none"):
        Encoder(tmp_path, output="tokens", pooling="mean")


def test_what_token_vectors_cannot_do_is_refused(tmp_path):
    save(tmp_path / "base", "Qwen3")
    plain = Encoder(tmp_path / "base", output="tokens")
    assert [v.shape[1] for v in plain.encode(DOCUMENTS[:2], normalize=False)] == [48, 48]
    model = {"model_type": "MultiVectorEncoder"}
    (tmp_path / "base" / "config_sentence_transformers.json").write_text(json.dumps(model))
    with pytest.raises(UnsupportedModelError, match="output='tokens'"):
        Encoder(tmp_path / "base", pooling="mean")
    expansion = {"query_expansion": {"strategy": "fixed", "length": 9}}
    (tmp_path / "base" / "sentence_bert_config.json").write_text(json.dumps(expansion))
    with pytest.raises(UnsupportedModelError, match="expansion that its own tokens do not see is not supported"):
        Encoder(tmp_path / "base", output="tokens")
    with pytest.raises(InvalidParameterError, match="output: expected sentence, tokens or sparse"):
        Encoder(tmp_path / "base", output="words")
    assert maxsim(np.eye(3), np.zeros((0, 3))) == 0
    with pytest.raises(UnsupportedModelError):
        Reranker(tmp_path / "base")
