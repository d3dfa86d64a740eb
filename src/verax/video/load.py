"""The models of a checkpoint's folder, described and checked at once, their weights read when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from verax import progress
from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.lora import with_lora
from verax.checkpoint.video.folder import VideoFolder
from verax.errors import UnsupportedModelError
from verax.loading import load_weights
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.nn.parallel import shard_blocks
from verax.video.mesh import AnyMesh, tensor_mesh
from verax.video.programs import Component
from verax.video.settings import read_settings

__all__ = ["Components", "describe_folder", "divided_component", "load_components"]

M = TypeVar("M", bound=nnx.Module)


class Components(NamedTuple):
    """A checkpoint's models."""

    text_encoder: Component[UMT5EncoderModel]
    image_encoder: Component[CLIPVisionModel] | None
    transformers: tuple[Component[WanModel], ...]
    vae: Component[WanVae]


def divided_component(
    what: str,
    kind: type[M],
    config: Any,
    dtype: DTypeLike,
    load: Callable[[M], M],
    *,
    keep: bool | None,
    offload: bool = False,
    mesh: AnyMesh | None = None,
    shard_weights: bool = False,
) -> Component[M]:
    """A model as the devices of a clip hold it.

    Args:
        what: its name in messages.
        kind: its class.
        config: its configuration.
        dtype: of its weights.
        load, keep, offload: as `Component` takes them.
        mesh: devices of the clip; None for the default device.
        shard_weights: True to divide the weights of a transformer's blocks over the mesh.
    """

    def make() -> M:
        made = cast(Any, kind)(config, dtype=dtype, rngs=nnx.Rngs(0))
        return shard_blocks(made, mesh) if mesh is not None and shard_weights and kind is WanModel else made

    place = mesh
    if mesh is not None and kind in (UMT5EncoderModel, CLIPVisionModel):
        place = tensor_mesh(mesh, nnx.eval_shape(make), what)
    # A clip calls a transformer many times, and an encoder once or twice: packing pays if the encoder stays for others.
    # float32 stays as it is: without AVX-512, packed weights are slower beside so many rows.
    pack = mesh is None and dtype == jnp.bfloat16 and (kind is WanModel or bool(keep))
    return Component(what, make, load, keep=keep, offload=offload, pack=pack, mesh=place)


def load_components(
    folder: VideoFolder,
    dtype: DTypeLike,
    *,
    experts: bool,
    keep_encoders: bool | None,
    offload: bool,
    lora: Mapping[Path, float],
    show_progress: bool,
    mesh: Mesh | None = None,
    shard_weights: bool = False,
) -> Components:
    """Describe a folder's models.

    Args:
        folder: of either layout.
        dtype: of the transformer's and the encoders' weights. The VAE's are float32.
        experts: True for two transformers, of which large ones are on the device in turn.
        keep_encoders: whether text and image encoder stay on the device; by their size if None.
        offload: whether all weights wait in the host's memory while they are not used.
        lora: files that change the transformer's weights, each with a factor.
        show_progress: bars while weights are read.
        mesh: devices each of which gets the weights of transformers and VAE, and a part of the encoders'; None for the
            default device.
        shard_weights: True to divide the weights of the transformers' blocks over the mesh instead.

    Raises:
        CheckpointError: if a part is missing, or a LoRA file does not fit the transformer.
        UnsupportedModelError: if verax has no such model, or the parts do not fit each other, or for LoRA files and two
            transformers.
    """

    def component(
        name: str, what: str, kind: type[M], config: Any, precision: DTypeLike, keep: bool | None
    ) -> Component[M]:
        def load(abstract: M) -> M:
            with progress.bar(f"loading {what}", enabled=show_progress, count=False) as report:
                return load_weights(abstract, open_part(name), mesh=cast(Mesh | None, made.mesh), progress=report)

        options: Any = {"keep": keep, "offload": offload, "mesh": mesh, "shard_weights": shard_weights}
        made = divided_component(what, kind, config, precision, load, **options)
        return made

    def open_part(name: str) -> Checkpoint:
        opened = folder.checkpoint(name)
        return with_lora(opened, lora) if name == "transformer" and lora else opened

    transformer = WanConfig.from_hf(folder.config("transformer"))
    vae = WanVaeConfig.from_hf(folder.config("vae"))
    text = UMT5Config.from_hf(folder.config("text_encoder"))
    image = None
    if transformer.image_dim is not None:
        image = CLIPVisionConfig.from_hf(folder.config("image_encoder"))
        _same("image_dim", transformer.image_dim, "the image encoder's hidden_size", image.hidden_size)
    _same("text_dim", transformer.text_dim, "the text encoder's d_model", text.d_model)
    _same("output channels", transformer.out_dim, "the VAE's z_dim", vae.z_dim)
    if lora:
        if experts:
            raise UnsupportedModelError("lora: files for a model of two transformers are not supported")
        open_part("transformer")  # now rather than after minutes of reading the prompt
    if image is not None or transformer.in_dim != vae.z_dim:
        channels = 2 * vae.z_dim + vae.frames_per_latent
        _same("input channels", transformer.in_dim, "what a clip's latents and condition have", channels)
    if experts and (second := WanConfig.from_hf(folder.config("transformer_2"))) != transformer:
        raise UnsupportedModelError(f"the two transformers should be of one size, got {transformer} and {second}")
    return Components(
        component("text_encoder", "text encoder", UMT5EncoderModel, text, dtype, keep_encoders),
        None
        if image is None
        else component("image_encoder", "image encoder", CLIPVisionModel, image, dtype, keep_encoders),
        (
            component("transformer", "high-noise transformer", WanModel, transformer, dtype, None),
            component("transformer_2", "low-noise transformer", WanModel, transformer, dtype, None),
        )
        if experts
        else (component("transformer", "transformer", WanModel, transformer, dtype, True),),
        component("vae", "video VAE", WanVae, vae, jnp.float32, True),
    )


def _same(ours: str, one: int, theirs: str, other: int) -> None:
    if one != other:
        raise UnsupportedModelError(f"the transformer's {ours}, {one}, should be {theirs}, {other}")


def describe_folder(model: str | Path) -> dict[str, Any]:
    """Kind, defaults and parts of a video model; a part's value is its number of parameters.

    Raises:
        CheckpointError: if a part's settings are missing or damaged.
        UnsupportedModelError: if verax has no such model, or the parts do not fit each other.
    """
    opened = VideoFolder(model)
    settings = read_settings(opened, opened.flow_shift, kind=None, negative_prompts={})
    experts = settings.boundary_ratio is not None
    found = load_components(
        opened, jnp.bfloat16, experts=experts, keep_encoders=None, offload=False, lora={}, show_progress=False
    )
    transformer, vae = found.transformers[0].config, found.vae.config
    components = (found.text_encoder, found.image_encoder, *found.transformers, found.vae)
    return {
        "path": str(opened.path),
        "layout": opened.layout,
        "kind": settings.kind,
        "clip": f"{settings.num_frames} frames of {settings.height} x {settings.width}",
        "transformer": f"{transformer.num_layers} layers of {transformer.dim}, {transformer.num_heads} heads",
        **({"boundary_ratio": settings.boundary_ratio} if experts else {}),
        "latents": f"{vae.z_dim} channels for {vae.frames_per_latent} frames of {vae.pixels_per_latent} x "
        f"{vae.pixels_per_latent} pixels",
        "parameters": {one.name: one.parameters for one in components if one is not None},
    }
