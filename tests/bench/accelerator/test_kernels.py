"""The kernels part: an experimental implementation is timed beside the one that is chosen."""

import pytest

from verax import ops
from verax.bench.accelerator import kernels
from verax.bench.accelerator.parts import PARTS


def test_where_no_experimental_implementation_runs_the_row_says_so():
    rows = [row for measured in PARTS["kernels"].load()(rehearse=True) for row in measured.rows]
    assert [row.case.partition(",")[0] for row in rows] == [
        "paged_decode_attention",
        "attention",
        "attention",
        "sample",
    ]
    assert [(row.value, row.error) for row in rows] == [(None, "")] * 4
    assert all(row.note.startswith("no experimental implementation takes it on") for row in rows)


def test_an_experimental_implementation_is_set_against_the_chosen_one(monkeypatch):
    implementations = ops.paged_decode_attention.implementations
    monkeypatch.setattr(kernels, "RUNS", 2)
    monkeypatch.setattr(ops.paged_decode_attention, "implementations", dict(implementations))
    ops.paged_decode_attention.implementation("new", experimental=True)(implementations["chunked"].function)
    measured, *_ = kernels.measure_kernels(rehearse=True)
    (row,) = measured.rows
    assert row.case.endswith(", new")
    assert row.value == pytest.approx(1e3 * row.seconds)
    assert ops.paged_decode_attention.select(*example().args).name in row.beside
    assert row.case.removesuffix(", new") not in row.beside


def test_attention_over_whole_sequences_is_set_against_the_other_implementations(monkeypatch):
    implementations = ops.attention.implementations
    monkeypatch.setattr(kernels, "RUNS", 2)
    monkeypatch.setattr(ops.attention, "implementations", dict(implementations))
    ops.attention.implementation("new", experimental=True)(implementations["chunked"].function)
    ops.attention.implementation("other")(implementations["chunked"].function)
    _, *measured = kernels.measure_kernels(rehearse=True)
    (whole,), (window,) = (each.rows for each in measured[:2])
    for row in (whole, window):
        assert row.case.endswith(", new")
        assert row.value == pytest.approx(1e3 * row.seconds)
        assert "other" in row.beside
        assert not {"new", "reference"} & set(row.beside)
    assert whole.flops == 4 * 2 * 128 * 48**2
    assert window.flops == 4 * 2 * 128 * (16 * 17 // 2 + 32 * 16)
    assert whole.bytes_moved == 48 * 2 * 128 * (3 * 2 + 4)
    assert window.bytes_moved == 48 * 128 * (2 * (2 + 4) + 2 * 1 * 2)


def test_draws_are_set_against_the_implementation_that_is_chosen(monkeypatch):
    implementations = ops.sampling.sample.implementations
    monkeypatch.setattr(kernels, "RUNS", 2)
    monkeypatch.setattr(ops.sampling.sample, "implementations", dict(implementations))
    ops.sampling.sample.implementation("new", experimental=True)(implementations["bisect"].function)
    *_, measured = kernels.measure_kernels(rehearse=True)
    (row,) = measured.rows
    assert row.case == "sample, 2 rows of 600, top-k 50, top-p 0.95, new"
    assert row.bytes_moved == 4 * 2 * 600
    assert ops.sampling.sample.select(*ops.sampling.sample.examples()[0].args).name in row.beside


def example():
    """A call of the operation."""
    return ops.paged_decode_attention.examples()[0]
