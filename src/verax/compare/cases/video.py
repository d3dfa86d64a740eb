"""Cases of `verax compare video`: each part of a SkyReels-V2 or Wan model in a PyTorch library, and in verax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax import builtin
from verax.checkpoint.random_weights import random_weight
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import EXPERTS, PARTS, VAE_2_2, diffusers_transformer
from verax.compare.case import Case, Side
from verax.compare.cases.video_parts import PART_SIDES
from verax.compare.inputs import Inputs
from verax.compare.torch_side import torch
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import load_model
from verax.models import DTYPES

__all__ = ["RANDOM", "VIDEO_PARTS", "build_part", "has_part", "video_case"]

VIDEO_PARTS = tuple(PARTS)
"""Names of the parts: transformer, transformer_2, vae, text_encoder, image_encoder."""

_TEXT = dict(vocab_size=100, d_model=16, d_kv=6, d_ff=36, num_layers=2, num_heads=5, feed_forward_proj="gated-gelu")

RANDOM: Mapping[str, Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "tiny": {
            "transformer": dict(
                _class_name="SkyReelsV2Transformer3DModel",
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=36,
                out_channels=16,
                image_dim=20,
                added_kv_proj_dim=24,
                text_dim=16,
                freq_dim=64,
                ffn_dim=32,
                num_layers=2,
                rope_max_seq_len=32,
            ),
            "vae": dict(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
            | dict(temperal_downsample=[False, True, True]),
            "text_encoder": _TEXT,
            "image_encoder": dict(hidden_size=20, intermediate_size=52, num_hidden_layers=3, num_attention_heads=4)
            | dict(image_size=35, patch_size=7, hidden_act="gelu"),
        },
        "tiny-5b": {
            "transformer": dict(
                _class_name="WanTransformer3DModel",
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=24,
                out_channels=24,
                text_dim=16,
                freq_dim=64,
                ffn_dim=32,
                num_layers=2,
                rope_max_seq_len=32,
            ),
            "vae": dict(VAE_2_2, base_dim=4, decoder_base_dim=6, z_dim=24, num_res_blocks=1, dim_mult=[1, 2, 2, 2])
            | dict(latents_mean=[0.1] * 24, latents_std=[0.9, 1.2] * 12),
            "text_encoder": _TEXT,
        },
        "5b": {
            "transformer": dict(
                _class_name="WanTransformer3DModel",
                num_attention_heads=24,
                attention_head_dim=128,
                in_channels=48,
                out_channels=48,
                text_dim=4096,
                freq_dim=256,
                ffn_dim=14336,
                num_layers=30,
            ),
            "vae": dict(VAE_2_2),
        },
        "1.3b": {
            "transformer": dict(
                _class_name="SkyReelsV2Transformer3DModel",
                num_attention_heads=12,
                attention_head_dim=128,
                in_channels=36,
                out_channels=16,
                image_dim=1280,
                added_kv_proj_dim=1536,
                text_dim=4096,
                freq_dim=256,
                ffn_dim=8960,
                num_layers=30,
            ),
            "vae": dict(base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2)
            | dict(temperal_downsample=[False, True, True]),
        },
    }
)
"""Settings of the parts of random models, by size: small ones, which fit each other, those of SkyReels-V2-I2V-1.3B, and
small and published ones like Wan2.2-TI2V-5B's."""

RANDOM_INPUTS = Inputs()


