"""Whole pipelines against diffusers': from prompt, picture and noise to frames, in float32.

Wan 2.2's have two transformers in turn, or text and image by one model.
"""

import json
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
PIL = pytest.importorskip("PIL.Image")

from tests.support.tiny_video import BOUNDARY, diffusers_pipeline
from verax import VideoRequest
from verax.models.wan.family import DIFFUSERS
from verax.video.caches import MagCurve
from verax.video.pipeline import VideoPipeline
from verax.video.programs import random_key
from verax.video.recipes import RECIPES
from verax.video.schedule import noise_levels

SIZE: dict[str, Any] = dict(height=32, width=48)
PROMPTS: dict[str, Any] = dict(
    prompt="A red circle floats left over a blue gradient", negative_prompt="blurred, static"
)


LATENTS = (4, 6)  # of a frame of SIZE


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Function from a kind to a pipeline of diffusers and ours on its checkpoint."""

    @cache
    def get(kind):
        folder = tmp_path_factory.mktemp(kind)
        theirs = diffusers_pipeline(kind, folder)
        return theirs, VideoPipeline(folder, dtype="float32", reference="diffusers", show_progress=False)

    return get


@pytest.fixture(params=["t2v", "i2v", "df"])
def pair(request, made):
    return request.param, *made(request.param)


@pytest.fixture(scope="module")
def forcing(made):
    theirs, ours = made("df")
    with_image = diffusers.SkyReelsV2DiffusionForcingImageToVideoPipeline(**theirs.components)
    with_image.set_progress_bar_config(disable=True)
    return theirs, with_image, ours


def picture(seed=0, height=70, width=50):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def noise(frames, seed=1):
    return np.random.default_rng(seed).normal(size=(1, 16, (frames - 1) // 4 + 1, *LATENTS)).astype(np.float32)


def theirs_frames(theirs, noises, monkeypatch, *, image=None, last_image=None, **options):
    """Frames of diffusers' pipeline, whose noise is handed to it where it would draw it."""
    queue = [torch.from_numpy(np.array(one)) for one in noises]
    monkeypatch.setattr(f"{type(theirs).__module__}.randn_tensor", lambda *_, **__: queue.pop(0))
    arrays = {"image": image, "last_image": last_image}
    images = {name: PIL.fromarray(array) for name, array in arrays.items() if array is not None}
    found = theirs(output_type="np", **images, **SIZE, **PROMPTS, **options)
    assert not queue
    frames = np.asarray(found.frames[0])
    assert frames.std() > 0.05
    return frames


@pytest.mark.parametrize("guidance", ["batch", "sequential"])
def test_frames_match_diffusers(pair, guidance, monkeypatch):
    kind, theirs, ours = pair
    options: dict[str, Any] = dict(num_frames=9, num_inference_steps=3, guidance_scale=4.0)
    images: dict[str, Any] = {"image": picture()} if kind == "i2v" else {}
    want = theirs_frames(theirs, [noise(9)], monkeypatch, **images, **options)
    got = ours(latents=noise(9), output_type="np", guidance=guidance, **images, **SIZE, **PROMPTS, **options)
    assert got.frames.shape == (9, 32, 48, 3)
    np.testing.assert_allclose(got.frames, want, atol=1e-4)


