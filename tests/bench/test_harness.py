"""The harness: noise is measured, the limit is the longer of two, products are counted, results name their machine."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.conftest import LIMITS
from verax import ops
from verax.bench import harness
from verax.checkpoint import Checkpoint
from verax.shapes import QWEN3_0_6B


def test_the_limit_is_the_longer_of_memory_and_products():
    assert harness.limit_seconds(LIMITS, bytes_moved=100e9, flops=1, dtype="float32") == 2.0
    assert harness.limit_seconds(LIMITS, bytes_moved=1, flops=1200e9, dtype="float32") == 3.0
    assert harness.limit_seconds(LIMITS, bytes_moved=1, flops=1200e9, dtype="bfloat16") == pytest.approx(4 / 3)


def test_what_others_use_of_the_processor_does_not_count_our_own(monkeypatch):
    monkeypatch.setattr(harness.time, "sleep", lambda _: None)
    monkeypatch.setattr(harness.machine, "num_cores", lambda: 2)
    seconds = iter([(100.0, 7.0), (100.0 + 0.75 * 2 * harness.LISTEN, 7.0 + 0.25 * 2 * harness.LISTEN)])
    monkeypatch.setattr(harness, "_cpu_seconds", lambda: next(seconds))
    noise = harness.measure_noise()
    assert noise["others"] == pytest.approx(0.5)
    assert noise["busy"]
    assert noise["spread"] > 0


@pytest.mark.parametrize("busy", [True, False])
def test_a_busy_machine_is_warned_of_and_remembered(monkeypatch, caplog, busy):
    monkeypatch.setattr(harness, "measure_noise", lambda: {"spread": 0.5, "others": 0.25, "busy": busy})
    with caplog.at_level(logging.WARNING, "verax.bench"):
        benchmark = harness.Benchmark("text")
    assert ("busy before the start" in caplog.text) == busy
    assert benchmark.limits == LIMITS
    page = {"title": "A", "intro": "B", "tables": []}
    result = benchmark.result("a", settings={"runs": 3}, versions={"torch": "2"}, **page)
    assert result["noise"]["busy"] == busy
    assert result["measured"] == LIMITS
    assert result["machine"]["torch"] == "2"
    assert result["memory"]["host_peak_gb"] > 0.01
    assert result["memory"]["device_peak_gb"] is None  # a CPU's memory is the host's
    assert (result["subject"], result["name"], result["settings"]) == ("text", "a", {"runs": 3})


def test_a_run_is_set_against_the_limit(monkeypatch):
    monkeypatch.setattr(harness, "measure_noise", lambda: {"busy": False})
    work = harness.Benchmark("ops").against_limit(4.0, bytes_moved=100e9, flops=400e9, dtype="float32")
    assert (work["gb_per_s"], work["gflop_per_s"]) == (25.0, 100.0)
    assert (work["limit_s"], work["fraction_of_limit"]) == (2.0, 0.5)


def test_products_are_counted_turn_by_turn_in_any_implementation():
    def call(x, weight, unused):
        step = lambda carry, _: (ops.linear(carry, weight), None)
        y = jax.lax.scan(step, x, length=3)[0]
        image = jax.lax.conv(jnp.ones((1, 2, 6, 6)), jnp.ones((4, 2, 3, 3)), (1, 1), "VALID")
        return y, image

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 8), (8, 8), (1000,))]
    products, moved = harness.count_products(call, *shapes)
    assert products == 3 * 2 * 5 * 8 * 8 + 2 * (4 * 4 * 4) * (2 * 3 * 3)
    assert moved == 4 * (5 * 8 + 8 * 8 + 5 * 8 + 4 * 4 * 4)  # the argument that nothing reads does not count


def test_without_a_model_the_weights_are_random_in_the_real_shapes():
    config = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512}
    with harness.checkpoint_folder(None, config) as folder:
        opened = Checkpoint.open(folder)
        assert opened.info("model.layers.0.mlp.down_proj.weight").shape == (1024, 3072)
        spread = np.std(np.asarray(opened.read("model.layers.0.mlp.down_proj.weight"), np.float32))
        assert spread == pytest.approx(3072**-0.5, rel=0.02)
    assert not folder.exists()
