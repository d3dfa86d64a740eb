"""Lines of a file of work: what each kind of file gives, and what is wrong with a line."""

import json

import pytest

from verax.batch.lines import InputFile, InputLine


def read(path, text, field="text"):
    path.write_bytes(text)
    file = InputFile(path, field)
    return [file.read(line, number) for number, line in enumerate(file.lines(), start=1)]


def test_an_object_has_a_name_and_fields(tmp_path):
    lines = read(
        tmp_path / "in.jsonl", b'{"custom_id": "a", "text": "one", "more": 1}\n{"custom_id": 7}\n{"text": "x"}'
    )
    assert lines == [
        InputLine(1, "a", {"text": "one", "more": 1}),
        InputLine(2, "7", {}),
        InputLine(3, "3", {"text": "x"}),
    ]


def test_a_line_of_another_file_is_a_text(tmp_path):
    lines = read(tmp_path / "in.txt", '{"a": 1}\r\n  \u00fc \u2028 b\n'.encode(), "prompt")
    assert lines == [InputLine(1, "1", {"prompt": '{"a": 1}'}), InputLine(2, "2", {"prompt": "  \u00fc \u2028 b"})]


def test_a_row_of_parquet_is_an_object(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"custom_id": "a", "text": "one", "seed": None}, {"custom_id": "b", "text": "two", "seed": 3}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    file = InputFile(tmp_path / "in.parquet", "text")
    assert [file.read(line, 1).fields for line in file.lines()] == [{"text": "one"}, {"text": "two", "seed": 3}]
    assert file.size is None
    (first, _) = InputFile(file.path, "text", ("custom_id", "seed")).lines()
    assert json.loads(first) == {"custom_id": "a"}


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        ("in.jsonl", b"{no", "invalid_json_line", "line 1: it is not valid JSON"),
        ("in.jsonl", b'"a text"', "invalid_json_line", "line 1: expected a JSON object"),
        ("in.jsonl", b'{"text": "\xff"}', "invalid_line", "line 1: it is not UTF-8"),
        ("in.jsonl", b'{"text": "\\ud800"}', "invalid_json_line", "line 1: it is not valid JSON"),
        ("in.jsonl", b"[" * 5000, "invalid_json_line", "line 1: "),
        ("in.jsonl", b'{"custom_id": ["a"]}', "invalid_request", "custom_id: expected a text or a whole number"),
        ("in.jsonl", b'{"custom_id": ""}', "invalid_request", "custom_id: expected a text or a whole number"),
        ("in.txt", b"a\xff", "invalid_line", "line 1: it is not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path, name, text, code, message):
    (error,) = read(tmp_path / name, text)
    assert (error.code, error.line) == (code, 1)
    assert message in error.message
