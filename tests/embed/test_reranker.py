"""`Reranker`: scores and rankings that no batch changes, activation functions of the files, and what it refuses."""

import shutil

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import qwen_tokenizer, random_sentences, tiny_encoder, tiny_reranker
from verax import Reranker
from verax.embed.buckets import Tokens
from verax.embed.reranker import INSTRUCTION
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.files import read_json, write_json
from verax.text.tokens.tokenizer import Tokenizer

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
    assert reranker.rank(QUERY, []) == []


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
        (dict(model_type="albert"), "model_type 'albert'; cross-encoders supported are bert"),
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


CHAT = """{% macro text(role) %}{% for m in messages if m.role == role %}{{ m.content }}{% endfor %}{% endmacro -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that \
the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ text("system") }}
<Query>: {{ text("query") }}
<Document>: {{ text("document") }}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""Prompt of Qwen3-Reranker as sentence-transformers renders it."""
LOGITS = {"method": "forward", "method_output_name": "logits"}


@pytest.fixture
def chats(tmp_path):
    """A function that makes a Qwen3-Reranker, with sentence-transformers' files or without."""

    def make(name="chats", template=CHAT + "\n", tokens=(), score=(), files=True):
        folder = tmp_path / name
        tiny_checkpoint(folder, architectures=["Qwen3ForCausalLM"], vocab_size=330, max_position_embeddings=1024)
        qwen_tokenizer(folder, chat_template=template)
        if not files:
            return folder
        package = "sentence_transformers"
        types = f"{package}.base.modules.transformer.Transformer", f"{package}.cross_encoder.modules.LogitScore"
        write_json(folder / "modules.json", [dict(path=p, type=t) for p, t in zip(("", "1"), types, strict=True)])
        find = Tokenizer.from_folder(folder).token_id
        (folder / "1").mkdir()
        answers = {"true_token_id": find("yes"), "false_token_id": find("no")}
        write_json(folder / "1" / "config.json", {**answers, **dict(score)})
        modes = {"text": LOGITS, "message": {**LOGITS, "format": "flat"}}
        transformer = {"transformer_task": "text-generation", "modality_config": modes, **dict(tokens)}
        write_json(folder / "sentence_bert_config.json", transformer)
        prompts = {"prompts": {"web": INSTRUCTION}, "default_prompt_name": "web", "model_type": "CrossEncoder"}
        write_json(folder / "config_sentence_transformers.json", prompts)
        return folder

    return make


def test_qwen3_reranker_has_the_same_scores_by_its_files_of_sentence_transformers(chats):
    plain, ours = Reranker(chats("plain", files=False)), Reranker(chats())
    for instruction in (None, "the document is about a fox"):
        expected = plain.score(QUERY, DOCUMENTS, instruction=instruction)
        assert expected.std() > 1e-3
        np.testing.assert_allclose(ours.score(QUERY, DOCUMENTS, instruction=instruction), expected, atol=2e-6)
    with pytest.raises(InvalidParameterError, match="max_length: 60 tokens leave none for the document"):
        ours.tokenize(QUERY, DOCUMENTS, max_length=60)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(score={"true_token_id": 10**6}), CheckpointError, "its tokens are not of the model's"),
        (dict(score={"module_input_name": "x"}), CheckpointError, "module_input_name: expected"),
        (dict(tokens={"modality_config": {"text": LOGITS}}), UnsupportedModelError, r"modality_config\.message None"),
        (dict(tokens={"processing_kwargs": {"text": {"padding": 8}}}), UnsupportedModelError, "processing_kwargs"),
        (dict(tokens={"processing_kwargs": {"chat_template": {"tools": [1]}}}), UnsupportedModelError, "processing_kw"),
        (dict(template="{{ messages[0].content }}"), UnsupportedModelError, "does not show messages of the roles"),
    ],
)
def test_files_of_a_scoring_language_model_that_are_not_supported_are_named(chats, changes, error, message):
    with pytest.raises(error, match=message):
        Reranker(chats(**changes))


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
        (lambda r: r.score_tokens([Tokens([2, 60, 3])]), "pairs: expected numbers from 0 to 59 at 0"),
        (lambda r: r.score_tokens([Tokens([2, 4.5, 3])]), "pairs: expected numbers from 0 to 59 at 0"),
        (lambda r: r.score_tokens([Tokens([2, 4, 3], [0])]), "pairs: expected a type for each"),
        (lambda r: r.tokenize(QUERY, "a cat"), "documents: expected a list of texts"),
        (lambda r: r.tokenize(QUERY, DOCUMENTS, max_length=4), "max_length: 4 tokens leave none for each text"),
    ],
)
def test_wrong_input_is_named(reranker, call, message):
    with pytest.raises(InvalidParameterError, match=message):
        call(reranker)
