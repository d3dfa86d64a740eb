"""Latencies, percentiles and goodput on numbers that are known."""

import pytest

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Run
from verax.bench.serve.summary import goodput_limits, latencies, summarise
from verax.bench.serve.traffic import Request
from verax.errors import InvalidParameterError


def answer(number, first, gap, tokens, **changes):
    """An answer whose first token takes `first` seconds, and each further one `gap`."""
    made = Answer(Request(number, (5,), tokens, slow=changes.pop("slow", False)), sent=10.0)
    made.events = [10.0 + first + gap * n for n in range(tokens)]
    made.ended = made.events[-1] + 0.5
    made.prompt_tokens, made.completion_tokens = 7, tokens
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_latencies_are_counted_from_the_request_in_milliseconds():
    found = latencies(answer(0, 0.25, 0.125, 3))
    assert found == {"ttft": 250.0, "tpot": 125.0, "itl": [125.0, 125.0], "e2el": 1000.0}


def test_time_per_token_counts_tokens_where_an_event_has_several():
    found = latencies(answer(0, 0.25, 0.5, 3, completion_tokens=6))
    assert found["itl"] == pytest.approx([500, 500])
    assert found["tpot"] == pytest.approx(1000 / 5)
    assert "tpot" not in latencies(answer(0, 0.25, 0.5, 1))


def test_percentiles_rates_and_kinds_of_failure():
    answers = [answer(number, number / 1000, 0.01, 5) for number in range(101)]
    answers += [answer(200, 9, 9, 5, error="http 429"), answer(201, 9, 9, 5, error="http 429")]
    answers += [answer(202, 9, 9, 5, error="timeout"), answer(203, 9, 9, 5, left=True)]
    report = summarise([Run(tuple(answers[:50]), 2.0), Run(tuple(answers[50:]), 3.0)])
    assert (report["requests"], report["completed"], report["disconnected"]) == (105, 101, 1)
    assert report["errors"] == {"http 429": 2, "timeout": 1}
    assert report["requests_per_s"] == pytest.approx(101 / 5)
    assert report["output_tokens_per_s"] == pytest.approx(101 * 5 / 5)
    assert (report["prompt_tokens"], report["output_tokens"]) == (7 * 101, 5 * 101)
    assert report["latency_ms"]["ttft"] == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})
    assert report["latency_ms"]["tpot"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), 10))
    assert "goodput_requests_per_s" not in report


def test_slow_readers_count_in_rates_and_not_in_latencies():
    report = summarise([Run((answer(0, 0.1, 0.1, 2), answer(1, 5.0, 5.0, 2, slow=True)), 1.0)])
    assert (report["completed"], report["slow"]) == (2, 1)
    assert report["latency_ms"]["ttft"]["p99"] == pytest.approx(100)


def test_nothing_completed_is_a_report_too():
    report = summarise([Run((answer(0, 1, 1, 2, error="timeout"),), 1.0)], {"ttft": 1.0})
    assert report["latency_ms"] == dict.fromkeys(("ttft", "tpot", "itl", "e2el"))
    assert report["goodput_requests_per_s"] == 0


def test_a_good_request_keeps_all_limits():
    answers = (answer(0, 0.1, 0.01, 5), answer(1, 0.3, 0.01, 5), answer(2, 0.1, 0.2, 5), answer(3, 0.1, 0.01, 1))
    assert summarise([Run(answers, 2.0)], goodput_limits("ttft:200,tpot:50"))["good"] == 2
    report = summarise([Run(answers, 2.0)], goodput_limits("ttft:200, tpot:50, e2e:1000"))
    assert (report["good"], report["goodput_requests_per_s"]) == (2, 1.0)
    assert summarise([Run(answers, 2.0)], goodput_limits("e2el:630"))["good"] == 1


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:nan", "itl:5", "p99:5", "ttft:5,"])
def test_goodput_has_vllms_spelling(text):
    with pytest.raises(InvalidParameterError, match=r"^goodput: expected"):
        goodput_limits(text)
