"""The embedding benchmark on a tiny checkpoint: its numbers, its page, and what it refuses."""

import json
import sys

import pytest

from tests.support.tiny_encoder import tiny_encoder
from verax import cli
from verax.bench.embed.run import bench_embed
from verax.bench.results import markdown, write
from verax.embed.encoder import Encoder
from verax.errors import InvalidParameterError, MissingDependencyError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_encoder(tmp_path_factory.mktemp("encoder")))


def bench(folder, **options):
    return bench_embed(folder, **{"sentences": 7, "batch_size": 3, "runs": 2, "warmup": 1, **options})


def test_our_side_alone_compiles_nothing_while_it_is_timed(folder, tmp_path):
    result = bench(folder)
    side = result["sides"]["verax"]
    assert list(result["sides"]) == ["verax"]
    assert len(side["seconds"]) == 2
    assert side["rate"] == 7 / side["median_s"]
    assert result["compiled_during_runs"] == 0
    assert (result["ratios"], result["chosen"], result["accuracy"]) == ({}, {}, {})
    page = markdown(result)
    assert "7 sentences" in page
    assert "3 at once" in page
    assert write(result, tmp_path).name.endswith("-embed-float32.json")


def test_latency_is_a_call_for_each_sentence(folder, tmp_path, monkeypatch):
    encode, counts = Encoder.encode, []

    def counted(self, texts, **options):
        counts.append(len(texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(Encoder, "encode", counted)
    result = bench(folder, latency=True)
    assert set(counts) == {1}
    assert result["compiled_during_runs"] == 0
    page = markdown(result)
    assert "each in a call of its own" in page
    assert f"A sentence: verax {1e3 * result['sides']['verax']['median_s'] / 7:.2f} ms." in page
    assert write(result, tmp_path).name.endswith("-embed-float32-latency.json")


def test_the_page_has_settings_and_distances_of_the_other_sides(folder):
    result = bench(folder)
    result["sides"]["openvino float32"] = result["sides"]["verax"]
    result["ratios"] = {"verax / openvino float32": 1.5}
    way = "A=B, one text a call"
    result["chosen"] = {"openvino float32": {"way": way, "trials": {way: 12.3}, "wrong": {"A=C": 0.12}}}
    result["accuracy"] = {"openvino float32": {"largest_difference": 2e-7, "cosine_distance": 3e-8}}
    page = markdown(result)
    assert "verax / openvino float32: 1.50x" in page
    assert f"- openvino float32: {way}; sentences/s in a trial: 12 with {way}; left out as wrong by 0.12: A=C" in page
    assert "| openvino float32 | 2.0e-07 | 3.0e-08 |" in page


def test_a_quantised_side_is_held_against_float32(folder, tmp_path):
    result = bench(folder, quantization="int8")
    distances = result["accuracy"]["verax"]
    assert 1e-7 < distances["cosine_distance"] < 0.01
    assert distances["rank_correlation"] > 0.9
    page = markdown(result)
    assert page.splitlines()[0].endswith(", int8")
    assert f"| {distances['same_nearest']:.1%} | {distances['rank_correlation']:.5f} |" in page
    assert write(result, tmp_path).name.endswith("-embed-int8.json")


def test_an_unknown_baseline_or_shape_is_refused_before_any_work():
    with pytest.raises(InvalidParameterError, match=r"against: expected transformers or openvino or .*, got 'tvm'"):
        bench(None, against=("tvm",))
    with pytest.raises(InvalidParameterError, match=r"shapes: expected minilm or modernbert or qwen3, got 'gpt'"):
        bench(None, shapes="gpt")


@pytest.mark.parametrize("library", ["openvino", "onnxruntime"])
def test_a_baseline_that_is_not_installed_names_its_extra(folder, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependencyError, match=rf"{library} is not installed: pip install 'verax\[{library}\]'"):
        bench(folder, against=(library,))


def test_the_command_prints_json_for_scripts(monkeypatch, capsys, folder):
    arguments = ["--model", folder, "--sentences", "3", "--runs", "1", "--warmup", "0", "--latency", "--json"]
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "embed", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["sentences"], settings["latency"]) == (3, True)
