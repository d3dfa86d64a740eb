"""The text part: every workload is a row, and the work of attention is counted."""

import pytest

from verax.bench.accelerator import text
from verax.bench.text.workload import Workload
from verax.errors import VeraxError


def test_attention_reads_every_key_that_a_token_sees():
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    workload = Workload("short-prompts", ((1, 2),), (3,), 0.0)
    # Four tokens are read: two of the prompt, two of the answer, whose last is not. They see 1 + 2 + 3 + 4 keys.
    assert text.attention_work(workload, config) == (4 * 4 * 8 * 3 * 10, 2 * 2 * 2 * 8 * 3 * (3 + 4))


def test_a_workload_that_fails_is_a_row_and_the_next_one_runs(monkeypatch):
    bench = text.bench_text

    def no_room(folder, make, **options):
        if make is text.TINY_WORKLOADS["prompt of 512"]:
            raise VeraxError("no room for the cache")
        return bench(folder, make, **options)

    monkeypatch.setattr(text, "bench_text", no_room)
    monkeypatch.setattr("verax.machine.measure_machine", lambda: LIMITS)
    monkeypatch.setattr(text, "_transformers_runs_here", lambda: False)
    chosen = ("prompt of 512", "4 x 100 tokens")
    monkeypatch.setattr(text, "TINY_WORKLOADS", {name: text.TINY_WORKLOADS[name] for name in chosen})
    failed, measured = list(text.measure_text("qwen3", None, rehearse=True))
    assert failed.rows[0].error == "VeraxError: no room for the cache"
    row = measured.rows[0]
    assert row.value == pytest.approx(6 / row.seconds)  # two prompts, three tokens each
    assert row.flops > measured.result["work"]["flops"]
    assert row.target == 3000
    assert measured.result["settings"]["model"] == "random weights, tiny, in the place of Qwen3-0.6B shapes"


LIMITS = {
    "memory_bandwidth_gb_per_s": 50.0,
    "matmul_float32_gflop_per_s": 400.0,
    "matmul_bfloat16_gflop_per_s": 900.0,
}
