"""Two files of results compared: what is proven slower, what cannot be known, and what does not count."""

import json

import numpy as np
import pytest

from verax.bench.compare import compare_results, render
from verax.errors import InvalidParameterError


def result(scale=1.0, runs=10, subject="text", noise=0.02, sides=("verax", "transformers batched"), **changes):
    """Results with runs of about one second, of our side and of a baseline; `scale` is our side's."""
    seconds = list(scale * (1 + noise * np.random.default_rng(runs).standard_normal(runs)))
    machine = {"cpu": "A", "jax": "0.10"}
    case = {"case": "", "sides": {name: {"seconds": seconds} for name in sides}}
    one = {"subject": subject, "name": "short", "machine": machine, "settings": {"runs": runs}, "cases": [case]}
    return {"short": {**one, **changes}}


def verdict_of(old, new):
    return next(row["verdict"] for row in compare_results(old, new)["rows"] if row["name"] == "short / verax")


@pytest.mark.parametrize(("scale", "verdict"), [(1.2, "slower"), (0.8, "faster"), (1.0, "same"), (1.05, "undecided")])
def test_a_change_beyond_the_threshold_is_distinguished_from_none(scale, verdict):
    assert verdict_of(result(), result(scale)) == verdict


def test_only_our_sides_are_regressions():
    comparison = compare_results(result(), result(1.2))
    assert comparison["regressions"] == ["short / verax"]
    assert [row["ours"] for row in comparison["rows"]] == [True, False]


def test_the_interval_belongs_to_the_ratio_of_medians():
    old, new = result(runs=31, noise=0.1), result(1.5, runs=30, noise=0.1)
    row = compare_results(old, new)["rows"][0]
    medians = [np.median(r["short"]["cases"][0]["sides"]["verax"]["seconds"]) for r in (old, new)]
    assert row["ratio"] == pytest.approx(medians[1] / medians[0])
    assert row["low"] < row["ratio"] < row["high"]
    # The median of n normal numbers deviates by 1.2533 s / sqrt(n); the interval is 3.92 deviations of the ratio long.
    deviation = row["ratio"] * 0.1 * 1.2533 * (1 / 31 + 1 / 30) ** 0.5
    assert row["high"] - row["low"] == pytest.approx(3.92 * deviation, rel=0.35)


@pytest.mark.parametrize(("runs", "verdict"), [(1, "undecided"), (3, "undecided"), (4, "slower")])
def test_few_runs_prove_nothing(runs, verdict):
    # 3 runs that are all slower than 3 others: by chance once in ten times.
    assert verdict_of(result(runs=runs), result(2.0, runs=runs)) == verdict


def test_every_case_of_a_list_is_compared_by_its_name():
    def ops(*names):
        cases = [{"group": "linear", "case": n, "sides": {"native": {"seconds": [1.0] * 5}}} for n in names]
        return {"a": {"subject": "ops", "machine": {}, "settings": {}, "cases": cases}}

    comparison = compare_results(ops("1 rows", "2 rows"), ops("2 rows", "4 rows"))
    assert [row["name"] for row in comparison["rows"]] == ["a / linear / 2 rows / native"]
    assert comparison["only_in_old"] == ["a / linear / 1 rows / native"]
    assert "Only in new: a / linear / 4 rows / native." in render(comparison)


def test_another_machine_or_a_busy_one_is_named():
    new = result()
    new["short"] |= {"machine": {"cpu": "B", "jax": "0.10"}, "noise": {"busy": True}}
    comparison = compare_results(result(), new)
    assert comparison["differing"] == {"cpu": ["A", "B"], "noise of new": ["quiet", "busy"]}
    assert "cpu: A and B" in render(comparison)


@pytest.mark.parametrize(
    ("new", "how", "match"),
    [
        (result(subject="ops"), {}, "expected a result of bench text, got one of bench ops"),
        (result(sides=("other",)), {}, "none of its sides is in old"),
        (result(cases=[]), {}, "new: no timed result"),
        (result(), {"threshold": 1.5}, "threshold"),
    ],
)
def test_what_cannot_be_compared_is_refused(new, how, match):
    with pytest.raises(InvalidParameterError, match=match):
        compare_results(result(), new, **how)


@pytest.mark.parametrize(("scale", "status"), [(1.2, 1), (1.0, 0)])
def test_the_command_fails_if_a_side_of_ours_is_slower(bench, tmp_path, scale, status):
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, (result(), result(scale)), strict=True):
        path.write_text(json.dumps({"subject": "text", "results": content}))
    ended, out, _ = bench("compare", *paths)
    assert (ended, "**slower**" in out) == (status, bool(status))
