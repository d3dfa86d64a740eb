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
    """Two results of embeddings, a day apart, as `results.write` names them."""
    for day, rate in (("20", 111.0), ("21", 222.0)):
        sides = {name: dict(median_s=1.0, p10_s=1.0, p90_s=1.0, rate=rate) for name in ("transformers", "verax")}
        settings = dict.fromkeys(("model", "dtype", "shortest", "longest", "tokens", "sentences", "batch_size"), 1)
        result = {
            "kind": "embed",
            "machine": {},
            "settings": {**settings, "runs": 10, "warmup": 1},
            "first_s": 1.0,
            "compiled_during_runs": 0,
            "sides": sides,
            "ratios": {},
        }
        (tmp_path / f"2026-11-{day}-amd-epyc-2c-embed-float32.json").write_text(json.dumps(result))
    return tmp_path


def page(folder, text):
    template = folder / "template.md"
    template.write_text(text)
    return render(template, folder)


def test_the_latest_result_of_a_name_is_taken(folder):
    assert Results(folder).names("emb") == ["embed-float32"]
    assert page(folder, "{{ result('embed-float32').sides.verax.rate }}") == "222.0"


def test_a_table_is_that_of_the_results_own_page_or_some_rows_of_it(folder):
    whole = page(folder, "{{ table('embed-float32') }}").split("\n")
    assert [line.split("|")[1].strip() for line in whole] == ["side", "---", "transformers", "verax"]
    assert page(folder, "{{ table('embed-float32', only=['verax']) }}").split("\n") == [*whole[:2], whole[3]]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{{ result('text').sides }}", "no result of 'text'; there are embed-float32"),
        ("{{ table('embed-float32', only=['verax', 'torch']) }}", "1 of the 2 rows"),
        ("{{ result('embed-float32').sides.torch.rate }}", "torch"),
        ("{{ nothing }}", "nothing"),
    ],
)
def test_a_page_that_asks_for_what_is_not_there_is_refused(folder, text, match):
    with pytest.raises(InvalidParameterError, match=match):
        page(folder, text)
