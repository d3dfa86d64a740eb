"""The cluster (how it is reached or started, and what may be taken of it) and the process of an actor in it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from verax._optional import require_optional
from verax.errors import InvalidParameterError, VeraxError
from verax.files import cache_folder

try:
    import fcntl
except ImportError:  # it does not exist for Windows
    fcntl = None

_log = logging.getLogger("verax.ray")

LOOPBACK = "127.0.0.1"
_SHARED = ("VERAX_CACHE_DIR", "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE")
"""Variables of this process that actors get too, so that they find its checkpoints and compiled programs."""


def start_ray(num_cpus: int | None = None) -> None:
    """Connect to the cluster of `RAY_ADDRESS`, or start Ray on this machine, unless this process has done either.

    Ray by itself listens at an address of the network, serves a dashboard, reports its use, and lets its workers yield
    to every other process. One that is started here listens at 127.0.0.1, without a dashboard. No reports are sent
    unless `RAY_USAGE_STATS_ENABLED` is set.

    `num_cpus`: CPUs of a Ray that is started here; all of the machine if None.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require_optional("ray")
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        return
    os.environ.setdefault("RAY_worker_niceness", "0")
    constants = require_optional("ray._private.ray_constants")
    # Ray replaces 127.0.0.1 by an address of the network, whatever it is given, unless it may not form a cluster.
    constants.ENABLE_RAY_CLUSTER = False
    os.environ.setdefault(constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
    try:
        ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # Ray has no type of its own for a node that is not up after 30 seconds
        ray.shutdown()
        raise VeraxError(f"ray: it did not start on this machine; try again when it is less busy: {error}") from error


def actor_environment() -> dict[str, Any]:
    """Runtime environment of an actor: its variables."""
    return {"env_vars": {name: os.environ[name] for name in _SHARED if name in os.environ}}


def check_actors(
    name: str, bounds: int | Sequence[int], num_cpus: float, num_gpus: float, *, left: int = 1
) -> tuple[int, int]:
    """The least and the most actors, if they make sense and leave CPUs to others.

    JAX reserves three quarters of the memory of every GPU that it sees, so that a part of one is refused. Those who
    read files, filter checkpoints and route requests need a CPU too: without it, all wait in silence. A cluster that
    `start_ray` has not started may grow, and is not checked for it.

    `bounds`: number of actors, or the least and the most. `left`: CPUs that others need.
    """
    least, most = (bounds, bounds) if isinstance(bounds, int) else bounds
    if not 1 <= least <= most:
        raise InvalidParameterError(f"{name}: expected at least 1, and the least before the most, got {bounds!r}")
    if num_gpus < 0 or num_gpus != int(num_gpus):
        raise InvalidParameterError(
            f"num_gpus: expected a whole number, got {num_gpus:g}; JAX reserves most of a GPU for one actor"
        )
    ray = require_optional("ray")
    if ray.is_initialized() and ray.util.get_node_ip_address() == LOOPBACK:
        there = ray.cluster_resources().get("CPU", 0.0)
        if (wanted := least * num_cpus) > there - left:
            room = f"use num_cpus={(there - left) / least:g}, or fewer actors" if there > left else "start a larger Ray"
            raise InvalidParameterError(
                f"{name}: {least} with {num_cpus:g} CPUs each take {wanted:g} of {there:g}, but {left} must be left "
                f"for those who read files, filter checkpoints and route requests; {room}"
            )
    return least, most


def set_threads() -> None:
    """Give JAX as many threads as Ray gave this actor CPUs. JAX must not have begun.

    JAX by itself takes the CPUs of the machine, whatever Ray has lent.
    """
    import ray

    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
    os.environ["NPROC"] = str(max(1, int(cpus)))


def keep_off_the_network() -> None:
    """Let a replica of a Ray on 127.0.0.1 listen at that address only.

    Ray Serve opens a port of each replica at all addresses, which unpickles what anyone sends. It has no option for the
    address, so that its own function is replaced in this process. On a cluster the port is needed; `RAY_USE_TLS` closes
    it to strangers.
    """
    if require_optional("ray").util.get_node_ip_address() != LOOPBACK:
        return
    module = require_optional("ray.serve._private.replica")
    bind = getattr(module, "add_port_to_grpc_server", None)
    if bind is None:
        _log.warning("this version of Ray Serve opens a port of each replica at all addresses; close it to strangers")
        return
    module.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", LOOPBACK))


@contextlib.contextmanager
def one_compiles(*what: object) -> Iterator[None]:
    """Context in which a model is started: the first actor of a machine compiles, others wait for its programs.

    Once they have been compiled, nobody waits any more.

    `what`: all that the compiled programs depend on; actors with the same `repr` wait for each other.
    """
    from verax._compat import JAXLIB

    home = cache_folder()
    if home is None or fcntl is None:
        yield
        return
    key = hashlib.sha256(repr((JAXLIB, *what)).encode()).hexdigest()[:16]
    folder = home / "ray"
    warm = folder / f"{key}.warm"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{key}.lock").open("w")
    except OSError:  # a cache that cannot be written must not stop the work
        yield
        return
    with lock:
        if not warm.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file lets go of it
        if warm.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        warm.touch()


def end_actor(error: BaseException) -> NoReturn:
    """End the process at once, so that Ray starts another. A dead engine in a live actor would fail every request."""
    _log.critical("the engine has failed, and its actor ends", exc_info=error)
    logging.shutdown()
    os._exit(1)
