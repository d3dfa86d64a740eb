"""Ends of abandoned requests out of the log that `verax serve` writes."""

import logging

import pytest

from verax.bench.serve.abandoned import abort_times, read_ends
from verax.serve.http.telemetry import ACCESS, JsonFormatter


def log_line(request_id, when, duration=0.5):
    """A line as the server writes it, at a Unix time."""
    record = logging.LogRecord(ACCESS, logging.INFO, "", 0, "request", None, None)
    record.created, record.msecs = when, when % 1 * 1000
    record.fields = {"method": "POST", "status": 200, "duration": duration, "request_id": request_id}
    return JsonFormatter().format(record) + "\n"


def test_the_ends_are_read_from_the_servers_own_lines_and_other_lines_are_skipped(tmp_path):
    log = tmp_path / "log"
    other = 'verax-text at http://127.0.0.1:1/v1\n{"time": "soon", "request_id": "x"}\n{"time": 3}\n{\n'
    log.write_text(log_line("a", 1764000000.25) + other + log_line("b", 1764000001.5, 0.25))
    ends = read_ends(log)
    assert set(ends) == {"a", "b"}
    assert ends["a"] == pytest.approx((1763999999.75, 1764000000.25), abs=1e-3)
    assert ends["b"] == pytest.approx((1764000001.25, 1764000001.5), abs=1e-3)


def test_a_request_without_an_end_or_with_one_after_a_second_is_late():
    left = {"soon": 10.0, "slow": 10.0, "never": 10.0}
    found = abort_times(left, {"soon": (9.0, 10.5), "slow": (9.0, 11.25), "other": (9.0, 99.0)})
    assert found["clients"] == 3
    assert found["logged"] == 2
    assert found["late"] == 2
    assert found["unread"] == 0
    assert found["p50_s"] == pytest.approx(0.875)
    assert found["most_s"] == pytest.approx(1.25)
    assert abort_times({}, {"a": (0.0, 1.0)}) == {"clients": 0, "logged": 0, "late": 0, "unread": 0}


def test_a_request_that_began_after_its_client_had_left_counts_from_its_beginning():
    found = abort_times({"a": 10.0, "b": 10.0}, {"a": (12.0, 12.5), "b": (9.5, 10.25)})
    assert (found["late"], found["unread"]) == (0, 1)
    assert (found["most_s"], found["unread_most_s"]) == (0.5, 2.5)
