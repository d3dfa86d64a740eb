"""Results: one file for a subject and processor, with the latest of each name, and one page for all."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from verax.bench import results
from verax.bench.harness import Samples
from verax.bench.results import render
from verax.errors import InvalidParameterError

MACHINE = {"cpu": "AMD EPYC 7-1", "cores": 2, "platform": "cpu", "devices": ["cpu:0"], "jax": "0.10"}
ROOT = Path(__file__).parents[2]


def result(name="short", seconds=(1.0, 2.0), **changes):
    side = Samples(tuple(seconds)).to_dict(10)
    case = {"case": "", "chosen": "verax", "sides": {"verax": side, "torch": side}, "ratios": {"torch": 1.5}}
    tables = [results.side_table(case, "tokens/s", digits=2, rate_digits=1)]
    page = {"title": "Text: short", "intro": "Two prompts.", "tables": tables, "notes": ["A note.", "- one", "- two"]}
    return {"subject": "text", "name": name, "machine": MACHINE, "settings": {}, "cases": [case], **page, **changes}


def test_a_file_has_the_latest_result_of_each_name(tmp_path):
    first = results.write(result(), tmp_path / "new", now=datetime(2026, 1, 2))
    assert first.name == "text-amd-epyc-7-1-2c.json"
    assert results.write(result("long"), tmp_path / "new") == first
    results.write(result(seconds=(3.0, 4.0)), tmp_path / "new", now=datetime(2026, 1, 3, 4, 5))
    read = results.read_results(first)
    assert list(read) == ["short", "long"]
    assert read["short"]["cases"][0]["sides"]["verax"]["seconds"] == [3.0, 4.0]
    assert read["short"]["date"] == "2026-01-03 04:05 UTC"
    assert '"seconds": [ 3.0, 4.0 ]' in first.read_text()  # a line, and not a line a number


def test_a_result_that_was_printed_is_read_like_a_file_of_one(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(result()))
    assert results.read_results(tmp_path / "a.json") == {"short": result()}


@pytest.mark.parametrize("text", ["{", "[]", '{"sides": {"a": {"seconds": [1]}}}'])
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
