"""`VideoPipeline` beyond parity: what it refuses, compiles, forgets, repeats, and reports while it runs."""

from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.tiny_video import video_folder
from verax import VideoPipeline, VideoRequest, ops
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.video.files import write_clip
from verax.video.images import read_image
from verax.video.outputs import VideoOutput
from verax.video.request import make_request

SIZE: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=3)


def picture(height=40, width=60, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def controls(frames=10):
    return np.random.default_rng(2).integers(0, 256, (frames, 20, 40, 3), np.uint8)


class Tensor:
    """PyTorch's tensor of bfloat16, which NumPy cannot read."""

    shape = (1, 512, 16)

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


def test_defaults_come_from_the_checkpoint_and_frames_are_bytes(pipes):
    clip = pipes("t2v")("a red circle", num_inference_steps=2)
    assert clip.frames.shape == (9, 16, 32, 3)
    assert clip.frames.dtype == np.uint8
    assert (clip.fps, clip.seed, clip.steps, clip.computed, clip.complete) == (24, 42, 2, 2, True)


def test_an_upright_picture_makes_an_upright_clip(pipes):
    clip = pipes("i2v")("a red circle", image=picture(60, 40), num_inference_steps=1)
    assert clip.frames.shape == (9, 32, 16, 3)


def test_a_seed_is_a_clip_and_all_of_its_64_bits_count(pipes):
    seeds = (5, 5 + 2**32, 5 + 2**63, 2**64 - 1, 5)
    clips = [pipes("t2v")("a red circle", seed=seed, **SIZE).frames.tobytes() for seed in seeds]
    assert len({*clips}) == 4
    assert clips[0] == clips[-1]
    with pytest.raises(InvalidParameterError, match="seed: expected a whole number of 0 to 18446744073709551615"):
        pipes("t2v")("a red circle", seed=2**64, **SIZE)


def test_prompts_without_a_segment_are_said_to_be_unused(pipes, caplog):
    pipes("df").resolve(VideoRequest(["a red circle", "a blue square"], height=16, width=32, num_frames=5))
    assert "prompt: 2 for 1 segments; the last are not used" in caplog.text


def test_prompts_may_come_from_an_iterator(pipes):
    resolved = pipes("df").resolve(VideoRequest(iter(["a red circle", "a blue square"]), height=16, width=32))
    assert resolved.prompts == resolved.prompts == ("a red circle", "a blue square")


def test_a_prompt_that_is_cut_is_named(pipes, caplog):
    pipes("t2v")("a red circle " + "a blue square " * 300, **SIZE)
    assert "prompt: the model reads 512 tokens of it, and not its end: 'blue square a blue" in caplog.text


def test_a_second_call_compiles_nothing_whatever_its_prompt_seed_and_number_of_steps(pipes):
    pipe = pipes("i2v")
    pipe("a red circle", image=picture(), **SIZE)
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    changed = {**SIZE, "num_inference_steps": 7}
    pipe("a blue square floats left", image=picture(seed=3), seed=5, guidance_scale=3.0, shift=3.0, **changed)
    assert compiled == []


@pytest.mark.parametrize("kind", ["t2v", "df"])
def test_a_callback_sees_every_step_and_changes_nothing(pipes, kind):
    seen = []
    reported = pipes(kind)("a red circle", callback=seen.append, **SIZE)
    silent = pipes(kind)("a red circle", **SIZE)
    np.testing.assert_allclose(reported.frames.astype(int), silent.frames, atol=1)
    steps = [one for one in seen if one.stage == "denoise"]
    assert [one.done for one in steps] == [1, 2, 3]
    assert all(one.total == 3 and one.latents.shape == (1, 16, 3, 2, 4) for one in steps)
    np.testing.assert_array_equal(seen[-1].frames, reported.frames)


def test_a_contact_sheet_shows_the_first_and_the_last_frame(tmp_path):
    frames = np.zeros((9, 16, 32, 3), np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None, None]
    sheet = read_image(VideoOutput(frames, fps=8, seed=0).save_contact_sheet(tmp_path / "sheet.png", images=5))
    left, top = 12, 12
    assert sheet[top, left].tolist() == [0, 0, 0]
    assert sheet[top, left + 3 * 44].tolist() == [6, 6, 6]
    assert sheet[top + (sheet.shape[0] - 12) // 2, left].tolist() == [8, 8, 8]


def test_a_callback_that_says_false_ends_the_run_with_the_segments_that_are_done(pipes):
    options: dict[str, Any] = dict(SIZE, num_frames=17, base_num_frames=9, overlap_history=5)
    whole = pipes("df")("a red circle", **options)
    stopped = pipes("df")(
        "a red circle", callback=lambda now: not (now.segment == 1 and now.stage == "denoise"), **options
    )
    assert (whole.complete, stopped.complete) == (True, False)
    assert len(stopped.frames) == 9
    np.testing.assert_allclose(stopped.frames.astype(int), whole.frames[:9], atol=1)


def test_a_callback_may_say_false_as_numpy_does(pipes):
    assert not pipes("t2v")("a red circle", callback=lambda now: np.isfinite(np.inf), **SIZE).complete
    assert pipes("t2v")("a red circle", callback=lambda now: None, **SIZE).complete


def test_encoders_are_given_back_and_read_again(folders):
    pipe = VideoPipeline.from_pretrained(folders("i2v"), dtype="float32", keep_encoders=False)
    first = pipe("a red circle", image=picture(), **SIZE)
    assert not pipe.stages.text_encoder.loaded
    assert pipe.stages.image_encoder is not None
    assert not pipe.stages.image_encoder.loaded
    assert pipe.denoiser.transformer.loaded
    np.testing.assert_array_equal(first.frames, pipe("a red circle", image=picture(), **SIZE).frames)


def test_weights_that_wait_in_the_hosts_memory_make_the_same_clip(folders, pipes):
    # A CPU has such a memory too, only in name.
    with ops.use_target("gpu"):
        pipe = VideoPipeline.from_pretrained(folders("t2v"), dtype="float32", offload=True)
    for _ in range(2):
        clip = pipe("a red circle", **SIZE)
        assert not any(one.loaded for one in pipe.parts.components)
        np.testing.assert_array_equal(clip.frames, pipes("t2v")("a red circle", **SIZE).frames)


def test_a_hub_id_is_fetched_and_opened(folders, pipes, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(folders("t2v"))
    )
    pipe = VideoPipeline.from_pretrained("Skywork/SkyReels-V2-T2V-14B-720P", dtype="float32")
    assert asked == ["Skywork/SkyReels-V2-T2V-14B-720P"] * 2  # its settings, then its weights
    with pipe.denoiser.transformer.weights() as ours, pipes("t2v").denoiser.transformer.weights() as theirs:
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_teacache_works_with_frames_at_different_steps(pipes):
    clip = pipes("df")(
        "a red circle", cache="teacache", cache_threshold=1e9, ar_step=2, **dict(SIZE, num_inference_steps=8)
    )
    assert (clip.steps, clip.computed) == (8 + 2 * 2, 5)


@pytest.mark.parametrize("video", [None, controls(11)], ids=["prompts", "a user's clip"])
def test_long_clips_continue_from_the_last_frames_of_the_clip(pipes, video):
    """Frames of several segments are given to the next where one adds fewer than are shared: here 4, of which 5 are."""
    pipe, seen = pipes("df"), []
    options: dict[str, Any] = dict(SIZE, base_num_frames=9, overlap_history=5, video=video, output_type="np")
    clip = pipe(["a red circle", "a blue square"], callback=seen.append, **dict(options, num_frames=21))
    first = pipe("a red circle", **options).frames
    assert clip.frames.shape == (len(first) + 12, 16, 32, 3)
    assert clip.steps == 3 * 4
    np.testing.assert_array_equal(clip.frames[: len(first)], first)
    for segment, last in ((1, len(first)), (2, len(first) + 4), (3, len(first) + 8)):
        latents = [now.latents for now in seen if (now.stage, now.segment) == ("denoise", segment)][-1]
        frames = 2 * clip.frames[None, last - 5 : last] - 1
        given = np.asarray(pipe.stages.encode(frames)).transpose(0, 4, 1, 2, 3)
        np.testing.assert_allclose(latents[:, :, :2], given, atol=1e-4)


def test_a_users_clip_is_continued_from_the_frames_of_the_overlap(pipes):
    def continued(frames):
        return pipes("df")("a red circle", video=frames, overlap_history=5, **SIZE).frames

    given = np.random.default_rng(0).integers(0, 256, (11, 16, 32, 3), np.uint8)
    clip = continued(given)
    np.testing.assert_array_equal(clip[:11], given)
    assert len(clip) == 11 + 9 - 5
    np.testing.assert_array_equal(continued(np.concatenate([given[:6] // 2, given[6:]]))[11:], clip[11:])
    assert (continued(np.concatenate([given[:6], 255 - given[6:]]))[11:] != clip[11:]).any()


def test_a_users_clip_keeps_its_rate_or_is_said_to_change(pipes, tmp_path, caplog):
    given = np.random.default_rng(0).integers(0, 256, (11, 16, 32, 3), np.uint8)
    request = dict(video=write_clip(given, tmp_path / "a.webp", fps=12), overlap_history=5, **SIZE)
    assert pipes("df").resolve(VideoRequest("a red circle", **request)).fps == 12
    assert caplog.text == ""
    assert pipes("df").resolve(VideoRequest("a red circle", fps=24, **request)).fps == 24
    assert "fps: video has 12 frames per second and the result 24, so that it is faster" in caplog.text


def test_a_picture_in_a_block_stays_as_it_was_given(pipes):
    pipe = pipes("df")
    options: dict[str, Any] = dict(SIZE, image=picture(), ar_step=1, causal_block_size=3, output_type="latent")
    latents = pipe("a red circle", **options).frames
    alone = pipe("a red circle", **dict(options, num_inference_steps=1)).frames
    np.testing.assert_array_equal(latents[:, :, 0], alone[:, :, 0])
    assert (latents[:, :, 1:] != alone[:, :, 1:]).any()


HALF = dict(height=32, width=64, num_inference_steps=4, half_size_steps=2)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("t2v", {"num_frames": 10}, r"num_frames: expected 4n \+ 1, got 10; nearest 9 or 13"),
        ("t2v", {"height": 100}, r"height: expected a multiple of 16, got 100; nearest 96 or 112"),
        ("t2v", {"width": 0}, r"width: expected a multiple of 16, got 0; nearest 16"),
        ("t2v", {"resolution": "480P"}, "resolution: expected one of 540P, 720P, got '480P'"),
        ("t2v", {"resolution": "540P", "height": 64}, "resolution: give it, or height and width, not both"),
        ("t2v", {"cache": "fbcache"}, "cache: expected one of teacache, magcache, got 'fbcache'"),
        ("t2v", {"image": picture()}, "image: this model is for text alone"),
        ("t2v", {"ar_step": 5}, "ar_step: needs a model for diffusion forcing"),
        ("t2v", {"num_frames": 17}, "num_frames: longer than base_num_frames, 9, needs a model for diffusion forcing"),
        ("t2v", {"latents": np.zeros((1, 16, 3, 9, 9))}, r"latents: .*\[1, 16, 3, 2, 4\], got \(1, 16, 3, 9, 9\)"),
        ("t2v", {"prompt_embeds": np.zeros((1, 512, 16))}, "prompt: give it or prompt_embeds, one of the two"),
        ("i2v", {}, "image: this model is for image to video, and needs the first frame"),
        ("i2v", {"image": "no such.png"}, "image: there is no file no such.png"),
        ("df", {"causal_block_size": 2}, "causal_block_size: 3 latent frames in a segment cannot be cut"),
        ("df", {"overlap_history": 4}, r"overlap_history: expected 4n \+ 1, got 4; nearest 1 or 5"),
        ("df", {"num_frames": 17, "overlap_history": 9}, "overlap_history: .*, which is all of a segment's 3"),
        ("df", {"video": picture()[None], "overlap_history": 5}, "video: has 1 frames, fewer than overlap_history, 5"),
        ("df", {"video": controls(9), "overlap_history": 9}, "num_frames: expected more than the 9 frames of video"),
        ("df", {"image": picture(), "num_frames": 1}, "num_frames: expected more than the one frame that the image"),
        ("i2v", {"image": picture(1, 1000)}, "image: 1 x 1000 pixels .* no part of the shape of a frame of 16 x 32"),
        ("df", {"last_image": picture(1000, 1)}, "last_image: 1000 x 1 pixels"),
        ("t2v", {"prompt": None}, "prompt: give it or prompt_embeds"),
        ("t2v", {"fps": 1001}, "fps: expected a whole number of 1 to 1000, or None, got 1001"),
        *(
            ("t2v", {"prompt": None, "prompt_embeds": np.zeros((1, 512, 16), dtype)}, "prompt_embeds: .* of floats")
            for dtype in (complex, str, bool)
        ),
        ("t2v", {"latents": np.full((1, 16, 3, 2, 4), "0.5")}, "latents: expected an array of floats, got <U3"),
        (
            "t2v",
            {"negative_prompt": "blue", "negative_prompt_embeds": np.zeros((1, 512, 16))},
            "negative_prompt: give it or negative_prompt_embeds, not both",
        ),
        *(("t2v", {"resume": path}, "resume: expected a folder, which need not exist") for path in ("", Path(), 5)),
        ("t2v", {"prompt": 5}, "prompt: expected a text, or a list of one for each segment, got int"),
        ("t2v", {"prompt": ["a", 5]}, "prompt: expected a text, got int"),
        ("t2v", {"negative_prompt": 5}, "negative_prompt: expected a text, got int"),
        *(
            ("t2v", {"prompt": None, "prompt_embeds": np.zeros(shape)}, "prompt_embeds: .* got shape")
            for shape in ((1, 512, 16, 7), (1, 0, 16), (512, 16))
        ),
        *(
            (kind, {"prompt": "a", name: Tensor()}, f"{name}: cannot be read as an array: .*BFloat16; give float32")
            for kind, name in (("i2v", "image"), ("t2v", "latents"), ("t2v", "negative_prompt_embeds"), ("df", "video"))
        ),
        ("i2v", {"image": picture(), "last_image": picture()}, "last_image: needs a model for first and last frame"),
        ("flf2v", {"image": picture()}, "last_image: this model needs the last frame in addition to the first"),
        ("flf2v", {"last_image": picture()}, "image: this model is for image to video, and needs the first frame"),
        ("flf2v", {"image": picture(), "last_image": picture(), "num_frames": 1}, "num_frames: expected more than one"),
        *(
            ("t2v", {name: value}, f"{name}: needs a VACE model .*; this one is t2v")
            for name, value in (
                *(("mask", "m.png"), ("mask", [])),
                *(("reference_images", [picture()]), ("conditioning_scale", 0.5)),
            )
        ),
        ("vace", {"image": picture()}, "image: a VACE model takes pictures as reference_images, or as frames of video"),
        ("vace", {"last_image": picture()}, "last_image: needs a model for first and last frame"),
        ("vace", {"mask": controls()}, "mask: needs the video whose parts it shows"),
        ("vace", {"video": controls(), "mask": controls(4)}, "mask: has 4 frames of 20 x 40, and video 9 of 20 x 40"),
        ("vace", {"video": controls(), "mask": controls(1)[:, :9]}, "mask: has 1 frames of 9 x 40, and video 9 of"),
        ("vace", {"video": controls(5), "num_frames": 9}, "video: has 5 frames, fewer than num_frames, 9"),
        ("vace", {"reference_images": [picture()] * 4}, "reference_images: expected at most 3, the latent frames of 9"),
        ("vace", {"reference_images": ["no such.png"]}, "reference_images: there is no file no such.png"),
        ("vace", {"conditioning_scale": "1,2,3"}, "conditioning_scale: expected a number, or one for each of the 2"),
        ("vace", {"conditioning_scale": "strong"}, "conditioning_scale: expected a number, .* got 'strong'"),
        (
            "vace",
            {"reference_images": picture(), "latents": np.zeros((1, 16, 3, 2, 4))},
            r"latents: .*\[1, 16, 4, 2, 4\]",
        ),
        ("t2v", {"cache": "magcache", "cache_curve": "no such.json"}, "cache_curve: no such.json: no such file"),
        ("df", {"cache": "magcache"}, "cache: no curve of MagCache was published for df.*--calibrate"),
        ("df", {"cache": "magcache", "ar_step": 2}, "ar_step: expected 0 with cache magcache"),
        ("t2v", {"cache": "teacache", "cache_max_skip_steps": 2}, "cache_max_skip_steps: it is for cache magcache"),
        ("t2v", {"cache_curve": "curve.json"}, "cache_curve: it is for cache magcache"),
        ("t2v", {"height": -64}, "height: expected a multiple of 16, got -64; nearest 16"),
        ("t2v", {"cache_threshold": 0.2}, "cache_threshold: it is for a cache"),
        ("t2v", {"cache": "magcache", "cache_retention_ratio": 1.5}, "cache_retention_ratio: expected a number"),
        ("t2v", {**HALF, "half_size_steps": 4}, "half_size_steps: expected fewer than the 4 steps"),
        ("t2v", {**HALF, "height": 16}, "half_size_steps: expected 0 for frames of 16 x 64, whose sides are less"),
        ("df", {**HALF, "ar_step": 1}, "ar_step: expected 0 with half_size_steps"),
        ("ti2v", {"guidance_scale_2": 2.0}, "guidance_scale_2: this model has one transformer"),
        ("t2v-a14b", {"guidance_scale": 1, "guidance_scale_2": 2}, "guidance_scale_2: expected at most 1 where"),
        ("ti2v", {"height": 48}, "height: expected a multiple of 32, got 48; nearest 32 or 64"),
        ("ti2v", {"last_image": picture()}, "last_image: needs a model for first and last frame"),
        *(
            (
                "t2v",
                {"recipe": "lightx2v", name: value},
                f"recipe: .*lightx2v sets {name} to {own}, and {name} is {value}",
            )
            for name, own, value in (
                *(("num_inference_steps", 4, 8), ("guidance_scale", 1.0, 5.0), ("guidance_scale_2", 1.0, 3.0)),
                *(("shift", 5.0, 8.0), ("solver", "euler", "lcm"), ("sigmas", "1.0,0.75,0.5,0.25", "1,0.5")),
            )
        ),
        ("t2v", {"recipe": "lightning"}, "recipe: expected one of lightx2v, self-forcing, causvid, fastwan, got"),
        ("t2v", {"recipe": ["lightx2v"]}, "recipe: expected one of lightx2v, self-forcing, causvid, fastwan, got"),
        ("t2v", {"callback": "print"}, "callback: expected a function, got str"),
        *(
            ("t2v", {"sigmas": value}, "sigmas: expected falling numbers")
            for value in ("1,x", [0.5, 0.75], [1.5, 0.75], [1, 0.5, 0], [], [1, float("nan")], 3)
        ),
        ("t2v", {"sigmas": [1, 0.5], "num_inference_steps": 3}, "num_inference_steps: 3, but there are 2 sigmas"),
        *(
            ("df", {name: 4 * 10**digits + 1}, f"{name}: expected a whole number of .*(at most|to) [1-9]")
            for name in ("height", "num_frames", "base_num_frames", "overlap_history", "num_inference_steps", "ar_step")
            for digits in (9, 30)
        ),
        *(("t2v", {"shift": shift}, "shift: expected noise levels that differ") for shift in (1e9, 1e300, 1e-60)),
        ("df", {"sigmas": [1, 0.99999999, 0.5], "solver": "euler"}, "sigmas: expected noise levels that differ"),
        ("t2v", {"solver": "heun"}, r"solver: expected one of unipc, dpm\+\+, euler, lcm"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(pipes, kind, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        pipes(kind)(**{"prompt": "a red circle", **options})


def test_a_control_clip_gives_its_first_frames_and_one_mask_is_for_all_of_them(pipes):
    pipe, clip = pipes("vace"), controls(7)
    mask = np.where(np.arange(40)[:, None] < 15, np.uint8(255), np.uint8(0)) * np.ones((1, 20, 1, 3), np.uint8)
    options: dict[str, Any] = dict(num_inference_steps=2, output_type="latent")
    made = pipe("a red circle", video=clip, mask=mask, **options)
    assert made.frames.shape == (1, 16, 2, 2, 4)  # of 5 frames
    same = pipe("a red circle", video=clip[:5], mask=np.repeat(mask, 5, axis=0), conditioning_scale="1", **options)
    np.testing.assert_array_equal(made.frames, same.frames)
    without = pipe("a red circle", conditioning_scale=0, num_frames=5, **options)
    nothing = pipe("a red circle", video=clip, mask=mask, conditioning_scale=[0, 0], **options)
    np.testing.assert_array_equal(without.frames, nothing.frames)
    assert np.abs(made.frames - nothing.frames).max() > 0.01
    read = pipe.resolve(VideoRequest("a red circle", video=controls(30), mask=controls(20), num_frames=5))
    assert len(read.video) == len(read.mask) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float32, got 'int8'"),
        ({"reference": "comfy"}, "reference: expected one of skyreels, wan, diffusers, got 'comfy'"),
        ({"kind": "v2v"}, "kind: expected one of t2v, i2v, flf2v, ti2v, df, vace, got"),
        ({"kind": "i2v"}, "kind: i2v does not fit this transformer"),
        ({"kind": "vace"}, "kind: vace does not fit this transformer"),
    ],
)
def test_wrong_ways_to_open_a_checkpoint_are_refused(folders, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        VideoPipeline.from_pretrained(folders("t2v"), **options)


def test_parts_that_do_not_fit_each_other_are_refused(tmp_path):
    folder = video_folder("t2v", tmp_path / "odd")
    config = folder / "text_encoder/config.json"
    config.write_text(config.read_text().replace('"d_model": 16', '"d_model": 24'))
    with pytest.raises(UnsupportedModelError, match="text_dim, 16, should be the text encoder's d_model, 24"):
        VideoPipeline.from_pretrained(folder)


def test_settings_that_are_none_are_refused(tmp_path):
    folder = video_folder("t2v", tmp_path / "odd", frames=9)
    with pytest.raises(CheckpointError, match=r"verax.json: frames is 9; expected .* num_frames"):
        VideoPipeline.from_pretrained(folder)


def test_a_lora_file_for_another_model_is_refused_at_once(folders, tmp_path):
    save_file({"blocks.7.ffn.0.lora_A.weight": np.zeros((2, 24), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="no weight of the transformer for blocks"):
        VideoPipeline.from_pretrained(folders("t2v"), lora=tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("option", "hint"), [("num_frame", "did you mean num_frames"), ("loras", "options are image, last_image")]
)
def test_an_unknown_option_is_refused_with_a_hint(option, hint):
    with pytest.raises(InvalidParameterError, match=f"{option}: not an option of a request; {hint}"):
        make_request("a red circle", {option: 9})
