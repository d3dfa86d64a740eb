"""The memory plan: what the run will use, and what is said when it is too much."""

import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from tests.support.tiny_video import video_folder
from verax import VideoPipeline
from verax.errors import RequestRefusedError
from verax.models.video_model import LatentGeometry, VideoSettings
from verax.models.wan.family import KINDS, SKYREELS
from verax.ops import use_target
from verax.ops._target import DeviceMemory, Target
from verax.video.memory import StageMemory, free_memory, out_of_memory_message
from verax.video.programs import KEPT_PROGRAMS, Component, Program
from verax.video.request import VideoRequest, resolve_request

PICTURE = np.random.default_rng(0).integers(0, 256, (20, 40, 3), np.uint8)
OPTIONS: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=1, image=PICTURE)


def test_the_plan_counts_the_weights_and_the_work_of_each_stage(pipes):
    pipe = pipes("i2v")
    plan = pipe.plan(VideoRequest("a red circle", **OPTIONS))
    assert [one.stage for one in plan] == ["text", "image", "encode", "denoise", "decode"]
    assert all(one.work > 0 for one in plan)  # also where a program passes weights over
    assert not pipe.denoiser.transformer.loaded
    denoise = plan[3]
    assert denoise.weights == pipe.denoiser.transformer.size
    assert denoise.others == sum(
        one.size for one in (pipe.stages.text_encoder, pipe.stages.image_encoder, pipe.stages.vae)
    )
    assert denoise.work > 4 * 16 * 3 * 2 * 4 * 4  # the solver's four arrays


@pytest.mark.parametrize(("platform", "devices", "free"), [("gpu", None, 900), ("gpu", 2, 500), ("cpu", 2, 300)])
def test_the_device_with_the_least_free_memory_counts_and_a_cpu_has_one_memory(platform, devices, free, monkeypatch):
    least = {1: DeviceMemory(800, 1000), 2: DeviceMemory(400, 1000)}
    monkeypatch.setattr("verax.ops.target", lambda: Target(platform, "", read_memory=least.__getitem__))
    mesh = None if devices is None else AbstractMesh((1, devices), ("guidance", "sequence"))
    components: Any = [SimpleNamespace(mesh=mesh, loaded=True, size=100), SimpleNamespace(mesh=None, loaded=False)]
    assert free_memory(components) == free


def test_a_request_that_does_not_fit_is_refused_before_anything_runs(pipes, monkeypatch):
    pipe = pipes("i2v")
    monkeypatch.setattr("verax.video.pipeline.free_memory", lambda _: 5000)
    monkeypatch.setattr(pipe, "_releasable", [])  # other tests count the encoders
    seen = []
    with pytest.raises(RequestRefusedError, match=r"memory: \w+ needs .* MB .*; neither fewer nor smaller"):
        pipe("a red circle", callback=seen.append, **OPTIONS)
    assert seen == []
    with pytest.raises(RequestRefusedError, match="memory: "):
        pipe.calibrate(VideoRequest("a red circle", **OPTIONS))


