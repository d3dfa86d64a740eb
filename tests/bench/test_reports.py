"""The earlier ports, measured again: sections become tables, failures are named, pages join those of earlier runs."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from verax import cli
from verax.bench import reports
from verax.bench.results import markdown
from verax.compare.align import Alignment
from verax.compare.comparison import Comparison, Errors, Row
from verax.compare.videos import compare_clips
from verax.errors import InvalidParameterError, MissingDependencyError

LIMITS = {"memory_bandwidth_gb_per_s": 50.0, "matmul_float32_gflop_per_s": 400, "matmul_bfloat16_gflop_per_s": 800}


@pytest.fixture(autouse=True)
def _no_measurement_of_the_machine(monkeypatch):
    monkeypatch.setattr("verax.machine.measure_machine", lambda: LIMITS)
    monkeypatch.setattr("verax.bench.harness.measure_noise", lambda: {"spread": 0.02, "others": 0.0, "busy": False})


@pytest.fixture
def sections(monkeypatch):
    """Two reports, of which sections work, lack a library, or need too much memory."""

    def works(quick):
        rows = [["verax", "quick" if quick else "whole"]]
        yield {"machine": {"torch": "9"}, "tables": [{"title": "Speed", "columns": ["side", "s"], "rows": rows}]}

    def lacks(quick):
        yield {"machine": {}, "tables": []}
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
    assert [table.get("why_not") for table in one["tables"]] == [None, "needs torch: pip install it."]
    assert two["tables"][0]["why_not"].startswith("RESOURCE_EXHAUSTED")
    assert one["machine"]["torch"] == "9"
    page = markdown(one)
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
    assert json.loads((tmp_path / "one.json").read_text())["tables"][0]["rows"] == [["verax", "quick"]]


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


def test_the_sections_are_cases_of_the_other_benchmarks(monkeypatch):
    asked = {}
    for name in ("bench_video", "bench_text", "bench_ops", "bench_delta"):
        monkeypatch.setattr(reports, name, lambda *args, name=name, **options: asked.setdefault(name, options))
    for make in (reports.speed_results, reports.generation_results, reports.paged_results, reports.delta_results):
        list(make(True))
    assert asked["bench_video"]["against"] == ("diffusers",)
    assert asked["bench_text"]["against"] == ("transformers",)
    assert asked["bench_ops"]["operations"] == ["paged"]
    assert (asked["bench_delta"]["sections"], len(asked["bench_delta"]["configurations"])) == (("rule", "layer"), 2)


def test_clips_are_compared_overall_by_frame_and_by_pixel(monkeypatch):
    first = np.full((13, 16, 16, 3), 0.5, np.float32)
    off = {"float32": 1e-4, "bfloat16": 1e-2}

    def compared(model, clip, *, dtype):
        assert (clip.num_frames, clip.num_inference_steps) == (13, 5)
        return SimpleNamespace(comparison=compare_clips(first, first + np.float32(off[dtype])))

    monkeypatch.setattr(reports, "compare_pipelines", compared)
    monkeypatch.setattr(reports, "_versions", lambda: {"torch": "2"})
    (result,) = reports.frame_results(True)
    overall, frames, pixels = (one["rows"] for one in result["tables"])
    assert [row[:3] for row in overall] == [["float32", "1.0e-08", "80.00"], ["bfloat16", "1.0e-04", "40.00"]]
    assert [row[0] for row in frames] == [str(i) for i in range(1, 14)]
    assert frames[12][1:3] == ["1.0e-08", "80.00"]
    assert pixels[1] == ["bfloat16", "1%", "1%", "1%", "1%", "2%"]
    assert result["machine"] == {"torch": "2"}


def test_the_layers_with_the_largest_errors_are_shown_in_their_order():
    sizes = [3, 20, 1, 19, *range(4, 17), 2]
    rows = [
        Row(f"l{i}", f"l{i}", "float32", "float32", Errors(size, size, size, 1, True)) for i, size in enumerate(sizes)
    ]
    rows.append(Row("(output)", "(output)", "float32", "float32", Errors(0, 0, 0, 1, True)))
    table = reports._layers("title", Comparison("two models", rows, Alignment([])))
    assert [row[0] for row in table["rows"]] == ["l1", "l3", *(f"l{i}" for i in range(7, 17)), "(output)"]
    assert "different" in table["note"]
