"""The video part: a guided step is two forward passes, and a clip that does not fit is a row."""

from verax.bench.accelerator import video
from verax.errors import VeraxError


def test_a_guided_step_is_two_passes_and_a_failure_is_a_row(monkeypatch):
    case = {
        "sides": {"verax": {"median_s": 0.4}},
        "products": 10.0,
        "bytes_moved": 7,
        "beside": {"diffusers": {"ratio": 1.5}},
        "compile_s": 30.2,
    }
    asked = []

    def bench(**options):
        asked.append(options)
        if len(asked) == 1:
            raise VeraxError("no room")
        return {"cases": [case]}

    monkeypatch.setattr(video, "bench_video", bench)
    failed, measured = list(video.measure_video("transformer", (97, 57), rehearse=False))
    assert [one["frames"] for one in asked] == [(97,), (57,)]
    assert (asked[0]["height"], asked[0]["width"], asked[0]["size"]) == (544, 960, "1.3b")
    assert failed.rows[0].error == "VeraxError: no room"
    row = measured.rows[0]
    assert (row.value, row.flops, row.bytes_moved, row.target, row.beside) == (0.8, 20.0, 14, 0.85, {"diffusers": 1.5})
    assert row.note == "compiled in 30 s"


def test_decoding_is_one_call(monkeypatch):
    case = {"sides": {"verax": {"median_s": 0.4}}, "products": 10.0, "bytes_moved": 7, "beside": {}, "compile_s": 1.0}
    monkeypatch.setattr(video, "bench_video", lambda **_: {"cases": [case]})
    (measured,) = video.measure_video("vae", (57,), rehearse=False)
    assert (measured.rows[0].value, measured.rows[0].flops, measured.rows[0].target) == (0.4, 10.0, None)
