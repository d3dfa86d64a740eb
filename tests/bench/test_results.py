"""Results: one file for a subject and processor, with the latest of each name, and one page for all."""

import json
from datetime import datetime

import pytest

from verax.bench import results
from verax.bench.timing import Samples
from verax.errors import InvalidParameterError

MACHINE = {"cpu": "AMD EPYC 7-1", "cores": 2, "platform": "cpu", "devices": ["cpu:0"], "jax": "0.10"}


def result(name="short", seconds=(1.0, 2.0), **changes):
    side = Samples(tuple(seconds)).to_dict(10)
    case = {"case": "", "chosen": "verax", "sides": {"verax": side, "torch": side}, "ratios": {"torch": 1.5}}
    tables = [results.side_table(case, "tokens/s", digits=2, rate_digits=1)]
    page = {"title": "Text: short", "intro": "Two prompts.", "tables": tables, "notes": ["A note.", "- one", "- two"]}
    return {"subject": "text", "name": name, "machine": MACHINE, "settings": {}, "cases": [case], **page, **changes}


def test_a_file_has_the_latest_result_of_each_name(tmp_path):
    first = results.write(result(), tmp_path / "new", now=datetime(2026, 1, 2))
    assert first.name == "text-amd-epyc-7-1-2c.json"
    assert results.write(result("long"), tmp_path / "new") == first
    results.write(result(seconds=(3.0, 4.0)), tmp_path / "new", now=datetime(2026, 1, 3, 4, 5))
    read = results.read_results(first)
    assert list(read) == ["short", "long"]
    assert read["short"]["cases"][0]["sides"]["verax"]["seconds"] == [3.0, 4.0]
    assert read["short"]["date"] == "2026-01-03 04:05 UTC"
    assert '"seconds": [ 3.0, 4.0 ]' in first.read_text()  # a line, and not a line a number


def test_an_accelerator_names_the_file(tmp_path):
    gpu = {**MACHINE, "platform": "gpu", "devices": ["NVIDIA H200 (cuda:0)"]}
    assert results.write(result(machine=gpu), tmp_path).name == "text-nvidia-h200-cuda-0-2c.json"


def test_a_result_that_was_printed_is_read_like_a_file_of_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result()))
    assert results.read_results(path) == {"short": result()}


@pytest.mark.parametrize("text", ["{", "[]", '{"sides": {"a": {"seconds": [1]}}}'])
def test_a_file_that_is_not_a_result_is_refused(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=r"result\.json"):
        results.read_results(path)


def test_the_page_has_tables_notes_and_the_machine():
    page = results.markdown(result(noise={"busy": True, "spread": 0.5, "others": 0.25}))
    assert page.startswith("# Text: short\n\nTwo prompts.\n\n| side | median s |")
    assert "| verax | 1.50 | 1.10-1.90 | 6.7 |  |\n| torch | 1.50 | 1.10-1.90 | 6.7 | 1.50x |" in page
    assert "A note.\n\n- one\n- two\n\nMachine: cpu AMD EPYC 7-1" in page
    assert "busy" in page


def test_a_table_says_why_it_was_not_run():
    lines = results.table_lines(results.not_run("GPU", "none is here"))
    assert lines[:3] == ["## GPU", "", "**Not run**: none is here."]


def test_outliers_are_shown_and_few_rounds_are_said_to_be_few():
    sides = {"ours": Samples((1.0, 2.0, 3.0, 4.0, 10.0)).to_dict(1), "theirs": Samples((1.0, 1.0)).to_dict(1)}
    assert "ours 10000 ms" in results.outliers(sides)[0]
    assert results.outliers({"theirs": sides["theirs"]}) == []
    assert "fewer than 10" in results.rounds({"runs": 9, "warmup": 1})
    assert "fewer" not in results.rounds({"runs": 10, "warmup": 1})


def test_a_checkpoint_is_named_without_its_folders(tmp_path):
    (tmp_path / "Small-Q4_K_M.gguf").touch()
    assert results.model_name(str(tmp_path / "Small-Q4_K_M.gguf")) == "Small-Q4_K_M.gguf"
    assert results.model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert results.slug("Small-Q4_K_M", "", "int8, int8 cache") == "small-q4-k-m-int8-int8-cache"


def test_a_plot_has_a_panel_for_each_group(tmp_path):
    pytest.importorskip("matplotlib")
    cases = [{**result()["cases"][0], "group": group, "case": "Small"} for group in ("rule", "layer")]
    assert results.plot({**result(), "cases": cases}, tmp_path / "a.png").stat().st_size > 10_000
