"""`verax rerank`: a query and lines in, a table or JSON out."""

import json

import pytest

from tests.support.tiny_encoder import tiny_reranker
from verax import Reranker

QUERY = "who sat on the mat ?"
LINES = ["a cat sat on the mat .", "the fox ran", "[red] river"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def expected(folder):
    return Reranker(folder).rank(QUERY, LINES)


def test_lines_of_a_file_become_a_table(run, tmp_path, folder, expected):
    (tmp_path / "in.txt").write_text("\n".join(LINES) + "\n")
    done = run("rerank", QUERY, "--model", folder, "--documents", tmp_path / "in.txt")
    assert done.status == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if "│" in line]
    assert rows == [[str(one.index), f"{one.score:.4f}", one.text] for one in expected]
    assert "3 documents in" in done.err


def test_standard_input_becomes_json(run, folder, expected):
    done = run("rerank", QUERY, "-m", folder, "--json", "--top-k", 2, stdin="\n".join(LINES))
    found = json.loads(done.out)
    assert [(one["index"], one["text"]) for one in found] == [(one.index, one.text) for one in expected[:2]]
    assert found[0]["score"] == pytest.approx(expected[0].score, abs=2e-6)


def test_products_can_be_of_8_bit_integers(run, folder, expected):
    done = run("rerank", QUERY, "-m", folder, "--json", "-q", "int8", stdin="\n".join(LINES))
    found = {one["index"]: one["score"] for one in json.loads(done.out)}
    differences = [abs(found[one.index] - one.score) for one in expected]
    assert 1e-7 < max(differences) < 0.05


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "message"),
    [
        ([QUERY], "a cat", 2, "Missing option '--model'"),
        (["", "-m", "nowhere"], "a cat", 2, "query 1: it is empty"),
        ([QUERY, "-m", "nowhere"], "", 2, "standard input: it is empty; expected a document on each line"),
        ([QUERY, "-m", "nowhere"], "a cat", 1, "nowhere: no such folder"),
        ([QUERY, "-m", "nowhere", "-d", "no.txt"], "", 2, "no.txt: no such file"),
    ],
)
def test_wrong_usage_is_explained(run, arguments, stdin, status, message):
    done = run("rerank", *arguments, stdin=stdin)
    assert done.status == status
    assert message in done.err
