"""`verax compare videos`: the report of a comparison, and the exit status."""

import base64
import errno
import json
import re

import numpy as np
import pytest

from verax.compare.videos import compare_clips
from verax.video.files import write_clip
from verax.video.images import read_clip


def clip(frames=3, height=24, width=32):
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), np.uint8)


@pytest.fixture(scope="module")
def pair():
    off = np.random.default_rng(1).integers(-9, 10, (3, 24, 32, 3))
    return clip(), (clip() + off).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def files(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [write_clip(frames, folder / name, fps=8) for frames, name in zip(pair, ("a<b", "b"), strict=True)]


def test_the_command_writes_a_report_that_needs_no_network(run, pair, files, tmp_path):
    done = run("compare", "videos", *files, "--output", tmp_path / "made" / "report")
    assert done.status == 0
    assert "good" in done.out
    found = {path.name: path for path in (tmp_path / "made" / "report").iterdir()}
    assert sorted(found) == ["side-by-side.mp4", "videos.html", "videos.json", "videos.md"]
    record = json.loads(found["videos.json"].read_text())
    assert record["psnr"] == pytest.approx(compare_clips(*pair).clip_psnr)
    assert f"| PSNR of the clip | {record['psnr']:.2f} dB |" in found["videos.md"].read_text()
    page = found["videos.html"].read_text()
    assert "<svg" in page
    assert "data:image/png;base64," in page
    assert "a&lt;b" in page
    linked = re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', page)
    assert linked == []
    assert f"data:video/mp4;base64,{base64.b64encode(found['side-by-side.mp4'].read_bytes()).decode()}" in page
    assert read_clip(found["side-by-side.mp4"])[0].shape == (3, 24, 96, 3)


def test_the_exit_status_says_whether_every_frame_reaches_the_psnr(run, files):
    worst = json.loads(run("compare", "videos", *files, "--json").out)["worst_psnr"]
    assert run("compare", "videos", *files, "--min-psnr", worst - 0.01).status == 0
    done = run("compare", "videos", *files, "--min-psnr", worst + 0.01)
    assert done.status == 1
    assert f"{worst:.2f} dB, below the minimum of {worst + 0.01:g}" in done.err


def test_a_report_that_cannot_be_written_is_not_a_difference(run, files, tmp_path, monkeypatch):
    def full(report, folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr("verax.compare.report.VideoReport.write", full)
    done = run("compare", "videos", *files, "--output", tmp_path / "report")
    assert done.status == 2
    assert "No space left on device" in done.err