def test_half_size_steps_match_lightx2vs_loop(made):
    """The loop of `WanScheduler4ChangingResolution`, but with noise of the next step's level, not the last's."""
    theirs, ours = made("t2v")
    steps, small, whole = 6, 3, noise(9)
    text = torch.from_numpy(np.array(ours.parts.prompt_states(PROMPTS["prompt"])))

    def scheduler(shift):
        one = diffusers.UniPCMultistepScheduler.from_config(theirs.scheduler.config, flow_shift=shift)
        one.set_timesteps(steps)
        return one

    def velocity(x, t):
        return theirs.transformer(x, t.expand(1), text, return_dict=False)[0]

    first, second = scheduler(ours.settings.shift), scheduler(ours.settings.shift + 1)
    x = torch.from_numpy(whole)[..., :4, :4].unfold(3, 2, 2).unfold(4, 2, 2).sum((-1, -2)) / 2
    for i, t in enumerate(first.timesteps[:small]):
        v, before = velocity(x, t), x
        x = first.step(v, t, x, return_dict=False)[0]
        clean = before - first.sigmas[i] * v
    enlarged = torch.nn.functional.interpolate(clean, size=whole.shape[2:], mode="trilinear")
    sigma = second.sigmas[small]
    x = (1 - sigma) * enlarged + sigma * torch.from_numpy(whole)
    second.set_begin_index(small)
    for t in second.timesteps[small:]:
        x = second.step(velocity(x, t), t, x, return_dict=False)[0]

    got = ours(
        **PROMPTS,
        **SIZE,
        latents=whole,
        num_frames=9,
        num_inference_steps=steps,
        half_size_steps=small,
        guidance_scale=1.0,
        output_type="latent",
    ).frames
    np.testing.assert_allclose(got, x.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 16},
        {"ar_step": 2, "causal_block_size": 2},
        {"image": picture()},
        {"image": picture(), "ar_step": 1, "causal_block_size": 1},
        {"image": picture(), "ar_step": 2, "causal_block_size": 2},
        {"image": picture(), "last_image": picture(5)},
        {"image": picture(), "addnoise_condition": 50},
    ],
    ids=["16 fps", "blocks in turn", "image", "frames in turn", "image and blocks", "last image", "noise on the image"],
)
def test_diffusion_forcing_matches_diffusers(forcing, options, monkeypatch):
    alone, with_image, ours = forcing
    key, steps = jax.random.fold_in(random_key(42 + 1), 0), count()

    def noise_of_given_frames(given):
        drawn = jax.random.normal(jax.random.fold_in(key, next(steps)), (1, 6, *LATENTS, 16))
        return torch.from_numpy(np.array(drawn.transpose(0, 4, 1, 2, 3)))[:, :, : given.shape[2]]

    monkeypatch.setattr(torch, "randn_like", noise_of_given_frames)
    theirs = with_image if "image" in options else alone
    theirs.transformer._set_ar_attention(options.get("causal_block_size", 1))
    rest: dict[str, Any] = dict(num_frames=21, num_inference_steps=3, guidance_scale=3.0)
    want = theirs_frames(theirs, [noise(21)], monkeypatch, **rest, **options)
    got = ours(latents=noise(21), output_type="np", **SIZE, **PROMPTS, **rest, **options)
    np.testing.assert_allclose(got.frames, want, atol=1e-4)


# With an image, diffusers fails where the last segment is shorter than the others.
@pytest.mark.parametrize(("image", "frames"), [(None, 37), (picture(), 41)], ids=["text", "image"])
def test_long_clips_match_diffusers(forcing, image, frames, monkeypatch):
    alone, with_image, ours = forcing
    theirs = alone if image is None else with_image
    theirs.transformer._set_ar_attention(1)
    rest: dict[str, Any] = dict(
        num_frames=frames, base_num_frames=17, overlap_history=5, num_inference_steps=2, guidance_scale=3.0
    )
    # Latents: 5, 3 new, and 2 or 3 new, each after the 2 that it shares.
    sizes = 5, (frames - 1) // 4 + 1 - 6
    later = [ours.stages.noise(7, i, (1, size, *LATENTS, 16)) for i, size in enumerate(sizes, start=1)]
    noises = [noise(17), *(np.asarray(one).transpose(0, 4, 1, 2, 3) for one in later)]
    want = theirs_frames(theirs, noises, monkeypatch, image=image, **rest)
    rest.update(latents=noise(17), seed=7, image=image, output_type="np", **SIZE, **PROMPTS)
    got = ours(**rest)
    assert got.frames.shape == (frames, 32, 48, 3)
    np.testing.assert_allclose(got.frames, want, atol=1e-4)

    # Decoded as one clip at the end; before that, the callback sees each segment decoded by itself.
    seen = []

    def stop_in_the_third(now):
        seen.append(now)
        return now.segment < 2

    stopped = ours(callback=stop_in_the_third, **rest)
    assert not stopped.complete
    np.testing.assert_allclose(stopped.frames, want[:29], atol=1e-4)
    latents = [now.latents.transpose(0, 2, 3, 4, 1) for now in seen if now.done == now.total == 2]
    alone = [ours.stages.decode_call(one)(one) for one in latents]
    previews = [now.frames for now in seen if now.stage == "decode"]
    for preview, decoded, skip in zip(previews, alone, (0, 5), strict=True):
        np.testing.assert_array_equal(preview, ours.stages.finish(decoded[:, skip:]))


