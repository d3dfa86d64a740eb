"""The other sides of the text, embedding and video benchmarks do the same work on the same weights."""

import importlib.util

import jax.numpy as jnp
import pytest

from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import sentence_files, tiny_encoder
from verax import LLM
from verax.bench.embed.cases import bench_embed
from verax.bench.results import markdown
from verax.bench.settings import EmbedSettings, TextSettings, VideoSettings
from verax.bench.text.cases import bench_text, transformers_sides
from verax.bench.text.workload import Workload
from verax.bench.video.cases import bench_video
from verax.checkpoint import Checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("diffusers")


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """Limits of the machine in the place of measured ones, which take seconds."""
    limits = {f"matmul_{dtype}_gflop_per_s": 400.0 for dtype in ("float32", "bfloat16")}
    monkeypatch.setattr("verax.machine.measure_machine", lambda: {"memory_bandwidth_gb_per_s": 50.0, **limits})


def test_transformers_generates_what_the_engine_generates(tmp_path):
    tiny_checkpoint(tmp_path)
    workload = Workload("short-prompts", ((5, 6, 7), (9, 8, 7, 6, 5)), (8, 8), 0.0)
    sides, _ = transformers_sides(Checkpoint.open(tmp_path), "float32", workload)
    assert [side() for side in sides.values()] == [16, 16]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = LLM(tmp_path, dtype="float32", max_num_seqs=2, max_model_len=32, use_tqdm=False)
    outputs = ours.generate([list(p) for p in workload.prompts], workload.params(), use_tqdm=False)
    for prompt, output in zip(workload.prompts, outputs, strict=True):
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tuple(tokens[0, len(prompt) :].tolist()) == output.outputs[0].token_ids


def test_all_sides_are_in_one_interleaved_result(tmp_path):
    tiny_checkpoint(tmp_path, dtype=jnp.bfloat16)
    workload = Workload("short-prompts", ((5, 6, 7), (8, 9)), (3, 2), 0.7)
    result = bench_text(TextSettings(model=str(tmp_path), runs=1, against="transformers"), workload)
    assert set(result["cases"][0]["sides"]) == {"transformers naive", "transformers batched", "verax"}
    assert set(result["cases"][0]["ratios"]) == {"transformers naive", "transformers batched"}
    assert result["machine"]["torch"] == torch.__version__


LIBRARIES = {"openvino": ("openvino", "nncf"), "onnxruntime": ("onnxruntime", "onnx")}
"""Modules that a side and its int8 need, which are its extra."""

SAME = 1e-6
"""Difference of numbers of two normalised vectors in float32: rounding of another order of sums."""


def bench(folder, against, **options):
    sizes = {"sentences": 11, "batch_size": 4, "runs": 1, "warmup": 0}
    return bench_embed(EmbedSettings(model=str(folder), against=against, **{**sizes, **options}))


@pytest.mark.parametrize(("library", "mode"), [("openvino", "mean"), ("onnxruntime", "lasttoken"), (None, "cls")])
def test_others_give_our_vectors_in_float32_and_near_them_in_int8(tmp_path, library, mode):
    for module in LIBRARIES.get(library, ()):
        pytest.importorskip(module, reason=f"needs {module}: pip install 'verax[{library}]'")
    tiny_encoder(tmp_path)
    sentence_files(tmp_path, mode=mode)
    exported = {f"{library} float32", f"{library} int8"} if library else set()
    result = bench(tmp_path, ("transformers", *((library, f"{library}-int8") if library else ())))
    assert set(result["cases"][0]["sides"]) == {"transformers", *exported, "verax"}
    assert set(result["cases"][0]["ratios"]) == {"transformers", *exported}
    assert result["accuracy"]["transformers"]["largest_difference"] < SAME
    assert result["machine"]["torch"] == torch.__version__
    for name in exported:
        assert len(result["chosen"][name]["trials"]) == 3
        assert result["chosen"][name]["way"] in result["chosen"][name]["trials"]
    if library:
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


def bench_clip(against, stage, dtype="float32"):
    settings = dict(frames=[5], height=16, width=16, dtype=dtype, layers=1, runs=1, warmup=0)
    return bench_video(VideoSettings(size="tiny", stage=[stage], against=against, **settings))


HAS_OPENVINO = importlib.util.find_spec("openvino") is not None


@pytest.mark.parametrize("stage", ["transformer", "text", "vae"])
def test_every_stage_has_the_result_of_the_others(stage):
    others = ["diffusers", *(["torch.compile"] if stage == "vae" else []), *(["openvino"] if HAS_OPENVINO else [])]
    result = bench_clip(others, stage)
    (case,) = result["cases"]
    others = [name for name in others if (stage, name) != ("vae", "openvino")]  # OpenVINO cannot decode
    assert set(case["sides"]) == {"verax", *others}
    assert max(case["sides"][name]["difference"] for name in others) < 1e-4
    assert {"torch", "diffusers", "transformers", *({"openvino"} & {*others})} <= set(result["machine"])
    assert result["name"].startswith(f"tiny-1-layers-{stage}-")
    assert all(f"| 5 | {name} |" in markdown(result) for name in others)


def test_openvino_in_bfloat16_has_our_result_of_the_transformer():
    pytest.importorskip("openvino", reason="needs openvino: pip install 'verax[openvino]'")
    (case,) = bench_clip(["openvino"], "transformer", "bfloat16")["cases"]
    assert case["sides"]["openvino"]["difference"] < 0.2  # it rounds the angles of a timestep to bfloat16
