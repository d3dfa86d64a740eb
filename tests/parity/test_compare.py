"""Comparisons of models with PyTorch's: planted errors are located, given inputs reach both sides, whole pipelines are
compared frame by frame."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from tests.parity import test_encoders
from tests.support.tiny_encoder import SIZES
from verax import ops
from verax.compare import compare_case
from verax.compare.case import Inputs
from verax.compare.cases.text import embed_case, text_case
from verax.compare.cases.video import video_case
from verax.compare.pipelines import compare_pipelines, random_video
from verax.errors import InvalidParameterError, UnsupportedModelError


def test_a_swapped_rotary_half_is_located(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "apply_rotary", lambda x, cos, sin, plain=ops.apply_rotary: plain(x, cos, -sin))
    result = compare_case(text_case("random", tmp_path, tokens=9), inject=True)
    assert not result.passed
    assert result.first.name == "model.layers.0.self_attn.rotary_q"
    assert [row.name for row in result.faults] == [
        f"model.layers.{i}.self_attn.rotary_{x}" for i in range(3) for x in "qk"
    ]
    assert {"model.layers.1.self_attn.o_proj.input", "model.layers.1.mlp.down_proj"} <= {
        row.name for row in result.rows
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_program_is_compared_with_the_layers(tmp_path, dtype):
    result = compare_case(text_case("random", tmp_path, tokens=9), dtype=dtype, fused=True)
    assert result.passed, result.failures
    (fused,) = result.fused
    assert fused.name == "(output)"
    assert 0 < fused.errors.l2 < 2 * result.output.errors.l2
    assert (fused.ratio is None) == (dtype == "float32")


def test_a_wrong_fused_operation_is_found_only_in_the_compiled_program(tmp_path, monkeypatch):
    def wrong(x, weights, biases=None, dtypes=None):
        return tuple(ops.linear(x, weight) * 1.01 for weight in weights)

    monkeypatch.setitem(ops.multi_linear.implementations, "wrong", ops.Implementation("wrong", wrong))
    case = text_case("random", tmp_path, tokens=9)
    assert compare_case(case).passed
    result = compare_case(case, fused=True)
    assert result.first is None
    assert [failure.split(" of ")[0] for failure in result.failures] == [
        "(output) as one compiled program has a relative L2 error"
    ]
    assert result.as_dict()["fused"][0]["errors"]["l2"] > 1e-4


PADDED = {
    "input_ids": np.random.default_rng(0).integers(1, 320, (3, 11)),
    "attention_mask": (np.arange(11) < np.array([[11], [4], [7]])).astype(int),
}


def test_padded_prompts_are_judged_by_their_tokens_alone(tmp_path):
    result = compare_case(text_case("random", tmp_path, inputs=Inputs(arrays=PADDED)))
    assert result.passed, result.failures
    assert result.about["tokens"] == [3, 11]
    assert result.judged.positions == 11 + 4 + 7


@pytest.mark.parametrize("family", test_encoders.COMPARED)
def test_every_encoder_is_equal_in_every_layer(family, tmp_path):
    test_encoders.save(tmp_path, family)
    padded = {**PADDED, "input_ids": PADDED["input_ids"] % SIZES["vocab_size"]}
    result = compare_case(embed_case(tmp_path, tmp_path, inputs=Inputs(arrays=padded)))
    assert result.passed, result.failures
    assert result.first is None
    assert len(result.rows) > 20
    assert (result.judged.sentences, result.judged.same_nearest) == (3, 1)
    assert result.judged.rank_correlation > 0.99
    assert result.judged.min_cosine > 1 - 1e-9


@pytest.mark.parametrize("family", ["MPNet", "DistilBert", "DebertaV2"])
def test_an_encoder_whose_modules_have_other_names_is_refused(family, tmp_path):
    test_encoders.save(tmp_path, family)
    with pytest.raises(UnsupportedModelError, match="is not compared layer by layer"):
        embed_case(tmp_path, tmp_path)


def test_lam_compares_sentences_by_cosine_and_rank(tmp_path):
    # With this many tokens its projections would run as one product: each is compared all the same.
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
    side = video_case(None, "transformer", inputs=Inputs(arrays=arrays)).ours("float32")
    np.testing.assert_array_equal(side.args[0], latents.transpose(0, 2, 3, 4, 1))
    np.testing.assert_array_equal(side.args[1], [7])
    np.testing.assert_array_equal(side.args[2], text)
    result = compare_case(video_case(None, "text_encoder", inputs=Inputs(arrays={"input_ids": np.array([[3, 1, 4]])})))
    assert result.passed, result.failures


@pytest.mark.parametrize(
    ("part", "arrays", "message"),
    [
        ("transformer", {"latents": np.ones((1, 36, 2, 4, 6))}, "it takes hidden_states"),
        ("transformer", {"hidden_states": np.ones((1, 36, 2, 5, 6))}, "divisible by 2"),
        ("vae", {"sample": np.ones((1, 3, 4, 16, 16))}, "4n \\+ 1 frames"),
        ("text_encoder", {"input_ids": np.array([[100]])}, "from 0 to 99"),
        ("image_encoder", {"pixel_values": np.ones((1, 3, 20, 20))}, r"expected \[any, 3, 35, 35\]"),
        ("decoder", {}, "image_encoder"),
    ],
)
def test_arrays_that_a_part_does_not_take_are_refused(part, arrays, message):
    with pytest.raises(InvalidParameterError, match=message):
        video_case(None, part, inputs=Inputs(arrays=arrays)).reference("float32")


def test_a_block_of_the_transformer_is_compared_in_all_of_its_parts():
    result = compare_case(video_case(None, "transformer"))
    assert result.passed, result.failures
    assert result.first is None
    assert result.output.errors.l2 < 2e-6
    block = {row.name.removeprefix("blocks.1."): row.reference for row in result.rows if "blocks.1." in row.name}
    assert block["self_attn.input"] == "blocks.1.attn1.input"  # what the modulation made
    assert block["self_attn.rotary_k"] == "blocks.1.attn1.rotary_k"
    assert block["self_attn.o.input"] == "blocks.1.attn1.to_out.0.input"  # what attention gave
    assert block["cross_attn.norm_k_img"] == "blocks.1.attn2.norm_added_k"
    assert block["ffn.2"] == "blocks.1.ffn.net.2"
    assert result.alignment.ours_only == ["img_emb.proj", "time_projection", "head"]
    assert result.alignment.guessed == []


def test_in_float32_every_frame_is_within_60_db_of_diffusers(tmp_path):
    report = compare_pipelines(random_video(tmp_path / "video"), num_frames=5, num_inference_steps=2)
    measured = report.comparison
    assert (measured.frames, measured.height, measured.width) == (5, 32, 48)
    assert min(measured.psnr) > 60
    assert min(measured.ssim) > 0.9999
    assert report.failures == []
    assert report.deterministic == {"verax": True, "diffusers": True}
    assert report.first.std() > 10  # of 255: there is something to be seen
