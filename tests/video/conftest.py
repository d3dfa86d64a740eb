"""Tiny checkpoints and pipelines that the tests of the video engine share."""

import pytest

from tests.support.tiny_video import video_folder
from verax import VideoPipeline


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Function from a kind of `tiny_video.KINDS` to its checkpoint, which is written once and is not to be changed."""
    paths = {}

    def get(kind):
        if kind not in paths:
            height, width = (32, 64) if kind == "ti2v" else (16, 32)
            settings = dict(height=height, width=width, num_frames=9)
            paths[kind] = video_folder(kind, tmp_path_factory.mktemp(kind), **settings)
        return paths[kind]

    return get


@pytest.fixture(scope="module")
def pipes(folders):
    """Function from a kind to a float32 pipeline, which the tests of a file share."""
    pipelines = {}

    def get(kind):
        if kind not in pipelines:
            pipelines[kind] = VideoPipeline(folders(kind), dtype="float32", show_progress=False)
        return pipelines[kind]

    return get
