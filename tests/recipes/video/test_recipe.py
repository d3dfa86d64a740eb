"""The built-in video model as shipped; its recipe, for a few steps of a smaller one; its convolutions' gradients."""

from dataclasses import replace
from itertools import repeat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.video import latents, reader, recipe, transformer, vae
from recipes.video.evaluation import classify, contact_sheet, psnr
from recipes.video.recipe import train_builtin
from recipes.video.shapes import SHAPES, draw, scenes
from recipes.video.transformer import MuonSchedule
from recipes.video.vae import own_gradient_conv2d, own_gradient_conv3d
from verax import VideoPipeline, ops
from verax.train.loop import train


def test_held_out_combinations_are_never_trained_on():
    trained = {drawn.combination for drawn in scenes(0, 0, 2000)}
    held_out = {drawn.combination for drawn in scenes(0, 0, 300, split="held_out")}
    assert not trained & held_out
    assert {name.split("/")[0] for name in held_out} == set(SHAPES)


def test_the_built_in_model_keeps_the_first_frame_and_its_colours():
    pipe = VideoPipeline.from_pretrained(show_progress=False)
    [shown] = scenes(7, 2, 1, split="held_out")
    picture = draw([shown], frames=1)[0, 0]
    clip = pipe(shown.caption, image=picture, num_inference_steps=8)
    assert clip.frames.shape == (17, 64, 64, 3)
    assert psnr(clip.frames[0], picture) >= 24
    seen = classify(clip.frames)
    assert (seen.colour, seen.top, seen.bottom) == (shown.colour, shown.top, shown.bottom)


def test_the_built_in_model_follows_unseen_prompts():
    pipe = VideoPipeline.from_pretrained(show_progress=False)
    right = [classify(pipe(s.caption).frames).agrees(s) for s in scenes(7, 0, 10, split="held_out")]
    assert all(one[word] for one in right for word in ("colour", "direction", "top", "bottom"))
    # The model draws the right shape for 82% of 150 prompts; the others are squares with round corners.
    assert sum(one["shape"] for one in right) >= 7


@pytest.fixture
def small(monkeypatch):
    """Patched sizes: the fewest layers that have every part."""
    config = replace(vae.CONFIG, base_dim=4, dim_mult=(1, 1, 1), temperal_downsample=(True, True), num_res_blocks=1)
    monkeypatch.setattr(vae, "CONFIG", config)
    monkeypatch.setattr(vae, "CUTS", ((1.0, ((1, 5, 8),)),))
    for module in (vae, latents, recipe):
        monkeypatch.setattr(module, "SIZE", 16)
        monkeypatch.setattr(module, "FRAMES", 5)
    monkeypatch.setattr(vae, "STATISTICS_CLIPS", 2)
    monkeypatch.setattr(latents, "CHUNK", 2)
    monkeypatch.setattr(latents, "AT_ONCE", 2)
    for module in (reader, transformer):
        monkeypatch.setattr(module, "BATCH", 2)
    for module in (reader, recipe):
        monkeypatch.setattr(module, "TEXT_ENCODER", replace(reader.TEXT_ENCODER, num_layers=1))
    for module in (transformer, recipe):
        monkeypatch.setattr(module, "TRANSFORMER", replace(transformer.TRANSFORMER, num_layers=1))
        monkeypatch.setattr(module, "IMAGE_ENCODER", replace(transformer.IMAGE_ENCODER, image_size=16))
    settings = {**recipe._SETTINGS, "verax.json": {**recipe._SETTINGS["verax.json"]}}
    settings["verax.json"] |= {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2}
    monkeypatch.setattr(recipe, "_SETTINGS", settings)


