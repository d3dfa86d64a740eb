"""Video reports: memory by implementation, speed by frames, and what compiling costs, from the benchmark's cases."""

import pytest

from verax.bench.reports import video

SECONDS = {"verax": 1.0, "verax, standard": 4.0, "verax, chunked": 1.0, "diffusers": 2.0}


def side(median):
    return {"median_s": median, "p10_s": median, "p90_s": median, "seconds": [median] * 3}


@pytest.fixture
def asked(monkeypatch):
    """What the video benchmark was asked for; it answers with a step of 1 s of ours and 2 s of diffusers'."""
    asked = []

    def bench_video(**options):
        asked.append(options)
        cases = [
            {
                "stage": stage,
                "frames": frames,
                "sides": {name: side(s) for name, s in SECONDS.items() if stage == "transformer" or "," not in name},
                "compile_s": 30.0,
                "compile_cached_s": 3.0,
                "beside": {"diffusers": {"first_s": 3.0, "ratio": 2.0}},
            }
            for stage in options.get("stages", ())
            for frames in options["frames"]
        ]
        plans = [
            {"frames": frames, "attention": implementation, "peak_gb": 4.25, "weights_gb": 0.5}
            if implementation != "auto"
            else {"frames": frames, "attention": implementation, "left_out": "no"}
            for implementation in options.get("memory", ())
            for frames in options["frames"]
        ]
        return {"settings": {}, "machine": {}, "cases": cases, "attention_memory": plans}

    monkeypatch.setattr(video, "bench_video", bench_video)
    return asked


@pytest.mark.parametrize("quick", [True, False])
def test_memory_is_of_the_reports_size_by_implementation_and_frames(asked, quick, monkeypatch):
    monkeypatch.setattr(
        video,
        "_measured",
        lambda frames, sizes, weights: {"peak_gb": frames + weights, "versions": {"torch": "2"}},
    )
    (table,), result = video.memory_tables(quick)
    assert [row[0] for row in table.rows] == ["9", "17", "57"]
    assert table.rows[0][1:] == ["4.25", "4.25", "not run: no", "9.50"]
    assert table.rows[2][4] == ("not run: --quick leaves it out" if quick else "57.50")
    assert (asked[0]["height"], asked[0]["width"], asked[0]["runs"]) == (544, 960, 0)
    assert asked[0]["layers"] == (1 if quick else 30)
    assert result["machine"] == {"torch": "2"}


def test_speed_is_of_guided_steps_and_decoding(asked):
    speed, compiling, paying, *left = video.speed_tables(True)[0]
    # 5 steps of two forward passes, then decoding: of diffusers 5 x 4 + 2 s, of ours 5 x 2 + 1 s.
    assert speed.rows[0] == ["9", "PyTorch (diffusers)", "4.00", "20.00", "2.00", "22.00", "1.00x", "1.00x"]
    assert speed.rows[1] == ["9", "verax, standard attention", "8.00", "40.00", "1.00", "41.00", "0.50x", "0.54x"]
    assert speed.rows[3] == ["9", "**verax**", "2.00", "10.00", "1.00", "11.00", "2.00x", "2.00x"]
    assert compiling.rows[0] == ["9", "32.00", "2.00", "30.00", "3.00"]
    # 10 steps: diffusers warms up for 1 s and takes 40; ours compiles for 30 s (3 from the cache) and takes 20.
    assert paying.rows[1] == ["9", "10", "41.0", "50.0", "23.0", "0.82x", "1.78x"]
    assert [table.why_not is not None for table in left] == [True, True]
    assert left[1].why_not == "--quick leaves it out."
    assert asked[0]["against"] == ("diffusers",)
