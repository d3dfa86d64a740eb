"""A GGUF file of UMT5 as transformers reads it: states of the encoder, and ids of the tokenizer in its metadata."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.checkpoint.video.test_quantized import UMT5, llama_cpps, original, weights_of, write_gguf
from verax.checkpoint.formats.gguf import GGUFFile
from verax.checkpoint.video.quantized import umt5_tokenizer
from verax.loading import load_weights
from verax.models.umt5 import UMT5EncoderModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = ("a", "red", "circle", "floats", "c", "i", "r", "l", "e", "s", "t", "o", "n", "ing")
TYPE = gguf.TokenType
PIECES = [("<pad>", 0.0, TYPE.CONTROL), ("</s>", 0.0, TYPE.CONTROL), ("<unk>", 0.0, TYPE.UNKNOWN)]
PIECES += [("\u2581", -3.0, TYPE.NORMAL), *((word, -5.0 - i, TYPE.NORMAL) for i, word in enumerate(WORDS))]
PIECES += [(f"\u2581{word}", -2.0 - i, TYPE.NORMAL) for i, word in enumerate(WORDS)]
PIECES += [(f"[PAD{i}]", -10000.0, TYPE.UNUSED) for i in range(96 - len(PIECES))]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    tokens, scores, kinds = map(list, zip(*PIECES, strict=True))
    path = tmp_path_factory.mktemp("umt5") / "umt5-xxl-encoder-Q8_0.gguf"
    weights = weights_of(UMT5EncoderModel, UMT5)
    metadata = [("add_embedding_length", 256), ("add_block_count", 2), ("add_feed_forward_length", 256)]
    metadata += [("add_head_count", 4), ("add_key_length", 64), ("add_layer_norm_rms_eps", 1e-6)]
    metadata += [("add_relative_attn_buckets_count", 32), ("add_vocab_size", 96), ("add_context_length", 512)]
    metadata += [("add_tokenizer_model", "t5"), ("add_token_list", tokens), ("add_token_scores", scores)]
    metadata += [("add_token_types", kinds), ("add_add_space_prefix", True), ("add_eos_token_id", 1)]
    metadata += [("add_unk_token_id", 2), ("add_pad_token_id", 0)]
    is_matrix = lambda name, weight: weight.ndim == 2 and "pos_embedding" not in name
    options = {"architecture": "t5encoder", "matrices": is_matrix, "rename": llama_cpps, "metadata": metadata}
    write_gguf(path, weights, "Q8_0", **options)
    (path.parent / "config.json").write_text('{"_class_name": "WanModel"}')
    return path


def test_states_are_those_of_transformers(file):
    abstract = nnx.eval_shape(lambda: UMT5EncoderModel(UMT5, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    ours = load_weights(abstract, original(file.parent).checkpoint("text_encoder"), dequantize=True)
    theirs = transformers.UMT5EncoderModel.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 37))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens)).last_hidden_state.numpy()
    states = ours(jnp.asarray(tokens, jnp.int32), jnp.array([37, 37]))
    np.testing.assert_allclose(states, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("text", ["a red circle", "floating  stones", "a unknown \u00e9 letter", "</s> a", ""])
def test_ids_are_those_of_transformers(text, file):
    vocabulary = [(token, score) for token, score, _ in PIECES]
    theirs = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0)
    assert umt5_tokenizer(GGUFFile(file).metadata, file).encode(text).ids == theirs(text).input_ids