@pytest.mark.usefixtures("small")
def test_the_recipe_makes_a_folder_that_makes_clips_and_resumes_what_is_there(tmp_path):
    made = train_builtin(tmp_path, steps=2, clip_count=2, show_progress=False)
    weights = made / "transformer" / "diffusion_pytorch_model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    assert train_builtin(tmp_path, steps=2, clip_count=2, resume=True, show_progress=False) == made
    assert weights.read_bytes() == before
    for name in ("vae", "reader", "transformer", "decoder"):
        assert (tmp_path / name / "loss.png").is_file()
    # Two clips, from text and from a picture: rows of two frames with a border of one pixel.
    drawn = scenes(0, 0, 1)
    words, pictures = (contact_sheet(made, drawn, columns=2, pictures=given) for given in (False, True))
    assert words.shape == pictures.shape == (18, 36, 3)
    assert (words != pictures).any()
    assert VideoPipeline.from_pretrained(made, show_progress=False).settings.text_tokens == latents.TEXT_TOKENS


CASES = {
    "causal": ((2, 3, 6, 5, 4), (7, 4, 3, 3, 3), dict(padding=1)),
    "one frame": ((2, 1, 6, 5, 4), (7, 4, 3, 3, 3), dict(padding=1)),
    "pointwise": ((2, 3, 4, 5, 4), (3, 4, 1, 1, 1), {}),
    "earlier frames": ((1, 4, 6, 5, 4), (3, 4, 3, 3, 3), dict(padding=1, cache=(1, 2, 6, 5, 4))),
    "halved in time": ((2, 6, 3, 4, 4), (4, 4, 3, 1, 1), dict(stride=(2, 1, 1), cache=(2, 1, 3, 4, 4))),
    "image": ((3, 6, 5, 4), (7, 4, 3, 3), dict(padding=1)),
    "halved image": ((3, 6, 8, 4), (5, 4, 3, 3), dict(stride=2, padding=((0, 1), (0, 1)))),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_the_reference(case):
    x_shape, w_shape, options = CASES[case]
    keys = jax.random.split(jax.random.key(0), 5)
    x, weight = jax.random.normal(keys[0], x_shape), jax.random.normal(keys[1], w_shape)
    bias = jax.random.normal(keys[2], w_shape[:1])
    options = {**options, **({"cache": jax.random.normal(keys[3], options["cache"])} if "cache" in options else {})}
    operation, own = (ops.conv3d, own_gradient_conv3d) if len(w_shape) == 5 else (ops.conv2d, own_gradient_conv2d)

    def run(implementation):
        @jax.jit
        def compute(*arrays):
            y, pull = jax.vjp(lambda *a: operation(*a, **options), *arrays)
            return y, *pull(jax.random.normal(keys[4], y.shape))

        with ops.use_implementations(**{operation.name: implementation}):
            return compute(x, weight, bias)

    for got, expected in zip(run(own), run("reference"), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5 * float(jnp.abs(expected).max()))


def test_muon_trains_inner_matrices_and_adamw_the_rest(tmp_path):
    """After one step from the same gradients, an inner matrix has moved equally in all its directions."""
    gradient = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    params = {name: jnp.zeros((6, 4)) for name in ("inner", "head", "embedding")} | {"bias": jnp.zeros(4)}
    common = dict(warmup_steps=0, weight_decay=0.0, clip=1e6)
    schedule = MuonSchedule(steps=2, peak_learning_rate=0.1, muon_learning_rate=0.1, **common)

    def linear_loss(params, batch):
        return sum(jnp.vdot(gradient, params[name]) for name in ("inner", "head", "embedding")) + params["bias"].sum()

    batches = lambda start: repeat({"tokens": np.zeros(1)})
    moved = train(linear_loss, params, batches, schedule, tmp_path, stop_at=1, show_progress=False)
    directions = np.linalg.svd(moved["inner"], compute_uv=False)
    assert directions.min() > 0.5 * directions.max()
    np.testing.assert_allclose(np.sqrt(np.mean(moved["inner"] ** 2)), 0.1 * 0.2, rtol=0.3)
    one = -float(moved["bias"][0])
    for name in ("head", "embedding"):  # AdamW's first step is as long for every element
        np.testing.assert_allclose(moved[name], -one * np.sign(gradient), rtol=1e-3)
