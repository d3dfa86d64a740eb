"""The timer: sides take turns, warm-up does not count, and a ratio is that of each round."""

from verax.bench.timing import Samples, interleave


def test_sides_take_turns_and_warm_up_is_not_counted():
    order, reported = [], []
    sides = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    samples = interleave(sides, runs=3, warmup=2, report=lambda done, total, note: reported.append((done, total)))
    assert order == ["a", "b"] * 5
    assert {name: len(side.seconds) for name, side in samples.items()} == {"a": 3, "b": 3}
    assert reported[-1] == (10, 10)


def test_a_drifting_machine_does_not_change_the_ratio():
    # Twice as slow in the second half, for both: the ratio within each round stays 3.
    ours, theirs = Samples((1.0, 1.0, 2.0, 2.0)), Samples((3.0, 3.0, 6.0, 6.0))
    assert ours.ratio_to(theirs) == 3.0
    assert theirs.ratio_to(ours) == 1 / 3


def test_reported_numbers_are_those_of_the_samples():
    numbers = Samples((1.0, 2.0, 3.0, 4.0, 10.0)).to_dict(work=30)
    assert numbers["median_s"] == 3.0
    assert numbers["rate"] == 10.0
    assert numbers["p10_s"] == 1.4
    assert numbers["seconds"] == [1.0, 2.0, 3.0, 4.0, 10.0]
