"""Programs of a model compiled for devices that are not attached: memory, collectives, copies.

    python -m tests.targets.compile qwen3 v5e --devices 4 --depth 2 --max-num-seqs 16 --max-model-len 2048

Results are kept by a hash of the program in `compiled/` in verax's folder of caches, see `files.cache_folder`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from tests.targets.hlo import read_module
from tests.targets.topology import GPU_SPECS, TPUS, Compiler, compiler_of, topology_mesh
from verax import models, ops
from verax._compat import no_compilation_cache
from verax.files import cache_folder, write_json
from verax.loading import model_shapes
from verax.nn import Sentences
from verax.plan.devices import Device, find_device
from verax.plan.model import Described, describe
from verax.plan.text import text_plan
from verax.plan.video import components, read_clip
from verax.text.step.program import AbstractModel, StepProgram, step_program
from verax.video.denoise import Conditions, predict_velocity
from verax.video.networks import Denoiser
from verax.video.programs import floats

READER = 3
"""Version of what is read out of a compiled program: results of other versions are not taken from the cache."""

_SIZES = ("argument", "output", "alias", "temp", "generated_code")


class Compiled(NamedTuple):
    """A compiled program. Bytes are one device's; the last five fields are `hlo.read_module`'s.

    Attributes:
        aliased: bytes of results that take the memory of arguments.
        temporaries: bytes of the buffers in between.
        code: bytes of the program itself.
        collectives: number of collectives by kind; those that do not occur are left out.
        host_transfers: number of transfers to or from the host within the program.
        donated_copies: number of copies of donated buffers of a megabyte and more in the memory of the device.
        argument_copies: number of results of a megabyte and more in the memory of the device that only hold other
            arguments again.
        loops_with_products: number of loops that multiply matrices in each turn.
    """

    name: str
    seconds: float
    arguments: int
    results: int
    aliased: int
    temporaries: int
    code: int
    collectives: dict[str, int]
    host_transfers: int
    donated_copies: int
    argument_copies: int
    loops_with_products: int

    @property
    def needed(self) -> int:
        """Bytes that have to fit. Donated buffers count once."""
        return self.arguments + self.results - self.aliased + self.temporaries + self.code


def compile_lowered(name: str, lowered: jax.stages.Lowered, compiler: Compiler, device: str) -> Compiled:
    """Compile a program, or read the record of an earlier compilation by the same compiler.

    Args:
        name: what the program does.
        lowered: the program, on a mesh of `topology.topology_mesh`.
        compiler: compiler of the device.
        device: name of the device, and how many there are.

    Raises:
        JaxRuntimeError: if the compiler refuses the program, because it does not fit or for another reason.
    """
    # The text has the rest: shapes, shardings, donated arguments, the number of devices.
    by = (compiler.package, version("jaxlib"), compiler.options, compiler.description)
    key = json.dumps([READER, jax.__version__, *by, device, lowered.as_text()])
    folder = cache_folder()
    stored = None if folder is None else folder / "compiled" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if stored is not None and stored.exists():
        return Compiled(**{**json.loads(stored.read_text(encoding="utf-8")), "name": name})
    begin = time.perf_counter()
    with no_compilation_cache():
        program = lowered.compile(compiler_options=dict(compiler.options))
    seconds, memory = time.perf_counter() - begin, program.memory_analysis()
    sizes = (getattr(memory, f"{size}_size_in_bytes") for size in _SIZES)
    result = Compiled(name, seconds, *sizes, **read_module(program.as_text() or ""))
    if stored is not None:
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_json(stored, result._asdict())
    return result


def programs_of(
    model: str, device: Device, mesh: Mesh, *, depth: int | None = None, **options: Any
) -> list[StepProgram]:
    """The programs that take most of a model's time, the largest of each kind that its engine has.

    A language model has the decode step and the mixed step, an encoder one batch of sentences, a video model one
    denoising step.

    Args:
        model: see `plan.model.describe`.
        device: kind of device.
        mesh: the devices, with an axis `tensor`.
        depth: layers of the model, or blocks of the transformer; all if None.
        options: options of `text_plan`, of `_encoder_pass` or of `read_clip`.
    """
    described = describe(model)
    if described.kind == "text":
        plan = text_plan(_with_depth(described, depth), device, tensor_parallel_size=mesh.size, **options)
        sizes, abstract = plan.sizes(), AbstractModel.from_module(plan.model)
        decode = max(shape for shape in sizes.shapes if shape.decode and shape.decode_steps == 1)
        mixed = max((shape for shape in sizes.shapes if not shape.decode), key=lambda shape: (shape.tokens, shape.rows))
        names = {
            decode: f"decode step: {decode.rows} sequences of {sizes.max_model_len} tokens",
            mixed: f"mixed step: {mixed.rows} sequences, {mixed.tokens} tokens",
        }
        return [replace(step_program(abstract, sizes, shape, mesh), name=name) for shape, name in names.items()]
    if described.kind == "video":
        name, function, arguments = _denoising_step(described, depth, options)
    else:
        name, function, arguments = _encoder_pass(_with_depth(described, depth), **options)
    whole = PartitionSpec()
    return [StepProgram(name, function, arguments, jax.tree.map(lambda _: whole, arguments), whole, mesh, donated=())]


def _encoder_pass(model: Described, batch_size: int, max_length: int = 128) -> tuple[str, Any, tuple[Any, ...]]:
    """Name, function and arguments of an encoder on a batch of sentences, without pooling."""
    architecture, config = models.encoder(model.config)
    graph, state = nnx.split(model_shapes(architecture, config, dtype=jnp.float32))

    def encode(state: Any, ids: Any, lengths: Any) -> Any:
        return models.hidden_states(nnx.merge(graph, state), ids, Sentences.padded(lengths, max_length))

    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch_size, max_length), (batch_size,)))
    return f"{batch_size} sentences of {max_length} tokens", encode, (state, ids, lengths)


def _denoising_step(
    model: Described, depth: int | None, options: Mapping[str, Any]
) -> tuple[str, Any, tuple[Any, ...]]:
    """Name, function and arguments of one pass of the transformer, for a prompt and a negative prompt."""
    clip = read_clip(model.config, **options)
    if depth is not None:
        clip = clip._replace(transformer=replace(clip.transformer, num_layers=depth))
    (transformer, *_), config, settings = components(clip).transformers, clip.transformer, clip.settings
    denoiser = Denoiser(transformer)
    patches = 0 if clip.image is None else clip.image.num_patches + 1
    image = None if config.image_dim is None else floats(2, patches, config.image_dim)
    text = floats(2, settings.text_tokens, config.text_dim)
    context = jax.eval_shape(denoiser.context_program.function, transformer.shapes, text, image, None)
    fps = jax.ShapeDtypeStruct((1,), jnp.int32) if config.inject_sample_info else None

    def velocity(weights: Any, latents: Any, timesteps: Any, context: Any, fps: Any) -> Any:
        scale, none = jnp.float32(settings.guidance_scale), jnp.int32(0)
        conditions = Conditions(context, None, fps, scale, None, none, jax.random.key(0))
        module = transformer.module(weights)
        return predict_velocity(module, latents, timesteps, conditions, mesh=None, guidance="batch")[0]

    latents = floats(*clip.latents[:-1], config.in_dim)
    arguments = transformer.shapes, latents, jax.ShapeDtypeStruct((), jnp.int32), context, fps
    request = clip.request
    size = f"{request.num_frames} frames of {request.height} x {request.width}"
    return f"denoising step, prompt and negative prompt: {size}", velocity, arguments


def _with_depth(model: Described, depth: int | None) -> Described:
    """A model cut to its first layers."""
    if depth is None:
        return model
    cut = {**model.config, "num_hidden_layers": depth}
    if "layer_types" in cut:
        cut["layer_types"] = cut["layer_types"][:depth]
    return model._replace(config=cut)


def compile_model(
    model: str, name: str, *, devices: int = 1, depth: int | None = None, **options: Any
) -> list[Compiled]:
    """Compile a model's programs for a device by its name, which takes minutes. Weights need not be there.

    `depth` and `options` are `programs_of`'s.

    Raises:
        MissingDependencyError: if the compiler of the device is not installed.
    """
    device = find_device(name)
    compiler, mesh = compiler_of(device), topology_mesh(device, devices)
    with ops.use_target(device.platform, device.kind, device.memory, devices):
        programs = programs_of(model, device, mesh, depth=depth, **options)
        return [compile_lowered(one.name, one.lower(), compiler, f"{devices} x {name}") for one in programs]


@dataclass(frozen=True)
class Case:
    """A model on devices that are not attached, with a few layers: more of them take minutes, and show no more."""

    model: str
    device: str
    devices: int
    depth: int
    options: dict[str, Any] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.model}-{self.device}x{self.devices}"


_TEXT = {"max_num_seqs": 16, "max_model_len": 2048}
_CLIP = {"num_frames": 81, "height": 480, "width": 832}

CASES = [
    Case(model, device, devices, depth, options)
    for device in ("v5e", "h100")
    for model, depth, options, counts in (
        ("qwen3", 2, _TEXT, (1, 4)),
        ("hybrid", 4, _TEXT, (1,)),
        ("t2v-1.3b", 8, _CLIP, (1,)),
        ("minilm", 2, {"batch_size": 32}, (1,)),
    )
    for devices in counts
]
"""Qwen3-0.6B; three delta layers and one of attention as wide as Qwen3.5-0.8B's; Wan 1.3B; all-MiniLM-L6-v2."""


@cache
def compiled(case: Case) -> list[Compiled]:
    """The programs of a case, compiled."""
    return compile_model(case.model, case.device, devices=case.devices, depth=case.depth, **case.options)


def main() -> None:
    """Compile the programs of a model, and print what was compiled as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as verax plan takes it")
    parser.add_argument("device", help=", ".join((*TPUS, *GPU_SPECS)))
    for number in ("devices", "depth", "max-num-seqs", "max-model-len", "batch-size", "num-frames", "height", "width"):
        parser.add_argument(f"--{number}", type=int)
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    programs = compile_model(given.pop("model"), given.pop("device"), **given)
    print(json.dumps([one._asdict() for one in programs], indent=2))


if __name__ == "__main__":
    main()
