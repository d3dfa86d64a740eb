"""`VideoRequest`: the same options by keyword and as an object, and errors for unknown options."""

import inspect
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from verax import VideoRequest
from verax.errors import InvalidParameterError
from verax.models.video_model import ATTENTION
from verax.options import options_of
from verax.video.request import ResolvedRequest, make_request


def test_options_are_the_fields_of_a_request(pipes):
    names = [field.name for field in fields(VideoRequest)]
    assert names[0] == "prompt"
    assert [field.name for field in fields(ResolvedRequest)] == names
    assert all(name in (inspect.getdoc(VideoRequest) or "") for name in names)
    assert options_of(VideoRequest)["attention"].choices == tuple(ATTENTION)


def test_a_call_by_keyword_is_the_clip_of_the_request(pipes):
    pipe = pipes("t2v")
    by_request = pipe.generate(VideoRequest("a red circle", num_inference_steps=2, seed=3))
    np.testing.assert_array_equal(by_request.frames, pipe("a red circle", num_inference_steps=2, seed=3).frames)


def test_a_request_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        VideoRequest("a red circle").seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "hint"), [("num_frame", "did you mean num_frames"), ("loras", "options are image, last_image")]
)
def test_an_unknown_option_is_refused_with_a_hint(option, hint):
    with pytest.raises(InvalidParameterError, match=f"{option}: not an option of a request; {hint}"):
        make_request("a red circle", {option: 9})
