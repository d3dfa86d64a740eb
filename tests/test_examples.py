"""The files of examples/ do what they say."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """What an example prints."""

    def call(name):
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")  # as a person runs it
        return capsys.readouterr().out

    return call


def test_text_completes_answers_and_prints_probabilities(run):
    out = run("text.py")
    assert "12 + 30 =| 42" in out
    assert re.search(r"\{'4': -0\.\d+, '[^']+': -\d+\.\d+\} took \d+", out)
    assert "85" in out.splitlines()[-1]


def test_several_answers_grow_at_once_and_one_is_left_early(run):
    out = run("async_text.py")
    assert re.search(r"12 \+ 30 =\| 42.*\|\d+ parts", out)
    story, answer = out.splitlines()[-2:]
    assert re.fullmatch(r"[^.]+\.", story)
    assert "85" in answer


def test_embed_finds_the_paraphrase(run):
    best = run("embed.py").splitlines()[1]
    assert "Mia spent five dollars on 3 apples." in best


def test_video_makes_clips_and_stops_on_request(run, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    out = run("video.py")
    for name in ("circle.gif", "circle-up.gif"):
        with image.open(tmp_path / name) as clip:
            assert (clip.size, clip.n_frames) == ((64, 64), 17)
    assert (tmp_path / "circle-up.png").is_file()
    assert out.splitlines()[-2:] == ["step 3 of 20, latents (1, 16, 5, 8, 8)", "complete: False"]


def test_a_pair_of_ones_own_shows_where_its_mistake_is(run):
    pytest.importorskip("torch")
    wrong, right = run("compare_own_pair.py").split("GELU exact: ")
    assert "GELU tanh: the first layer that is off is norm" in wrong
    assert right.startswith("every layer agrees")


def test_the_port_of_gpt2_is_proven():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert runpy.run_path(str(EXAMPLES / "port_gpt2" / "check.py"))["main"]() == 0
