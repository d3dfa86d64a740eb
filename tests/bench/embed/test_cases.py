"""The embedding benchmark on a tiny checkpoint: its numbers, its page, and what it refuses."""

import json

import pytest

from tests.support.tiny_encoder import tiny_encoder
from verax.bench.embed.cases import bench_embed
from verax.bench.results import markdown, number
from verax.bench.settings import EmbedSettings
from verax.embed.encoder import Encoder
from verax.errors import MissingDependencyError, VeraxError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_encoder(tmp_path_factory.mktemp("encoder")))


def measure(folder, **options):
    return bench_embed(EmbedSettings(model=folder, **{"sentences": 7, "batch_size": 3, "runs": 2, **options}))


def test_our_side_alone_compiles_nothing_while_it_is_timed(folder):
    result = measure(folder)
    (case,) = result["cases"]
    side = case["sides"]["verax"]
    assert list(case["sides"]) == ["verax"]
    assert (len(side["seconds"]), side["rate"]) == (2, 7 / side["median_s"])
    assert result["compiled_during_runs"] == 0
    assert (case["ratios"], "min_cosine" in side) == ({}, False)
    assert (result["settings"]["sentences"], result["name"]) == (7, "float32")
    assert f"| {number(1e3 * side['median_s'])} |" in markdown(result)


def test_latency_of_a_quantised_side_is_a_call_for_each_sentence_and_compared_with_float32(folder, monkeypatch):
    encode, counts = Encoder.encode, []

    def counted(self, texts, **options):
        if options.get("batch_size"):  # not the reference
            counts.append(len(texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(Encoder, "encode", counted)
    result = measure(folder, latency=True, quantization="int8")
    assert set(counts) == {1}
    assert (result["compiled_during_runs"], result["name"]) == (0, "int8-latency")
    page, distances = markdown(result), result["cases"][0]["sides"]["verax"]
    assert f"verax {1e3 * result['cases'][0]['sides']['verax']['median_s'] / 7:.2f} ms." in page
    assert 1e-7 < 1 - distances["min_cosine"] < 0.01
    assert distances["rank_correlation"] > 0.9
    assert f"| {distances['same_nearest']:.1%} | {distances['rank_correlation']:.5f} |" in page


@pytest.mark.parametrize(
    ("library", "raised", "error", "message"),
    [
        ("openvino", "ModuleNotFoundError('no', name='openvino')", MissingDependencyError, r"verax\[openvino\]'"),
        ("onnxruntime", "ModuleNotFoundError('no', name='onnx')", MissingDependencyError, r"verax\[onnxruntime\]'"),
        ("transformers", "ModuleNotFoundError('no', name='torch')", MissingDependencyError, r"verax\[parity\]'"),
        ("onnxruntime", "ImportError('broken')", VeraxError, "ImportError: broken; its output ends: printed"),
    ],
)
def test_a_library_that_cannot_run_is_named_with_its_extra_or_its_output(
    folder, tmp_path, monkeypatch, library, raised, error, message
):
    (tmp_path / f"{library}.py").write_text(f"print('printed', flush=True)\nraise {raised}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(error, match=rf"^{library}: .*{message}"):
        measure(folder, against=(library,))


def test_the_command_prints_json_for_scripts(bench, folder):
    status, out, _ = bench("embed", "--model", folder, "--sentences", 3, "--runs", 1, "--warmup", 0, "--json")
    assert (status, json.loads(out)["settings"]["sentences"]) == (0, 3)
