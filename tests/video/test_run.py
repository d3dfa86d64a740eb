"""Stages of a run: the plan and the run take the same list."""

from typing import Any

import numpy as np
import pytest

from tests.support.tiny_video import video_folder
from verax import VideoPipeline, VideoRequest
from verax.video.run import stages_of

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 40, 3), np.uint8)
CLIP = np.random.default_rng(0).integers(0, 256, (11, 16, 32, 3), np.uint8)
SIZE: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=2)
LONG: dict[str, Any] = dict(SIZE, num_frames=17, base_num_frames=9, overlap_history=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: video_folder(kind, tmp_path_factory.mktemp(kind)) for kind in ("t2v", "i2v", "df")}


def programs(pipe):
    found = (pipe.stages, pipe.denoiser)
    return {name: one for owner in found for name, one in vars(owner).items() if name.endswith("program") and one}


@pytest.mark.parametrize(
    ("kind", "reference", "options"),
    [
        ("t2v", "skyreels", SIZE),
        ("t2v", "diffusers", dict(SIZE, guidance_scale=1.0)),
        ("i2v", "skyreels", dict(SIZE, image=IMAGE)),
        ("i2v", "diffusers", dict(SIZE, image=IMAGE, output_type="latent")),
        ("df", "skyreels", dict(SIZE, image=IMAGE, last_image=IMAGE, addnoise_condition=20)),
        ("df", "skyreels", dict(SIZE, num_frames=13, base_num_frames=13, video=CLIP, overlap_history=5, ar_step=1)),
        ("df", "skyreels", LONG),
        ("df", "diffusers", LONG),
    ],
)
def test_a_plan_compiles_each_program_of_the_run_once(folders, kind, reference, options):
    pipe = VideoPipeline.from_pretrained(folders[kind], dtype="float32", reference=reference, show_progress=False)
    pipe.plan(VideoRequest("a red circle", **options))
    planned = {name: program.count for name, program in programs(pipe).items()}
    pipe("a red circle", **options)
    ran = {name: program.count for name, program in programs(pipe).items()}
    assert ran == planned


def names(pipe, **options):
    parts = pipe.parts
    request = pipe.resolve(VideoRequest("a red circle", **options))
    return [(stage.name, stage.segment) for stage in stages_of(request, parts)]


def test_segments_share_frames_by_one_reference_and_latents_by_the_other(folders):
    ours, theirs = (VideoPipeline.from_pretrained(folders["df"], reference=name) for name in ("skyreels", "diffusers"))
    short = dict(LONG, num_frames=13)
    assert names(ours, **short) == [
        *(("text", 0), ("denoise", 0), ("decode", 0), ("encode again", 0)),
        *(("denoise", 1), ("decode", 1)),
    ]
    assert names(theirs, **short) == [
        *(("text", 0), ("denoise", 0), ("join", 0)),
        *(("denoise", 1), ("join", 1), ("decode", 1)),
    ]
    assert names(theirs, callback=print, **short)[3] == ("decode", 0)  # a preview of the first segment


def test_latents_need_no_decoding_of_the_last_segment(folders):
    pipe = VideoPipeline.from_pretrained(folders["df"])
    assert names(pipe, output_type="latent", **SIZE)[-1] == ("denoise", 0)