def test_latents_and_embeddings_have_the_layout_of_diffusers(pair):
    kind, theirs, ours = pair
    words = theirs.encode_prompt(**PROMPTS, max_sequence_length=512)
    embeds: dict[str, Any] = dict(
        zip(("prompt_embeds", "negative_prompt_embeds"), (one.numpy() for one in words), strict=True)
    )
    options: dict[str, Any] = dict(num_frames=5, num_inference_steps=2, image=picture() if kind == "i2v" else None)
    by_embeds = ours(**embeds, latents=noise(5), output_type="latent", **SIZE, **options)
    by_prompt = ours(**PROMPTS, latents=noise(5), output_type="latent", **SIZE, **options)
    assert by_embeds.frames.shape == (1, 16, 2, *LATENTS)
    np.testing.assert_allclose(by_embeds.frames, by_prompt.frames, atol=1e-4)


@pytest.mark.parametrize(("kind", "guidance_scale"), [("flf2v", 4.0), ("flf2v-skyreels", 1.0), ("i2v-a14b", 4.0)])
def test_frames_between_a_first_and_a_last_frame_match_diffusers(made, kind, guidance_scale):
    theirs, ours = made(kind)
    options: dict[str, Any] = dict(**SIZE, num_frames=13, num_inference_steps=3, guidance_scale=guidance_scale)
    arrays = {"image": picture(0), "last_image": picture(5, 41, 90)}
    images = {name: PIL.fromarray(array) for name, array in arrays.items()}
    want = theirs(latents=torch.from_numpy(noise(13)), output_type="np", **images, **PROMPTS, **options).frames[0]
    got = ours(latents=noise(13), output_type="np", **arrays, **PROMPTS, **options)
    assert want.std() > 0.05
    np.testing.assert_allclose(got.frames, want, atol=1e-4)


def clip(seed, height=80, width=120, frames=9):
    """A clip of the aspect of SIZE; diffusers takes no other."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def masks(frames=9):
    """Gray masks, whose middle is new in later frames."""
    levels = np.random.default_rng(3).integers(0, 256, (frames, 80, 120, 1), np.uint8)
    levels[2:, 20:60, 30:90] = 255
    return np.repeat(levels, 3, axis=-1)


@pytest.mark.parametrize(
    ("guidance_scale", "output", "given"),
    [
        (1.0, "np", {}),
        (4.0, "latent", {"video": clip(2), "mask": masks(), "conditioning_scale": [0.7, -1.5]}),
        (1.0, "np", {"reference_images": [picture(7), picture(8, 33, 95)], "conditioning_scale": 0.5}),
        (4.0, "np", {"video": clip(2), "reference_images": [picture(7, 64, 31)]}),
        (
            4.0,
            "latent",
            {"video": clip(2), "mask": masks(), "reference_images": [picture(7, 64, 31), picture(8), picture(9)]},
        ),
    ],
    ids=["nothing", "mask", "references", "two transformers", "all"],
)
def test_a_controlled_clip_matches_diffusers(made, given, output, guidance_scale):
    theirs, ours = made("vace-a14b" if "mask" not in given and "video" in given else "vace")
    options: dict[str, Any] = dict(**SIZE, num_frames=9, num_inference_steps=3, guidance_scale=guidance_scale)
    references = len(given.get("reference_images", ()))
    images = {
        name: value if name == "conditioning_scale" else [PIL.fromarray(one) for one in value]
        for name, value in given.items()
    }
    start = noise(9 + 4 * references)
    want = theirs(latents=torch.from_numpy(start), output_type=output, **images, **PROMPTS, **options).frames
    got = ours(latents=start, output_type=output, **given, **PROMPTS, **options).frames
    # Their latents begin with the references'.
    want = want[0] if output == "np" else want.numpy()[:, :, references:]
    assert want.std() > 0.05
    np.testing.assert_allclose(got, want, atol=1e-4)


SIZE_2_2: dict[str, Any] = dict(height=32, width=64, num_frames=9, num_inference_steps=5)


@pytest.fixture
def exact_times(monkeypatch):
    """Times embedded in float64: diffusers' float32 angles of a thousand are off by 3e-5."""
    module = import_module("diffusers.models.transformers.transformer_wan")
    embed = module.Timesteps.forward

    def forward(self, timesteps):
        half = self.num_channels // 2
        angles = timesteps.double()[:, None] * 10000.0 ** -(torch.arange(half).double() / half)
        exact = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        torch.testing.assert_close(exact, embed(self, timesteps), atol=1e-3, rtol=0)
        return exact

    monkeypatch.setattr(module.Timesteps, "forward", forward)


