"""The file of results: what is read back, a line that was cut off, files of others, and two writers."""

import json

import msgspec
import pytest

from verax.batch.lines import bad_line
from verax.batch.requests import AnswerLine, LineResponse
from verax.batch.results import ResultFile
from verax.errors import InvalidParameterError

GOOD = AnswerLine.of("good", LineResponse(200, "r1", msgspec.Raw(b'{"text": "a\\nb"}')))
REFUSED = AnswerLine.of("refused", LineResponse(400, "r2", msgspec.Raw(b'{"error": {}}')))
BROKEN = AnswerLine.failure(bad_line("invalid_json_line", "it is no JSON", 3))


@pytest.fixture
def path(tmp_path):
    output = ResultFile.open(tmp_path / "out.jsonl", AnswerLine)
    for answer in (GOOD, REFUSED, BROKEN):
        output.write(answer)
    output.file.close()
    return tmp_path / "out.jsonl"


def test_a_line_is_in_the_file_once_it_is_written(path):
    output = ResultFile.open(path, AnswerLine)
    output.write(AnswerLine.of("next", GOOD.response))
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == ["good", "refused", None, "next"]
    assert lines[3]["response"]["body"] == {"text": "a\nb"}


def test_answers_are_known_by_their_id_and_wrong_lines_by_their_number(path):
    output = ResultFile.open(path, AnswerLine)
    assert (output.answered, output.bad_lines, output.num_failed) == ({"good", "refused"}, {3}, 2)


def test_errors_are_removed_to_run_again(path):
    before = path.read_bytes().splitlines(keepends=True)
    output = ResultFile.open(path, AnswerLine, retry_errors=True)
    assert (output.answered, output.bad_lines, output.num_failed) == ({"good"}, set(), 0)
    output.write(REFUSED)
    output.file.close()
    assert path.read_bytes() == before[0] + before[1]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("retry_errors", [False, True])
@pytest.mark.parametrize("kept", [1, 8, 60])
def test_a_line_that_was_cut_off_is_removed(path, kept, retry_errors):
    whole = path.read_bytes()
    path.write_bytes(whole + msgspec.json.encode(GOOD)[:kept])
    output = ResultFile.open(path, AnswerLine, retry_errors=retry_errors)
    assert output.answered == ({"good"} if retry_errors else {"good", "refused"})
    output.file.close()
    assert path.read_bytes() == (whole.splitlines(keepends=True)[0] if retry_errors else whole)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b'{"custom_id": "a", "method": "POST"}\n', "line 1"),
        (b"notes of mine", "its last line"),
        (b'{"id": 1', "its last line"),
        (b"\xff\n", "line 1"),
    ],
)
@pytest.mark.parametrize("retry_errors", [False, True])
def test_a_file_of_somebody_else_stays_as_it_is(tmp_path, text, where, retry_errors):
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(InvalidParameterError, match=f"notes.txt: {where} is not a result of this command"):
        ResultFile.open(path, AnswerLine, retry_errors=retry_errors)
    assert path.read_bytes() == text


@pytest.mark.parametrize("retry_errors", [False, True])
def test_two_runs_do_not_write_to_one_file(path, retry_errors):
    pytest.importorskip("fcntl")
    first = ResultFile.open(path, AnswerLine, retry_errors=retry_errors)
    with pytest.raises(InvalidParameterError, match="another process is writing to it"):
        ResultFile.open(path, AnswerLine)
    first.file.close()
    ResultFile.open(path, AnswerLine).file.close()


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(InvalidParameterError, match="expected a file"):
        ResultFile.open(tmp_path, AnswerLine)
