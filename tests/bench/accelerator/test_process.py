"""Parts in processes of their own: one that fails or hangs leaves a line and its log."""

import json

import pytest

from verax.bench.accelerator.process import device, part_file, run_part


def test_the_last_line_of_a_process_that_failed_is_the_error(tmp_path):
    record = run_part("no-such-part", tmp_path, rehearse=True, seconds=120)
    assert record["error"] == "KeyError: 'no-such-part'"
    assert json.loads(part_file("no-such-part", tmp_path).read_text()) == record
    assert "Traceback" in (tmp_path / "parts" / "no-such-part.log").read_text()


def test_a_process_is_stopped_at_the_end_of_its_time(tmp_path):
    record = run_part("operations", tmp_path, rehearse=True, seconds=0.2)
    assert record["error"] == "stopped after 0 s"
    assert record["seconds"] == pytest.approx(0.2, abs=10)


def test_the_device_is_found_by_another_process(tmp_path):
    assert device(tmp_path)["device_kind"] == "cpu"
