"""The networks of a checkpoint's folder, described and checked at once, their weights read when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from verax import models, ops, progress
from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.formats.pth import PthFile
from verax.checkpoint.formats.quantized import QuantizedEntry
from verax.checkpoint.formats.safetensors import SafetensorsFile
from verax.checkpoint.lora import with_lora
from verax.checkpoint.video.folder import VideoFolder
from verax.errors import InvalidParameterError
from verax.loading import DEQUANTIZE, load_weights, quantized_shapes
from verax.models.video_model import Network, VideoAutoencoder, VideoModel, VideoTransformer
from verax.nn.parallel import shard_blocks
from verax.ops.quantized import Precision
from verax.video.mesh import AnyMesh, tensor_mesh
from verax.video.programs import Component

M = TypeVar("M", bound=nnx.Module)


class Components(NamedTuple):
    """A checkpoint's networks."""

    text_encoder: Component[Any]
    image_encoder: Component[Any] | None
    transformers: tuple[Component[Any], ...]
    vae: Component[Any]


def open_model(folder: VideoFolder, *, kind: str | None = None, reference: str | None = None) -> VideoModel:
    """Family, settings and rules of a folder, by the class name in its transformer's config.json.

    `kind`: kind of model; None to go by the folder. `reference`: name of the rules to follow; None for the rules
    of the checkpoint's authors.
    """
    family = models.video_model(folder.config("transformer"))
    if reference is not None and reference not in family.references:
        raise InvalidParameterError(f"reference: expected one of {', '.join(family.references)}, got {reference!r}")
    model = family.from_folder(folder, kind=kind, rules=None if reference is None else family.references[reference])
    return replace(model, name=folder.name, folder=folder.path)


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
    precision: Precision | None = None,
    packed: Callable[[], Mapping[str, QuantizedEntry]] = dict,
) -> Component[M]:
    """A network as the devices of a clip hold it.

    `shard_weights`: True to divide the weights of a transformer's blocks over the mesh. `precision`: precision to
    quantise to. `packed`: weights that stay as the checkpoint has quantised them.
    """
    stored = packed()
    if shard_weights and is_quantizable(kind) and (precision is not None or stored):
        raise InvalidParameterError(
            "shard_weights: quantised weights are not divided over devices; leave it out, or give "
            f"quantization={DEQUANTIZE!r}"
        )
    is_transformer = issubclass(kind, VideoTransformer)
    if shard_weights and is_transformer and config.control_layers:
        raise InvalidParameterError("shard_weights: not implemented for VACE, whose blocks do not run in one loop")

    def make() -> M:
        module = cast(Any, kind)(config, dtype=dtype, rngs=nnx.Rngs(0))
        return shard_blocks(module, mesh) if mesh is not None and shard_weights and is_transformer else module

    held = partial(quantized_shapes, packed=stored, precision=precision) if stored or precision is not None else None
    place = mesh
    if mesh is not None and not is_transformer and not issubclass(kind, VideoAutoencoder):
        abstract = nnx.eval_shape(make)
        place = tensor_mesh(mesh, abstract if held is None else held(abstract), what)
    # A clip calls a transformer many times, and an encoder once or twice: packing pays if the encoder stays for others.
    # float32 stays unpacked: without AVX-512, packed weights are slower with this number of rows.
    pack = mesh is None and dtype == jnp.bfloat16 and (is_transformer or bool(keep))
    return Component(what, make, load, keep=keep, offload=offload, held=held, pack=pack, mesh=place)


QUANTIZATIONS: Mapping[str, Precision] = {"int8": Precision(8), "fp8": Precision(8, is_float=True)}
"""Precisions by the names that users give: 8-bit integers or floats, with a scale for each row."""


def is_quantizable(kind: type[nnx.Module]) -> bool:
    """True for a network of which weights may be quantised: transformers and UMT5."""
    return hasattr(kind, "quantized_weights")


