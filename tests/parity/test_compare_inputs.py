"""Given inputs reach both sides, and what is padded counts for nothing."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.parity import test_sentence_models as sentence_models
from tests.support.tiny_encoder import SIZES
from verax.compare import compare_case
from verax.compare.case import Inputs
from verax.compare.cases import video as cases_video
from verax.compare.cases.text import embed_case, text_case
from verax.errors import InvalidParameterError

PADDED = {
    "input_ids": np.random.default_rng(0).integers(1, 320, (3, 11)),
    "attention_mask": (np.arange(11) < np.array([[11], [4], [7]])).astype(int),
}


def test_padded_prompts_are_judged_by_their_tokens_alone(tmp_path):
    result = compare_case(text_case("random", tmp_path, inputs=Inputs(arrays=PADDED)))
    assert result.passed, result.failures
    assert result.about["tokens"] == [3, 11]
    assert result.judged.positions == 11 + 4 + 7


def test_padded_sentences_are_equal_in_every_layer(tmp_path):
    result = compare_case(embed_case("random", tmp_path, inputs=Inputs(arrays=PADDED)))
    assert result.passed, result.failures
    assert result.first is None
    assert result.judged.sentences == 3
    assert result.judged.same_nearest == 1
    assert result.judged.rank_correlation > 0.99


@pytest.mark.parametrize("family", sentence_models.FAMILIES)
def test_every_encoder_is_equal_in_every_layer(family, tmp_path):
    sentence_models.FAMILIES[family](tmp_path).save_pretrained(tmp_path)
    padded = {**PADDED, "input_ids": PADDED["input_ids"] % SIZES["vocab_size"]}
    result = compare_case(embed_case(tmp_path, tmp_path, inputs=Inputs(arrays=padded)))
    assert result.passed, result.failures
    assert result.first is None
    assert len(result.rows) > 20
    assert result.judged.min_cosine > 1 - 1e-9


def test_lam_compares_sentences_by_cosine_and_rank(tmp_path):
    # So many tokens that its projections would run as one product: each is compared all the same.
    tokens = np.random.default_rng(0).integers(1, 300, (3, 90))
    result = compare_case(embed_case(None, tmp_path, inputs=Inputs(arrays={"input_ids": tokens}, origin="ids.npz")))
    assert result.passed, result.failures
    assert "deltanet_layers.0.q_proj" in {row.name for row in result.rows}
    assert result.judged.sentences == 3
    assert result.judged.min_cosine > 1 - 1e-9
    assert (result.judged.same_nearest, result.judged.rank_correlation) == (1, pytest.approx(1))
    assert result.about["inputs"] == "ids.npz"
    assert embed_case(None, tmp_path).about["tokens"][0] >= 3  # random ones too have ranks


def test_a_part_of_a_video_model_runs_on_given_arrays():
    rng = np.random.default_rng(1)
    latents, text = rng.standard_normal((1, 36, 2, 4, 6), np.float32), rng.standard_normal((1, 512, 16), np.float32)
    arrays = {"hidden_states": latents, "encoder_hidden_states": text, "timestep": np.array([7])}
    side = cases_video.video_case(None, "transformer", inputs=Inputs(arrays=arrays)).ours("float32")
    np.testing.assert_array_equal(side.args[0], latents.transpose(0, 2, 3, 4, 1))
    np.testing.assert_array_equal(side.args[1], [7])
    np.testing.assert_array_equal(side.args[2], text)
    result = compare_case(
        cases_video.video_case(None, "text_encoder", inputs=Inputs(arrays={"input_ids": np.array([[3, 1, 4]])}))
    )
    assert result.passed, result.failures


@pytest.mark.parametrize(
    ("part", "arrays", "message"),
    [
        ("transformer", {"latents": np.ones((1, 36, 2, 4, 6))}, "it takes hidden_states"),
        ("transformer", {"hidden_states": np.ones((1, 36, 2, 5, 6))}, "divisible by 2"),
        ("vae", {"sample": np.ones((1, 3, 4, 16, 16))}, "4n \\+ 1 frames"),
        ("text_encoder", {"input_ids": np.array([[100]])}, "from 0 to 99"),
        ("image_encoder", {"pixel_values": np.ones((1, 3, 20, 20))}, r"expected \[any, 3, 35, 35\]"),
    ],
)
def test_arrays_that_a_part_does_not_take_are_refused(part, arrays, message):
    with pytest.raises(InvalidParameterError, match=message):
        cases_video.video_case(None, part, inputs=Inputs(arrays=arrays)).reference("float32")
