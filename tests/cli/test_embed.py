"""`verax embed`: lines and JSONL in, .npy and JSONL out, nothing half-written; `verax rerank`: a table or JSON."""

import json

import numpy as np
import pytest
import scipy.sparse

from tests.support.tiny_encoder import SIZES, random_weights, tiny_encoder, tiny_reranker, tiny_tokenizer
from verax import Encoder, Reranker, checkpoint
from verax.models import masked_lm

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


def test_vectors_may_be_unnormalised_and_cut_sentences_are_counted(run, encoder_folder):
    done = run("embed", "--model", encoder_folder, "--no-normalize", "--max-length", 5, "the cat sat on the mat")
    (record,) = map(json.loads, done.out.splitlines())
    assert not 0.99 < np.linalg.norm(record["embedding"]) < 1.01
    assert "1 cut to 5 tokens" in done.err


BATCH = [{"custom_id": f"id-{i}", "title": line} for i, line in enumerate(LINES)]


def vectors_in(path):
    return {entry["custom_id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def test_a_batch_has_a_vector_for_each_name_and_continues(run, tmp_path, encoder_folder, expected):
    out, lines = tmp_path / "out.jsonl", [*map(json.dumps, BATCH), '{"custom_id": "b"}', "{no"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = ["embed", "--model", encoder_folder, "--batch", tmp_path / "in.jsonl", "--field", "title", "-o", out]
    done = run(*command)
    assert (done.status, done.out) == (1, "")
    assert "4 done, 2 failed, 0 skipped in " in done.err
    found = vectors_in(out)
    assert list(found) == ["id-0", "id-1", "id-2", "id-3", "b", None]
    assert all(set(entry) == {"custom_id", "embedding", "error"} for entry in found.values())
    np.testing.assert_allclose([found[f"id-{i}"]["embedding"] for i in range(4)], expected, atol=1e-6)
    assert found["b"]["error"]["message"] == "expected a text in the field 'title'; it has none"
    assert found[None]["error"]["line"] == 6
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:4], '{"custom_id": "b", "title": "the fox ran"}']))
    assert "0 done, 0 failed, 5 skipped (earlier errors: 2; " in run(*command).err
    done = run(*command, "--retry-errors")
    assert done.status == 0
    assert "1 done, 0 failed, 4 skipped in " in done.err
    assert list(vectors_in(out)) == ["id-0", "id-1", "id-2", "id-3", "b"]


def test_a_batch_of_plain_lines_becomes_parquet(run, tmp_path, encoder_folder, expected):
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in.txt").write_text("\n".join(LINES) + "\n")
    out = tmp_path / "out.parquet"
    assert run("embed", "--model", encoder_folder, "--batch", tmp_path / "in.txt", "-o", out).status == 0
    columns = parquet.read_table(out).to_pydict()
    assert columns["custom_id"] == ["1", "2", "4"]  # the third line is blank
    np.testing.assert_allclose(columns["embedding"], expected[[0, 1, 3]], atol=1e-6)
    assert columns["error"] == [None] * 3


def test_numbers_that_are_not_finite_are_an_error_and_no_vectors(run, tmp_path):
    checkpoint.save(
        {
            name: np.where(np.arange(60)[:, None] == 6, np.nan, weight) if "word" in name else weight  # cat
            for name, weight in random_weights({"model_type": "bert", **SIZES}).items()
        },
        tmp_path,
        config={"model_type": "bert", **SIZES},
    )
    tiny_tokenizer(tmp_path)
    (tmp_path / "in.txt").write_text("the fox ran\nthe cat\n")
    command = ["embed", "--model", tmp_path, "--batch-size", "1"]  # within a call, NaN reaches the neighbours
    for options in ([], ["--precision", "binary"]):
        done = run(*command, "--file", tmp_path / "in.txt", *options)
        assert (done.status, done.out) == (1, "")
        assert "no finite numbers for text 1" in done.err
    assert run(*command, "--batch", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl").status == 1
    found = vectors_in(tmp_path / "out.jsonl")
    assert (found["1"]["error"], found["2"]["embedding"]) == (None, None)
    assert "no finite numbers" in found["2"]["error"]["message"]


QUERY = "who sat on the mat ?"
DOCUMENTS = ["a cat sat on the mat .", "the fox ran", "[red] river"]


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory):
    return tiny_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def ranked(reranker_folder):
    return Reranker(reranker_folder).rank(QUERY, DOCUMENTS)


