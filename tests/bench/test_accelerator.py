"""The run on an accelerator: parts are finished once, a failure is a line, and the budget ends the run."""

import json
import sys
from dataclasses import asdict

import pytest

from verax import cli, ops
from verax.bench import accelerator
from verax.bench.accelerator import PARTS, bench_accelerator, find_device, run_part
from verax.bench.results import Row, markdown, write
from verax.bench.text import cases as text
from verax.bench.text.workload import Workload
from verax.bench.video import cases as video
from verax.errors import InvalidParameterError, VeraxError

H200 = {
    "platform": "gpu",
    "device_kind": "NVIDIA H200",
    "cpu": "a CPU",
    "cores": 2,
    "devices": ["NVIDIA H200 (cuda:0)"],
}
ROW = Row(
    "57 frames", 1.5, "s", target=0.85, seconds=1.5, flops=989.5e12 * 0.75, bytes_moved=4.8e12 * 0.3, ratios={"x": 2.5}
)


@pytest.fixture
def machine(monkeypatch):
    """Parts that only say that they ran, on a device of which there is none here; what they report can be changed."""
    ran, outcomes, device = [], {}, dict(H200)

    def run_part(name, folder, *, rehearse, seconds):
        ran.append(name)
        error, rows = outcomes.get(name, ("", [ROW]))
        record = {"rows": [asdict(row) for row in rows], "error": error, "seconds": 1.0}
        record |= {"device": device["device_kind"], "rehearse": rehearse}
        path = accelerator._part_file(name, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        return record

    monkeypatch.setattr(accelerator, "run_part", run_part)
    monkeypatch.setattr(accelerator, "find_device", lambda folder: device)
    return ran, outcomes, device


def test_finished_parts_are_skipped_and_failed_ones_run_again(machine, tmp_path):
    ran, outcomes, _ = machine
    outcomes["delta"] = ("RuntimeError: out of memory", [])
    outcomes["video-vae"] = ("", [ROW, Row("9 frames", error="refused")])
    first = bench_accelerator(tmp_path)
    assert ran == list(PARTS)
    assert not first["complete"]
    ran.clear()
    outcomes.clear()
    second = bench_accelerator(tmp_path)
    assert ran == ["delta", "video-vae"]
    assert second["complete"]
    assert list(second["parts"]) == list(PARTS)


@pytest.mark.parametrize("change", [{"device_kind": "NVIDIA H100 80GB HBM3"}, {"rehearse": True}])
def test_parts_of_another_device_or_of_a_rehearsal_do_not_count(machine, tmp_path, change):
    ran, _, device = machine
    bench_accelerator(tmp_path, only=["delta"], rehearse=change.pop("rehearse", False))
    device.update(change)
    bench_accelerator(tmp_path, only=["delta"])
    assert ran == ["delta", "delta"]


def test_correctness_comes_first_and_what_has_a_target_before_the_rest():
    assert list(PARTS)[:5] == ["tests", "operations", "text-0.6b-bfloat16", "video-57-97", "delta"]


def test_no_part_is_begun_without_a_share_of_the_budget(machine, tmp_path, monkeypatch):
    ran, *_ = machine
    monkeypatch.setattr(accelerator, "SHORTEST", 50.0)
    times = iter([0.0, 1.0, 60.0])
    monkeypatch.setattr(accelerator.time, "monotonic", lambda: next(times))
    result = bench_accelerator(tmp_path, only=["operations", "tests"], seconds=100)
    assert ran == ["tests"]
    assert result["parts"]["operations"]["error"] == "not begun: the budget of 100 s is spent"
    assert not result["complete"]


def test_the_table_has_targets_and_shares_of_the_cards_limits(machine, tmp_path):
    _, outcomes, _ = machine
    outcomes["delta"] = ("RuntimeError: no room\nfor 9 | bytes", [])
    result = bench_accelerator(tmp_path, only=["video-57-97", "delta"])
    page = markdown(result)
    # 0.75 of a second of products, 0.3 of memory, in 1.5 s.
    assert "| video-57-97 | 57 frames | 1.5 s | 0.85 s | 494.8 | 960 | 50% | 2.50x x |  |" in page
    assert "| delta |  | **failed** |  |  |  |  |  | RuntimeError: no room for 9 \\| bytes |" in page
    assert "989.5 TFLOP/s of dense bfloat16 products, 4,800 GB/s" in page
    assert write(result, tmp_path).name == "accelerator-nvidia-h200-cuda-0-2c.json"


def test_a_cpu_is_refused_unless_it_is_a_rehearsal(machine, tmp_path):
    _, _, device = machine
    device["platform"] = "cpu"
    with pytest.raises(InvalidParameterError, match="no GPU or TPU here; --rehearse"):
        bench_accelerator(tmp_path)
    assert bench_accelerator(tmp_path, rehearse=True)["complete"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"only": ["vidoe"]}, "only: expected tests, operations"), ({"seconds": 0}, "seconds: expected more than 0")],
)
def test_wrong_settings_are_named(machine, tmp_path, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        bench_accelerator(tmp_path, **options)


def test_the_command_lists_runs_and_says_by_its_status_whether_all_is_done(machine, tmp_path, monkeypatch, capsys):
    _, outcomes, _ = machine

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["verax", "bench", "accelerator", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code

    assert run("--list") == 0
    assert "delta               the gated delta rule" in capsys.readouterr().out
    outcomes["delta"] = ("killed", [])
    assert run("--output", str(tmp_path), "--only", "delta,operations") == 1
    assert "| delta |  | **failed** |" in capsys.readouterr().out
    outcomes.clear()
    assert run("--output", str(tmp_path), "--only", "delta,operations", "--json") == 0
    assert json.loads(capsys.readouterr().out)["complete"]


def test_the_last_line_of_a_process_that_failed_is_the_error(tmp_path):
    record = run_part("no-such-part", tmp_path, rehearse=True, seconds=120)
    assert record["error"] == "KeyError: 'no-such-part'"
    assert json.loads(accelerator._part_file("no-such-part", tmp_path).read_text()) == record
    assert "Traceback" in (tmp_path / "parts" / "no-such-part.log").read_text()


def test_a_process_is_stopped_at_the_end_of_its_time(tmp_path):
    record = run_part("operations", tmp_path, rehearse=True, seconds=0.2)
    assert record["error"] == "stopped after 0 s"
    assert record["seconds"] == pytest.approx(0.2, abs=10)


def test_the_device_is_found_by_another_process(tmp_path):
    assert find_device(tmp_path)["device_kind"] == "cpu"


def test_attention_reads_every_key_that_a_token_sees():
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    workload = Workload("short-prompts", ((1, 2),), (3,), 0.0)
    # Four tokens are read: two of the prompt, two of the answer, whose last is not. They see 1 + 2 + 3 + 4 keys.
    assert accelerator.attention_work(workload, config) == (4 * 4 * 8 * 3 * 10, 2 * 2 * 2 * 8 * 3 * (3 + 4))


@pytest.fixture
def known_machine(monkeypatch):
    names = ("memory_bandwidth_gb_per_s", "matmul_float32_gflop_per_s", "matmul_bfloat16_gflop_per_s")
    monkeypatch.setattr("verax.machine.measure_machine", lambda: dict.fromkeys(names, 50.0))


def test_a_workload_that_fails_is_a_row_and_the_next_one_runs(monkeypatch, known_machine):
    bench = text.bench_text

    def no_room(folder, make, **options):
        if make.keywords == {"tokens": 16}:
            raise VeraxError("no room for the cache")
        return bench(folder, make, **options)

    monkeypatch.setattr(text, "bench_text", no_room)
    monkeypatch.setattr(accelerator, "_torch_runs_here", lambda: False)
    chosen = ("prompt of 512", "4 x 100 tokens")
    monkeypatch.setattr(accelerator, "TEXT_CASES", {name: accelerator.TEXT_CASES[name] for name in chosen})
    ((failed,), _), ((row,), result) = accelerator.measure_text("qwen3", None, True)
    assert failed.error == "VeraxError: no room for the cache"
    assert row.value == pytest.approx(6 / row.seconds)  # two prompts, three tokens each
    assert row.flops > result["work"]["flops"]
    assert row.target == 3000
    assert result["settings"]["shapes"] == "qwen3"


def test_a_guided_step_is_two_passes_and_a_failure_is_a_row(monkeypatch):
    side, asked = {"median_s": 0.4, "rate": 1.0}, []
    case = {"chosen": "verax", "sides": {"verax": side}, "flops": 10.0, "bytes_moved": 7, "compile_s": 30.2}

    def bench(**options):
        asked.append(options)
        if len(asked) == 1:
            raise VeraxError("no room")
        return {"cases": [{**case, "ratios": {"diffusers": 1.5, "verax, flash": 2.0}}]}

    monkeypatch.setattr(video, "bench_video", bench)
    ((failed,), _), ((row,), _) = accelerator.measure_video("transformer", (97, 57), False)
    assert [one["frames"] for one in asked] == [(97,), (57,)]
    assert (asked[0]["height"], asked[0]["width"], asked[0]["size"]) == (544, 960, "1.3b")
    assert failed.error == "VeraxError: no room"
    assert (row.value, row.flops, row.bytes_moved, row.target, row.ratios) == (0.8, 20.0, 14, 0.85, {"diffusers": 1.5})
    ((decoding,), _) = next(accelerator.measure_video("vae", (57,), False))
    assert (decoding.value, decoding.flops, decoding.target) == (0.4, 10.0, None)


def test_both_directions_of_the_delta_rule_are_measured_and_the_missing_library_is_named(monkeypatch, known_machine):
    def missing(*arguments, **options):
        raise VeraxError("not installed")

    monkeypatch.setattr("verax.bench.delta.baselines.find_baselines", missing)
    ((forward,), _), ((both,), result) = accelerator.measure_delta(True)
    assert [forward.case, both.case] == ["delta rule, forward", "delta rule, forward and backward"]
    for row in (forward, both):
        assert (row.error, row.target) == ("", None)
        assert row.note.endswith("not installed")
    assert forward.flops < both.flops
    assert result["subject"] == "delta"


def test_where_no_experimental_implementation_runs_the_row_says_so(known_machine):
    rows = [row for rows, _ in accelerator.measure_kernels(True) for row in rows]
    operations = ["paged_decode_attention", "attention", "attention", "sample"]
    assert [row.case.partition(",")[0] for row in rows] == operations
    assert [(row.value, row.error) for row in rows] == [(None, "")] * 4


def test_an_experimental_implementation_is_compared_with_the_others(monkeypatch, known_machine):
    implementations = ops.attention.implementations
    monkeypatch.setattr(ops.attention, "implementations", dict(implementations))
    ops.attention.implementation("new", experimental=True)(implementations["chunked"].function)
    ops.attention.implementation("other")(implementations["chunked"].function)
    rows = [row for rows, _ in accelerator.measure_kernels(True) for row in rows if row.case.endswith(", new")]
    whole, window = rows
    for row in rows:
        assert row.value == pytest.approx(1e3 * row.seconds)
        assert "other" in row.ratios
        assert not {"new", "reference"} & set(row.ratios)
    assert whole.flops == 4 * 2 * 128 * 48**2
    assert window.flops == 4 * 2 * 128 * (16 * 17 // 2 + 32 * 16)
    assert whole.bytes_moved == 48 * 2 * 128 * (3 * 2 + 4)
    assert window.bytes_moved == 48 * 128 * (2 * (2 + 4) + 2 * 1 * 2)
