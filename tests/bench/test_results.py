"""Results: one file for a subject and processor, one page for all, and what is proven slower between two files."""

import json
from pathlib import Path

import numpy as np
import pytest

from verax.bench import results
from verax.bench.harness import Samples
from verax.bench.results import compare_results, markdown, render
from verax.errors import InvalidParameterError

MACHINE = {"cpu": "AMD EPYC 7-1", "cores": 2, "platform": "cpu", "devices": ["cpu:0"], "jax": "0.10"}
ROOT = Path(__file__).parents[2]


def result(name="short", seconds=(1.0, 2.0), **changes):
    side = Samples(tuple(seconds)).to_dict(10)
    case = {"case": "", "chosen": "verax", "sides": {"verax": side, "torch": side}, "ratios": {"torch": 1.5}}
    tables = [results.sides_table([case], "tokens/s")]
    page = {"title": "Text: short", "intro": "Two prompts.", "tables": tables, "notes": ["A note.", "- one", "- two"]}
    return {"subject": "text", "name": name, "machine": MACHINE, "settings": {}, "cases": [case], **page, **changes}


def test_a_file_has_the_latest_result_of_each_name(tmp_path):
    first = results.write(result(), tmp_path / "new")
    assert first.name == "text-amd-epyc-7-1-2c.json"
    assert results.write(result("long"), tmp_path / "new") == first
    results.write(result(seconds=(3.0, 4.0)), tmp_path / "new")
    read = results.read_results(first)
    assert list(read) == ["short", "long"]
    assert read["short"]["cases"][0]["sides"]["verax"]["seconds"] == [3.0, 4.0]
    assert '"seconds": [ 3.0, 4.0 ]' in first.read_text()  # a line, and not a line a number


def test_a_result_that_was_printed_is_read_like_a_file_of_one(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(result()))
    assert results.read_results(tmp_path / "a.json") == {"short": result()}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"sides": {"a": {"seconds": [1]}}}', '{"subject": "text"}', '{"subject": "text", "results": []}'],
)
def test_a_file_that_is_not_a_result_is_refused(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(InvalidParameterError, match=r"result\.json"):
        results.read_results(tmp_path / "result.json")


def test_a_slug_is_words_with_hyphens():
    assert results.slug("Small-Q4_K_M", "", "int8, int8 cache") == "small-q4-k-m-int8-int8-cache"


def test_the_page_is_what_the_command_makes_of_the_results(bench, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert bench("docs", "--output", tmp_path / "performance.md")[0] == 0
    page = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert page == (ROOT / "docs/performance.md").read_text(encoding="utf-8"), "run `verax bench docs`"


@pytest.fixture
def page(tmp_path):
    """Function from a template to its page, of a folder with two results of embeddings."""
    rows = [["transformers", "1.0"], ["verax", "2.0"]]
    one = {"subject": "embed", "name": "float32", "rate": 222.0, "tables": [{"columns": ["side", "s"], "rows": rows}]}
    content = {"subject": "embed", "results": {"float32": one, "int8": {**one, "name": "int8"}}}
    (tmp_path / "embed-amd-epyc-2c.json").write_text(json.dumps(content))

    def write(text):
        (tmp_path / "template.md").write_text(text)
        return render(tmp_path / "template.md", tmp_path)

    return write


def test_a_page_shows_results_by_file_and_name_and_tables_or_some_of_their_rows(page):
    assert page("{{ names('embed-amd') | join(' ') }}") == "embed-amd-epyc-2c/float32 embed-amd-epyc-2c/int8"
    assert page("{{ result('embed-amd-epyc-2c/float32').rate }}") == "222.0"
    whole = page("{{ table('embed-amd-epyc-2c/int8') }}").split("\n")
    assert whole == ["| side | s |", "|---|---|", "| transformers | 1.0 |", "| verax | 2.0 |"]
    assert page("{{ table('embed-amd-epyc-2c/int8', only=['verax']) }}").split("\n") == [*whole[:2], whole[3]]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{{ result('text') }}", "no result of 'text'; there are embed-amd-epyc-2c/float32"),
        ("{{ table('embed-amd-epyc-2c/int8', only=['verax', 'torch']) }}", "1 of the 2 rows"),
        ("{{ result('embed-amd-epyc-2c/int8').sides }}", "sides"),
        ("{{ nothing }}", "nothing"),
    ],
)
def test_a_page_that_asks_for_what_is_not_there_is_refused(page, text, match):
    with pytest.raises(InvalidParameterError, match=match):
        page(text)


def timed(scale=1.0, runs=10, subject="text", noise=0.02, sides=("verax", "transformers batched"), **changes):
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
    assert verdict_of(timed(), timed(scale)) == verdict


