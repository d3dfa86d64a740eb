"""Step caches: TeaCache and MagCache choose before a run the steps that skip the transformer's blocks.

A step that skips the blocks adds the residual that they added when they last ran. Neither choice looks at the latents,
so that it is a column of the loop's table (`Tables.run_blocks`), and the loop is one program.

- TeaCache: Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model" (2024).
- MagCache: Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Real

from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import Positive, read_value
from verax.files import read_json, write_json
from verax.models.video_model import TeaCache, VideoModel
from verax.video.request import ResolvedRequest

CURVE_FILE = "magcache.json"
"""Name of the file with a checkpoint's own curve, in its folder."""


def teacache_steps(
    timesteps: Real[np.ndarray, "R ..."],
    embedded: Float[np.ndarray, "R ..."],
    threshold: float,
    cache: TeaCache,
) -> Bool[np.ndarray, "R"]:
    """True for the steps that run the blocks with TeaCache.

    The distance between the embeddings of time of two steps is mapped by a polynomial to an estimate of the distance
    between the blocks' outputs.

    SkyReels-V2's own code counts calls, two a step, against a number of steps, and so starts over half way through.
    Here, as in the authors' code, the first steps are the first of the run.

    Args:
        timesteps: timestep of each step, of all frames or (diffusion forcing) of each frame.
        embedded: projection of time's embedding, which modulates the blocks, of each step.
        threshold: sum of estimated changes at which the blocks run again; 0.1 to 0.3 is usual.
        cache: measure of the family's `teacache`.
    """
    R = len(timesteps)
    run_blocks = np.ones(R, bool)
    change = 0.0
    for i in range(cache.kept, R):
        before = embedded[i - 1]
        change += np.polyval(cache.polynomial, np.abs(embedded[i] - before).mean() / np.abs(before).mean())
        run_blocks[i] = change >= threshold
        if run_blocks[i]:
            change = 0.0
    return run_blocks


def magcache_steps(
    ratios: Float[np.ndarray, "R G"], *, threshold: float, max_skip_steps: int, retention_ratio: float
) -> Bool[np.ndarray, "R"]:
    """True for the steps that run the blocks with MagCache.

    The product of the ratios since the blocks last ran says how much smaller the residual would be by now. Its distance
    from 1 is the error of a skipped step, and a step is skipped while the sum of these errors is at most `threshold`.
    As in the authors' code and in diffusers' `MagCacheConfig`, but for one thing: prompt and negative prompt are rows
    of one call, so that a step is skipped only if both may skip it.

    Args:
        ratios: size of each step's residual over the residual of the step before, of each row of guidance.
        threshold: sum of errors up to which steps are skipped.
        max_skip_steps: skipped steps in a row, at most.
        retention_ratio: share of the steps, the first ones, that always run. The first step always does.
    """
    R, G = ratios.shape
    run_blocks = np.ones(R, bool)
    product, error, skipped = np.ones(G), np.zeros(G), 0
    for i in range(max(1, int(retention_ratio * R + 0.5)), R):
        product, skipped = product * ratios[i], skipped + 1
        error = error + np.abs(1 - product)
        run_blocks[i] = error.max() > threshold or skipped > max_skip_steps
        if run_blocks[i]:
            product, error, skipped = np.ones(G), np.zeros(G), 0
    return run_blocks


def interpolated(ratios: Float[np.ndarray, "N G"], steps: int) -> Float[np.ndarray, "R G"]:
    """Curve for another number of steps: the nearest of the measured steps for each, as MagCache's authors do."""
    if steps == 1:
        return ratios[-1:]
    return ratios[np.round(np.arange(steps) * ((len(ratios) - 1) / (steps - 1))).astype(int)]


@jax.jit
def magnitude_ratio(residual: Float32[Array, "G F h w D"], before: Float32[Array, "G F h w D"]) -> Float32[Array, "G"]:
    """Mean over the tokens of a residual's size over the size of the residual of the step before."""
    size, size_before = (jnp.linalg.norm(one, axis=-1) for one in (residual, before))
    return (size / (size_before + 1e-8)).mean(axis=(1, 2, 3))


@dataclass(frozen=True, eq=False)
class MagCurve:
    """MagCache's curve of a checkpoint, which `VideoPipeline.calibrate` measures.

    Attributes:
        model: name of the checkpoint's folder or repository.
        kind: kind of model, see `VideoSettings.kind`.
        transformer: its sizes, in words.
        ratios: size of each step's residual over the residual of the step before, 1 for the first; a column for the
            prompt and, with guidance, one for the negative prompt.
    """

    model: str
    kind: str
    transformer: str
    ratios: Float[np.ndarray, "N G"]

    @classmethod
    def of(cls, model: VideoModel, ratios: Float[np.ndarray, "N G"]) -> MagCurve:
        """Curve of a model."""
        return cls(model.name, model.settings.kind, _sizes(model), ratios)

    def save(self, path: str | Path) -> Path:
        """Write a JSON file for `cache_curve`, whole or not at all."""
        facts = {name: getattr(self, name) for name in ("model", "kind", "transformer")}
        write_json(Path(path), {**facts, "steps": len(self.ratios), "ratios": self.ratios.round(5).tolist()})
        return Path(path)

    @classmethod
    def read(cls, path: str | Path) -> MagCurve:
        """Read a file of `save`.

        Raises:
            CheckpointError: naming the file, if it is missing, damaged or another kind of file.
        """
        file = read_json(Path(path))
        facts = {name: read_value(file, name, str) for name in ("model", "kind", "transformer")}
        rows = read_value(file, "ratios", list[tuple[Positive, ...]])
        if not rows or {len(row) for row in rows} not in ({1}, {2}):
            raise CheckpointError(f"{path}: ratios: expected a row for each step, all of one number or all of two")
        return cls(**facts, ratios=np.array(rows))


