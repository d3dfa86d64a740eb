"""The earlier ports, measured again: sections become tables, failures are named, pages join earlier ones."""

import json
import sys

import pytest

from verax import cli
from verax.bench import reports
from verax.bench.results import markdown
from verax.errors import InvalidParameterError

RESULT = {
    "intro": "Work.",
    "machine": {"torch": "9"},
    "measured": {},
    "noise": {"spread": 0.02, "others": 0.0, "busy": False},
    "tables": [{"title": "", "columns": ["side", "s"], "rows": [["verax", "1"]]}],
}


@pytest.fixture
def asked(monkeypatch):
    """Two reports, of which one section works and one fails."""
    commands = []

    def run(words, log, seconds):
        commands.append(" ".join(words))
        if "ops" in words:
            return {"result": None, "error": "needs torch: pip install it", "note": "", "seconds": 1.0}
        return {"result": RESULT, "error": "", "note": "", "seconds": 1.0}

    chosen = {
        "one": reports.Report("One", "About one.", {"speed": ("text --runs 5", "--runs 1"), "parity": ("ops", "")}),
        "two": reports.Report("Two", "About two.", {"memory": ("ops --only paged", "")}),
    }
    monkeypatch.setattr(reports, "REPORTS", chosen)
    monkeypatch.setattr(reports, "run_command", run)
    return commands


def test_a_section_that_cannot_run_is_a_table_with_the_reason(asked):
    (one,) = reports.bench_reports(only=["one"], quick=True)
    assert asked == ["-m verax bench text --runs 5 --runs 1 --json", "-m verax bench ops --json"]
    page = markdown(one)
    assert "## Speed\n\nWork.\n\n| side | s |" in page
    assert "**Not run**: needs torch: pip install it." in page


def test_pages_join_the_pages_of_earlier_runs(asked, tmp_path):
    reports.write_reports(reports.bench_reports(only=["one"], quick=True), tmp_path)
    before = (tmp_path / "one.md").read_text()
    reports.write_reports(reports.bench_reports(only=["two"]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "one.json", "one.md", "two.json", "two.md"]
    assert (tmp_path / "one.md").read_text() == before
    index = (tmp_path / "README.md").read_text()
    assert "[One](one.md) | 1 | 1 |" in index
    assert "[Two](two.md) | 0 | 1 |" in index
    assert "`verax bench reports --quick --only one`" in index
    assert json.loads((tmp_path / "one.json").read_text())["tables"][0]["rows"] == [["verax", "1"]]


def test_an_unknown_report_is_refused(asked):
    with pytest.raises(InvalidParameterError, match="only: expected one, two, got 'three'"):
        reports.bench_reports(only=["three"])


def test_the_command_writes_pages(asked, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "reports", "--quick", "--only", "one", "-o", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "| verax | 1 |" in (tmp_path / "one.md").read_text()
    assert "measuring one: speed" in capsys.readouterr().err
