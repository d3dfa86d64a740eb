"""`Reranker`: scores and rankings that no batch changes, activation functions of the files, and what it refuses."""

import shutil

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import random_sentences, tiny_encoder, tiny_reranker
from verax import Reranker
from verax.embed.buckets import Tokens
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.files import read_json, write_json

QUERY = "who sat on the mat ?"
DOCUMENTS = random_sentences(20, seed=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def reranker(folder):
    return Reranker(folder)


@pytest.fixture(scope="module")
def scores(reranker):
    return reranker.score(QUERY, DOCUMENTS)


def test_scores_are_in_the_order_of_the_documents_and_depend_on_no_batch(reranker, scores):
    assert (scores.shape, scores.dtype) == ((20,), np.float32)
    assert scores.std() > 0.01
    order = np.random.default_rng(0).permutation(20)
    again = reranker.score(QUERY, [DOCUMENTS[i] for i in order], batch_size=3)
    np.testing.assert_allclose(again, scores[order], atol=2e-6)
    assert reranker.score(QUERY, []).shape == (0,)


def test_a_ranking_has_the_best_documents_first(reranker, scores):
    ranked = reranker.rank(QUERY, iter(DOCUMENTS))
    assert [one.index for one in ranked] == np.argsort(-scores).tolist()
    assert [one.text for one in ranked] == [DOCUMENTS[one.index] for one in ranked]
    np.testing.assert_allclose([one.score for one in ranked], np.sort(scores)[::-1], atol=2e-6)
    assert reranker.rank(QUERY, DOCUMENTS, 3) == ranked[:3]
    assert [one.index for one in reranker.rank(QUERY, ["a cat", "a cat"])] == [0, 1]


def test_scores_that_are_not_finite_are_no_ranking(reranker, monkeypatch):
    monkeypatch.setattr(reranker, "score", lambda query, texts: np.asarray([1, np.nan], np.float32))
    with pytest.raises(CheckpointError, match="no finite numbers for text 1"):
        reranker.rank(QUERY, DOCUMENTS[:2])


def test_long_pairs_are_cut_and_counted(folder, reranker):
    short = Reranker(folder, max_length=16)
    short.score(QUERY, ["the cat", "the cat sat on the mat and " * 5])
    assert short.truncated == 1
    (cut,) = reranker.tokenize(QUERY, [DOCUMENTS[0] * 3], max_length=16)
    assert len(cut.ids) == 16
    assert cut.left_out > 0


@pytest.fixture
def changed(folder, tmp_path):
    """A function that copies the checkpoint with changes of its config.json."""

    def change(**changes):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        write_json(tmp_path / "config.json", {**read_json(folder / "config.json"), **changes})
        return tmp_path

    return change


def test_old_files_name_the_activation_function(changed, scores):
    old = changed(sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    logits = Reranker(old).score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), scores, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(id2label={"0": "no", "1": "yes"}), "a classifier of 2 labels ranks nothing"),
        (dict(id2label=None), "a classifier of 2 labels"),  # transformers' default
        (dict(architectures=["BertForMaskedLM"]), "architectures BertForMaskedLM: no reranker"),
        (dict(model_type="electra"), "model_type 'electra'; cross-encoders supported are bert"),
        (
            dict(sentence_transformers={"activation_fn": "os.system"}),
            r"activation function 'os\.system' is not supported; torch\.nn's Identity",
        ),
    ],
)
def test_what_is_not_supported_is_named(changed, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        Reranker(changed(**changes))


def test_a_model_without_a_classifier_lacks_its_weights(tmp_path):
    tiny_encoder(tmp_path, architectures=["BertForSequenceClassification"], id2label={"0": "LABEL_0"})
    with pytest.raises(CheckpointError, match=r"missing from model\.safetensors"):
        Reranker(tmp_path)


def test_a_language_model_without_the_answers_is_not_a_reranker(tmp_path):
    with pytest.raises(UnsupportedModelError, match="its tokenizer lacks one of the tokens yes, no"):
        Reranker(tiny_checkpoint(tmp_path / "qwen3"))
    with pytest.raises(UnsupportedModelError, match="model_type 'qwen2': the only language model that ranks"):
        Reranker(tiny_checkpoint(tmp_path / "qwen2", family="qwen2"))
    with pytest.raises(UnsupportedModelError, match="auto_map: a language model that ranks by its own code"):
        Reranker(tiny_checkpoint(tmp_path / "code", auto_map={"AutoConfig": "modeling_zeranker.ZEConfig"}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.score(3, DOCUMENTS), "query: expected texts, got 3"),
        (lambda r: r.score(QUERY, ["a cat", 3]), "documents: expected texts, got 3 at 1"),
        (lambda r: r.score(QUERY, b"cat"), "documents: expected a text or texts"),
        (lambda r: r.score(QUERY, "a cat"), "documents: expected a list of texts, got the text 'a cat'"),
        (lambda r: r.score(QUERY, DOCUMENTS, instruction="find cats"), "instruction: this model reads none"),
        (lambda r: r.score(QUERY, DOCUMENTS, batch_size=0), "batch_size: expected a whole number of at least 1"),
        (lambda r: r.rank(QUERY, DOCUMENTS, 0), "top_k: expected a whole number of at least 1, got 0"),
        (lambda r: r.score_tokens([Tokens([2, 3]), Tokens([4] * 65)]), r"expected 1 to 64 tokens .*, got 65 at 1"),
        (lambda r: r.tokenize(QUERY, DOCUMENTS, max_length=4), "max_length: 4 tokens leave none for each text"),
    ],
)
def test_wrong_input_is_named(reranker, call, message):
    with pytest.raises(InvalidParameterError, match=message):
        call(reranker)
