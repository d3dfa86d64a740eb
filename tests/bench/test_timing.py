"""The timer: sides take turns, warm-up does not count, and a ratio is the median of the rounds' ratios."""

import pytest

from verax.bench import timing
from verax.bench.timing import Samples, interleave


@pytest.fixture
def clock(monkeypatch):
    """A clock that sides move; they take the seconds that they are given, one call after the other."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def side(*seconds):
        left = list(seconds)

        def run():
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return run

    return side


def test_sides_take_turns_and_warm_up_is_not_counted(clock):
    order, reported = [], []
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    samples = interleave(sides, runs=3, warmup=2, report=lambda done, total, note: reported.append((done, total)))
    assert order == ["a", "b"] * 5
    assert {name: len(side.seconds) for name, side in samples.items()} == {"a": 3, "b": 3}
    assert reported[-1] == (10, 10)


def test_warm_up_continues_until_no_side_gets_faster(clock):
    samples = interleave({"steady": clock(1.0), "compiles": clock(9.0, 5.0, 1.0)}, runs=2, warmup=1)
    assert samples["compiles"] == Samples((1.0, 1.0), (9.0, 5.0, 1.0))
    assert samples["steady"] == Samples((1.0, 1.0), (1.0, 1.0, 1.0))


def test_warm_up_ends_even_if_a_side_never_gets_steady(clock):
    samples = interleave({"a": clock(*(0.5**i for i in range(20)))}, runs=1, warmup=1)["a"]
    assert len(samples.warmup) == timing.MOST_WARMUP


def test_a_side_with_loops_is_timed_by_the_call(clock):
    samples = interleave({"a": clock(1.0), "b": clock(1.0, 3.0)}, runs=2, warmup=0, loops={"b": 2})
    assert samples["a"].seconds == (1.0, 1.0)
    assert samples["b"].seconds == (2.0, 3.0)


def test_the_first_call_of_a_turn_can_be_left_out(clock):
    samples = interleave({"cold": clock(5.0, 1.0, 2.0, 5.0, 3.0, 4.0)}, runs=2, warmup=0, loops={"cold": 2}, untimed=1)
    assert samples["cold"].seconds == (1.5, 3.5)


def test_a_drifting_machine_does_not_change_the_ratio():
    # Twice as slow in the second half, for both: the ratio within each round stays 3.
    ours, theirs = Samples((1.0, 1.0, 2.0, 2.0)), Samples((3.0, 3.0, 6.0, 6.0))
    assert ours.ratio_to(theirs) == 3.0
    assert theirs.ratio_to(ours) == 1 / 3


def test_reported_numbers_follow_from_the_samples():
    numbers = Samples((1.0, 2.0, 3.0, 4.0, 10.0), (20.0,)).to_dict(work=30)
    assert numbers["median_s"] == 3.0
    assert numbers["rate"] == 10.0
    assert numbers["p10_s"] == 1.4
    assert numbers["seconds"] == [1.0, 2.0, 3.0, 4.0, 10.0]
    assert numbers["outliers"] == [10.0]  # the quartiles are 2 and 4: beyond 7
    assert numbers["warmup_seconds"] == [20.0]
