"""The other sides of the text, embedding and video benchmarks do the same work on the same weights."""

import importlib.util
import re

import pytest

from tests.bench import conftest
from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import sentence_files, tiny_encoder
from verax.bench.embed.cases import bench_embed
from verax.bench.results import markdown
from verax.bench.settings import EmbedSettings, TextSettings, VideoSettings
from verax.bench.text import engines
from verax.bench.text.cases import Workload, bench_text
from verax.bench.video.cases import bench_video
from verax.errors import VeraxError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("diffusers")

known_machine = conftest.known_machine


def test_transformers_generates_what_the_engine_generates(tmp_path):
    tiny_checkpoint(tmp_path)
    workload = Workload("short-prompts", ((5, 6, 7), (9, 8, 7, 6, 5)), (8, 6), 0.0)
    settings = TextSettings(model=str(tmp_path), runs=1, warmup=0, dtype="float32", against="transformers")
    result = bench_text(settings, workload)
    sides = result["cases"][0]["sides"]
    assert set(sides) == {"transformers naive", "transformers batched", "verax"}
    assert set(result["cases"][0]["ratios"]) == set(sides) - {"verax"}
    assert sides["transformers naive"]["same_tokens"] == sides["verax"]["same_tokens"] == 14
    assert result["machine"]["torch"] == torch.__version__
    run, _ = engines.transformers(transformers, str(tmp_path), "float32", None, 2, 16)
    work = ([list(prompt) for prompt in workload.prompts], list(workload.max_tokens), 0.0)
    assert run(*work, batched=True) == run(*work)


LIBRARIES = {"openvino": ("openvino", "nncf"), "onnxruntime": ("onnxruntime", "onnx")}
"""Modules that a side and its int8 need, which are its extra."""

SAME = 1e-6
"""Difference of numbers of two normalised vectors in float32: rounding of another order of sums."""


def bench(folder, against, **options):
    sizes = {"sentences": 11, "batch_size": 4, "runs": 1, "warmup": 0}
    return bench_embed(EmbedSettings(model=str(folder), against=against, **{**sizes, **options}))


@pytest.mark.parametrize(("library", "mode"), [("openvino", "mean"), ("onnxruntime", "lasttoken")])
def test_others_give_our_vectors_in_float32_and_near_them_in_int8(tmp_path, library, mode):
    for module in LIBRARIES[library]:
        pytest.importorskip(module, reason=f"needs {module}: pip install 'verax[{library}]'")
    tiny_encoder(tmp_path)
    sentence_files(tmp_path, mode=mode)
    exported = {f"{library} float32", f"{library} int8"}
    result = bench(tmp_path, ("transformers", library, f"{library}-int8"))
    assert set(result["cases"][0]["sides"]) == {"transformers", *exported, "verax"}
    assert set(result["cases"][0]["ratios"]) == {"transformers", *exported}
    sides, notes = result["cases"][0]["sides"], "\n".join(result["notes"])
    assert sides["transformers"]["max_error"] < SAME
    assert result["machine"]["torch"] == torch.__version__
    for name in exported:
        assert re.search(rf"- {name}: .*(one text a call|batches of 4)", notes)
    assert sides[f"{library} float32"]["max_error"] < SAME
    assert SAME < 1 - sides[f"{library} int8"]["min_cosine"] < 0.03
    assert set(LIBRARIES[library]) <= set(result["machine"])
    for side in sides.values():
        assert min(side["start_s"], side["first_s"]) > 0
        assert 2e7 < side["peak_bytes"] < 2e9
        assert f"| {side['first_s']:.1f} | {side['start_s']:.1f} | {side['peak_bytes'] / 1e6:.0f} |" in markdown(result)
    assert sides[f"{library} float32"]["peak_bytes"] < 0.8 * sides["transformers"]["peak_bytes"]  # torch's is not in it


def test_openvino_in_bfloat16_is_as_near_to_float32_as_we_are(tmp_path):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'verax[openvino]'")
    tiny_encoder(tmp_path)
    sentence_files(tmp_path, mode="cls")
    result = bench(tmp_path, ("openvino",), dtype="bfloat16", latency=True, starts=False)
    sides = result["cases"][0]["sides"]
    assert [side for side in sides.values() if "start_s" in side] == []
    ours, theirs = (1 - sides[name]["min_cosine"] for name in ("verax", "openvino bfloat16"))
    assert 0 < ours < 1e-3
    assert theirs < 1e-3  # float32 where the processor has no bfloat16
    assert "- openvino bfloat16: PERFORMANCE_HINT=LATENCY, one text a call" in result["notes"]


def test_an_export_that_fails_is_shown_with_its_output(tmp_path, monkeypatch):
    tiny_encoder(tmp_path / "encoder")
    (tmp_path / "openvino.py").write_text("__version__ = '0.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(VeraxError, match=r"(?s)^openvino: CalledProcessError: .*has no attribute 'convert_model'"):
        bench(tmp_path / "encoder", ("openvino",))


def bench_clip(against, stages, dtype="float32"):
    """Result of the video benchmark of a tiny model."""
    settings = dict(frames=[5], height=16, width=16, dtype=dtype, layers=1, runs=1, warmup=0)
    return bench_video(VideoSettings(size="tiny", stage=stages, against=against, **settings))


HAS_OPENVINO = importlib.util.find_spec("openvino") is not None


@pytest.mark.parametrize(
    ("stage", "others", "left_out"),
    [
        ("transformer", ["diffusers"], []),
        ("vae", ["diffusers", "torch.compile"], ["openvino"]),
    ],
)
def test_every_stage_has_the_result_of_the_others(stage, others, left_out):
    others = others + ["openvino"] * HAS_OPENVINO
    result = bench_clip(others, [stage])
    (case,) = result["cases"]
    others = [name for name in others if name not in left_out]  # OpenVINO cannot decode
    assert set(case["sides"]) == {"verax", *others}
    assert max(case["sides"][name]["difference"] for name in others) < 1e-4
    assert {"torch", "diffusers", *(["openvino"] * ("openvino" in others))} <= set(result["machine"])
    assert result["name"].startswith(f"tiny-1-layers-{stage}-")
    assert all(f"frames | {name} |" in markdown(result) for name in others)


def test_openvino_in_bfloat16_has_our_result_of_the_transformer():
    pytest.importorskip("openvino", reason="needs openvino: pip install 'verax[openvino]'")
    (case,) = bench_clip(["openvino"], ["transformer"], "bfloat16")["cases"]
    assert case["sides"]["openvino"]["difference"] < 0.2  # it rounds the angles of a timestep to bfloat16
