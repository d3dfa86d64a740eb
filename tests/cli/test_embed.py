"""`verax embed`: lines, arguments and JSONL in, .npy and JSONL out, nothing half-written."""

import json

import numpy as np
import pytest

from tests.support.tiny_encoder import tiny_encoder
from verax import Encoder

LINES = ["a cat sat on the mat .", "the fox ran", "", "a cat sat on the mat ."]


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def expected(encoder_folder):
    return Encoder(encoder_folder).encode(LINES)


def test_lines_of_a_file_become_rows_of_an_array(run, tmp_path, encoder_folder, expected):
    (tmp_path / "in.txt").write_text("\n".join(LINES) + "\n")
    done = run("embed", "--model", encoder_folder, "--file", tmp_path / "in.txt", "-o", tmp_path / "out.npy")
    assert (done.status, done.out) == (0, "")
    vectors = np.load(tmp_path / "out.npy")
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, expected)
    assert "4 sentences in" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.npy"]


def test_standard_input_becomes_jsonl(run, encoder_folder, expected):
    done = run("embed", "--model", encoder_folder, stdin="\n".join(LINES))
    records = [json.loads(line) for line in done.out.splitlines()]
    assert [record["text"] for record in records] == LINES
    np.testing.assert_array_equal(np.asarray([r["embedding"] for r in records], np.float32), expected)


def test_a_field_of_jsonl_keeps_the_others(run, tmp_path, encoder_folder, expected):
    given = [{"id": i, "title": line} for i, line in enumerate(LINES)]
    text = "\n\n".join(map(json.dumps, given))
    out = tmp_path / "out.jsonl"
    done = run("embed", "--model", encoder_folder, "--field", "title", "-o", out, "--batch-size", "2", stdin=text)
    assert done.status == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{k: r[k] for k in ("id", "title")} for r in records] == given
    np.testing.assert_allclose([r["embedding"] for r in records], expected, atol=1e-6)


def test_vectors_can_stay_as_they_are_pooled_and_cut_sentences_are_told(run, encoder_folder):
    done = run("embed", "--model", encoder_folder, "--no-normalize", "--max-length", 5, "the cat sat on the mat")
    (record,) = map(json.loads, done.out.splitlines())
    assert not 0.99 < np.linalg.norm(record["embedding"]) < 1.01
    assert "1 cut to 5 tokens" in done.err


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--output", "vectors.txt", "a"], None, "expected a name that ends in .npy or .jsonl"),
        (["--output", "no/such/out.npy", "a"], None, "there is no folder no/such"),
        (["--file", "nowhere.txt"], None, "nowhere.txt: no such file"),
        (["--field", "text"], '{"text": "a"}\n{"title": "b"}', "line 2: expected an object with a text in its field"),
        (["--field", "text"], '{"text": "a"}\n\n{', "line 3: not valid JSON"),
        ([], "", "expected a sentence on each line"),
        (["--batch-size", "0", "a"], None, "batch-size"),
    ],
)
def test_wrong_usage_is_explained_before_the_model_is_loaded(run, monkeypatch, arguments, stdin, message):
    monkeypatch.setattr("verax.embed.encoder.Encoder.__init__", lambda *a, **k: pytest.fail("it was loaded"))
    done = run("embed", *arguments, stdin=stdin)
    assert done.status == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_an_old_file_survives_an_error_on_the_way(run, tmp_path, encoder_folder, monkeypatch):
    out = tmp_path / "out.npy"
    out.write_text("old")

    def full(file, array):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    done = run("embed", "--model", encoder_folder, "-o", out, "the fox ran")
    assert done.status == 1
    assert "No space left" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]
    assert out.read_text() == "old"
