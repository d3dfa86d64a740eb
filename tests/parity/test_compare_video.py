"""Parts of a video model, and the clip of its whole pipeline, compared with diffusers'."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from verax.compare import compare_case
from verax.compare.cases.video import video_case
from verax.compare.pipelines import Clip, compare_pipelines, random_video
from verax.errors import InvalidParameterError


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


def test_an_unknown_part_is_refused():
    with pytest.raises(InvalidParameterError, match="image_encoder"):
        video_case(None, "decoder")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_video(tmp_path_factory.mktemp("random") / "video")


def test_in_float32_every_frame_is_within_60_db_of_diffusers(model):
    report = compare_pipelines(model, Clip(num_frames=5, num_inference_steps=2))
    found = report.comparison
    assert (found.frames, found.height, found.width) == (5, 32, 48)
    assert min(found.psnr) > 60
    assert min(found.ssim) > 0.9999
    assert report.failures == []
    assert report.deterministic == {"verax": True, "diffusers": True}
    assert report.first.std() > 10  # of 255: there is something to be seen