def network_precision(kind: type[nnx.Module], quantization: str | None) -> Precision | None:
    """Precision that a network's weights are quantised to; None for those of the checkpoint.

    Transformers multiply 8-bit integers by inputs that are rounded to integers as well. A text encoder, which has the
    larger outliers and runs once, does not round its inputs.
    """
    if quantization is not None and quantization not in (*QUANTIZATIONS, DEQUANTIZE):
        names = ", ".join((*QUANTIZATIONS, DEQUANTIZE))
        raise InvalidParameterError(f"quantization: expected one of {names}, got {quantization!r}")
    precision = QUANTIZATIONS.get(quantization or "")
    if precision is None or not is_quantizable(kind):
        return None
    return precision._replace(rounds_inputs=issubclass(kind, VideoTransformer) and not precision.is_float)


def stays_as_stored(
    folder: VideoFolder, name: str, kind: type[nnx.Module], dtype: DTypeLike, quantization: str | None
) -> bool:
    """True if quantised weights of a network's files, where these are there, stay so in memory.

    Their products round the inputs, to bfloat16 at least, which somebody who asks for float32 does not want.
    """
    stays = quantization is None and dtype == jnp.bfloat16
    return stays and is_quantizable(kind) and folder.has_weights(name)


def load_components(
    folder: VideoFolder,
    model: VideoModel,
    dtype: DTypeLike,
    *,
    keep_encoders: bool | None = None,
    offload: bool = False,
    lora: Sequence[Mapping[Path, float]] = (),
    show_progress: bool = False,
    mesh: Mesh | None = None,
    shard_weights: bool = False,
    quantization: str | None = None,
) -> Components:
    """Describe a folder's networks.

    Args:
        dtype: dtype of the transformer's, the encoders' and the VAE's decoder's weights.
        keep_encoders: whether text and image encoder stay on the device; if None, when they are small or all networks
            take at most half of its memory.
        offload: whether all weights wait in the host's memory while they are not used.
        lora: files that change the weights of each transformer, each with a factor.
        mesh: devices each of which gets the weights of transformers and VAE, and a part of the encoders' weights; None
            for the default device.
        shard_weights: True to divide the weights of the transformers' blocks over the mesh instead.
        quantization: "int8" or "fp8" to quantise transformers and text encoder while loading, after the changes of
            `lora` and whatever the files have; "dequantize" for floats; None for what the files have, or for floats if
            `dtype` is float32.
    """

    def component(network: Network, dtype: DTypeLike, keep: bool | None) -> Component[Any]:
        precision = network_precision(network.module, quantization)
        may_stay = stays_as_stored(folder, network.folder, network.module, dtype, quantization)

        def load(abstract: Any) -> Any:
            with progress.bar(f"loading {network.name}", enabled=show_progress, count=False) as report:
                return load_weights(
                    abstract,
                    open_part(network.folder),
                    precision=precision,
                    dequantize=not may_stay,
                    mesh=cast(Mesh | None, described.mesh),
                    progress=report,
                )

        def packed() -> Mapping[str, QuantizedEntry]:
            return open_part(network.folder).packed if may_stay else {}

        options: Any = {"keep": keep, "offload": offload, "mesh": mesh, "shard_weights": shard_weights}
        options |= {"precision": precision, "packed": packed}
        described = divided_component(network.name, network.module, network.config, dtype, load, **options)
        return described

    changes = dict(zip((network.folder for network in model.transformers), lora, strict=False))

    def open_part(name: str) -> Checkpoint:
        opened = folder.checkpoint(name)
        return with_lora(opened, changes[name]) if changes.get(name) else opened

    # Two large transformers are on the device in turn.
    several = len(model.transformers) > 1
    for name in filter(changes.get, changes):
        open_part(name)  # now rather than after minutes of reading the prompt
    image = model.image_encoder
    encoders = [component(network, dtype, keep_encoders) for network in (model.text_encoder, image) if network]
    transformers = tuple(component(network, dtype, None if several else True) for network in model.transformers)
    vae, memory = component(model.vae, dtype, True), ops.target().memory
    if keep_encoders is None and not offload and memory is not None:
        size = sum(one.size for one in (*encoders, *transformers, vae))
        for encoder in encoders:  # to read one again takes longer than a clip of few steps
            encoder.keep |= size <= memory.total // 2
    return Components(encoders[0], encoders[1] if image else None, transformers, vae)


