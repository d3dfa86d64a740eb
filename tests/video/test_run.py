"""Runs: plan and run take the same stages, a run continues from finished segments, two transformers share one.

Latents of two transformers are compared with diffusers' in tests/parity/test_video_pipeline.py.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from verax import VideoPipeline, VideoRequest
from verax.errors import InvalidParameterError, VeraxError
from verax.video.run import stages_of

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 40, 3), np.uint8)
CLIP = np.random.default_rng(0).integers(0, 256, (11, 16, 32, 3), np.uint8)
SIZE: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=2)
LONG: dict[str, Any] = dict(SIZE, num_frames=17, base_num_frames=9, overlap_history=5)


def programs(pipe):
    owners = vars(pipe.stages) | vars(pipe.denoiser)
    return {name: program for name, program in owners.items() if name.endswith("program") and program}


@pytest.mark.parametrize(
    ("kind", "reference", "options"),
    [
        ("t2v", "diffusers", dict(SIZE, guidance_scale=1.0)),
        ("i2v", "diffusers", dict(SIZE, image=IMAGE, output_type="latent")),
        ("df", "skyreels", dict(SIZE, image=IMAGE, last_image=IMAGE, addnoise_condition=20)),
        ("df", "skyreels", dict(SIZE, num_frames=13, base_num_frames=13, video=CLIP, overlap_history=5, ar_step=1)),
        ("df", "skyreels", LONG),
        ("df", "diffusers", LONG),
        ("df", "skyreels", dict(LONG, height=32, half_size_steps=1)),
        ("flf2v", "skyreels", dict(SIZE, height=32, image=IMAGE, last_image=IMAGE, half_size_steps=1)),
        (
            *("vace", "skyreels"),
            dict(SIZE, height=32, video=CLIP, mask=CLIP[:1], reference_images=[IMAGE, IMAGE[:9]], half_size_steps=1),
        ),
    ],
)
def test_a_plan_compiles_each_program_of_the_run_once(folders, kind, reference, options):
    pipe = VideoPipeline.from_pretrained(folders(kind), dtype="float32", reference=reference, show_progress=False)
    pipe.plan(VideoRequest("a red circle", **options))
    planned = {name: program.count for name, program in programs(pipe).items()}
    pipe("a red circle", **options)
    ran = {name: program.count for name, program in programs(pipe).items()}
    # The memory of full size decides: programs of half size are compiled by the run.
    sized = ("program", "encode_program", "condition_program") if "half_size_steps" in options else ()
    assert ran == {name: count * (1 + (name in sized)) for name, count in planned.items()}


def names(pipe, **options):
    stages = stages_of(pipe.resolve(VideoRequest("a red circle", **options)), pipe.parts)
    return [(stage.name, stage.segment) for stage in stages]


def test_segments_share_frames_by_one_reference_and_latents_by_the_other(folders):
    ours, theirs = (VideoPipeline.from_pretrained(folders("df"), reference=name) for name in ("skyreels", "diffusers"))
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


def test_latents_that_are_not_finite_are_an_error_and_no_black_clip(pipes, tmp_path):
    embeddings = np.full((1, 512, 16), np.inf, np.float32)
    with pytest.raises(VeraxError, match="latents have numbers that are not finite"):
        pipes("df")(prompt_embeds=embeddings, resume=tmp_path / "clip", **SIZE)
    assert not (tmp_path / "clip").exists()


def test_latents_need_no_decoding_of_the_last_segment(folders):
    pipe = VideoPipeline.from_pretrained(folders("df"))
    assert names(pipe, output_type="latent", **SIZE)[-1] == ("denoise", 0)


PROMPTS = ["a red circle", "a blue square", "a green circle"]


def test_a_controlled_clip_continues_with_the_same_pictures_alone(folders, tmp_path):
    pipe = VideoPipeline.from_pretrained(folders("vace"), dtype="float32", show_progress=False)
    options = dict(SIZE, resume=tmp_path / "clip", reference_images=[IMAGE], sigmas="1,0.5", output_type="latent")
    made = pipe("a red circle", **options)
    again = pipe("a red circle", **options)
    assert (made.steps, again.steps) == (2, 0)
    np.testing.assert_array_equal(again.frames, made.frames)
    with pytest.raises(InvalidParameterError, match=r"resume: .* is of another clip: reference_images was \['uint8"):
        pipe("a red circle", **{**options, "reference_images": [IMAGE[1:]]})


class StoppedError(Exception):
    pass


def stop_in_the_second_segment(now):
    if now.segment == 1 and now.stage == "denoise":
        raise StoppedError


@pytest.fixture(scope="module")
def whole(pipes):
    return pipes("df")(PROMPTS, **LONG)


@pytest.fixture
def stopped(pipes, tmp_path):
    """A folder with the first of three segments."""
    folder = tmp_path / "clip"
    with pytest.raises(StoppedError):
        pipes("df")(PROMPTS, callback=stop_in_the_second_segment, resume=folder, **LONG)
    assert [path.name for path in folder.iterdir()] == ["segment_0000.safetensors"]
    return folder


def test_a_clip_continues_where_it_was_ended(pipes, whole, stopped):
    assert (whole.steps, len(whole.frames)) == (6, 17)
    first = (stopped / "segment_0000.safetensors").stat().st_ino
    resumed = pipes("df")(PROMPTS, resume=stopped, **LONG)
    assert resumed.steps == 4
    assert (stopped / "segment_0000.safetensors").stat().st_ino == first  # a segment is written once
    np.testing.assert_array_equal(resumed.frames, whole.frames)
    again = pipes("df")(PROMPTS, resume=str(stopped), **LONG)
    assert again.steps == 0
    np.testing.assert_array_equal(again.frames, whole.frames)
    longer = pipes("df")([*PROMPTS, "a red square"], resume=stopped, **{**LONG, "num_frames": 21})
    assert longer.steps == 2
    np.testing.assert_array_equal(longer.frames[:17], whole.frames)


def test_another_prompt_later_keeps_the_segments_before_it(pipes, whole, stopped):
    changed = pipes("df")([PROMPTS[0], "a red square"], resume=stopped, **LONG)
    assert changed.steps == 4
    np.testing.assert_array_equal(changed.frames[:9], whole.frames[:9])
    assert (changed.frames[9:] != whole.frames[9:]).any()
    # Of the clip before, the later segments that its folder still has do not follow the new second one.
    pipes("df")(PROMPTS, resume=stopped, **LONG)
    assert pipes("df")([PROMPTS[0], "a red square", PROMPTS[2]], resume=stopped, **LONG).steps == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, "resume: .* is of another clip: seed was 42, now 7"),
        ({"resume": Path(__file__)}, "resume: expected a folder, which need not exist yet, got .*test_run.py"),
        ({"resume": "no/such/clip"}, "resume: there is no folder no/such"),
    ],
)
def test_a_folder_of_another_clip_is_refused_by_name(pipes, stopped, changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        pipes("df")(PROMPTS, **{**LONG, "resume": stopped, **changes})


def test_segments_of_other_weights_are_refused_by_name(folders, tmp_path):
    def of_file(shade, **options):
        tensors = {"blocks.0.self_attn.q.diff": np.full((24, 24), shade, np.float32)}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        options = {"dtype": "float32", "lora": tmp_path, "show_progress": False, **options}
        return VideoPipeline.from_pretrained(folders("df"), **options)

    made = tmp_path / "made"
    of_file(1)(PROMPTS[0], resume=made, **SIZE)
    assert of_file(1)(PROMPTS[0], resume=made, **SIZE).steps == 0
    for pipe, name in ((of_file(2), "lora"), (of_file(1, quantization="int8"), "quantization")):
        with pytest.raises(InvalidParameterError, match=f"resume: .* is of another clip: {name} was"):
            pipe(PROMPTS[0], resume=made, **SIZE)


def test_segments_of_another_checkpoint_of_the_same_name_are_refused(folders, stopped, tmp_path):
    folder = folders("df")
    other = shutil.copytree(folder, tmp_path / folder.name)
    path = other / "transformer/diffusion_pytorch_model.safetensors"
    save_file({name: 1.1 * weight for name, weight in load_file(path).items()}, path)
    with pytest.raises(InvalidParameterError, match=r"resume: .* is of another clip: weights was"):
        VideoPipeline(other, dtype="float32", show_progress=False)(PROMPTS, resume=stopped, **LONG)


def test_a_file_of_something_else_is_refused(pipes, tmp_path):
    (tmp_path / "segment_0000.safetensors").write_bytes(b"something else")
    with pytest.raises(InvalidParameterError, match=r"resume: .*segment_0000\.safetensors is not a finished segment"):
        pipes("df")(PROMPTS, resume=tmp_path, **LONG)


def test_the_plan_has_a_row_for_each_transformer(pipes):
    plan = pipes("t2v-a14b").plan(VideoRequest("a red circle", **SIZE))
    assert [row.stage for row in plan] == ["text", "denoise", "denoise", "decode"]
    first, second = (row for row in plan if row.stage == "denoise")
    assert second.others == first.others + first.weights


def test_teacache_begins_again_with_each_transformer(pipes):
    options: dict[str, Any] = dict(SIZE, num_inference_steps=16, guidance_scale=1.0, guidance_scale_2=1.0)
    clip = pipes("t2v-a14b")("a red circle", cache="teacache", cache_threshold=1e9, **options)
    assert (clip.steps, clip.computed) == (16, 2 * 5)  # the first five of each are computed