def test_no_clip_is_advised_that_would_be_refused(pipes, monkeypatch):
    pipe, large = pipes("ti2v"), {**OPTIONS, "height": 64, "width": 64}
    plan = pipe.plan(VideoRequest("a red circle", **large))
    worst = max(plan, key=lambda one: one.peak)
    monkeypatch.setattr("verax.video.pipeline.free_memory", lambda _: worst.weights + worst.others + worst.work // 2)
    monkeypatch.setattr(pipe, "_releasable", [])
    with pytest.raises(RequestRefusedError, match="memory: ") as refusal:
        pipe("a red circle", **large)
    assert "num_frames=1 " not in str(refusal.value)  # the picture alone


def test_encoders_stay_until_a_clip_does_not_fit_next_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr("verax.video.programs.KEEP_LIMIT", 0)
    folder = video_folder("i2v", tmp_path / "i2v")
    with use_target("cpu", memory=1000):
        assert not VideoPipeline(folder).stages.text_encoder.keep
    pipe, large = VideoPipeline(folder), {**OPTIONS, "height": 96, "width": 96}  # so that decoding takes most
    first = pipe("a red circle", **large).frames
    encoders = pipe.stages.text_encoder, pipe.stages.image_encoder
    assert all(encoder.loaded for encoder in encoders)
    needed = max(one.peak for one in pipe.plan(VideoRequest("a red circle", **large)))
    monkeypatch.setattr("verax.video.pipeline.free_memory", lambda _: needed - 1)
    np.testing.assert_array_equal(pipe("a red circle", **large).frames, first)
    assert not any(encoder.loaded for encoder in encoders)


def test_weights_of_an_earlier_clip_count_and_leave_where_a_later_one_needs_their_place(tmp_path, monkeypatch):
    pipe = VideoPipeline(video_folder("t2v", tmp_path / "t2v"), keep_encoders=False, show_progress=False)
    options = {name: value for name, value in OPTIONS.items() if name != "image"}
    empty = pipe.plan(VideoRequest("a red circle", **options))
    first = pipe("a red circle", **options).frames
    stayed = [pipe.denoiser.transformer, pipe.stages.vae]
    assert all(one.loaded for one in stayed)
    later = pipe.plan(VideoRequest("a red circle", **options))
    assert [(one.stage, one.others) for one in later] == [
        ("text", stayed[0].size + stayed[1].size),
        ("denoise", stayed[1].size),
        ("decode", stayed[0].size),
    ]
    assert max(later, key=lambda one: one.peak).stage == "text"
    monkeypatch.setattr("verax.video.pipeline.free_memory", lambda _: max(one.peak for one in empty))
    loaded = {}

    def note(progress):
        loaded.setdefault(progress.stage, [one.loaded for one in stayed])

    np.testing.assert_array_equal(pipe("a red circle", callback=note, **options).frames, first)
    assert loaded["text"] == [False, False]


def test_guidance_is_in_turn_where_only_that_fits(pipes, monkeypatch, caplog):
    pipe = pipes("i2v")
    needs = {"batch": 2, "sequential": 1}
    monkeypatch.setattr(VideoPipeline, "_plan", lambda _, asked: [StageMemory("denoise", 0, 0, needs[asked.guidance])])
    for free, peak in ((2, 2), (0, 2), (None, 2)):
        monkeypatch.setattr("verax.video.pipeline.free_memory", lambda _, free=free: free)
        assert pipe.plan(VideoRequest("a red circle", **OPTIONS))[0].peak == peak
    monkeypatch.setattr("verax.video.pipeline.free_memory", lambda _: 1)
    assert caplog.text == ""
    assert pipe.plan(VideoRequest("a red circle", **OPTIONS))[0].peak == 1
    assert "guidance: prompt and negative prompt one after the other" in caplog.text


GEOMETRY = LatentGeometry(frames_per_latent=4, pixels_per_latent=8, pixels_per_token=16, channels=16, text_width=8)


def request(**options):
    asked = VideoRequest("a", guidance="batch", **options)
    model: Any = SimpleNamespace(
        settings=VideoSettings(kind="df"), geometry=GEOMETRY, rules=SKYREELS, conditioning=KINDS["df"]
    )
    return resolve_request(asked, model)


def plan_of(asked, change):
    """Work in proportion to frames, pixels and rows, and 30 times that with standard attention."""
    asked = SimpleNamespace(**{**vars(asked), **change})
    latents = GEOMETRY.latents(min(asked.num_frames, asked.base_num_frames))
    work = latents * asked.height * asked.width * (2 if asked.guidance == "batch" else 1)
    return [StageMemory("denoise", 1000, 500, work * (30 if asked.attention == "standard" else 1))]


@pytest.mark.parametrize(
    ("options", "share", "devices", "named", "not_named"),
    [
        (
            *({"attention": "standard"}, 0.05, 1),
            ("memory: denoise needs 76.80 MB", "attention='flash' (2.56 MB)", "num_frames=1 ", "height="),
            ("sequential", "offload"),
        ),
        ({}, 0.45, 1, ("height=96, width=192",), ()),
        ({}, 0.45, 8, ("height=96, width=128",), ()),
        (
            *({"num_frames": 197, "base_num_frames": 97}, 1 - 1e-6, 1),
            ("guidance='sequential'", "base_num_frames=85 ", "offload=True"),
            (),
        ),
    ],
    ids=["standard attention", "one device", "eight devices", "segments"],
)
def test_a_refusal_names_only_what_would_fit(options, share, devices, named, not_named):
    asked = request(**{"num_frames": 97, "height": 160, "width": 320, "attention": "auto", **options})
    plan = plan_of(asked, {})

    def message(free):
        return out_of_memory_message(asked, GEOMETRY, plan, free, partial(plan_of, asked), devices=devices)

    why = message(int(share * plan[0].peak))
    assert why is not None
    assert [text for text in named if text not in why] == []
    assert [text for text in not_named if text in why] == []
    assert message(10**12) is None


def test_of_a_function_the_last_compiled_programs_are_kept_and_others_leave_the_memory():
    program, client = Program(lambda x, *, power: x**power), jax.devices()[0].client
    before = len(client.live_executables())
    for size in (*range(1, KEPT_PROGRAMS + 6), 1):
        np.testing.assert_array_equal(program(np.full(size, 2, np.float32), power=3), np.full(size, 8))
    assert program.count == KEPT_PROGRAMS
    assert len(client.live_executables()) <= before + KEPT_PROGRAMS


def test_sizes_that_come_and_go_leave_no_traces():
    program = Program(lambda x: jnp.where(x > 0, jax.nn.silu(x), jnp.clip(x, -1, 1)) + jnp.pad(x, 1)[:-2])

    def traces():
        gc.collect()
        return sum(type(thing).__name__ in ("Jaxpr", "JaxprEqn", "PjitParams") for thing in gc.get_objects())

    def run(sizes):
        for size in sizes:
            program(np.ones(size, np.float32))

    run(range(1, KEPT_PROGRAMS + 3))
    before = traces()
    run(range(KEPT_PROGRAMS + 3, KEPT_PROGRAMS + 13))
    assert traces() <= before


def test_offloaded_weights_wait_in_the_hosts_memory():
    reads = []

    def load(module):
        reads.append(1)
        return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    component = Component("linear", lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), load, offload=True)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(load(None)))]
    for _ in range(2):
        with component.weights() as weights:
            for got, want in zip(weights, expected, strict=True):
                assert got.sharding.memory_kind == "device"
                np.testing.assert_array_equal(got, want)
        assert not component.loaded
    assert len(reads) == 2


def test_a_cpu_says_that_it_has_nowhere_to_offload_to(tmp_path, caplog):
    pipe = VideoPipeline.from_pretrained(video_folder("t2v", tmp_path / "t2v"), offload=True)
    assert "offload: a CPU has one memory" in caplog.text
    assert pipe.denoiser.transformer.keep