def load_tiny_decoder(
    choice: str,
    folder: VideoFolder,
    model: VideoModel,
    dtype: DTypeLike,
    *,
    offload: bool = False,
    mesh: Mesh | None = None,
) -> Component[Any]:
    """Describe a tiny decoder, which takes the place of a VAE's.

    `choice`: `tiny=FILE`, or `tiny` for a file of the published name in the checkpoint's folder. `dtype`: dtype of its
    weights.

    Raises:
        InvalidParameterError: for another choice, a family without one, a file that is missing, or a decoder of other
            latents.
        CheckpointError, UnsupportedModelError: if the file is not a tiny decoder that verax has.
    """
    name, _, given = choice.partition("=")
    if name != "tiny" or choice == "tiny=":
        raise InvalidParameterError(f"vae: expected tiny, or tiny=FILE, got {choice!r}")
    tiny, geometry = model.tiny_decoder, model.geometry
    if tiny is None:
        raise InvalidParameterError("vae: this family of models has no tiny decoder; leave it out")
    stem = tiny.stem
    places = [folder.path / f"{stem}{suffix}" for suffix in (".safetensors", ".pth")]
    path = next((place for place in ([Path(given)] if given else places) if place.is_file()), None)
    if path is None:
        raise InvalidParameterError(f"vae: there is no file {given or f'{places[0]} or {places[1].name}'}")
    file = SafetensorsFile(path) if path.suffix == ".safetensors" else PthFile(path)
    opened = Checkpoint(path, {}, {}, dict.fromkeys(file.tensors, file))
    config = tiny.config({key: info.shape for key, info in file.tensors.items()}, path)
    sizes = (config.z_dim, config.frames_per_latent, config.pixels_per_latent)
    if sizes != (expected := (geometry.channels, geometry.frames_per_latent, geometry.pixels_per_latent)):
        raise InvalidParameterError(
            f"vae: {path} is for latents of {sizes[0]} channels, {sizes[1]} frames and {sizes[2]} pixels; this model's "
            f"have {expected[0]}, {expected[1]} and {expected[2]}: {stem} fits"
        )

    def load(abstract: Any) -> Any:
        return load_weights(abstract, opened, mesh=mesh)

    def make() -> Any:
        return tiny.module(config, dtype=dtype, rngs=nnx.Rngs(0))

    return Component("tiny decoder", make, load, keep=True, offload=offload, mesh=mesh)


def describe_folder(path: str | Path) -> dict[str, Any]:
    """Kind, defaults and networks of a video model; the value of a network is its number of parameters.

    Settings are read, and neither weights nor a tokenizer.
    """
    folder = VideoFolder(path)
    model = open_model(folder)
    networks = load_components(folder, model, jnp.bfloat16, quantization=DEQUANTIZE)
    settings, geometry, transformer = model.settings, model.geometry, model.transformers[0].config
    components = (networks.text_encoder, networks.image_encoder, *networks.transformers, networks.vae)
    pixels = geometry.pixels_per_latent
    return {
        "path": str(folder.path),
        "layout": folder.layout,
        "kind": settings.kind,
        "clip": f"{settings.num_frames} frames of {settings.height} x {settings.width}",
        "transformer": f"{transformer.num_layers} layers of {transformer.dim}, {transformer.num_heads} heads",
        **({} if settings.boundary_ratio is None else {"boundary_ratio": settings.boundary_ratio}),
        "latents": f"{geometry.channels} channels for {geometry.frames_per_latent} frames of {pixels} x {pixels} "
        "pixels",
        "parameters": {one.name: one.parameters for one in components if one is not None},
    }
