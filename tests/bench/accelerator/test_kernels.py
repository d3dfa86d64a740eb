"""The kernels part: an experimental implementation is timed beside the one that is chosen."""

import pytest

from verax import ops
from verax.bench.accelerator import kernels
from verax.bench.accelerator.parts import PARTS


def test_where_no_experimental_implementation_runs_the_row_says_so():
    (measured,) = PARTS["kernels"].load()(rehearse=True)
    assert [(row.value, row.error) for row in measured.rows] == [(None, "")]
    assert measured.rows[0].note.startswith("no experimental implementation takes it on")


def test_an_experimental_implementation_is_set_against_the_chosen_one(monkeypatch):
    implementations = ops.paged_decode_attention.implementations
    monkeypatch.setattr(kernels, "RUNS", 2)
    monkeypatch.setattr(ops.paged_decode_attention, "implementations", dict(implementations))
    ops.paged_decode_attention.implementation("new", experimental=True)(implementations["chunked"].function)
    (measured,) = kernels.measure_kernels(rehearse=True)
    (row,) = measured.rows
    assert row.case.endswith(", new")
    assert row.value == pytest.approx(1e3 * row.seconds)
    assert list(row.beside) == [ops.paged_decode_attention.select(*example().args).name]


def example():
    """A call of the operation."""
    return ops.paged_decode_attention.examples()[0]