def test_lines_of_a_file_become_a_table(run, tmp_path, reranker_folder, ranked):
    (tmp_path / "in.txt").write_text("\n".join(DOCUMENTS) + "\n")
    done = run("rerank", QUERY, "--model", reranker_folder, "--documents", tmp_path / "in.txt")
    assert done.status == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if "│" in line]
    assert rows == [[str(one.index), f"{one.score:.4f}", one.text] for one in ranked]
    assert "3 documents in" in done.err


def test_ranked_standard_input_becomes_json(run, reranker_folder, ranked):
    done = run("rerank", QUERY, "-m", reranker_folder, "--json", "--top-k", 2, stdin="\n".join(DOCUMENTS))
    found = json.loads(done.out)
    assert [(one["index"], one["text"]) for one in found] == [(one.index, one.text) for one in ranked[:2]]
    assert found[0]["score"] == pytest.approx(ranked[0].score, abs=2e-6)
    assert json.loads(run("rerank", QUERY, *DOCUMENTS, "-m", reranker_folder, "--json", "--top-k", 2).out) == found


def test_a_model_of_token_vectors_ranks_by_maxsim(run, tmp_path):
    tiny_encoder(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "MultiVectorEncoder"}')
    expected = Encoder(tmp_path, output="tokens").rank(QUERY, DOCUMENTS, top_k=2)
    done = run("rerank", QUERY, "-m", tmp_path, "--json", "--top-k", 2, stdin="\n".join(DOCUMENTS))
    got = json.loads(done.out)
    assert [one["index"] for one in got] == [one.index for one in expected]
    assert got[0]["score"] == pytest.approx(expected[0].score, rel=1e-5)
    done = run("rerank", QUERY, "-m", tmp_path, "--instruction", "x", stdin="a cat")
    assert done.status == 2
    assert "--instruction" in done.err


def test_vectors_in_bits_are_written(run, tmp_path, encoder_folder):
    done = run("embed", "-m", encoder_folder, "--precision", "ubinary", "-o", tmp_path / "v.npy", *LINES[:2])
    assert done.status == 0
    expected = Encoder(encoder_folder).encode(LINES[:2], precision="ubinary")
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), expected)
    lines = run("embed", "-m", encoder_folder, "--precision", "ubinary", *LINES[:2]).out.splitlines()
    assert [repr(json.loads(line)["embedding"]) for line in lines] == [repr(row.tolist()) for row in expected]
    assert run("embed", "-m", encoder_folder, "--precision", "int4", "a cat").status != 0


def test_sparse_vectors_are_written_as_pairs_or_as_a_matrix(run, tmp_path):
    config, folder = {"model_type": "bert", **SIZES}, tmp_path / "model"
    checkpoint.save(random_weights(config, find=masked_lm), folder, config=config)
    tiny_tokenizer(folder)
    expected = Encoder(folder, output="sparse").encode(LINES, max_active=60).toarray()
    done = run("embed", "-m", folder, "--sparse", "-o", tmp_path / "v.npz", stdin="\n".join(LINES))
    assert (done.status, done.out) == (0, "")
    np.testing.assert_array_equal(scipy.sparse.load_npz(tmp_path / "v.npz").toarray(), expected)
    done = run("embed", "-m", folder, "--sparse", *LINES[:2])
    for line, row in zip(done.out.splitlines(), expected, strict=False):
        embedding = json.loads(line)["embedding"]
        assert embedding["indices"] == np.flatnonzero(row).tolist()
        np.testing.assert_allclose(embedding["values"], row[embedding["indices"]], atol=2e-6)  # another batch
    assert run("embed", "--sparse", "a cat").status == 2
    assert run("embed", "-m", folder, "--sparse", "-o", tmp_path / "v.npy", "a cat").status == 2
