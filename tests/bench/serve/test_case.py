"""A case: what a server adds to the time to first token, ratios with their spread, and progress within a turn."""

import pytest

from tests.bench.serve.test_summary import answer
from verax.bench.serve import case as module
from verax.bench.serve.case import added_ttft
from verax.bench.serve.load import Run


def run(*answers, seconds=1.0):
    return Run(answers, seconds)


def test_the_added_time_is_that_of_each_request_beside_itself():
    server = [run(answer(0, 0.5, 0.1, 3), answer(1, 0.3, 0.1, 3)), run(answer(0, 0.25, 0.1, 3))]
    engine = [run(answer(0, 0.4, 0.1, 3), answer(1, 0.1, 0.1, 3)), run(answer(0, 0.2, 0.1, 3))]
    added = added_ttft(server, engine)
    assert added["requests"] == 3
    assert added["rounds_p50"] == pytest.approx([150.0, 50.0])
    assert added["p50"] == pytest.approx(100.0)
    assert added["mean"] == pytest.approx(350 / 3)


def test_requests_that_failed_left_or_read_slowly_on_either_side_are_no_pair():
    whole = [answer(number, 0.1, 0.1, 3) for number in range(4)]
    broken = [
        answer(0, 9.0, 0.1, 3, error="timeout"),
        answer(1, 9.0, 0.1, 3, left=True),
        answer(2, 9.0, 0.1, 3, slow=True),
        answer(3, 0.3, 0.1, 3),
    ]
    for server, engine, added in ((broken, whole, 200.0), (whole, broken, -200.0)):
        found = added_ttft([run(*server)], [run(*engine)])
        assert (found["requests"], found["p50"]) == (1, pytest.approx(added))
    assert added_ttft([run(broken[0])], [run(whole[0])]) is None


def test_a_ratio_is_that_of_the_tokens_per_second_of_each_round():
    ours = [run(answer(0, 0, 0, 10), seconds=s) for s in (1.0, 2.0, 1.0)]
    theirs = [run(answer(0, 0, 0, 10), seconds=s) for s in (2.0, 2.0, 3.0)]
    found = module._ratios({"ours": ours, "theirs": theirs}, "ours")
    assert found["ratios"] == {"ours / theirs": pytest.approx(2.0)}
    assert found["ratio_p10_p90"] == {"ours / theirs": pytest.approx([1.2, 2.8])}


def test_a_side_that_completed_nothing_has_no_ratio():
    failed = [run(answer(0, 0, 0, 10, error="http 429"))]
    assert module._ratios({"ours": [run(answer(0, 0, 0, 10))], "theirs": failed}, "ours")["ratios"] == {}


def test_latencies_of_the_server_are_over_those_of_each_side():
    spread = lambda p50, p99: {"mean": 0.0, "p50": p50, "p90": 0.0, "p99": p99}
    ours = {"ttft": spread(3.0, 8.0), "tpot": spread(1.0, 1.0), "itl": spread(1.0, 2.0), "e2el": spread(9.0, 9.0)}
    theirs = {"ttft": spread(2.0, 4.0), "tpot": None, "itl": spread(0.0, 1.0), "e2el": spread(9.0, 18.0)}
    found = module._latency_ratios({"theirs": {"latency_ms": theirs}, "ours": {"latency_ms": ours}}, "ours")
    assert found == {
        "ours / theirs": {"ttft": {"p50": 1.5, "p99": 2.0}, "itl": {"p99": 2.0}, "e2el": {"p50": 1.0, "p99": 0.5}}
    }


def test_answers_within_a_turn_are_shown_now_and_then(monkeypatch):
    now = iter([1.0, 1.05, 1.1, 1.3])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    shown = []
    bar = module._Shown(lambda done, total, note="": shown.append((done, total, note)))
    count = bar.counter("server")
    count()
    bar.turn(1, 4, "server 2.00 s")
    for _ in range(3):
        count()
    assert shown == [(0, None, "server: 1 answers"), (1, 4, "server 2.00 s"), (1, 4, "server: 4 answers")]
