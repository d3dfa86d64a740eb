"""`verax video`: flags of both spellings, files whole or not at all, one line for each error."""

import json
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.tiny_video import video_folder
from verax.video import files

STAGES = ["stage", "text", "image", "encode", "denoise", "decode", "free"]

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        kind: video_folder(kind, tmp_path_factory.mktemp(kind), height=16, width=32, num_frames=9)
        for kind in ("i2v", "df", "vace")
    }


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "in.png"
    PIL.fromarray(np.random.default_rng(0).integers(0, 256, (20, 40, 3), np.uint8)).save(path)
    return path


def test_the_reports_flags_make_a_file_and_say_what_it_took(run, folders, picture, tmp_path):
    out = tmp_path / "out.gif"
    done = run(
        *("video", "--model_id", folders["i2v"], "--image", picture, "--prompt", "a red circle"),
        *("--guidance_scale", "5.0", "--shift", "3.0", "--fps", "8", "--seed", "1", "--inference_steps", "2"),
        *("--num_frames", "9", "--height", "16", "--width", "32", "-o", out, "--dtype", "float32"),
    )
    assert (done.status, done.out.strip()) == (0, str(out))
    assert "recipe" not in done.err
    with PIL.open(out) as written:
        assert (written.size, getattr(written, "n_frames", 1)) == ((32, 16), 9)
    assert "memory: " in done.err
    assert "9 frames of 16 x 32" in done.err
    assert "2 of 2 steps computed" in done.err


def test_a_clip_is_controlled_by_a_clip_masks_and_references(run, folders, picture, tmp_path):
    control, out = tmp_path / "control.gif", tmp_path / "out.gif"
    files.write_clip(np.random.default_rng(1).integers(0, 256, (6, 20, 40, 3), np.uint8), control, fps=10)
    command = ("video", "-m", folders["vace"], "--prompt", "a red circle", "--inference-steps", "1", "-o", out)
    done = run(
        *(*command, "--video", control, "--mask", picture, "--reference-image", picture, "--reference-image", picture),
        *("--conditioning-scale", "1,0.5"),
    )
    assert (done.status, done.out.strip()) == (0, str(out))
    assert "5 frames of 16 x 32" in done.err
    refused = run(*command, "--conditioning-scale", "1,0.5,2")
    assert refused.status != 0
    assert "conditioning_scale: expected a number, or one for each of the 2 control layers" in refused.err


def test_a_long_clip_is_previewed_in_segments_and_says_which_steps_were_computed(run, folders, tmp_path):
    weights = {"lora_A": (2, 24), "lora_B": (24, 2)}
    lora = {f"blocks.0.self_attn.q.{name}.weight": np.ones(shape, np.float32) for name, shape in weights.items()}
    save_file(lora, tmp_path / "style.safetensors")
    out = tmp_path / "out.webp"
    done = run(
        *("video", "-m", folders["df"], "--prompt", "a red circle", "--prompt", "a blue square", "--preview"),
        *("--num-frames", "13", "--base-num-frames", "9", "--overlap-history", "5", "--inference-steps", "7"),
        *("--teacache", "--teacache_thresh", "1e9", "--lora", f"{tmp_path / 'style.safetensors'}:0.5"),
        *("-o", out, "--dtype", "float32"),
    )
    assert (done.status, done.out.strip()) == (0, str(out))
    assert "10 of 14 steps computed" in done.err
    counts = {}
    for path in tmp_path.glob("*.webp"):
        with PIL.open(path) as written:
            counts[path.name] = getattr(written, "n_frames", 1)
    assert counts == {"out.webp": 13, "out-segment-1.webp": 9, "out-segment-2.webp": 4}


def test_a_recipe_says_what_it_sets(run, folders, tmp_path):
    out = tmp_path / "out.gif"
    size = ("--num-frames", "9", "--height", "16", "--width", "32", "--dtype", "float32")
    done = run("video", "-m", folders["df"], "--prompt", "a red circle", "--recipe", "fastwan", *size, "-o", out)
    assert (done.status, done.out.strip()) == (0, str(out))
    assert "recipe fastwan: solver lcm, sigmas 1.0,0.28,0.12, num_inference_steps 3, shift 8.0, " in done.err
    assert "3 of 3 steps computed" in done.err


