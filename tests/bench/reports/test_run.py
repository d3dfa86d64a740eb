"""The earlier ports, measured again: sections become tables, failures are named, pages join those of earlier runs."""

import json
import sys

import jax
import pytest

from verax import cli
from verax.bench.reports import run as reports
from verax.bench.reports import text
from verax.bench.reports.tables import Table
from verax.errors import InvalidParameterError, MissingDependencyError

LIMITS = {"memory_bandwidth_gb_per_s": 50.0, "matmul_float32_gflop_per_s": 400, "matmul_bfloat16_gflop_per_s": 800}


def side(median, **more):
    return {"median_s": median, "p10_s": median, "p90_s": median, "rate": 8 / median, "seconds": [median] * 3, **more}


@pytest.fixture(autouse=True)
def _no_measurement_of_the_machine(monkeypatch):
    monkeypatch.setattr("verax.machine.measure_machine", lambda: LIMITS)
    monkeypatch.setattr("verax.bench.harness.measure_noise", lambda: {"spread": 0.02, "others": 0.0, "busy": False})


@pytest.fixture
def sections(monkeypatch):
    """Two reports, of which sections work, lack a library, or need too much memory."""

    def works(quick):
        result = {"machine": {"torch": "9"}, "sides": {"verax": side(1.0)}}
        return [Table("Speed", ["side", "s"], [["verax", "quick" if quick else "whole"]], "How.")], result

    def lacks(quick):
        raise MissingDependencyError("needs torch: pip install it")

    def grows(quick):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    made = {
        "one": reports.Report("One", "About one.", {"speed": works, "parity": lacks}),
        "two": reports.Report("Two", "About two.", {"memory": grows}),
    }
    monkeypatch.setattr(reports, "REPORTS", made)


def test_what_cannot_run_is_a_table_that_says_why(sections):
    one, two = reports.bench_reports(only=["one", "two"])
    assert [table["why_not"] for table in one["tables"]] == [None, "needs torch: pip install it."]
    assert two["tables"][0]["why_not"].startswith("RESOURCE_EXHAUSTED")
    assert one["machine"]["torch"] == "9"
    assert list(one["results"]) == ["speed"]
    page = reports.render({**one, "date": "today"})
    assert "| verax | whole |" in page
    assert "**Not run**: needs torch: pip install it." in page


def test_pages_join_those_of_earlier_runs(sections, tmp_path):
    reports.write_reports(reports.bench_reports(only=["one"], quick=True), tmp_path)
    before = (tmp_path / "one.md").read_text()
    reports.write_reports(reports.bench_reports(only=["two"]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "one.json", "one.md", "two.json", "two.md"]
    assert (tmp_path / "one.md").read_text() == before
    index = (tmp_path / "README.md").read_text()
    assert "[One](one.md) | 1 | 1 |" in index
    assert "[Two](two.md) | 0 | 1 |" in index
    assert "`verax bench reports --quick --only one`" in index
    assert json.loads((tmp_path / "one.json").read_text())["results"]["speed"]["sides"]["verax"]["seconds"]


def test_an_unknown_report_is_refused(sections):
    with pytest.raises(InvalidParameterError, match="only: expected one, two, got 'three'"):
        reports.bench_reports(only=["three"])


def test_the_command_writes_pages(sections, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "reports", "--quick", "--only", "one", "-o", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "| verax | quick |" in (tmp_path / "one.md").read_text()
    assert "measuring one: speed" in capsys.readouterr().err


def test_generation_is_set_against_one_prompt_at_a_time(monkeypatch):
    sides = {"transformers naive": side(4.0), "transformers batched": side(2.0), "verax": side(1.0)}
    settings = {"dtype": "bfloat16", "requests": 4, "temperature": 0.7}
    result = {"sides": sides, "settings": settings, "start_up": {"compile_s": 3.0}}
    monkeypatch.setattr(text, "bench_text", lambda *args, **kwargs: result)
    (table,), _ = text.generation_tables(True)
    assert [row[-1] for row in table.rows] == ["1.00x", "2.00x", "4.00x"]
    assert table.rows[2][:2] == ["**verax**", "1.00"]


def test_paged_attention_has_a_row_for_each_batch(monkeypatch):
    make = text.paged_decode_case
    monkeypatch.setattr(text, "BATCHES", (1, 3))
    monkeypatch.setattr(text, "CACHED", 20)
    monkeypatch.setattr(
        text, "paged_decode_case", lambda rows, length: make(rows, length, heads=2, kv_heads=1, size=16)
    )
    (table,), result = text.paged_tables(True)
    assert [row[0] for row in table.rows] == ["1", "3"]
    chosen = result["cases"][1]["runs"]
    assert table.rows[1][1] == chosen
    assert (table.rows[1][5] != "") == (chosen != "reference")


def test_the_delta_rule_is_set_against_torch_and_cython(monkeypatch):
    case = {
        "case": "Medium",
        "runs": "verax native",
        "sides": {"verax native": side(0.001), "torch": side(0.004)},
        "ratios": {"torch": 4.0},
    }
    cases = [{**case, "section": section} for section in ("rule", "layer")]
    result = {"cases": cases, "skipped": {"cython": "Cython is not installed"}}
    monkeypatch.setattr(text, "bench_delta", lambda **kwargs: result)
    rule, layer, large, other, skipped = text.delta_tables(True)[0]
    assert rule.rows == [["Medium", "2", "8", "128", "1.00 (verax native)", "4.00", "not run", "4.00x", ""]]
    assert layer.rows == rule.rows
    assert (large.title, large.why_not) == ("CPU: Large", "--quick leaves it out.")
    assert other.why_not == "JAX finds no GPU on this machine."
    assert "Cython is not installed" in skipped.why_not