def noise_of(ours):
    channels, scale = ours.geometry.channels, ours.geometry.pixels_per_latent
    shape = (1, channels, 3, SIZE_2_2["height"] // scale, SIZE_2_2["width"] // scale)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def final_latents(theirs, ours, *, image=None, **options):
    """Latents after all steps of both."""
    options |= {"output_type": "latent", **SIZE_2_2, **PROMPTS}
    given, shown = ({}, {}) if image is None else ({"image": image}, {"image": PIL.fromarray(image)})
    want = theirs(latents=torch.from_numpy(noise_of(ours)), **shown, **options)
    got = ours(latents=noise_of(ours), **given, **options)
    return got.frames, want.frames.numpy()


@pytest.mark.usefixtures("exact_times")
@pytest.mark.parametrize(
    ("kind", "scales"),
    [("t2v-a14b", {"guidance_scale": 4.0, "guidance_scale_2": 2.0}), ("i2v-a14b", {"guidance_scale": 4.0})],
)
def test_latents_of_two_transformers_match_diffusers(made, kind, scales):
    theirs, ours = made(kind)
    first = noise_levels(5, ours.settings.shift, DIFFUSERS.sigmas).timesteps >= 1000 * BOUNDARY
    assert 0 < first.sum() < 5
    got, want = final_latents(theirs, ours, image=picture() if kind == "i2v-a14b" else None, **scales)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).mean()


@pytest.mark.usefixtures("exact_times")
@pytest.mark.parametrize(
    ("kind", "recipe"), [("t2v-a14b", "lightx2v"), ("t2v-a14b", "self-forcing"), ("ti2v", "fastwan")]
)
def test_latents_of_recipes_match_diffusers_with_their_schedulers(made, kind, recipe, monkeypatch):
    """Diffusers' pipeline with the scheduler at the recipe's noise levels; LCM's noise is handed to it."""
    theirs, ours = made(kind)
    settings = RECIPES[recipe]
    parent = diffusers.FlowMatchLCMScheduler if settings.solver == "lcm" else diffusers.FlowMatchEulerDiscreteScheduler

    class Scheduler(parent):
        def set_timesteps(self, *_, device=None, **__):
            super().set_timesteps(sigmas=list(settings.sigmas), device=device)
            if settings.whole_timesteps:
                self.timesteps = self.timesteps.round()

    queue = []
    key = jax.random.fold_in(random_key(42 + 1), 0)
    for i in range(len(settings.sigmas)):
        fresh = jax.random.normal(
            jax.random.fold_in(jax.random.fold_in(key, i), 1), np.moveaxis(noise_of(ours), 1, -1).shape, np.float32
        )
        queue.append(torch.from_numpy(np.array(np.moveaxis(np.asarray(fresh), -1, 1))))
    if settings.solver == "lcm":
        monkeypatch.setattr(f"{parent.__module__}.randn_tensor", lambda *_, **__: queue.pop(0))
    parts = {**theirs.components, "scheduler": Scheduler(shift=settings.shift)}
    more = {} if kind == "t2v-a14b" else {"expand_timesteps": True}
    pipe = type(theirs)(**parts, **more, **({"boundary_ratio": BOUNDARY} if kind == "t2v-a14b" else {}))
    pipe.set_progress_bar_config(disable=True)
    size = {name: value for name, value in SIZE_2_2.items() if name != "num_inference_steps"}
    latents = noise_of(ours)
    want = pipe(latents=torch.from_numpy(latents), output_type="latent", guidance_scale=1.0, **size, **PROMPTS).frames
    got = ours(latents=latents, output_type="latent", recipe=recipe, **size, **PROMPTS).frames
    assert np.abs(got - want.numpy()).max() < 1e-4 * np.abs(want.numpy()).mean()


@pytest.mark.usefixtures("exact_times")
def test_latents_of_an_image_and_a_text_match_diffusers(made):
    theirs, ours = made("ti2v")
    parts = {name: part for name, part in theirs.components.items() if name != "transformer_2"}
    theirs = diffusers.WanImageToVideoPipeline(**parts, expand_timesteps=True)
    theirs.set_progress_bar_config(disable=True)
    got, want = final_latents(theirs, ours, image=picture(), guidance_scale=4.0)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).mean()
    frame = ours.parts.model.rules.resize["ti2v"](picture(), SIZE_2_2["height"], SIZE_2_2["width"])
    held = np.asarray(ours.stages.encode(frame[None, None]))
    np.testing.assert_array_equal(got[:, :, 0], held[:, 0].transpose(0, 3, 1, 2))


