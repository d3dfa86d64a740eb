"""The run on an accelerator: parts are finished once, a failure is a line, and the budget ends the run."""

import json
import sys

import pytest

from verax import cli
from verax.bench.accelerator import process
from verax.bench.accelerator.parts import PARTS
from verax.bench.accelerator.row import Row
from verax.bench.accelerator.run import bench_accelerator
from verax.bench.results import markdown, write
from verax.errors import InvalidParameterError

H200 = {
    "platform": "gpu",
    "device_kind": "NVIDIA H200",
    "cpu": "a CPU",
    "cores": 2,
    "devices": ["NVIDIA H200 (cuda:0)"],
}
ROW = Row(
    "57 frames", 1.5, "s", target=0.85, seconds=1.5, flops=989.5e12 * 0.75, bytes_moved=4.8e12 * 0.3, beside={"x": 2.5}
)


@pytest.fixture
def machine(monkeypatch):
    """Parts that only say that they ran, on a device of which there is none here; what they report can be changed."""
    ran, outcomes, device = [], {}, dict(H200)

    def run_part(name, folder, *, rehearse, seconds):
        ran.append(name)
        error, rows = outcomes.get(name, ("", [ROW]))
        record = {"rows": [row.as_dict() for row in rows], "error": error, "seconds": 1.0}
        record |= {"device": device["device_kind"], "rehearse": rehearse}
        path = process.part_file(name, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        return record

    monkeypatch.setattr(process, "run_part", run_part)
    monkeypatch.setattr(process, "device", lambda folder: device)
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
    monkeypatch.setattr("verax.bench.accelerator.run.SHORTEST", 50.0)
    times = iter([0.0, 1.0, 60.0])
    monkeypatch.setattr("verax.bench.accelerator.run.time.monotonic", lambda: next(times))
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
    assert "| delta | | **failed** | | | | | | RuntimeError: no room for 9 \\| bytes |" in page
    assert "989.5 TFLOP/s of dense bfloat16 products, 4,800 GB/s" in page
    assert write(result, tmp_path).name.endswith("-nvidia-h200-cuda-0-2c-accelerator.json")


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
    assert "| delta | | **failed** |" in capsys.readouterr().out
    outcomes.clear()
    assert run("--output", str(tmp_path), "--only", "delta,operations", "--json") == 0
    assert json.loads(capsys.readouterr().out)["complete"]
