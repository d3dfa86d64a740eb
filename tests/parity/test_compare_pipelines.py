"""The clip of a whole pipeline beside that of diffusers' pipeline."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from verax.compare.pipelines import Clip, compare_pipelines, random_video


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
    assert report.first.std() > 10  # of 255: there is something to be seen
