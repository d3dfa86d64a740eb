"""Rerankers against transformers' models: cross-encoders of each family, and Qwen3-Reranker's model card."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.parity.test_encoders import QWEN, filled, save
from tests.support.tiny_encoder import qwen_tokenizer, random_sentences
from verax import Reranker
from verax.embed.reranker import PREFIX, SUFFIX

DOCUMENTS = random_sentences(30, seed=5)
QUERIES = ["who sat on the mat ?", " ".join(random_sentences(3, seed=6, most=30))]
LONGEST = 32


HEAD = dict(kind="ForSequenceClassification", num_labels=1)
FAMILIES = {
    "bert": partial(save, family="Bert", **HEAD),
    "xlm-roberta": partial(save, family="XLMRoberta", **HEAD),
    "modernbert": partial(save, family="ModernBert", **HEAD, classifier_pooling="cls", classifier_bias=False),
    "deberta-v2": partial(save, family="DebertaV2", **HEAD, type_vocab_size=2),
    "camembert": partial(save, family="Camembert", **HEAD),
    "electra": partial(save, family="Electra", **HEAD),
    "gte": partial(save, family="Gte", **HEAD),
    "xlm-roberta-types": partial(save, family="XLMRoberta", **HEAD, type_vocab_size=2),
    "gte-types": partial(save, family="Gte", **HEAD, type_vocab_size=2),
    "modernbert-mean": partial(save, family="ModernBert", **HEAD, classifier_pooling="mean", classifier_bias=True),
}


def logits(model, folder, query, max_length=LONGEST):
    """As sentence-transformers' CrossEncoder: padded batches of pairs, the longer text cut first."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(
        [(query, document) for document in DOCUMENTS],
        **dict(padding=True, truncation="longest_first", max_length=max_length, return_tensors="pt"),
        return_token_type_ids=getattr(model.config, "type_vocab_size", 0) > 1,
    )
    with torch.no_grad():
        return model(**inputs).logits[:, 0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_sigmoid_of_transformers_logits(family, tmp_path):
    theirs = FAMILIES[family](tmp_path)
    reranker = Reranker(tmp_path, max_length=LONGEST)
    for query in QUERIES:  # a short one, and one that loses its end
        ours = reranker.score(query, DOCUMENTS)
        assert reranker.truncated > 0
        expected = logits(theirs, tmp_path, query)
        assert expected.std() > 0.1
        np.testing.assert_allclose(ours, torch.sigmoid(expected).numpy(), atol=2e-6)


@pytest.mark.parametrize(
    ("family", "changes"), [("Qwen3", {}), ("Llama", {}), ("Gemma3Text", dict(use_bidirectional_attention=True))]
)
def test_a_language_model_with_a_classifier_is_a_cross_encoder(family, changes, tmp_path):
    qwen_tokenizer(tmp_path)
    config = getattr(transformers, f"{family}Config")(**{**QWEN, "num_labels": 1, "pad_token_id": 1, **changes})
    theirs = filled(getattr(transformers, f"{family}ForSequenceClassification")(config))
    theirs.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    end = tokenizer.convert_ids_to_tokens(1)  # padding: the logit is read before it
    documents = [*DOCUMENTS[:5], DOCUMENTS[0] + end, end, ""]
    with torch.no_grad():
        pairs = [tokenizer(QUERIES[0], text, return_tensors="pt") for text in documents]
        expected = [torch.sigmoid(theirs(input_ids=pair["input_ids"]).logits[0, 0]).item() for pair in pairs]
    np.testing.assert_allclose(Reranker(tmp_path).score(QUERIES[0], documents), expected, atol=2e-6)


@pytest.mark.parametrize("family", ["bert", "modernbert-mean"])
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    rounded = FAMILIES[family](tmp_path).to(torch.bfloat16)
    rounded.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    rounded.save_pretrained(tmp_path)
    truth, theirs = (
        logits(type(rounded).from_pretrained(tmp_path, dtype=dtype), tmp_path, QUERIES[0]).numpy()
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = Reranker(tmp_path, dtype="bfloat16", max_length=LONGEST).score(QUERIES[0], DOCUMENTS)
    assert np.linalg.norm(ours - truth) <= 1.1 * np.linalg.norm(theirs - truth)


@pytest.mark.parametrize(("instruction", "tied"), [(None, True), ("the document is about a fox", False)])
def test_a_language_model_gives_the_probability_of_yes_as_on_its_model_card(instruction, tied, tmp_path):
    assert qwen_tokenizer(tmp_path) <= QWEN["vocab_size"]
    sizes = {**QWEN, "max_position_embeddings": 1024, "tie_word_embeddings": tied}
    theirs = filled(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)))
    theirs.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    max_length = len(prefix) + len(suffix) + 200
    task = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    pairs = [f"<Instruct>: {task}\n<Query>: {QUERIES[0]}\n<Document>: {document}" for document in DOCUMENTS]
    inputs = tokenizer(
        pairs, padding=False, truncation="longest_first", max_length=max_length - len(prefix) - len(suffix)
    )
    for i, ids in enumerate(inputs["input_ids"]):
        inputs["input_ids"][i] = prefix + ids + suffix
    inputs.pop("attention_mask", None)
    padded = tokenizer.pad({"input_ids": inputs["input_ids"]}, padding=True, return_tensors="pt")
    with torch.no_grad():
        last = theirs(**padded).logits[:, -1]
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    expected = torch.stack([last[:, no], last[:, yes]], dim=1).log_softmax(dim=1)[:, 1].exp().numpy()
    assert expected.std() > 0.005
    reranker = Reranker(tmp_path, max_length=max_length)
    np.testing.assert_allclose(reranker.score(QUERIES[0], DOCUMENTS, instruction=instruction), expected, atol=2e-6)
    assert reranker.truncated > 0
