"""The harness: sides take turns, warm-up does not count, noise and limits are measured, products are counted."""

import fcntl
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.conftest import LIMITS
from verax import ops
from verax.bench import harness
from verax.bench.harness import Samples, time_sides
from verax.checkpoint import Checkpoint
from verax.shapes import QWEN3_0_6B


@pytest.fixture
def clock(monkeypatch):
    """A clock that sides move; they take the seconds that they are given, one call after the other."""
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def side(*seconds):
        left = list(seconds)

        def run():
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return run

    return side


def test_sides_take_turns_and_warm_up_is_not_counted(clock):
    order = []
    samples = time_sides({name: lambda name=name: order.append(name) for name in "ab"}, runs=3, warmup=2)
    assert order == ["a", "b"] * 5
    assert {name: len(side.seconds) for name, side in samples.items()} == {"a": 3, "b": 3}


def test_warm_up_continues_until_no_side_gets_faster(clock):
    samples = time_sides({"steady": clock(1.0), "compiles": clock(9.0, 5.0, 1.0)}, runs=2, warmup=1)
    assert samples["compiles"] == Samples((1.0, 1.0), (9.0, 5.0, 1.0))
    assert samples["steady"] == Samples((1.0, 1.0), (1.0, 1.0, 1.0))
    never = time_sides({"a": clock(*(0.5**i for i in range(20)))}, runs=1, warmup=1)["a"]
    assert len(never.warmup) == harness.MOST_WARMUP


def test_short_calls_are_timed_in_a_loop_whose_first_call_does_not_count(clock, monkeypatch):
    monkeypatch.setattr(harness, "SHORTEST", 8.0)  # after one call of 4 s: two in a turn
    cold = time_sides({"cold": clock(4.0, 5.0, 1.0, 2.0, 5.0, 3.0, 4.0)}, runs=2, warmup=0, short=True)["cold"]
    assert cold.seconds == (1.5, 3.5)


def test_one_process_at_a_time_measures_where_a_turn_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv(harness.TURN, str(tmp_path / "turn"))
    free = []

    def run():
        with (tmp_path / "turn").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free.append(False)

    time_sides({"a": run}, runs=2, warmup=0)
    assert free == [False, False]
    run()
    assert len(free) == 2


def test_a_drifting_machine_does_not_change_the_ratio():
    # Twice as slow in the second half, for both: the ratio within each round stays 3.
    ours, theirs = Samples((1.0, 1.0, 2.0, 2.0)), Samples((3.0, 3.0, 6.0, 6.0))
    assert ours.ratio_to(theirs) == 3.0


def test_reported_numbers_follow_from_the_samples():
    numbers = Samples((1.0, 2.0, 3.0, 4.0, 10.0), (20.0,)).to_dict(work=30)
    assert (numbers["median_s"], numbers["rate"], numbers["p10_s"]) == (3.0, 10.0, 1.4)
    assert numbers["seconds"] == [1.0, 2.0, 3.0, 4.0, 10.0]
    assert numbers["warmup_seconds"] == [20.0]


@pytest.mark.parametrize(
    ("moved", "flops", "dtype", "limit"), [(100e9, 1, 32, 2), (1, 1200e9, 32, 3), (1, 1800e9, 16, 2)]
)
def test_the_limit_is_the_longer_of_memory_and_products(monkeypatch, moved, flops, dtype, limit):
    monkeypatch.setattr(harness, "measure_noise", lambda: {"busy": False})
    dtype = {32: "float32", 16: "bfloat16"}[dtype]
    work = harness.Benchmark("ops").against_limit(4.0, bytes_moved=moved, flops=flops, dtype=dtype)
    assert (work["limit_s"], work["fraction_of_limit"]) == (limit, limit / 4)
    assert (work["gb_per_s"], work["gflop_per_s"]) == (moved / 4e9, flops / 4e9)


@pytest.mark.parametrize("busy", [True, False])
def test_a_busy_machine_is_warned_of_and_remembered(monkeypatch, caplog, busy):
    monkeypatch.setattr(harness.psutil, "cpu_percent", lambda seconds: 30.0 * busy)  # of all cores, ours and others
    monkeypatch.setattr(harness.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(harness.machine, "num_cores", lambda: 2)
    with caplog.at_level(logging.WARNING, "verax.bench"):
        benchmark = harness.Benchmark("text")
    assert ("busy before the start" in caplog.text) == busy
    page = {"title": "A", "intro": "B", "tables": []}
    result = benchmark.result("a", settings={"runs": 3}, versions={"torch": "2"}, **page)
    assert (result["noise"]["busy"], result["noise"]["others"]) == (busy, 0.6 * busy)
    assert (result["measured"], result["machine"]["torch"]) == (LIMITS, "2")
    assert result["memory"]["host_peak_gb"] > 0.01
    assert result["memory"]["device_peak_gb"] is None  # a CPU's memory is the host's
    assert (result["subject"], result["name"], result["settings"]) == ("text", "a", {"runs": 3})


def test_products_are_counted_turn_by_turn_in_any_implementation():
    def call(x, weight):
        step = lambda carry, _: (ops.linear(carry, weight), None)
        y = jax.lax.scan(step, x, length=3)[0]
        image = jax.lax.conv(jnp.ones((1, 2, 6, 6)), jnp.ones((4, 2, 3, 3)), (1, 1), "VALID")
        return y, image

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 8), (8, 8))]
    assert harness.count_products(call, *shapes) == 3 * 2 * 5 * 8 * 8 + 2 * (4 * 4 * 4) * (2 * 3 * 3)


def test_without_a_model_the_weights_are_random_in_the_real_shapes():
    config = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512}
    with harness.checkpoint_folder(None, config) as folder:
        weight = Checkpoint.open(folder).read("model.layers.0.mlp.down_proj.weight")
        assert weight.shape == (1024, 3072)
        assert np.std(np.asarray(weight, np.float32)) == pytest.approx(3072**-0.5, rel=0.02)
    assert not folder.exists()


def test_sides_of_verax_are_traced_once_after_the_rounds(tmp_path):
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in ("verax", "torch")}
    time_sides(sides, runs=2, warmup=0, title="a case", trace=tmp_path)
    assert calls == ["verax", "torch"] * 2 + ["verax"]
    (file,) = tmp_path.glob("a-case-verax/**/perfetto_trace.json.gz")
    assert file.stat().st_size > 0