def test_a_plan_needs_no_weights_and_writes_nothing(run, folders, picture, tmp_path, tmp_path_factory):
    configurations = tmp_path_factory.mktemp("configurations") / "i2v"
    shutil.copytree(folders["i2v"], configurations, ignore=shutil.ignore_patterns("*.safetensors"))
    done = run(
        *("video", "-m", configurations, "--image", picture, "--prompt", "a red circle", "--plan"),
        *("-o", tmp_path / "out.gif", "--dtype", "float32"),
    )
    assert done.status == 0
    assert [line.split()[0] for line in done.out.splitlines()] == STAGES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "option", "name"),
    [("av", ("-o", "out.mp4"), "PyAV"), ("PIL.Image", ("--contact-sheet", "sheet.png"), "Pillow")],
)
def test_what_cannot_be_written_for_lack_of_a_package_is_named_before_any_work(
    run, tmp_path, monkeypatch, module, option, name
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    done = run("video", "-m", "no/such/folder", "--prompt", "a red circle", *option)
    assert done.status == 1
    assert f"{name} is not installed: pip install 'verax[video]'" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "out.avi"), "--output: "),
        (("-o", "no/such/out.gif"), "--output: there is no folder no/such"),
        (("-o", "clip", "--resume", "./clip"), "--resume: clip: a folder of frames (--output) holds nothing else"),
        (("-o", "clip", "--contact-sheet", "clip/sheet.png"), "--contact-sheet: clip/sheet.png: a folder of frames"),
        (("--lora", "missing.safetensors:0.5"), "missing.safetensors: no such file"),
        (("--recipe", "lightx2v", "--steps", "8"), "recipe: lightx2v sets num_inference_steps to 4, and"),
        (("-m", "no/such/folder"), "no/such/folder: no such folder"),
        (("--prompt", ""), "prompt 2: it is empty"),
        (("--devices", "64"), "devices: expected 64 devices, got 1; JAX_NUM_CPU_DEVICES=64"),
        (("--sequence-parallel", "64"), "expected 1 x 64 = 64 devices, got 1; JAX_NUM_CPU_DEVICES=64"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(run, folders, picture, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run(
        *("video", "-m", folders["i2v"], "--image", picture, "--prompt", "a red circle", "--dtype", "float32"),
        *arguments,
    )
    assert done.status in (1, 2)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_batch_makes_a_clip_for_each_line_and_continues_where_it_stopped(
    run, folders, picture, tmp_path, monkeypatch
):
    pytest.importorskip("av")
    clips = tmp_path / "made" / "clips"
    lines = [
        {"custom_id": "one", "prompt": "a red circle"},
        {"custom_id": "wide", "prompt": "a red circle", "num_frames": 8},
        {"custom_id": "two", "prompt": "a blue square", "seed": 1},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ["--image", picture, "--num-frames", "5", "--inference-steps", "1", "--dtype", "float32"]
    batch = ["video", "-m", folders["i2v"], "--batch", tmp_path / "in.jsonl", "-o", clips, *options]
    write = files._write_mp4

    def interrupted(frames, path, fps, crf):
        if (clips / "one.mp4").exists():
            raise KeyboardInterrupt
        write(frames, path, fps, crf)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_mp4", interrupted)
        done = run(*batch)
    assert done.status == 130
    assert "1 done, 1 failed, 0 skipped in " in done.err
    assert "stopped before the end: the same command continues with the rest" in done.err
    assert sorted(path.name for path in clips.iterdir()) == ["one.mp4", "results.jsonl"]
    done = run(*batch)
    assert (done.status, done.out) == (1, "")
    assert "1 done, 0 failed, 2 skipped (earlier errors: 1; " in done.err
    results = [json.loads(line) for line in (clips / "results.jsonl").read_text().splitlines()]
    assert [result["file"] for result in results] == ["one.mp4", None, "two.mp4"]
    assert [result["custom_id"] for result in results] == ["one", "wide", "two"]
    assert results[1]["error"]["message"] == "num_frames: expected 4n + 1, got 8; nearest 5 or 9"
    assert (results[2]["settings"]["seed"], results[2]["settings"]["image"]) == (1, str(picture))
    assert set(results[2]["seconds"]) >= {"text", "denoise", "decode"}


def test_a_curve_is_measured_and_used(run, folders, tmp_path):
    clip = ("video", "-m", folders["df"], "--prompt", "a red circle", "--steps", "6", "--num-frames", "9")
    clip = (*clip, "--height", "16", "--width", "32", "--dtype", "float32")
    done = run(*clip, "--calibrate", tmp_path / "curve.json", "-o", tmp_path / "none.gif")
    assert (done.status, done.out.strip()) == (0, str(tmp_path / "curve.json"))
    assert not (tmp_path / "none.gif").exists()
    cache = ("--cache", "magcache", "--cache-curve", tmp_path / "curve.json", "--cache-threshold", "1e9")
    done = run(*clip, *cache, "-o", tmp_path / "out.gif")
    assert done.status == 0
    assert "2 of 6 steps computed" in done.err  # the first, and one after three that are skipped