def _sizes(model: VideoModel) -> str:
    """Sizes of a model's transformers, in words."""
    config = model.transformers[0].config
    sizes = f"{config.num_layers} layers of {config.dim}, {config.num_heads} heads"
    return sizes if len(model.transformers) == 1 else f"{len(model.transformers)} times {sizes}"


def _magnitude_ratios(request: ResolvedRequest, model: VideoModel) -> Float[np.ndarray, "R G"]:
    """MagCache's curve for a request: of its file, else of the checkpoint's folder, else the published one.

    A file is for its checkpoint and number of steps. The others are interpolated to the request's steps.

    Raises:
        InvalidParameterError: if there is no curve, or the request's is of another checkpoint or number of steps.
    """
    steps = request.num_inference_steps
    if request.cache_curve is not None:
        ratios = _own_curve(request, model)
    elif model.folder is not None and (model.folder / CURVE_FILE).is_file():
        ratios = interpolated(MagCurve.read(model.folder / CURVE_FILE).ratios, steps)
    else:
        published = model.magcache(request.height * request.width, has_image=request.image is not None)
        if published is None:
            raise InvalidParameterError(
                f"cache: no curve of MagCache was published for {model.name} ({model.settings.kind}, {_sizes(model)}); "
                f"measure it (verax video --calibrate FILE --steps {steps}) and give it as cache_curve"
            )
        ratios = interpolated(published, steps)
    return ratios[:, : request.rows]


def _own_curve(request: ResolvedRequest, model: VideoModel) -> Float[np.ndarray, "R G"]:
    """Curve of a request's file."""
    assert request.cache_curve is not None
    try:
        curve = MagCurve.read(request.cache_curve)
    except (CheckpointError, UnsupportedModelError) as error:
        raise InvalidParameterError(f"cache_curve: {error}") from error
    for name, own in (("model", model.name), ("kind", model.settings.kind), ("transformer", _sizes(model))):
        if getattr(curve, name) != own:
            raise InvalidParameterError(
                f"cache_curve: {request.cache_curve} is of another checkpoint: its {name} is {getattr(curve, name)}, "
                f"and this one's {own}; measure the curve of this one (verax video --calibrate FILE)"
            )
    if len(curve.ratios) != request.num_inference_steps:
        raise InvalidParameterError(
            f"cache_curve: {request.cache_curve} is of {len(curve.ratios)} steps, and the clip has "
            f"{request.num_inference_steps}; measure one with --calibrate FILE --steps {request.num_inference_steps}"
        )
    return curve.ratios


def with_cache(request: ResolvedRequest, model: VideoModel) -> ResolvedRequest:
    """Request with MagCache's curve, if it uses that cache.

    Refuses a cache that the model has no measure for, and options of a cache without it.

    Raises:
        InvalidParameterError: naming the option.
    """
    if request.cache is None and request.cache_threshold is not None:
        raise InvalidParameterError("cache_threshold: it is for a cache; give cache too, or leave this out")
    if request.cache != "magcache":
        for name in ("cache_curve", "cache_max_skip_steps", "cache_retention_ratio"):
            if getattr(request, name) is not None:
                raise InvalidParameterError(f"{name}: it is for cache magcache; give that too, or leave this out")
        if request.cache == "teacache" and model.teacache(request.height * request.width) is None:
            raise InvalidParameterError("cache: TeaCache has no coefficients for this family of models; leave it out")
        return request
    if request.ar_step:
        raise InvalidParameterError("ar_step: expected 0 with cache magcache, whose curve is of all frames at one step")
    return replace(request, cache_ratios=_magnitude_ratios(request, model))


def cached_steps(
    request: ResolvedRequest,
    model: VideoModel,
    spans: Any,
    timesteps: Real[np.ndarray, "R ..."],
    fps: np.ndarray | None,
    steps_before: int = 0,
) -> Bool[np.ndarray, "R"]:
    """True for the iterations of a segment that run the blocks, with the request's cache.

    `spans`: iterations of each transformer (`run.Span`), each of which begins with computed ones. `steps_before`:
    steps before these iterations, at another size.
    """
    assert request.cache_threshold is not None
    chosen = []
    ratios = None if request.cache_ratios is None else request.cache_ratios[steps_before:]
    # As in MagCache's code for Wan2.2's I2V-A14B, which keeps all steps of high noise, where the image takes effect.
    always = int(len(model.transformers) > 1 and model.conditioning.encode is not None)
    for span in spans:
        rows = slice(span.begin, span.end)
        if ratios is None:
            cache = model.teacache(request.height * request.width)
            assert cache is not None
            embedded = span.denoiser.project_time(timesteps[rows], fps)
            chosen.append(teacache_steps(timesteps[rows], embedded, request.cache_threshold, cache))
        elif span.transformer < always:
            chosen.append(np.ones(span.end - span.begin, bool))
        else:
            assert request.cache_max_skip_steps is not None
            assert request.cache_retention_ratio is not None
            steps = magcache_steps(
                ratios[rows],
                threshold=request.cache_threshold,
                max_skip_steps=request.cache_max_skip_steps,
                retention_ratio=request.cache_retention_ratio,
            )
            chosen.append(steps)
    return np.concatenate(chosen)