@pytest.mark.usefixtures("exact_times")
def test_frames_of_text_match_diffusers(made):
    theirs, ours = made("ti2v")
    want = theirs(latents=torch.from_numpy(noise_of(ours)), output_type="np", **SIZE_2_2, **PROMPTS, guidance_scale=4.0)
    got = ours(latents=noise_of(ours), output_type="np", **SIZE_2_2, **PROMPTS, guidance_scale=4.0)
    assert got.frames.shape == (9, 32, 64, 3)
    assert got.frames.std() > 0.05
    np.testing.assert_allclose(got.frames, want.frames[0], atol=1e-4)


@pytest.fixture
def mag_cache(monkeypatch):
    """Diffusers' MagCache, which knows Wan's blocks, for SkyReels-V2's too."""
    mag = import_module("diffusers.hooks.mag_cache")
    registry, of_models = mag.TransformerBlockRegistry, "diffusers.models.transformers.transformer_"
    wan, skyreels = import_module(f"{of_models}wan"), import_module(f"{of_models}skyreels_v2")
    monkeypatch.setitem(registry._registry, skyreels.SkyReelsV2TransformerBlock, registry.get(wan.WanTransformerBlock))

    def enable(transformer, **settings):
        transformer.enable_cache(mag.MagCacheConfig(**settings))

    return enable


def curve_of(ours, ratios, path):
    """File of a curve that has the same ratios for both prompts."""
    return MagCurve.of(ours.parts.model, np.repeat(np.array(ratios)[:, None], 2, axis=1)).save(path)


@pytest.mark.usefixtures("exact_times")
@pytest.mark.parametrize(("kind", "guidance"), [("t2v", "sequential"), ("i2v", "batch"), ("t2v-a14b", "batch")])
def test_latents_with_magcache_match_diffusers(made, kind, guidance, mag_cache, monkeypatch, tmp_path):
    theirs, ours = made(kind)
    steps, threshold = 10, 0.1
    ratios = [1, 1.02, 0.99, 0.97, 0.985, 0.96, 0.99, 0.98, 0.97, 0.9]
    settings: dict[str, Any] = dict(threshold=threshold, max_skip_steps=2, retention_ratio=0.2)
    first = int(sum(noise_levels(steps, ours.settings.shift, DIFFUSERS.sigmas).timesteps >= 1000 * BOUNDARY))
    parts = {"transformer": ratios}
    if kind == "t2v-a14b":
        parts = {"transformer": ratios[:first], "transformer_2": ratios[first:]}
    for name, own in parts.items():
        mag_cache(getattr(theirs, name), mag_ratios=own, num_inference_steps=len(own), **settings)
    options: dict[str, Any] = dict(guidance_scale=4.0, num_inference_steps=steps, num_frames=9, **SIZE, **PROMPTS)
    images = {"image": PIL.fromarray(picture())} if kind == "i2v" else {}
    latents = noise(9)
    try:
        if kind == "i2v":
            monkeypatch.setattr(f"{type(theirs).__module__}.randn_tensor", lambda *_, **__: torch.from_numpy(latents))
        want = theirs(latents=torch.from_numpy(latents), output_type="latent", **images, **options).frames.numpy()
    finally:
        for name in parts:
            getattr(theirs, name).disable_cache()
    cache: dict[str, Any] = {f"cache_{name}": value for name, value in settings.items()}
    cache |= {"cache": "magcache", "cache_curve": curve_of(ours, ratios, tmp_path / "curve.json"), "guidance": guidance}
    images = {"image": picture()} if kind == "i2v" else {}
    got = ours(latents=latents, output_type="latent", **images, **options, **cache)
    assert 4 <= got.computed <= 7
    assert np.abs(got.frames - want).max() < 1e-4 * np.abs(want).mean()


@pytest.mark.usefixtures("exact_times")
def test_measured_curves_match_diffusers(made, mag_cache, capsys):
    theirs, ours = made("t2v")
    mag_cache(theirs.transformer, calibrate=True, num_inference_steps=5)
    options: dict[str, Any] = dict(guidance_scale=4.0, num_inference_steps=5, num_frames=9, **SIZE, **PROMPTS)
    try:
        theirs(latents=torch.from_numpy(noise(9)), output_type="latent", **options)
    finally:
        theirs.transformer.disable_cache()
    want = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    got = ours.calibrate(VideoRequest(latents=noise(9), **options)).ratios
    np.testing.assert_allclose(got, np.transpose(want), rtol=1e-5)
