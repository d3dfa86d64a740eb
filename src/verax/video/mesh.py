"""Several devices for one clip: the two passes of classifier-free guidance on two groups of devices, the tokens of each
pass over the devices of its group, and the layers of the text and image encoders over all of them.

xDiT (Fang et al., 2024, arXiv:2411.01738) has the first two under the names of CFG parallel and Ulysses.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.models.video_model import LatentGeometry, VideoSettings
from verax.nn.parallel import fitting_sizes
from verax.ops.division import TENSOR_AXIS
from verax.video.request import ResolvedRequest, VideoRequest, default_size

GUIDANCE = "guidance"
"""Axis of the mesh over which the rows of guidance are divided: prompt and negative prompt."""

SEQUENCE = "sequence"
"""Axis of the mesh over which the tokens of a frame are divided."""

_log = logging.getLogger("verax.video")

AnyMesh = Mesh | AbstractMesh
"""Devices of a clip; an `AbstractMesh` where they need not be there, for shapes alone."""

REPLICATED = PartitionSpec()
BY_ROW = PartitionSpec(GUIDANCE)


def clip_mesh(
    config: Any,
    *,
    guidance_parallel: bool,
    sequence_parallel: int,
    devices: int | None,
    request: VideoRequest,
    settings: VideoSettings,
    geometry: LatentGeometry,
    mesh: Mesh | None = None,
    shard_weights: bool = False,
    attached: bool = True,
) -> AnyMesh | None:
    """Mesh of the axes `GUIDANCE` and `SEQUENCE`, as the options of a pipeline describe it; None for one device.

    If only `devices` is given, the most of them are used; of two ways that use as many, guidance parallelism.

    Args:
        devices: number of devices; None for the product of these two.
        request: request with the size and the guidance of a clip, which `devices` are to fit.
        settings: defaults of the checkpoint for these options.
        mesh: the user's own mesh in place of these options.
        attached: False for an abstract mesh, whose devices need not be there.
    """
    if mesh is None:
        groups, size = _parallelism(guidance_parallel, sequence_parallel, devices, attached)
        if devices is not None and (groups, size) == (1, 1):
            groups, size = _fitting(devices, config.num_heads, request, settings, geometry)
        clip_devices = _new_mesh(groups, size, attached)
    elif (guidance_parallel, sequence_parallel, devices) != (False, 1, None):
        raise InvalidParameterError("mesh: give it, or guidance_parallel, sequence_parallel and devices, not both")
    else:
        clip_devices = _checked_mesh(mesh)
    size, heads = axis_size(clip_devices, SEQUENCE), config.num_heads
    if heads % size:
        fit = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0)
        raise InvalidParameterError(
            f"sequence_parallel: expected a number that divides this model's {heads} heads ({fit}), got {size}"
        )
    if shard_weights and clip_devices is None:
        raise InvalidParameterError(
            "shard_weights: expected several devices to divide the weights over, got one; give guidance_parallel, "
            "sequence_parallel, devices or mesh"
        )
    return clip_devices


def _new_mesh(groups: int, size: int, attached: bool) -> AnyMesh | None:
    if (groups, size) == (1, 1):
        return None
    if not attached:
        return AbstractMesh((groups, size), (GUIDANCE, SEQUENCE))
    expected = f"sequence_parallel={size}, guidance_parallel={groups > 1}: expected {groups} x {size} = {groups * size}"
    return make_mesh((groups, size), (GUIDANCE, SEQUENCE), _first(groups * size, expected))


def _parallelism(guidance: bool, sequence: int, devices: int | None, attached: bool) -> tuple[int, int]:
    """Groups of devices, and devices of a group, as the options give them: 1 and 1 where `devices` is to decide."""
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 1:
        raise InvalidParameterError(f"sequence_parallel: expected a whole number of at least 1, got {sequence!r}")
    chosen = (1 + guidance) * sequence
    if devices is not None and chosen not in (1, devices):
        raise InvalidParameterError(
            f"devices: expected {chosen}, of guidance_parallel={guidance} and sequence_parallel={sequence}, or these "
            f"left out; got {devices!r}"
        )
    if devices is not None and chosen == 1:
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise InvalidParameterError(f"devices: expected a whole number of at least 1, got {devices!r}")
        if attached:
            _first(devices, f"devices: expected {devices}")
    return 1 + guidance, sequence


def _fitting(
    devices: int, heads: int, request: VideoRequest, settings: VideoSettings, geometry: LatentGeometry
) -> tuple[int, int]:
    """Groups of devices, and devices of a group, that use the most of some devices."""
    height, width = default_size(request, settings)
    h, w = (side // geometry.pixels_per_token for side in (request.height or height, request.width or width))
    scale = settings.guidance_scale if request.guidance_scale is None else request.guidance_scale
    guided = scale > 1
    fitting = [
        (groups * size, groups, size)
        for groups in range(1, 2 + guided)
        for size in range(1, devices // groups + 1)
        if heads % size == 0 and h * w % size == 0
    ]
    used, groups, size = max(fitting)
    if used < devices:
        passes = "the two passes of guidance" if guided else "one pass, without guidance"
        _log.warning(
            "devices: %d of %d are used: more cannot divide %s, %d heads, and %d x %d tokens of a frame",
            *(used, devices, passes, heads, h, w),
        )
    return groups, size


def _checked_mesh(mesh: Any) -> Mesh:
    """User's mesh, refused with other axes, three or more devices along the first, or devices of other hosts."""
    if (
        not isinstance(mesh, Mesh)
        or mesh.axis_names != (GUIDANCE, SEQUENCE)
        or mesh.shape[GUIDANCE] > 2
        or mesh.is_multi_process
    ):
        got = dict(mesh.shape) if isinstance(mesh, Mesh) else repr(mesh)
        raise InvalidParameterError(
            f"mesh: expected a jax.sharding.Mesh of this host's devices with the axes {GUIDANCE!r}, of size 1 or 2, "
            f"and {SEQUENCE!r}, in this order; got {got}"
        )
    return Mesh(mesh.devices, mesh.axis_names)  # XLA places these axes; `jax.make_mesh` makes Explicit ones