def video_case(model: str | Path | None, part: str, *, inputs: Inputs = RANDOM_INPUTS, size: str = "tiny") -> Case:
    """Case that compares one part of a video model.

    Args:
        model: a folder of either published layout; None for random weights.
        part: one of `VIDEO_PARTS`.
        inputs: arrays by the names of the reference's arguments, in its layout; the others are random.
        size: size of the model with random weights, one of `RANDOM`.

    Raises:
        CheckpointError: if the folder or the part cannot be read.
        InvalidParameterError: for another part or size, or inputs that the part does not take.
        MissingDependencyError: without torch, diffusers or transformers.
    """
    if part not in VIDEO_PARTS:
        raise InvalidParameterError(f"part: expected one of {', '.join(VIDEO_PARTS)}, got {part!r}")
    kind, folder = PART_SIDES[part], None if model is None else VideoFolder(model)
    if folder is None and part not in (known := _random(size)):
        raise InvalidParameterError(f"part: random weights of {size} are made for {', '.join(known)}, not {part}")
    settings = dict(RANDOM[size][part]) if folder is None else folder.config(part)
    if part in EXPERTS and folder is not None:
        settings = diffusers_transformer(settings, folder.pipeline)
    config = kind.config(settings)
    given = inputs.checked(kind.inputs(config))
    abstract = nnx.eval_shape(lambda: build_part(part, settings))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract))}
    opened = None if folder is None else folder.checkpoint(part)

    def weight(name: str) -> np.ndarray:
        return random_weight(name, shapes[name]) if opened is None else np.asarray(opened.read(name), np.float32)

    def reference(dtype: str) -> Side:
        made = kind.torch({name: value for name, value in settings.items() if name != "_diffusers_version"})
        _fill(made, part, settings, weight)
        _cast(made.eval().requires_grad_(False), dtype)
        return kind.run(made, config, given)[0]

    def ours(dtype: str) -> Side:
        if opened is not None:
            made = load_model(opened, kind.build, config, dtype=dtype)
        else:
            graph, state = nnx.split(nnx.eval_shape(lambda: kind.build(config, dtype=DTYPES[dtype], rngs=nnx.Rngs(0))))
            leaves = [
                (path, leaf.replace(jnp.asarray(weight(".".join(map(str, path))), leaf.dtype)))
                for path, leaf in nnx.to_flat_state(state)
            ]
            made = nnx.merge(graph, nnx.from_flat_state(leaves))
        return kind.run(made, config, given)[1]

    if folder is None:
        weights = "random" if size == "tiny" else f"random, {size}"
    else:
        weights = "built-in" if folder.path == builtin.video_model() else str(folder.path)
    about = {"model": weights, "part": PARTS[part].what, **inputs.about}
    what = type(abstract).__name__
    library = "transformers" if part.endswith("encoder") else "diffusers"
    return Case(f"{what} and {library}", reference, ours, kind.names(settings), about)


def build_part(part: str, settings: Mapping[str, Any]) -> nnx.Module:
    """Our module of a part with the given settings."""
    kind = PART_SIDES[part]
    return kind.build(kind.config(settings), rngs=nnx.Rngs(0))


def has_part(model: str | Path | None, part: str, *, size: str = "tiny") -> bool:
    """True if a folder, or a random model of a size, has a part.

    Raises:
        CheckpointError: if it is no video model's folder.
    """
    return part in (_random(size) if model is None else VideoFolder(model))


def _random(size: str) -> Mapping[str, Any]:
    if size not in RANDOM:
        raise InvalidParameterError(f"size: expected one of {', '.join(RANDOM)}, got {size!r}")
    return RANDOM[size]


def _fill(model: Any, part: str, settings: Mapping[str, Any], weight: Callable[[str], np.ndarray]) -> None:
    """Copy weights into the reference's model, one after the other; `weight` takes the original's name.

    Raises:
        CheckpointError: if a shape does not fit, or a parameter is left without a weight.
    """
    names, state, filled = PARTS[part].names(settings), model.state_dict(), set()
    for key, tensor in state.items():
        if (found := names.backward(key)) is None:
            continue
        original, piece = found
        whole = PARTS[part].form(original).to_diffusers(weight(original))
        array = np.split(whole, len(names.forward(original) or (key,)))[piece]
        if array.shape != tuple(tensor.shape):
            raise CheckpointError(f"{original}: shape {list(array.shape)}, the reference needs {list(tensor.shape)}")
        tensor.copy_(torch().from_numpy(np.array(array)))
        filled.add(key)
    if missing := {key for key, _ in model.named_parameters()} - filled:
        raise CheckpointError(f"no weights for the reference's {', '.join(sorted(missing)[:5])}")


def _cast(model: Any, dtype: str) -> None:
    """Cast parameters as `from_pretrained` does.

    Modules that diffusers keeps in float32 are not cast. Buffers are not cast.
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = kept if hasattr(model, "register_to_config") else ()
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(kept):
            parameter.data = parameter.data.to(getattr(torch(), dtype))
