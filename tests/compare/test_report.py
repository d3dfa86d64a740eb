"""The verdict of a comparison, and the pages that it is written as."""

import dataclasses
import json
import math
import re

from verax.compare.align import Alignment
from verax.compare.comparison import Comparison, Errors, Row
from verax.compare.report import write


def row(name, l2, own=None, dtype="float32", truth=None):
    errors = Errors(l2, 2 * l2, l2, 1 - l2**2, "" if math.isfinite(l2) else "ours has NaN")
    return Row(
        name, name, dtype, dtype, errors, own=None if own is None else errors._replace(l2=own), against_truth=truth
    )


def comparison(*rows, **options):
    return Comparison("a <model>", list(rows), Alignment([]), **options)


def test_the_first_error_beyond_the_trend_is_not_the_largest():
    result = comparison(row("a", 2e-7), row("b", 9e-7), row("c", 4e-5), row("d", 3e-3), row("(output)", 1e-3))
    assert result.first.name == "c"
    assert result.failures == [
        "2 of 5 layers have a relative L2 error over 1e-04: the first is d (3.0e-03), the largest d (3.0e-03)"
    ]


def test_a_guessed_arrangement_is_named_where_the_numbers_disagree():
    result = comparison(row("a", 1e-7), dataclasses.replace(row("b", 0.9), layout="[2, 3, 3] -> [2, 3, 3]?"))
    assert "how b is arranged is a guess: take sizes that differ" in result.failures[-1]


def test_at_a_lower_precision_the_ratio_decides():
    near = comparison(row("(output)", 1e-2, dtype="bfloat16", truth=(5e-3, 6e-3)), dtype="bfloat16")
    far = comparison(row("(output)", 1e-2, dtype="bfloat16", truth=(9e-3, 6e-3)), dtype="bfloat16")
    assert (near.passed, far.passed) == (True, False)


def test_a_wrong_row_that_large_numbers_hide_makes_models_different():
    wrong = row("b", 1e-6)
    wrong.errors = wrong.errors._replace(worst=0.5, worst_at="at [3]")
    result = comparison(row("a", 1e-7), wrong, row("(output)", 1e-7))
    assert result.first is wrong
    assert result.failures == [
        "1 of 3 layers have a relative L2 error over 8e-04 in a row or channel: the first is b at [3] (5.0e-01), the "
        "largest b at [3] (5.0e-01)"
    ]
    assert comparison(row("(output)", 1e-7), fused=[wrong]).failures[0].startswith("b as one compiled program at [3]")
    output = row("(output)", 1e-2, dtype="bfloat16", truth=(5e-3, 5e-3))
    for errors, passes in (((2e-2, 1e-2), True), ((0.5, 1e-2), False), ((0.02, 0.0), True)):
        below = comparison(dataclasses.replace(output, worst_against_truth=errors), dtype="bfloat16")
        assert below.passed == passes
        assert (below.first is None) == passes


def test_rounding_of_what_the_reference_keeps_in_float32_is_not_a_finding():
    kept = [row("time", 1e-6, truth=(1e-6, 0.0)), row("block", 1e-2, dtype="bfloat16", truth=(6e-3, 5e-3))]
    assert comparison(*kept, dtype="bfloat16").first is None
    kept.insert(0, row("cast", 4e-3, truth=(4e-3, 0.0)))
    assert comparison(*kept, dtype="bfloat16").first.name == "cast"


def test_pages_hold_all_rows_and_need_no_network(tmp_path):
    rows = [row(f"blocks.{i}.{part}", 1e-7, own=1e-7) for i in range(20) for part in ("attn.q", "attn", "norm")]
    rows[30] = row("blocks.10.attn.q", 1e-2, own=1e-2)
    large = comparison(*rows, row("(output)", 1e-3, own=0.0))
    large.gradients = [row("kernel", 1e-7), row("bias", 1e-7)]
    pages = {path.suffix: path.read_text() for path in write(large, tmp_path / "new")}
    assert json.loads(pages[".json"])["faults"] == ["blocks.10.attn.q"]
    assert pages[".md"].count("\n| blocks.") == 60
    assert pages[".html"].count("<td>blocks.") == 120  # each with the reference's name
    assert "a &lt;model&gt;" in pages[".html"]
    assert pages[".html"].count("<svg") == 2
    names = re.findall(r'<g id="(\w+)"', pages[".html"])
    assert len(names) == len(set(names))
    for outside in ('src="', 'href="http', "@import", "<script", "<link"):
        assert outside not in pages[".html"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["compare.html", "compare.json", "compare.md"]


def test_at_a_lower_precision_the_compiled_programs_ratio_decides_too():
    output = row("(output)", 1e-2, dtype="bfloat16", truth=(5e-3, 6e-3))
    far = dataclasses.replace(output, against_truth=(9e-3, 6e-3))
    result = comparison(output, fused=[far], dtype="bfloat16")
    assert result.failures == [
        "(output) as one compiled program: its error against float32 is 1.50 times the reference's"
    ]
