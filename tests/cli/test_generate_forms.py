"""`verax generate` with `--choice`, `--regex`, `--json-schema` and `--grammar`."""

import re

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install 'verax[server]'")


FORMS = {
    "choice": (["--choice", "yes", "--choice", "no"], r"yes|no"),
    "regex": (["--regex", "[0-9]{2}/[0-9]{2}"], r"[0-9]{2}/[0-9]{2}"),
    "json-schema": (["--json-schema", "schema.json"], r"12|42"),
    "grammar": (["--grammar", "grammar.gbnf"], r"<(a|b)>"),
}


@pytest.mark.parametrize(("arguments", "pattern"), FORMS.values(), ids=FORMS)
def test_an_answer_has_the_form_that_an_option_asks_for(run, folder, tmp_path, monkeypatch, arguments, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"enum": [12, 42]}')
    (tmp_path / "grammar.gbnf").write_text('root ::= "<" ("a" | "b") ">"')
    done = run("generate", "Q: ", "-m", folder, "--max-tokens", "20", "--max-num-seqs", "1", *arguments)
    assert done.status == 0, done.err
    assert re.fullmatch(pattern, done.out.removeprefix("Q: ").removesuffix("\n"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--regex", "(a"], "structured_outputs: regex:"),
        (["--grammar", "bad.gbnf"], "structured_outputs: grammar:"),
        (["--json-schema", '{"type": '], "structured_outputs: json: it is no JSON text"),
        (["--json-schema", '{"not": {"type": "string"}}'], "structured_outputs: json:"),
        (["--choice", ""], "structured_outputs: choice:"),
        (["--regex", "a", "--choice", "b"], "expected exactly one of json, regex, choice, grammar"),
        (["--regex", "a", "--ignore-eos"], "ignore_eos"),
    ],
)
def test_a_wrong_form_is_one_line_and_status_1(run, folder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.gbnf").write_text("root ::= other")
    done = run("generate", "-m", folder, "--max-num-seqs", "1", "abc", *arguments)
    assert (done.status, done.out) == (1, "")
    assert says in done.err
    assert done.err.startswith("verax: error: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
def test_a_form_whose_file_is_missing_or_no_text_is_one_line_and_status_2(run, tmp_path, option):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("missing", "bytes"):
        done = run("generate", "abc", option, tmp_path / name)
        assert (done.status, done.out) == (2, "")
        assert f"{option}: cannot read {tmp_path / name}: " in done.err
        assert done.err.count("\n") == 1
