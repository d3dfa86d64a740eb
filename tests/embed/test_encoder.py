"""`Encoder.encode`: the habits of sentence-transformers, buckets that compile once, neighbours that change nothing."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import (
    SIZES,
    random_sentences,
    random_weights,
    sentence_files,
    tiny_encoder,
    tiny_reranker,
    tiny_tokenizer,
)
from verax import Encoder, Reranker, checkpoint
from verax.embed.buckets import PackedBuckets, Tokens
from verax.embed.token_encoder import TokenEncoder
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.models import masked_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder):
    return Encoder(folder)


SENTENCES = random_sentences(70, seed=1)


def test_a_string_gives_a_vector_and_a_list_an_array(encoder):
    one = encoder.encode("the cat sat")
    many = encoder.encode(["the cat sat"])
    assert (one.shape, many.shape) == ((48,), (1, 48))
    assert one.dtype == many.dtype == np.float32
    assert encoder.dimension == 48
    assert encoder.encode("the cat sat", precision="binary").shape == (6,)
    assert encoder.encode([], precision="binary").shape == (0, 6)
    assert encoder.encode("the cat sat", precision="int8", ranges=[[-1.0] * 48, [1.0] * 48]).dtype == np.int8
    np.testing.assert_array_equal(one, many[0])
    np.testing.assert_allclose(np.linalg.norm(one), 1, atol=1e-6)


def test_any_iterable_of_texts_will_do(encoder):
    expected = encoder.encode(["a cat", "a dog"])
    for same in (("a cat", "a dog"), iter(["a cat", "a dog"]), np.asarray(["a cat", "a dog"])):
        np.testing.assert_array_equal(encoder.encode(same), expected)


def test_order_is_kept_and_no_vector_depends_on_its_batch(encoder):
    vectors = encoder.encode(SENTENCES)
    for i in (0, 7, 33, 69):
        np.testing.assert_allclose(encoder.encode(SENTENCES[i]), vectors[i], atol=2e-6)
    shuffled = np.random.default_rng(0).permutation(70)
    again = encoder.encode([SENTENCES[i] for i in shuffled], batch_size=20)
    np.testing.assert_allclose(again, vectors[shuffled], atol=2e-6)


@pytest.mark.parametrize("model", [Encoder, TokenEncoder, Reranker])
def test_a_text_without_finite_numbers_leaves_the_others_of_its_call_alone(model, tmp_path):
    whole, damaged = ((tiny_reranker if model is Reranker else tiny_encoder)(tmp_path / name) for name in "ab")
    weights = load_file(damaged / "model.safetensors")
    (key,) = (key for key in weights if key.endswith("word_embeddings.weight"))
    weights[key][Tokenizer.from_file(str(damaged / "tokenizer.json")).token_to_id("fox")] = np.nan
    save_file(weights, damaged / "model.safetensors")
    texts = ["the cat sat", "a fox", "the mat under a house"]
    call = (lambda m: m.score("a dog", texts)) if model is Reranker else lambda m: m.encode(texts)
    expected, got = (call(model(folder)) for folder in (whole, damaged))
    assert np.isnan(got[1]).all()
    for i in (0, 2):
        np.testing.assert_allclose(got[i], expected[i], atol=2e-6)


def test_sentences_in_rows_of_their_own_do_not_depend_on_their_batch_either(tmp_path):
    folder = tiny_encoder(tmp_path, model_type="lam", lam_config={"rule": "gated"})
    encoder, texts = Encoder(folder, max_length=12), ["the cat sat on the mat", "a dog", "the fox ran"]
    alone = [encoder.encode(text) for text in texts]
    np.testing.assert_allclose(encoder.encode(texts), alone, atol=2e-6)


def test_long_sentences_are_cut_keep_their_end_token_and_are_counted(folder):
    encoder = Encoder(folder, max_length=6)
    got = encoder.encode(["the cat sat on the mat", "the cat", "the cat sat on a mat in a house"])
    assert encoder.truncated == 2
    np.testing.assert_array_equal(got[0], encoder.encode("the cat sat on"))
    encoder.encode("the cat")
    assert encoder.truncated == 0


def test_nothing_compiles_after_warm_up_and_each_bucket_once(folder):
    encoder = Encoder(folder, max_length=16)
    encoder.encode(["a cat"] * 4, batch_size=4)
    encoder.encode(["the dog", "it ran far"], normalize=False, batch_size=4)
    assert encoder.num_compiled() == 1
    encoder.warm_up(batch_size=4, show_progress=False)
    buckets = encoder.num_compiled()
    assert buckets == len(PackedBuckets(4, 16, 1024).empty_jobs(16)) == 7
    encoder.encode(SENTENCES, batch_size=4)
    encoder.encode(SENTENCES[:7], batch_size=4, normalize=False)
    assert encoder.num_compiled() == buckets


@pytest.mark.parametrize(
    "options", [{}, {"model_type": "lam", "lam_config": {"rule": "gated"}}], ids=["packed", "padded"]
)
def test_a_warm_up_for_short_texts_compiles_what_they_take(options, tmp_path):
    encoder = Encoder(tiny_encoder(tmp_path, **options))
    encoder.warm_up(batch_size=1, max_length=18, show_progress=False)
    assert encoder.num_compiled() == 2
    encoder.encode(["the " * 16, "a cat"], batch_size=1)
    assert encoder.num_compiled() == 2


@pytest.mark.parametrize(
    ("batch_size", "max_length"), [(1, 5), (32, 512), (7, 100), (5, 16), (64, 33), (None, 2), (None, 60), (3, 257)]
)
@pytest.mark.parametrize("shortest", [0, 0.5])
def test_packed_calls_hold_every_sentence_in_few_shapes_with_little_padding(batch_size, max_length, shortest):
    buckets = PackedBuckets(batch_size, max_length, 256)
    shapes = {(job.tokens.shape, job.lengths.shape) for job in buckets.empty_jobs(max_length)}
    texts = random_tokens(int(shortest * max_length), max_length, count=700)
    jobs = list(buckets.jobs(texts))
    seen = {}
    for job in jobs:
        assert (job.tokens.shape, job.lengths.shape) in shapes
        assert len(job.members) <= (batch_size or 64)
        assert job.tokens.shape[1] <= max(256, -(-max_length // 8) * 8 * 9 / 8)
        room = np.maximum(job.lengths[: len(job.members)], 4).sum()
        assert job.tokens.shape[1] <= max(16, room + 8, room * 9 / 8)
        assert not job.lengths[len(job.members) :].any()
        pieces = np.split(job.tokens[0], np.cumsum(job.lengths[: len(job.members)]))
        assert not pieces.pop().any()
        seen |= {int(i): list(piece) for i, piece in zip(job.members, pieces, strict=True)}
    assert seen == {i: list(text.ids) for i, text in enumerate(texts)}
    assert len({job.tokens.shape for job in jobs}) <= len(shapes)


def random_tokens(shortest, longest, *, count):
    rng = np.random.default_rng(0)
    return [Tokens(rng.integers(1, 9, n).tolist()) for n in rng.integers(shortest, longest + 1, count)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.encode(3), "sentences: expected a text or texts, got 3"),
        (lambda e: e.encode(b"cat"), "sentences: expected a text or texts"),
        (lambda e: e.encode({"a": "cat"}), "sentences: expected a text or texts, got {'a': 'cat'}"),
        (lambda e: e.tokenize("a cat"), "sentences: expected a list of texts, got the text 'a cat'"),
        (lambda e: e.encode_tokens([5, 6]), "token_ids: expected a list of tokens for each sentence, got 5 at 0"),
        (lambda e: e.encode(["cat", None]), "sentences: expected texts, got None at 1"),
        (lambda e: e.encode(["cat", "\ud800"]), "sentences: not Unicode text at 1"),
        (lambda e: e.encode("cat", batch_size=0), "batch_size: expected a whole number of at least 1, got 0"),
        (lambda e: e.encode("cat", prompt_name="query"), "there is no prompt 'query'; the checkpoint has none"),
        (lambda e: e.encode("cat", prompt=3), "prompt: expected texts, got 3"),
        (lambda e: e.encode("cat", precision="int4"), "precision: expected one of float32, int8"),
        (lambda e: e.encode("cat", precision="int8"), "ranges: int8 of a single vector"),
        (lambda e: e.encode("cat", precision="int8", ranges=np.zeros((2, 3))), r"ranges: expected the shape \(2, 48\)"),
        (
            lambda e: e.encode("cat", precision="int8", ranges=np.ones((2, 48)) * [[1], [-1]]),
            "ranges: expected the small",
        ),
        (
            lambda e: e.encode("cat", precision="uint8", ranges=np.full((2, 48), np.nan)),
            "ranges: expected the smallest",
        ),
        (lambda e: e.warm_up(batch_size=0), "batch_size: expected a whole number of at least 1, got 0"),
    ],
)
def test_wrong_input_is_named(encoder, call, message):
    with pytest.raises(InvalidParameterError, match=message):
        call(encoder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dtype="float16"), "dtype: expected one of bfloat16, float32, got 'float16'"),
        (dict(pooling="first"), "pooling: expected one of cls, max, mean, .*, got 'first'"),
        (dict(dimensions=49), "dimensions: expected 1 to 48, got 49"),
        (dict(dimensions=True), "dimensions: expected 1 to 48, got True"),
        (dict(max_length=65), "max_length: expected 1 to the model's 64 positions, got 65"),
        (dict(max_length=2), "max_length: 2 tokens leave none"),
    ],
)
def test_wrong_options_are_named(folder, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        Encoder(folder, **options)


def test_an_adapter_next_to_the_weights_is_refused(tmp_path):
    tiny_encoder(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedModelError, match=r"adapter_config\.json: adapters of encoders are not supported"):
        Encoder(tmp_path)


def test_a_language_model_of_its_own_code_has_to_say_where_its_tokens_attend(tmp_path):
    path = tiny_checkpoint(tmp_path, auto_map={"AutoModel": "modeling_qwen.Qwen2Model"}) / "config.json"
    with pytest.raises(
        UnsupportedModelError, match=r"auto_map: modeling_qwen\.Qwen2Model is the checkpoint's own code"
    ):
        Encoder(tmp_path)
    vectors = []
    for is_causal in (True, False):
        path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": is_causal}))
        vectors.append(Encoder(tmp_path).encode("the small fox"))
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


@pytest.mark.parametrize("output", ["sentence", "tokens"])
def test_a_token_without_an_embedding_is_named(output, tmp_path):
    path = tiny_encoder(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"new{i}" for i in range(SIZES["vocab_size"] - tokenizer.get_vocab_size() + 1)])
    tokenizer.save(str(path))
    encoder = Encoder(tmp_path, output=output)
    last = tokenizer.id_to_token(SIZES["vocab_size"])
    encoder.encode("the cat new0")
    with pytest.raises(InvalidParameterError, match=f"the model has embeddings of 60 tokens, none of '{last}'"):
        encoder.encode(["the cat", f"the {last} cat"])


def test_keys_of_the_first_releases_load(tmp_path, encoder):
    def first(key):
        return "bert." + key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    old = Encoder(tiny_encoder(tmp_path, rename=first))
    np.testing.assert_array_equal(old.encode("the cat sat"), encoder.encode("the cat sat"))


def test_the_files_of_sentence_transformers_decide_by_default(tmp_path):
    tiny_encoder(tmp_path)
    sentence_files(tmp_path, mode="cls", max_seq_length=9)
    assert (Encoder(tmp_path).settings.pooling, Encoder(tmp_path).max_length) == ("cls", 9)
    chosen = Encoder(tmp_path, pooling="mean", max_length=12)
    assert (chosen.settings.pooling, chosen.max_length) == ("mean", 12)
    (tmp_path / "sentence_bert_config.json").unlink()
    for given, expected in (({"max_len": 8}, 8), ({"max_len": 8, "model_max_length": 10}, 10), ({}, 64)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
        assert Encoder(tmp_path).max_length == expected
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json: no such file"):
        Encoder(tmp_path)
    assert Encoder(tmp_path, pooling="cls").settings.pooling == "cls"


PROMPTS = {"query": "the house : ", "passage": "a river : ", "topic": "fox : "}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    folder = tiny_encoder(tmp_path_factory.mktemp("prompted"))
    sentence_files(folder, prompts=PROMPTS)
    return Encoder(folder)


def test_a_prompt_goes_before_each_sentence_by_its_name_or_as_a_text(prompted):
    texts = SENTENCES[:5]
    expected = prompted.encode(["fox : " + text for text in texts])
    assert np.abs(expected - prompted.encode(texts)).max() > 0.01
    for options in ({"prompt_name": "topic"}, {"prompt": "fox : "}, {"prompt": "fox : ", "prompt_name": "query"}):
        np.testing.assert_array_equal(prompted.encode(texts, **options), expected)
    assert prompted.prompts == PROMPTS


def test_queries_and_documents_have_their_own_prompts(prompted, encoder):
    texts = SENTENCES[:5]
    np.testing.assert_array_equal(prompted.encode_query(texts), prompted.encode(texts, prompt_name="query"))
    np.testing.assert_array_equal(prompted.encode_document(texts), prompted.encode(texts, prompt_name="passage"))
    np.testing.assert_array_equal(
        prompted.encode_query(texts, prompt_name="topic"), prompted.encode(texts, prompt="fox : ")
    )
    np.testing.assert_array_equal(encoder.encode_query(texts), encoder.encode(texts))  # a model without prompts


def test_an_unknown_prompt_is_named_with_those_that_there_are(prompted):
    with pytest.raises(InvalidParameterError, match="there is no prompt 'other'; there are query, passage, topic"):
        prompted.encode("the cat", prompt_name="other")


def test_fewer_dimensions_are_the_first_ones_of_length_one(folder, encoder):
    raw = encoder.encode(SENTENCES, normalize=False)
    np.testing.assert_array_equal(encoder.encode(SENTENCES, normalize=False, dimensions=7), raw[:, :7])
    expected = raw[:, :7] / np.linalg.norm(raw[:, :7], axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.encode(SENTENCES, dimensions=7), expected, atol=2e-6)
    short = Encoder(folder, dimensions=7)
    assert short.dimension == 7
    np.testing.assert_array_equal(short.encode(SENTENCES), encoder.encode(SENTENCES, dimensions=7))
    ids = [ids for ids, _ in short.tokenize(SENTENCES)]
    np.testing.assert_allclose(short.encode_tokens(ids), expected, atol=2e-6)
    with pytest.raises(InvalidParameterError, match="dimensions: expected 1 to 7, got 8"):
        short.encode("the cat", dimensions=8)


def test_a_model_that_was_trained_for_some_dimensions_has_no_others(tmp_path):
    tiny_encoder(tmp_path, matryoshka_dimensions=[8, 16])
    encoder = Encoder(tmp_path)
    assert encoder.encode("the cat", dimensions=16).shape == (16,)
    assert encoder.encode("the cat", dimensions=48).shape == (48,)
    with pytest.raises(InvalidParameterError, match="dimensions: the model was trained for 8, 16, got 7"):
        encoder.encode("the cat", dimensions=7)


def test_token_vectors_lie_in_the_order_of_the_texts_and_are_alike_in_any_batch(folder):
    encoder = Encoder(folder, output="tokens")
    vectors = encoder.encode(SENTENCES[:8])
    assert [len(vector) for vector in vectors] == encoder.token_counts(SENTENCES[:8])
    for one, sentence in zip(vectors, SENTENCES[:8], strict=True):
        np.testing.assert_allclose(one, encoder.encode(sentence, batch_size=1), atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors[0], axis=1), 1, atol=1e-6)
    best = encoder.rank(SENTENCES[3], SENTENCES[:8], top_k=1)[0]
    assert best.index == 3
    assert encoder.check_dimensions(None) == encoder.check_dimensions(48) == 48
    with pytest.raises(InvalidParameterError, match="dimensions: token vectors have none"):
        Encoder(folder, output="tokens", dimensions=4)
    with pytest.raises(InvalidParameterError, match="task: expected document or query"):
        encoder.encode("a cat", task="title")


def expanding(folder, length):
    """A folder of token vectors whose queries are filled up to `length` tokens that they do not see."""
    folder = tiny_encoder(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "MultiVectorEncoder"}))
    filled = {"query_expansion": {"strategy": "fixed", "length": length, "token": "fox"}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(filled))
    return folder


def test_queries_that_are_filled_up_have_a_call_of_their_length(tmp_path):
    encoder = Encoder(expanding(tmp_path / "long", 40), output="tokens", max_length=8)
    together = encoder.encode_query(["the cat sat on the mat", "a dog"])
    for one, query in zip(together, ["the cat sat on the mat", "a dog"], strict=True):
        assert one.shape == (40, 48)
        np.testing.assert_allclose(encoder.encode_query(query, batch_size=1), one, atol=2e-6)
    encoder.score("cat " * 60, ["a dog", "cat " * 60])
    assert encoder.truncated == 2
    with pytest.raises(UnsupportedModelError, match=r"queries of 65 tokens .* longer than the model's 64 positions"):
        Encoder(expanding(tmp_path / "longer", 65), output="tokens")


def test_max_length_goes_before_the_files_length_of_documents(tmp_path):
    path = expanding(tmp_path, 16) / "sentence_bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "document_length": 10}))
    for max_length, tokens in ((None, 10), (20, 20), (8, 8)):
        encoder = Encoder(tmp_path, output="tokens", max_length=max_length)
        assert len(encoder.encode_document("cat " * 30)) == tokens
        assert len(encoder.encode_query("cat")) == 16


def test_a_warm_up_of_token_vectors_compiles_queries_too(tmp_path):
    encoder = Encoder(expanding(tmp_path, 16), output="tokens", max_length=16)
    encoder.warm_up(batch_size=1, show_progress=False)
    assert encoder.num_compiled() == 2
    encoder.encode_document(["a cat"], batch_size=1)
    encoder.encode_query(["a cat"], batch_size=1)
    assert encoder.num_compiled() == 2


def test_sparse_vectors_are_alike_in_any_batch_and_of_tokens_and_keep_the_largest_weights(tmp_path):
    config = {"model_type": "bert", **SIZES, "architectures": ["BertForMaskedLM"]}
    checkpoint.save(random_weights(config, find=masked_lm), tmp_path, config=config)
    tiny_tokenizer(tmp_path)
    encoder = Encoder(tmp_path, output="sparse", show_progress=False)
    vectors = encoder.encode(SENTENCES[:9], batch_size=2)
    assert (vectors.shape, vectors.dtype) == ((9, 60), np.float32)
    assert 0 < vectors.nnz < 9 * 60
    for i in range(9):
        np.testing.assert_allclose(encoder.encode(SENTENCES[i]).toarray(), vectors[[i]].toarray(), atol=2e-6)
    assert encoder.encode([]).shape == (0, 60)

    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder", "max_active_dims": 5}')
    few = Encoder(tmp_path, output="sparse", show_progress=False)
    largest = np.sort(vectors.toarray(), axis=1)[:, -5:]
    got = few.encode(SENTENCES[:9])
    np.testing.assert_allclose(np.sort(got.data.reshape(9, 5), axis=1), largest, atol=2e-6)
    of_tokens = few.encode_tokens([ids for ids, _ in few.tokenize(SENTENCES[:9])])
    np.testing.assert_array_equal(of_tokens.toarray(), got.toarray())
    with pytest.raises(InvalidParameterError, match="sentences: expected a text or texts, got None"):
        few.encode(None)
