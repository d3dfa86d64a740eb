"""A long clip that goes on where it was ended: by a callback, an error, or for the sake of another prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_video import video_folder
from verax import VideoPipeline
from verax.errors import InvalidParameterError

PROMPTS = ["a red circle", "a blue square", "a green circle"]
OPTIONS: dict[str, Any] = dict(
    height=16, width=32, num_frames=17, base_num_frames=9, overlap_history=5, num_inference_steps=2
)


class StoppedError(Exception):
    pass


def stop_in_the_second_segment(now):
    if now.segment == 1 and now.stage == "denoise":
        raise StoppedError


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return VideoPipeline.from_pretrained(video_folder("df", tmp_path_factory.mktemp("df")), dtype="float32")


@pytest.fixture(scope="module")
def whole(pipe):
    return pipe(PROMPTS, **OPTIONS)


@pytest.fixture
def stopped(pipe, tmp_path):
    """A file with the first of three segments."""
    file = tmp_path / "clip.safetensors"
    with pytest.raises(StoppedError):
        pipe(PROMPTS, callback=stop_in_the_second_segment, resume=file, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["clip.safetensors"]
    return file


def test_a_clip_goes_on_where_it_was_ended(pipe, whole, stopped):
    assert (whole.steps, len(whole.frames)) == (6, 17)
    resumed = pipe(PROMPTS, resume=stopped, **OPTIONS)
    assert resumed.steps == 4
    np.testing.assert_array_equal(resumed.frames, whole.frames)
    again = pipe(PROMPTS, resume=str(stopped), **OPTIONS)
    assert again.steps == 0
    np.testing.assert_array_equal(again.frames, whole.frames)
    longer = pipe([*PROMPTS, "a red square"], resume=stopped, **{**OPTIONS, "num_frames": 21})
    assert longer.steps == 2
    np.testing.assert_array_equal(longer.frames[:17], whole.frames)


def test_another_prompt_later_keeps_the_segments_before_it(pipe, whole, stopped):
    changed = pipe([PROMPTS[0], "a red square"], resume=stopped, **OPTIONS)
    assert changed.steps == 4
    np.testing.assert_array_equal(changed.frames[:9], whole.frames[:9])
    assert (changed.frames[9:] != whole.frames[9:]).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, "resume: .* has segments of another clip: seed was 42, now 7"),
        ({"resume": Path("clip.npz")}, "resume: expected a file name that ends in .safetensors, got 'clip.npz'"),
        ({"resume": "no/such/clip.safetensors"}, "resume: there is no folder no/such"),
    ],
)
def test_a_file_of_another_clip_is_refused_by_name(pipe, stopped, changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        pipe(PROMPTS, **{**OPTIONS, "resume": stopped, **changes})


def test_a_file_of_something_else_is_refused(pipe, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(InvalidParameterError, match=r"resume: .*model\.safetensors is not a file of finished segments"):
        pipe(PROMPTS, resume=tmp_path / "model.safetensors", **OPTIONS)
