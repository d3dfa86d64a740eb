"""Everything that differs between the versions of JAX and Flax that verax supports (JAX 0.10 to the newest)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from verax.files import cache_folder

if TYPE_CHECKING:
    from jax.sharding import Mesh


def _version(text: str) -> tuple[int, int, int]:
    """`"0.10.2.dev3"` as `(0, 10, 2)`."""
    major, minor, patch = text.split(".")[:3]
    digits = patch[: len(patch) - len(patch.lstrip("0123456789"))]
    return int(major), int(minor), int(digits or 0)


JAXLIB = version("jaxlib")
_JAXLIB_VERSION = _version(JAXLIB)
HEARTBEAT_TIMEOUT = 30
"""Seconds of silence after which JAX aborts the processes of a group, should nothing else have ended them before."""

SHUTDOWN_TIMEOUT = 10
"""Seconds that a process of a group waits at its end for the others' end."""

_CACHE = "jax_compilation_cache_dir"

_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
"""Kinds of work that XLA:GPU puts into command buffers: its default, and loops."""


def compiler_options(platform: str) -> dict[str, bool | str]:
    """XLA options of a program, for a platform (`"cpu"`, `"gpu"`, `"tpu"`).

    XLA:CPU before 0.11 rewrites bfloat16 scatters, slices and gathers through float32 copies of the *whole* buffer, the
    paged cache included. Switching that pass off keeps them in place; every dot must then accumulate in float32. The
    pass `cse_barrier_expander` of all versions drops optimization barriers before fusion, which then computes a shared
    value, such as the sines of rotary embeddings, again in each layer.

    XLA:GPU merges products of the same inputs, such as queries, keys and values, into one. For that it copies their
    weights side by side in every run, and a decode step reads and writes them two times more than it has to. It leaves
    loops whose turns the device decides on, and the choices that they are in, out of its command buffers (CUDA's
    graphs). Then the host waits in each step until the device has come to the sampler, and prepares nothing meanwhile.
    And it gives cuDNN's convolutions arrays with channels first, around each of which it turns Wan's, where they are
    last: a quarter of the time of a decoded clip on an H100.
    """
    if platform == "cpu":
        widening = "float-normalization-bf16," if _JAXLIB_VERSION < (0, 11, 0) else ""
        return {"xla_disable_hlo_passes": f"{widening}cse_barrier_expander"}
    if platform == "gpu":
        return {
            "xla_gpu_dot_merger_threshold_mb": "0",
            "xla_gpu_enable_command_buffer": _COMMANDS,
            "xla_gpu_force_conv_nhwc": True,
        }
    return {}


def begin_copy_to_host(array: jax.Array) -> None:
    """Let the device begin the copy that `np.asarray` waits for.

    The CPU's arrays are read where they lie. There JAX would copy them on another thread, for which it waits too: 0.4
    of the 3.7 ms of an encoder's call.
    """
    if array.platform() != "cpu":
        array.copy_to_host_async()


def make_mesh(shape: Sequence[int], names: Sequence[str], devices: Sequence[Any] | None = None) -> Mesh:
    """A device mesh whose axes are placed by XLA's partitioner (`Auto`); `jax.make_mesh` alone defaults to `Explicit`.

    All devices are used if none are given. The shape is passed by position: the parameter is `axis_shapes` in JAX 0.10
    and `axis_sizes` from 0.11.
    """
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape), tuple(names), axis_types=axis_types, devices=devices)


def join_processes(coordinator: str, count: int, rank: int) -> None:
    """Wait until all processes have joined JAX's coordination service, which rank 0 runs at this address alone.

    `coordinator`: `HOST:PORT`.

    Raises:
        RuntimeError: if JAX has begun to use devices, or the address cannot be had.
    """
    # Its handler of SIGTERM would keep a process alive that is to end.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        count,
        rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator,
        initialization_timeout=24 * 3600,  # JAX aborts the process afterwards: the caller gives up before
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
    )


def leave_processes() -> None:
    """Leave the coordination service, which waits until all processes do."""
    jax.distributed.shutdown()


def coordination_store() -> Any:
    """The key-value store of the coordination service, with `key_value_set` and `blocking_key_value_get`."""
    from jax._src import distributed  # no public name reaches it

    return distributed.global_state.client


def compilation_cache() -> str | None:
    """The folder of JAX's persistent compilation cache; None if it is off."""
    return getattr(jax.config, _CACHE)


def enable_compilation_cache() -> None:
    """Keep compiled programs on disk between processes, unless the user has decided on JAX's cache themselves.

    In `files.cache_folder()`; one folder for each jaxlib, whose formats differ.
    """
    home = cache_folder()
    if home is None or compilation_cache() is not None:
        return
    folder = home / f"jaxlib-{JAXLIB}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home must not stop the work
        return
    _set_cache(str(folder))


@contextlib.contextmanager
def empty_compilation_cache() -> Iterator[None]:
    """Compile into a cache of one's own, empty at first and gone afterwards: to measure what a first run costs."""
    before = compilation_cache()
    with tempfile.TemporaryDirectory(prefix="verax-cache-") as folder:
        _set_cache(folder)
        try:
            yield
        finally:
            _set_cache(before)


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Compile without the cache, which cannot read programs for devices that are not attached."""
    before = compilation_cache()
    _set_cache(None)
    try:
        yield
    finally:
        _set_cache(before)


def _set_cache(folder: str | None) -> None:
    jax.config.update(_CACHE, folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax_cache.reset_cache()  # JAX keeps the folder of its first compilation otherwise


def drop_jax_traces() -> None:
    """Drop what JAX has traced of its own functions, such as `jnp.where`, for each shape, without a bound.

    From JAX 0.11 on it also keeps the trace of every program, dead code taken out of it: where there is none, that is
    the key of the weak reference itself. Compiled programs stay, which `jax.clear_caches` drops too.
    """
    from jax._src.interpreters import partial_eval, pxla  # no public name reaches them

    for module, name in ((partial_eval, "trace_to_jaxpr"), (pxla, "_dce_jaxpr")):
        cached: Any = getattr(module, name, None)
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