def tensor_mesh(mesh: AnyMesh, model: nnx.Module, what: str) -> AnyMesh:
    """Devices of a clip that divide the layers of one of its models, on the axis `tensor`.

    The mesh has the first devices of the clip, as many as the model divides over.

    `model`: the model, or its shapes. `what`: its name, for a message.
    """
    fitting = fitting_sizes(model)
    count = max(size for size in fitting if size <= mesh.size)
    if count < mesh.size:
        _log.warning(
            "%s: its weights are on %d of %d devices; numbers that it divides over: %s",
            *(what, count, mesh.size, ", ".join(map(str, fitting))),
        )
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh((count,), (TENSOR_AXIS,))
    # In the order of the clip's mesh, so that results lie where the clip's programs take them.
    return Mesh(mesh.devices.reshape(-1)[:count], (TENSOR_AXIS,))


def _first(count: int, expected: str) -> list[Any]:
    """The first devices of this host; an error that begins with `expected` if there are fewer."""
    there = jax.local_devices()
    if count > len(there):
        hint = f"; JAX_NUM_CPU_DEVICES={count} divides a CPU into as many" if there[0].platform == "cpu" else ""
        raise InvalidParameterError(f"{expected} devices, got {len(there)}{hint}")
    return there[:count]


def axis_size(mesh: AnyMesh | None, axis: str) -> int:
    """Number of devices along an axis; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[axis]


def check_request(mesh: AnyMesh | None, request: ResolvedRequest, geometry: LatentGeometry) -> None:
    """Refuse a request that cannot be divided over a mesh."""
    if axis_size(mesh, GUIDANCE) > 1 and not request.guided:
        raise InvalidParameterError(
            f"guidance_parallel: expected a guidance_scale above 1, got {request.guidance_scale:g}, which needs no "
            "negative prompt: there is one pass, and nothing for the second group of devices"
        )
    size, step = axis_size(mesh, SEQUENCE), geometry.pixels_per_token
    h, w = request.height // step, request.width // step
    if h * w % size:
        height, width = (_nearest(side, size // math.gcd(size, other)) * step for side, other in ((h, w), (w, h)))
        raise InvalidParameterError(
            f"sequence_parallel: expected a number that divides the {h} x {w} tokens of a frame of {request.height} x "
            f"{request.width}, got {size}; height={height} or width={width} would fit"
        )
    small = request.phases(geometry)[0]
    if (h := small.height // step) * (w := small.width // step) % size:
        raise InvalidParameterError(
            f"half_size_steps: expected 0, or tokens of half a frame that sequence_parallel, {size}, divides, got "
            f"{h} x {w}"
        )


def _nearest(value: int, step: int) -> int:
    """Multiple of `step` from 1 on that is nearest to `value`."""
    return max(1, round(value / step)) * step


class Layout(NamedTuple):
    """Division of a program over a mesh.

    `arguments`: partition of each argument: of an array, of all arrays of a tree, or a tree of those.
    """

    mesh: AnyMesh
    arguments: tuple[Any, ...]
    results: Any

    def divide(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, run by each device on its shards. Options are the same everywhere."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            return jax.shard_map(
                functools.partial(function, **options),
                mesh=self.mesh,
                in_specs=self.arguments,
                out_specs=self.results,
                # It refuses an all-gather's result where it is replicated, and branches of `cond` that differ in this.
                check_vma=False,
            )(*arguments)

        return run

    def place(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments on their devices, or their shapes with the devices, where they are shapes."""

        def put(spec: PartitionSpec, tree: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(functools.partial(_put, sharding), tree)

        return jax.tree.map(put, self.arguments, arguments, is_leaf=lambda spec: isinstance(spec, PartitionSpec))


def _put(sharding: NamedSharding, leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)


def layout(mesh: AnyMesh | None, *arguments: Any, results: Any = REPLICATED) -> Layout | None:
    """`Layout` on a mesh; None without one."""
    return None if mesh is None else Layout(mesh, arguments, results)
