"""A run of lines: results in their order, wrong lines, calls that grow, and starts behind what is there."""

import json

import msgspec
import pytest

from verax.batch import results as module
from verax.batch.lines import InputFile, LineError
from verax.batch.results import LineRun, ResultFile
from verax.batch.work import VectorLine

GOOD = [{"custom_id": name, "text": name} for name in "abcdefgh"]


def results_in(folder):
    return [json.loads(text) for text in (folder / "out.jsonl").read_bytes().splitlines()]


def names_in(folder):
    return [result["custom_id"] for result in results_in(folder)]


@pytest.fixture
def run_lines(tmp_path):
    """Runs lines into out.jsonl, and gives the run and the lines of each call."""

    def run(lines, *, fails=(), dies_at=None, retry_errors=False, **sizes):
        calls = []

        def work(some):
            calls.append([line.custom_id for line in some])
            if dies_at in calls[-1]:
                raise KeyboardInterrupt
            return [
                VectorLine.failure(LineError("invalid_request", "wrong", None, None), line.custom_id)
                if line.custom_id in fails
                else VectorLine(line.custom_id, msgspec.Raw(b"[1.0]"), None)
                for line in some
            ]

        path = tmp_path / "in.jsonl"
        path.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines))
        with_results = ResultFile.open(tmp_path / "out.jsonl", VectorLine, retry_errors=retry_errors)
        run = LineRun(InputFile(path, "text"), with_results, work, **sizes)
        try:
            run.run()
        except KeyboardInterrupt:
            assert not run.complete
        finally:
            with_results.file.close()
        return run, calls

    return run


def counts(run):
    return run.counts.done, run.counts.failed, run.counts.skipped


def test_results_are_in_the_order_of_the_lines_with_an_error_for_each_wrong_one(run_lines, tmp_path):
    lines = [GOOD[0], "{no\n", GOOD[1], "\n", GOOD[0], GOOD[2]]
    run, _ = run_lines(lines, fails="b", least=4, most=4)
    assert (run.complete, *counts(run)) == (True, 2, 3, 0)
    assert run.counts.bytes == (tmp_path / "in.jsonl").stat().st_size
    assert names_in(tmp_path) == ["a", None, "b", "a", "c"]
    errors = [result["error"] and (result["error"]["code"], result["error"]["line"]) for result in results_in(tmp_path)]
    expected = [("invalid_json_line", 2), ("invalid_request", None), ("duplicate_custom_id", 5)]
    assert errors == [None, *expected, None]


def test_a_second_run_does_nothing_again_but_errors_if_asked(run_lines, tmp_path):
    lines = [GOOD[0], "{no\n", GOOD[1], GOOD[0], GOOD[2]]
    run_lines(lines, fails="b")
    before = (tmp_path / "out.jsonl").read_bytes()
    run, calls = run_lines(lines)
    assert (*counts(run), calls) == (0, 0, 5, [])
    assert (tmp_path / "out.jsonl").read_bytes() == before
    run, calls = run_lines([*lines, GOOD[3]], retry_errors=True)
    assert (*counts(run), calls) == (2, 2, 2, [["b"], ["d"]])
    assert names_in(tmp_path) == ["a", "c", None, "b", "a", "d"]


def test_after_an_end_in_the_middle_of_a_call_no_line_is_lost_or_doubled(run_lines, tmp_path):
    run_lines(GOOD, least=2, most=2, dies_at="f")
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b'{"custom_id":"e","embe')  # what a full disk leaves
    run, calls = run_lines(GOOD, least=2, most=2)
    assert (*counts(run), calls) == (4, 0, 4, [["e", "f"], ["g", "h"]])
    assert names_in(tmp_path) == list("abcdefgh")


def test_calls_grow_while_they_are_short(run_lines, monkeypatch):
    _, calls = run_lines(GOOD, least=1, most=4)
    assert calls == [["a"], ["b", "c"], ["d", "e", "f", "g"], ["h"]]
    monkeypatch.setattr(module, "SHORT", 0.0)
    _, calls = run_lines([{**one, "custom_id": one["custom_id"] * 2} for one in GOOD], least=2, most=4)
    assert [len(call) for call in calls] == [2, 2, 2, 2]
