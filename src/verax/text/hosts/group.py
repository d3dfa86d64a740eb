"""Group of hosts that run one engine: how they find each other, what they compare, and how they end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import msgspec

from verax import _compat
from verax._optional import require_optional
from verax.errors import HostsError
from verax.text.engine.engine_config import EngineConfig
from verax.text.hosts.dispatch import Dispatch
from verax.text.hosts.link import Address, Link

__all__ = ["Group"]

JOIN_TIMEOUT = 300.0
"""Seconds that a host waits for the others, as in `jax.distributed`."""

CONNECT_TIMEOUT = 60.0
"""Seconds that a host which has joined has for its connection to rank 0."""

LAST_ANSWERS = 4.0
"""Seconds that rank 0 has for the last answers to its clients, once another rank is gone."""

LINGER = 10.0
"""Seconds for the last message to the followers, and for their answer."""

END = b""
"""Message after the last dispatch, and its answer."""

_PLACES = ("node_rank", "master_addr", "master_port")
"""Options in which the ranks may differ."""

_log = logging.getLogger("verax.text")


class Group:
    """The processes of one engine, as one of them sees the others. `join` makes it.

    A process that is gone ends all others within ten seconds: the rest could not go on without its part of the model.

    Attributes:
        rank: number of this process.
        size: number of processes.
        lost: sentence that names the rank that is gone; None as long as there is none.
    """

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.lost: str | None = None
        self._links: list[Link] = []
        self._found_lost = threading.Event()

    @classmethod
    def join(cls, config: EngineConfig, options: Mapping[str, Any]) -> Group:
        """Wait for the processes of all hosts, and connect to rank 0, or rank 0 to the others.

        Args:
            config: options of the engine.
            options: further facts that must be equal on all ranks.

        Raises:
            HostsError: if a process is missing, JAX runs already, or a version or an option differs.
        """
        require_optional("zmq")
        self = cls(config.node_rank, config.nnodes)
        _join_jax(config)
        self._connect(_numeric(config.coordinator))
        # A follower that ends by itself, before `dispatches` has, leaves the others without its part of the model.
        atexit.register(self.end if self.leads else _exit)
        versions = {name: version(name) for name in ("verax", "jax", "jaxlib")}
        own = {field.name: str(getattr(config, field.name)) for field in fields(config) if field.name not in _PLACES}
        self.agree({**versions, **own, **options})
        return self

    @property
    def leads(self) -> bool:
        """True on rank 0, which schedules."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """The value of each rank, on every rank. All ranks call it in the same order; none goes on before the last.

        Args:
            value: what JSON can express.

        Raises:
            HostsError: if a rank has ended.
        """
        if self.leads:
            values = [value, *(msgspec.msgpack.decode(self._receive(link)) for link in self._links)]
            self._send(msgspec.msgpack.encode(values))
            return values
        self._send(msgspec.msgpack.encode(value))
        return msgspec.msgpack.decode(self._receive(self._links[0]))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare what must be equal on all ranks.

        Raises:
            HostsError: on every rank, naming each difference.
        """
        first, *others = self.exchange({name: str(value) for name, value in facts.items()})
        differences = [
            f"{name} is {first.get(name)} on rank 0 and {found.get(name)} on rank {rank}"
            for rank, found in enumerate(others, start=1)
            for name in dict.fromkeys((*first, *found))
            if found.get(name) != first.get(name)
        ]
        if differences:
            if not self.leads:  # rank 0 ends first, or it would take the end of a connection for a loss
                self._links[0].wait(LINGER)
            self.end()
            raise HostsError(f"nnodes: the hosts must be equal, but {'; '.join(differences)}")

    def send(self, dispatch: Dispatch) -> None:
        """Send a dispatch to all followers, before it is made here.

        Raises:
            HostsError: if one of them is gone.
        """
        if self.lost is not None:
            raise HostsError(self.lost)
        self._send(dispatch.encode())

    def dispatches(self) -> Iterator[Dispatch]:
        """The dispatches of rank 0, until it ends."""
        while message := self._links[0].receive():
            yield Dispatch.decode(message)
        self.end()

    def failure(self, error: Exception) -> Exception:
        """The error of a program that failed: that a rank is gone, if one is."""
        self._found_lost.wait(LAST_ANSWERS)
        return error if self.lost is None else HostsError(self.lost)

    def end(self) -> None:
        """End the group, on all ranks; rank 0 ends the followers. The process ends here if a rank is gone."""
        atexit.unregister(self.end if self.leads else _exit)
        if self.lost is not None:
            _exit()
        for link in self._links:
            link.part()
            with contextlib.suppress(HostsError):  # a rank that has ended too
                link.send(END)
        for link in self._links:
            if self.leads:  # followers expect the end of their connections once they have answered
                link.wait(LINGER)
            link.close(LINGER)
        self._links = []
        _compat.leave_processes()

    def _connect(self, host: str) -> None:
        """Make the links. The coordination service's key-value store tells followers where rank 0 listens."""
        store = _compat.coordination_store()
        if self.leads:
            listening = [Link.listen(host, rank, self._lost) for rank in range(1, self.size)]
            for link, address in listening:
                store.key_value_set(f"verax/rank/{link.rank}", msgspec.json.encode(address).decode())
            for link, address in listening:
                link.accept(address, CONNECT_TIMEOUT)
                self._links.append(link)
            return
        found = store.blocking_key_value_get(f"verax/rank/{self.rank}", round(CONNECT_TIMEOUT * 1000))
        self._links.append(Link.connect(msgspec.json.decode(found, type=Address), 0, self._lost))

    def _send(self, message: bytes) -> None:
        for link in self._links:
            link.send(message)

    def _receive(self, link: Link) -> bytes:
        message = link.receive()
        if message == END:
            raise HostsError(f"node_rank: rank {link.rank} has ended before the engine had started; see its output")
        return message

    def _lost(self, rank: int) -> None:
        """End this process: at once, or on rank 0 once clients had time for their answers."""
        self.lost = (
            f"node_rank: rank {rank} of {self.size} is gone: its process has ended, or the connection to it is broken; "
            f"rank {self.rank} ends, and the group must be started again"
        )
        self._found_lost.set()
        _log.critical(self.lost)
        if self.leads:
            time.sleep(LAST_ANSWERS)
        _exit()


def _exit() -> None:
    """End the process without waiting for collectives that will never return."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _join_jax(config: EngineConfig) -> None:
    """Join JAX's processes, on a thread: the wait is native, and could not be interrupted.

    Raises:
        HostsError: if JAX runs already or not all hosts join.
    """
    failed: list[Exception] = []

    def join() -> None:
        try:
            _compat.join_processes(config.coordinator, config.nnodes, config.node_rank)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=join, name="verax-join", daemon=True)
    thread.start()
    thread.join(JOIN_TIMEOUT)
    if thread.is_alive():
        raise HostsError(
            f"nnodes: waited {JOIN_TIMEOUT:.0f} s for {config.nnodes} processes at {config.coordinator}; start one on "
            "each host, with --node-rank 0 on the host of this address"
        )
    if failed:
        raise HostsError(f"nnodes: rank {config.node_rank} cannot join at {config.coordinator}: {failed[0]}")


def _numeric(coordinator: str) -> str:
    """The number of the coordinator's host, which ZeroMQ needs."""
    host = urlsplit(f"//{coordinator}").hostname
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
