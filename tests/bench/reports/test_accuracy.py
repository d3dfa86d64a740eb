"""The report on accuracy: what its tables say of clips, and which layers they show."""

from types import SimpleNamespace

import numpy as np
import pytest

from verax.bench.reports import accuracy
from verax.compare.align import Alignment
from verax.compare.comparison import Comparison, Errors, Row
from verax.compare.videos import compare_clips


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    monkeypatch.setattr(accuracy, "_versions", lambda: {"torch": "2"})


def test_clips_are_told_overall_by_frame_and_by_pixel(monkeypatch):
    first = np.full((13, 16, 16, 3), 0.5, np.float32)
    off = {"float32": 1e-4, "bfloat16": 1e-2}

    def compared(model, clip, *, dtype):
        assert (clip.num_frames, clip.num_inference_steps) == (13, 5)
        return SimpleNamespace(comparison=compare_clips(first, first + np.float32(off[dtype])))

    monkeypatch.setattr(accuracy, "compare_pipelines", compared)
    (overall, frames, pixels), result = accuracy.frame_tables(True)
    assert [row[:3] for row in overall.rows] == [["float32", "1.0e-08", "80.00"], ["bfloat16", "1.0e-04", "40.00"]]
    assert [row[0] for row in frames.rows] == [str(i) for i in range(1, 14)]
    assert frames.rows[12][1:3] == ["1.0e-08", "80.00"]
    assert pixels.rows[1] == ["bfloat16", "1%", "1%", "1%", "1%", "2%"]
    assert result["machine"] == {"torch": "2"}


def test_the_layers_with_the_largest_errors_are_shown_in_their_order():
    sizes = [3, 20, 1, 19, *range(4, 17), 2]
    rows = [
        Row(f"l{i}", f"l{i}", "float32", "float32", Errors(size, size, size, 1, True)) for i, size in enumerate(sizes)
    ]
    rows.append(Row("(output)", "(output)", "float32", "float32", Errors(0, 0, 0, 1, True)))
    table = accuracy._layers("title", Comparison("two models", rows, Alignment([])))
    assert [row[0] for row in table.rows] == ["l1", "l3", *(f"l{i}" for i in range(7, 17)), "(output)"]
    assert "different" in table.note