def test_the_interval_belongs_to_the_ratio_of_medians():
    old, new = timed(runs=31, noise=0.1), timed(1.5, runs=30, noise=0.1)
    row = compare_results(old, new)["rows"][0]
    medians = [np.median(r["short"]["cases"][0]["sides"]["verax"]["seconds"]) for r in (old, new)]
    assert row["ratio"] == pytest.approx(medians[1] / medians[0])
    assert row["low"] < row["ratio"] < row["high"]
    # The median of n normal numbers deviates by 1.2533 s / sqrt(n); the interval is 3.92 deviations of the ratio long.
    deviation = row["ratio"] * 0.1 * 1.2533 * (1 / 31 + 1 / 30) ** 0.5
    assert row["high"] - row["low"] == pytest.approx(3.92 * deviation, rel=0.35)


@pytest.mark.parametrize(
    ("seconds", "rates", "verdict"),
    [(1.0, [50.0] * 10, "slower"), (0.01, [0.0] * 10, "slower"), (2.0, [100.0] * 10, "same"), (2.0, None, "slower")],
)
def test_runs_with_rates_are_compared_by_their_work(seconds, rates, verdict):
    """A load of a given duration, a server that fails at once, twice as many requests, and a file without rates."""
    old, new = timed(noise=0), timed(seconds, noise=0)
    for result, given in ((old, [100.0] * 10), (new, rates)):
        if given:
            result["short"]["cases"][0]["sides"]["verax"]["rates"] = given
    assert verdict_of(old, new) == verdict


@pytest.mark.parametrize(("runs", "verdict"), [(1, "undecided"), (3, "undecided"), (4, "slower")])
def test_few_runs_prove_nothing(runs, verdict):
    # 3 runs that are all slower than 3 others: by chance once in ten times.
    assert verdict_of(timed(runs=runs), timed(2.0, runs=runs)) == verdict


def test_every_case_of_a_list_is_compared_by_its_name():
    def ops(*names):
        cases = [{"group": "linear", "case": n, "sides": {"native": {"seconds": [1.0] * 5}}} for n in names]
        return {"a": {"subject": "ops", "machine": {}, "settings": {}, "cases": cases}}

    comparison = compare_results(ops("1 rows", "2 rows"), ops("2 rows", "4 rows"))
    assert [row["name"] for row in comparison["rows"]] == ["a / linear / 2 rows / native"]
    assert comparison["notes"] == [
        "Only in old: a / linear / 1 rows / native.",
        "Only in new: a / linear / 4 rows / native.",
    ]


def test_another_machine_or_a_busy_one_is_named():
    new = timed()
    new["short"] |= {"machine": {"cpu": "B", "jax": "0.10"}, "noise": {"busy": True}}
    comparison = compare_results(timed(), new)
    assert comparison["differing"] == {"cpu": ["A", "B"], "noise": ["quiet", "busy"]}
    assert "cpu: A and B" in markdown(comparison)


@pytest.mark.parametrize(
    ("new", "options", "match"),
    [
        (timed(subject="ops"), {}, "expected a result of bench text, got one of bench ops"),
        (timed(sides=("other",)), {}, "none of its sides is in old"),
        (timed(cases=[]), {}, "new: no timed result"),
        (timed(), {"threshold": 1.5}, "threshold"),
    ],
)
def test_what_cannot_be_compared_is_refused(new, options, match):
    with pytest.raises(InvalidParameterError, match=match):
        compare_results(timed(), new, **options)


@pytest.mark.parametrize(("scale", "status"), [(1.2, 1), (1.0, 0)])
def test_the_command_fails_if_a_side_of_ours_is_slower(bench, tmp_path, scale, status):
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, (timed(), timed(scale)), strict=True):
        path.write_text(json.dumps({"subject": "text", "results": content}))
    ended, out, _ = bench("compare", *paths, "--json")
    assert (ended, json.loads(out)["regressions"]) == (status, ["short / verax"] * status)  # and not the baseline's
    assert ("**slower**" in bench("compare", *paths)[1]) == bool(status)


@pytest.mark.filterwarnings("error")
def test_a_side_that_finished_nothing_in_both_is_undecided():
    old = timed()
    old["short"]["cases"][0]["sides"]["verax"]["rates"] = [0.0] * 10
    assert verdict_of(old, old) == "undecided"


def test_json_has_none_for_a_run_that_finished_nothing(bench, tmp_path):
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, rate in zip(paths, (100.0, 0.0), strict=True):
        content = timed()
        content["short"]["cases"][0]["sides"]["verax"]["rates"] = [rate] * 10
        path.write_text(json.dumps({"subject": "text", "results": content}))
    _, out, _ = bench("compare", *paths, "--json")
    row = json.loads(out, parse_constant=pytest.fail)["rows"][0]
    assert (row["verdict"], row["new_s"], row["ratio"]) == ("slower", None, None)
