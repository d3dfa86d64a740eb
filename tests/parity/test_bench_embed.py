"""The other sides of the embedding benchmark give the vectors of `Encoder` on the same weights."""

import pytest

from tests.support.tiny_encoder import sentence_files, tiny_encoder
from verax.bench.embed.cases import bench_embed
from verax.bench.settings import EmbedSettings

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

LIBRARIES = {"openvino": ("openvino", "nncf"), "onnxruntime": ("onnxruntime", "onnx")}
"""Modules that a side and its int8 need, which are its extra."""

SAME = 1e-6
"""Difference of numbers of two normalised vectors in float32: rounding of another order of sums."""


def bench(folder, against, **options):
    sizes = {"sentences": 11, "batch_size": 4, "runs": 1, "warmup": 0}
    return bench_embed(EmbedSettings(model=str(folder), against=against, **{**sizes, **options}))


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_transformers_gives_our_vectors(tmp_path, mode):
    tiny_encoder(tmp_path)
    sentence_files(tmp_path, mode=mode)
    result = bench(tmp_path, ("transformers",))
    assert set(result["cases"][0]["sides"]) == {"transformers", "verax"}
    assert result["accuracy"]["transformers"]["largest_difference"] < SAME
    assert result["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize(("library", "mode"), [("openvino", "mean"), ("onnxruntime", "lasttoken")])
def test_an_exported_model_gives_our_vectors_in_float32_and_near_them_in_int8(tmp_path, library, mode):
    for module in LIBRARIES[library]:
        pytest.importorskip(module, reason=f"needs {module}: pip install 'verax[{library}]'")
    tiny_encoder(tmp_path)
    sentence_files(tmp_path, mode=mode)
    result = bench(tmp_path, (library, f"{library}-int8"))
    names = {f"{library} float32", f"{library} int8"}
    assert set(result["cases"][0]["sides"]) == {*names, "verax"}
    assert set(result["cases"][0]["ratios"]) == names
    for name in names:
        assert len(result["chosen"][name]["trials"]) == 3
        assert result["chosen"][name]["way"] in result["chosen"][name]["trials"]
    assert result["accuracy"][f"{library} float32"]["largest_difference"] < SAME
    assert SAME < result["accuracy"][f"{library} int8"]["cosine_distance"] < 0.03
    assert library in result["machine"]


def test_openvino_in_bfloat16_is_as_near_to_float32_as_we_are(tmp_path):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'verax[openvino]'")
    result = bench(tiny_encoder(tmp_path), ("openvino",), dtype="bfloat16", latency=True)
    ours, theirs = (result["accuracy"][name]["cosine_distance"] for name in ("verax", "openvino bfloat16"))
    assert 0 < ours < 1e-3
    assert theirs < 1e-3  # float32 where the processor has no bfloat16
    assert result["chosen"]["openvino bfloat16"]["way"] == "PERFORMANCE_HINT=LATENCY, one text a call"
