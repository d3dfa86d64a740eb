"""The process of an actor: its threads, its first compilation, and its end."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from typing import NoReturn

from verax._optional import require_optional
from verax.files import cache_folder
from verax.ray.cluster import LOOPBACK

try:
    import fcntl
except ImportError:  # it does not exist for Windows
    fcntl = None

__all__ = ["end_actor", "keep_off_the_network", "one_compiles", "set_threads"]

_log = logging.getLogger("verax.ray")


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

    Args:
        what: all that the compiled programs depend on; actors with the same `repr` wait for each other.
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
    except OSError:  # a cache that cannot be written is no reason to refuse work
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
