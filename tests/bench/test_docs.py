"""The page of measurements is made of the results in the repository, and of nothing else."""

import json
import sys
from pathlib import Path

import pytest

from verax import cli
from verax.bench.docs import Results, render
from verax.errors import InvalidParameterError

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_command_makes_of_the_results(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "docs", "--output", str(tmp_path / "performance.md")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    made = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert made == (ROOT / "docs/performance.md").read_text(encoding="utf-8"), "run `verax bench docs`"


@pytest.fixture
def folder(tmp_path):
    """A folder with two results of embeddings."""
    rows = [["transformers", "1.0"], ["verax", "2.0"]]
    one = {"subject": "embed", "name": "float32", "rate": 222.0, "tables": [{"columns": ["side", "s"], "rows": rows}]}
    content = {"subject": "embed", "results": {"float32": one, "int8": {**one, "name": "int8"}}}
    (tmp_path / "embed-amd-epyc-2c.json").write_text(json.dumps(content))
    return tmp_path


def page(folder, text):
    template = folder / "template.md"
    template.write_text(text)
    return render(template, folder)


def test_a_result_is_found_by_its_file_and_name(folder):
    assert Results(folder).names("embed-amd") == ["embed-amd-epyc-2c/float32", "embed-amd-epyc-2c/int8"]
    assert page(folder, "{{ result('embed-amd-epyc-2c/float32').rate }}") == "222.0"


def test_a_table_is_a_whole_one_of_the_result_or_some_of_its_rows(folder):
    whole = page(folder, "{{ table('embed-amd-epyc-2c/int8') }}").split("\n")
    assert whole == ["| side | s |", "|---|---|", "| transformers | 1.0 |", "| verax | 2.0 |"]
    assert page(folder, "{{ table('embed-amd-epyc-2c/int8', only=['verax']) }}").split("\n") == [*whole[:2], whole[3]]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{{ result('text') }}", "no result of 'text'; there are embed-amd-epyc-2c/float32"),
        ("{{ table('embed-amd-epyc-2c/int8', only=['verax', 'torch']) }}", "1 of the 2 rows"),
        ("{{ result('embed-amd-epyc-2c/int8').sides }}", "sides"),
        ("{{ nothing }}", "nothing"),
    ],
)
def test_a_page_that_asks_for_what_is_not_there_is_refused(folder, text, match):
    with pytest.raises(InvalidParameterError, match=match):
        page(folder, text)
