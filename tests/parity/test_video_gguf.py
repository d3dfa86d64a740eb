"""A GGUF file of UMT5 as transformers reads it: states of the encoder, and ids of the tokenizer in its metadata."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.video_gguf import PIECES, UMT5, write_umt5
from verax.checkpoint.formats.gguf import GGUFFile
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.quantized import umt5_tokenizer
from verax.loading import load_weights
from verax.models.umt5 import UMT5EncoderModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("umt5") / "umt5-xxl-encoder-Q8_0.gguf"
    write_umt5(path)
    (path.parent / "config.json").write_text('{"_class_name": "WanModel"}')
    return path


def test_states_are_those_of_transformers(file):
    abstract = nnx.eval_shape(lambda: UMT5EncoderModel(UMT5, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    ours = load_weights(abstract, VideoFolder(file.parent).checkpoint("text_encoder"), dequantize=True)
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
