import numpy as np
import pytest

from tests.support.tiny_encoder import sentence_files, tiny_encoder
from verax.ray import embed as module
from verax.ray.embed import Embed


def test_each_text_gets_its_vector_and_a_bad_one_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "set_threads", lambda: None)
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    folder = tiny_encoder(tmp_path / "encoder")
    sentence_files(folder, max_seq_length=16)
    embed = Embed(str(folder), output="vector")
    texts = np.array(["a dog", None, "a cat"], object)
    found = embed({"text": texts, "custom_id": np.arange(3)})
    assert found["vector"].shape == (3, embed._encoder.dimension)
    assert found["vector"].dtype == np.float32
    assert found["error"].tolist() == [None, "text: expected a text, got None", None]
    assert not found["vector"][1].any()
    alone = embed({"text": np.array(["a cat"], object)})
    assert alone["vector"][0] == pytest.approx(found["vector"][2], abs=1e-5)
