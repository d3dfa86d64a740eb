import numpy as np
import pytest

from verax.errors import InvalidParameterError
from verax.ray import clips as module
from verax.ray.clips import Clips


class Pipeline:
    """A pipeline that writes what it was asked for."""

    made = []

    def __call__(self, prompt, **options):
        if prompt == "refused":
            raise InvalidParameterError("num_frames: expected 5")
        self.made.append((prompt, options))
        return self

    def save(self, path):
        path.write_text("clip")


@pytest.fixture
def clips(monkeypatch, tmp_path):
    from verax.video.pipeline import VideoPipeline

    monkeypatch.setattr(module, "set_threads", lambda: None)
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(VideoPipeline, "from_pretrained", lambda *a, **o: Pipeline())
    monkeypatch.setattr(Pipeline, "made", [])
    return Clips(tmp_path / "clips", request={"num_frames": 5, "seed": 1})


def batch(**columns):
    return {name: np.array(values, object) for name, values in columns.items()}


def test_each_row_is_a_file_by_its_id_and_a_bad_one_has_its_reason(clips, tmp_path):
    rows = batch(custom_id=["a-1", "../b", "c"], prompt=["one", "two", "refused"], seed=[None, 7, None])
    found = clips(rows)
    assert found["path"][0] == str(tmp_path / "clips" / "a-1.mp4")
    assert found["path"][2] is None
    assert found["error"].tolist() == [None, None, "num_frames: expected 5"]
    assert all((tmp_path / "clips") in path.parents for path in (tmp_path / "clips").iterdir())
    assert len(list((tmp_path / "clips").iterdir())) == 2
    assert Pipeline.made == [("one", {"num_frames": 5, "seed": 1}), ("two", {"num_frames": 5, "seed": 7})]


def test_a_clip_that_is_there_is_not_made_again(clips):
    rows = batch(custom_id=["a"], prompt=["one"])
    assert clips(rows)["path"] == clips(rows)["path"]
    assert len(Pipeline.made) == 1
