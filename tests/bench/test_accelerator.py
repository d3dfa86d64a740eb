"""The run on an accelerator: parts are finished once, a failure is a line, and the budget ends the run; reports."""

import json
from pathlib import Path

import pytest

from verax.bench import accelerator
from verax.bench.accelerator import BENCH, PARTS, REPORTS, bench_accelerator
from verax.bench.harness import TURN
from verax.bench.processes import run_command
from verax.bench.results import markdown, write
from verax.bench.settings import AcceleratorSettings
from verax.cli.bench import SUBJECTS
from verax.errors import InvalidParameterError

GPU = {"platform": "gpu", "devices": ["NVIDIA H200 (cuda:0)"]}
RESULT = {"intro": "Work.", "tables": [{"title": "", "columns": ["side", "s"], "rows": [["verax", "1"]]}]}


def run_parts(folder, **options):
    return bench_accelerator(AcceleratorSettings(folder=folder, **options))


@pytest.fixture
def machine(monkeypatch):
    """Parts that only say that they ran, on a device of which there is none here; what they report can be changed."""
    ran, errors, device = [], {}, {**GPU, "cpu": "a CPU", "cores": 2}

    def run(words, log, seconds, variables):
        assert log.is_absolute()  # a part runs in another folder
        assert all(Path(word).is_absolute() for word in (*words[-1:] * ("--trace" in words), variables[TURN]))
        ran.append(log.stem)
        error = errors.get(log.stem, "")
        log.parent.mkdir(parents=True, exist_ok=True)
        return {"result": None if error else RESULT, "note": "", "error": error, "seconds": 1.0}

    monkeypatch.setattr(accelerator, "run_command", run)
    monkeypatch.setattr(accelerator, "find_device", lambda folder: device)
    return ran, errors, device


def test_finished_parts_are_skipped_and_failed_ones_run_again(machine, tmp_path, monkeypatch):
    ran, errors, _ = machine
    written = []
    monkeypatch.setitem(RESULT, "machine", GPU)
    monkeypatch.setattr(accelerator, "write", lambda result, folder: written.append(result))
    errors["delta"] = "RuntimeError: out of memory"
    monkeypatch.chdir(tmp_path)
    assert not run_parts(Path("here"), jobs=1)["complete"]
    assert ran == list(PARTS)
    assert len(written) == len(PARTS) - 1
    for kept in (ran, errors, written):
        kept.clear()
    second = run_parts(tmp_path / "here")
    assert (ran, second["complete"], list(second["parts"])) == (["delta"], True, list(PARTS))
    assert len(written) == 1


@pytest.mark.parametrize("change", [{"devices": ["NVIDIA H100 80GB HBM3 (cuda:0)"]}, {"rehearse": True}])
def test_parts_of_another_device_or_of_a_rehearsal_do_not_count(machine, tmp_path, change):
    ran, _, device = machine
    run_parts(tmp_path, only=["delta"], rehearse=change.pop("rehearse", False))
    device.update(change)
    run_parts(tmp_path, only=["delta"])
    assert ran == ["delta", "delta"]


def test_the_page_has_the_tables_of_each_part_or_its_failure(machine, tmp_path):
    _, errors, _ = machine
    errors["delta"] = "RuntimeError: no room\nfor 9 bytes"
    result = run_parts(tmp_path, only=["video-57", "delta"])
    page = markdown(result)
    assert "target: 0.43 s. Work.\n\n| side | s |" in page
    assert "## delta\n\n**Not run**: RuntimeError: no room for 9 bytes." in page
    assert write(result, tmp_path).name == "accelerator-nvidia-h200-cuda-0-2c.json"


def test_a_cpu_is_refused_unless_it_is_a_rehearsal(machine, tmp_path):
    machine[2]["platform"] = "cpu"
    with pytest.raises(InvalidParameterError, match="no GPU or TPU here; --rehearse"):
        run_parts(tmp_path)
    assert run_parts(tmp_path, rehearse=True)["complete"]


def test_the_command_lists_runs_and_says_by_its_status_whether_all_is_done(machine, tmp_path, bench):
    _, errors, _ = machine
    status, out, _ = bench("accelerator", "--list")
    assert (status, "the gated delta rule" in out) == (0, True)
    errors["delta"] = "killed"
    arguments = ("accelerator", "--folder", tmp_path, "--only", "delta,kernels")
    status, out, _ = bench(*arguments)
    assert (status, "**Not run**: killed." in out) == (1, True)
    errors.clear()
    status, out, _ = bench(*arguments, "--json")
    assert (status, json.loads(out)["complete"]) == (0, True)


@pytest.mark.parametrize("tiny", [False, True])
def test_the_commands_are_taken_as_they_are(bench, monkeypatch, tiny):
    for name, (_, module) in SUBJECTS.items():
        monkeypatch.setattr(f"verax.bench.{module}.bench_{name}", lambda given: {"settings": str(given)})
    for part in (*PARTS.values(), *REPORTS.values()):
        if "bench " in part.command:
            words = part.words(tiny=tiny)
            assert bench(*words[words.index("bench") + 1 :])[0] == 0, words


def test_a_process_gives_its_json_or_the_last_line_of_its_error_and_is_stopped_in_time(tmp_path):
    log = tmp_path / "parts" / "a.log"
    assert run_command(["-c", "print('[1]')"], log, 60)["result"] == [1]
    assert run_command(["-c", "raise KeyError('no such part')"], log, 60)["error"] == "KeyError: 'no such part'"
    assert "Traceback" in log.read_text()
    record = run_command(["-c", "import time; time.sleep(60)"], tmp_path / "a.log", 0.2)
    assert record["error"] == "stopped after 0 s"
    assert record["seconds"] == pytest.approx(0.2, abs=10)


@pytest.mark.parametrize("error", ["", "needs torch: pip install it"])
def test_a_report_is_a_page_whose_table_may_be_missing(monkeypatch, bench, error):
    asked = []
    noise = {"others": 0.0, "busy": False}
    result = {**RESULT, "machine": {"torch": "9"}, "measured": {}, "noise": noise, "date": "today"}

    def run(words, log, seconds):
        asked.append(" ".join(words))
        return {"result": None if error else result, "error": error, "note": "", "seconds": 1.0}

    part = accelerator.Part("About one", BENCH.format("text --runs 5"), "--runs 1")
    monkeypatch.setattr(accelerator, "REPORTS", {"one": part})
    monkeypatch.setattr(accelerator, "run_command", run)
    status, page, _ = bench("reports", "--quick", "--only", "one")
    assert status == 0
    assert asked == ["-m verax bench text --runs 5 --json --runs 1"]
    assert "About one." in page
    assert ("**Not run**: needs torch: pip install it." if error else "Work.\n\n| side | s |") in page
