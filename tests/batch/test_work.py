"""Clips of lines: options of the line before options of the command, files by name, and a reason for each that is not
made."""

import codecs
import json

import numpy as np
import pytest

from tests.support.tiny_video import video_folder
from verax import VideoPipeline
from verax.batch.lines import InputFile, InputLine
from verax.batch.results import LineRun, ResultFile
from verax.batch.work import ClipLine, Clips
from verax.video.outputs import VideoOutput

pytest.importorskip("av")

OPTIONS = dict(height=32, width=32, num_frames=5, num_inference_steps=3)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return VideoPipeline(video_folder("t2v", tmp_path_factory.mktemp("t2v")), show_progress=False)


@pytest.fixture
def make(pipeline, monkeypatch, tmp_path):
    """Makes the clip of a line without a model's work, and gives its result and what was to be generated."""
    asked = []

    def generate(request):
        asked.append(request)
        frames = np.zeros((request.num_frames, request.height, request.width, 3), np.uint8)
        return VideoOutput(frames, request.fps, request.seed, seconds={"denoise": 1.23456})

    monkeypatch.setattr(pipeline, "generate", generate)

    def call(custom_id="a", **fields):
        (result,) = Clips(pipeline, tmp_path, OPTIONS)([InputLine(1, custom_id, fields)])
        return result, asked[-1] if asked else None

    return call


def test_a_line_has_its_own_options_and_else_those_of_the_command(make, tmp_path):
    result, asked = make("scene-1", prompt="a red circle", seed=7, height=16, fps=None)
    assert (asked.seed, asked.height, asked.width, asked.num_inference_steps) == (7, 16, 32, 3)
    assert (result.file, result.seconds, result.error) == ("scene-1.mp4", {"denoise": 1.235}, None)
    assert (tmp_path / "scene-1.mp4").read_bytes()[4:8] == b"ftyp"
    settings = dict(prompt="a red circle", seed=7, height=16, width=32, num_frames=5, fps=24)
    assert settings.items() <= result.settings.items()
    again, _ = make("scene-2", **json.loads(json.dumps(result.settings)))
    assert again.settings == result.settings


def test_a_name_that_is_a_path_stays_in_the_folder(make, tmp_path):
    result, _ = make("../out", prompt="a red circle")
    assert [path.name for path in tmp_path.iterdir()] == [result.file]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "prompt: expected a text, or a list of one for each segment, got None"),
        ({"prompt": 5}, "prompt", "prompt: expected a text, or a list"),
        ({"prompt": ["a", 5]}, "prompt", "prompt: expected a text, got int"),
        ({"prompt": "a", "num_frame": 5}, "num_frame", "did you mean num_frames?"),
        ({"prompt": "a", "num_frames": 6}, "num_frames", "expected 4n + 1, got 6; nearest 5 or 9"),
        ({"prompt": "a", "height": "32"}, "height", "expected a whole number"),
        ({"prompt": "a", "image": "missing.png"}, "image", "there is no file missing.png"),
        ({"prompt": "a", "video": "a" * 5000}, None, "File name too long"),
        ({"prompt": "a", "latents": [1]}, "latents", "it is not an option of a line"),
        ({"prompt": "a", "resume": "a.safetensors"}, "resume", "it is not an option of a line"),
    ],
)
def test_a_line_whose_clip_cannot_be_made_has_the_reason(make, tmp_path, fields, param, message):
    result, asked = make(**fields)
    assert (asked, result.file, result.custom_id) == (None, None, "a")
    assert result.error.param == param
    assert message in result.error.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("device lost"), IndexError("no latents"), OverflowError("2**64")])
def test_any_exception_is_the_error_of_its_line_and_the_next_one_is_made(make, pipeline, monkeypatch, tmp_path, error):
    generate = pipeline.generate

    def fail(request):
        if request.prompt == "b":
            raise error
        return generate(request)

    monkeypatch.setattr(pipeline, "generate", fail)
    lines = tmp_path / "in.jsonl"
    lines.write_bytes(
        codecs.BOM_UTF8 + b"".join(b'{"custom_id": "%b", "prompt": "%b"}\n' % (x, x) for x in (b"a", b"b", b"c"))
    )
    results = ResultFile.open(tmp_path / "results.jsonl", ClipLine)
    with results.file:
        LineRun(InputFile(lines, "prompt"), results, Clips(pipeline, tmp_path, OPTIONS), least=3, most=3).run()
    written = [json.loads(line) for line in (tmp_path / "results.jsonl").read_bytes().splitlines()]
    assert [line["custom_id"] for line in written] == ["a", "b", "c"]
    assert [line["error"] and line["error"]["code"] for line in written] == [None, "server_error", None]
    assert str(error) in written[1]["error"]["message"]
