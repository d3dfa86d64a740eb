"""The quality benchmark on the built-in model: fewer bits are further from float32, refusals are clear."""

import pytest

from tests.support import gguf as files
from tests.support.tiny import HYBRID, tiny_checkpoint
from verax.bench.results import markdown
from verax.bench.settings import QualitySettings
from verax.bench.text.quality import bench_quality, held_out_texts


@pytest.fixture(scope="module")
def result():
    variants = ["float32", "int8", "bfloat16, int8 cache", "int4-64", "int4-128"]
    return bench_quality(QualitySettings(variants=variants, tokens=600), window=256)


def test_fewer_bits_are_further_from_float32_and_groups_that_do_not_divide_are_left_out(result):
    rows = result["variants"]
    assert rows["float32"]["kl_divergence"] == 0
    assert rows["float32"]["top1_agreement"] == 1
    assert 1.3 < rows["float32"]["perplexity"] < 2
    assert 0 < rows["bfloat16, int8 cache"]["kl_divergence"] < rows["int4-64"]["kl_divergence"]
    assert rows["int8"]["kl_divergence"] < rows["int4-64"]["kl_divergence"] < 0.1
    assert rows["int8"]["weights_mb"] > rows["int4-64"]["weights_mb"]
    assert "128 does not divide" in rows["int4-128"]["left_out"]
    assert "| int4-128 | left out: " in markdown(result)
    assert (result["subject"], result["name"]) == ("text", "quality-built-in")
    # 6 layers, 2 heads of 32, keys and values: a byte each, and a scale
    assert rows["bfloat16, int8 cache"]["cache_bytes_per_token"] == 2 * 6 * 2 * (32 + 4)


def test_the_built_in_model_is_measured_on_texts_that_it_never_saw():
    texts = held_out_texts()
    assert len(texts) > 50
    assert all(text.endswith("<|endoftext|>") and text.count("<|endoftext|>") == 1 for text in texts)


def test_a_quantised_file_is_measured_dequantised_and_as_it_is_stored(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny")
    files.write(folder, tmp_path / "a.gguf", "Q8_0")
    (tmp_path / "story.txt").write_text("once upon a time there was a small fox " * 20)
    settings = dict(model=str(tmp_path / "a.gguf"), text=tmp_path / "story.txt", variants="float32; as stored")
    result = bench_quality(QualitySettings(**settings), window=100)
    rows = result["variants"]
    assert rows["float32"]["kl_divergence"] == 0 < rows["as stored"]["kl_divergence"] < 0.05
    assert rows["as stored"]["weights_mb"] < rows["float32"]["weights_mb"]


def test_of_a_hybrid_model_only_the_layers_that_attend_have_a_cache(tmp_path):
    folder = tiny_checkpoint(tmp_path / "hybrid", family="qwen3_5_text", **HYBRID)
    (tmp_path / "story.txt").write_text("once upon a time there was a small fox " * 5)
    settings = dict(model=str(folder), text=tmp_path / "story.txt", variants="float32; bfloat16")
    rows = bench_quality(QualitySettings(**settings), window=40)["variants"]
    assert rows["float32"]["kl_divergence"] == 0 < rows["bfloat16"]["kl_divergence"] < 0.05
    assert rows["bfloat16"]["cache_bytes_per_token"] == 2 * 1 * 2 * 16 * 2  # one layer, 2 heads of 16, two bytes each
