"""Several hosts that run one engine: how they find each other, what they compare, what rank 0 sends, and how they end.

Rank 0 schedules and sends each dispatch over one ZeroMQ link to each follower: a pair of sockets of the kind PAIR,
encrypted by CURVE, on which messages arrive once and in order, and a broken connection is not made again. Rank 0
listens at its own address, with a port and a CURVE key for each follower. Only who has the public key can connect; it
reaches the follower by the key-value store of JAX's coordination service.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from verax import _compat
from verax._optional import require_optional
from verax.errors import HostsError
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.step import StepShape

ProgramName = Literal["admit", "adapt", "step", "sample", "keep_state", "restore_state", "replay", "extend", "draft"]

COMPRESSED_FROM = 4096
"""Bytes from which a message is compressed: the rows of steps and of admitted sequences are padded."""


class Dispatch(msgspec.Struct, frozen=True, array_like=True):
    """A program and the arrays that the host gives it. Its device state is what earlier dispatches left.

    Attributes:
        program: `"admit"` fills a slot, `"adapt"` writes an adapter, `"step"` runs a step, `"sample"` samples the step
            before it, `"keep_state"` and `"restore_state"` copy the recurrent state of a slot to a row for prefixes and
            back, `"replay"` continues recurrent states after a step that verifies, `"extend"` puts blocks into tables
            before drafts, `"draft"` runs a step of the draft model.
        arrays: int32 arrays in the order of the program's arguments, as shapes and bytes.
        shape: the bucket of a step, of either model.
    """

    program: ProgramName
    arrays: tuple[tuple[tuple[int, ...], bytes], ...]
    shape: StepShape | None = None

    @classmethod
    def of(cls, program: ProgramName, *arrays: np.ndarray, shape: StepShape | None = None) -> Dispatch:
        """A dispatch of a program with int32 arrays."""
        return cls(program, tuple((array.shape, array.tobytes()) for array in arrays), shape)

    def unpack(self) -> tuple[np.ndarray, ...]:
        """The arrays."""
        return tuple(np.frombuffer(data, np.int32).reshape(shape) for shape, data in self.arrays)

    def encode(self) -> bytes:
        """The message."""
        message = msgspec.msgpack.encode(self)
        # The numbers of an adapter hardly get smaller.
        compresses = len(message) >= COMPRESSED_FROM and self.program != "adapt"
        return b"z" + zlib.compress(message, 1) if compresses else b"-" + message

    @classmethod
    def decode(cls, message: bytes) -> Dispatch:
        """The dispatch of a message."""
        body = zlib.decompress(message[1:]) if message[:1] == b"z" else message[1:]
        return msgspec.msgpack.decode(body, type=cls)


HEARTBEAT = 1_000
"""Milliseconds between two signs of life. ZeroMQ's own threads send them, whatever Python does."""

SILENCE = 5_000
"""Milliseconds without an answer after which the other side counts as gone."""


class Address(NamedTuple):
    """Numeric host, port and public key of a listening link."""

    host: str
    port: int
    public_key: str

    @property
    def endpoint(self) -> str:
        """The address by ZeroMQ's name."""
        return f"tcp://{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


class Link:
    """Connection to one rank. One thread at a time sends and receives.

    `host`: numeric address of the side that listens. `on_lost`: called once, on a thread of the link's own, when the
    other side is gone before `part`.
    """

    def __init__(self, host: str, rank: int, on_lost: Callable[[int], None]):
        self.rank = rank
        self._zmq = zmq = require_optional("zmq")
        self._socket = socket = zmq.Context.instance().socket(zmq.PAIR)
        socket.ipv6 = ":" in host
        socket.sndhwm = socket.rcvhwm = 0  # what is on its way is bounded by the steps, each of which needs all ranks
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT, SILENCE
        self._public_key, secret_key = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = self._public_key, secret_key
        self._monitor = socket.get_monitor_socket()
        self._on_lost = on_lost
        self._parted = self._gone = False

    @classmethod
    def listen(cls, host: str, rank: int, on_lost: Callable[[int], None]) -> tuple[Link, Address]:
        """Listen for a rank at an address of this host, on a free port."""
        link = cls(host, rank, on_lost)
        link._socket.curve_server = True
        port = link._socket.bind_to_random_port(f"tcp://{bracketed(host)}")
        return link, Address(host, port, link._public_key.decode())

    @classmethod
    def connect(cls, address: Address, rank: int, on_lost: Callable[[int], None]) -> Link:
        """Connect to a rank that listens."""
        link = cls(address.host, rank, on_lost)
        link._socket.curve_serverkey = address.public_key.encode()
        link._socket.connect(address.endpoint)
        link.send(b"")
        link._start_watch(None)
        return link

    def accept(self, address: Address, timeout: float) -> None:
        """Wait for the other side's first message, which is empty."""
        deadline = time.monotonic() + timeout
        while not self._socket.poll(100):
            if time.monotonic() > deadline:
                raise HostsError(
                    f"node_rank: rank {self.rank} has joined and did not connect to {address.endpoint} within "
                    f"{timeout:.0f} s; a firewall between the hosts must let their ports through"
                )
        self._start_watch(self._socket.recv(copy=False).get(self._zmq.SRCFD))

    def send(self, message: bytes) -> None:
        """Send a message, without waiting."""
        try:
            if not self._gone:
                return self._socket.send(message, self._zmq.NOBLOCK)
        except self._zmq.Again:
            pass
        raise HostsError(f"node_rank: rank {self.rank} is gone")

    def receive(self) -> bytes:
        """Wait for the next message."""
        return self._socket.recv()

    def part(self) -> None:
        """Expect the end of the connection, which does not count as a loss from now on."""
        self._parted = True

    def wait_for_end(self, timeout: float) -> bool:
        """Drop messages until `END`, for up to `timeout` seconds; False if it has not come, or cannot come any more."""
        deadline = time.monotonic() + timeout
        while True:
            if self._socket.poll(100):
                if self._socket.recv() == END:
                    return True
            elif self._gone or time.monotonic() > deadline:
                return False

    def close(self, linger: float) -> None:
        """End the connection; messages on their way have `linger` seconds."""
        self.part()
        self._socket.disable_monitor()
        self._socket.close(linger=round(linger * 1000))

    def _start_watch(self, descriptor: int | None) -> None:
        name = f"verax-rank-{self.rank}"
        threading.Thread(target=self._watch, args=(descriptor,), name=name, daemon=True).start()

    def _watch(self, descriptor: int | None) -> None:
        """Wait until the connection ends.

        `descriptor`: its file descriptor; None if the socket has no other connection. Others come to a port where
        somebody listens. They have no key, so that the first handshake that succeeds belongs to the connection.
        """
        parse = require_optional("zmq.utils.monitor").parse_monitor_message
        established = False
        while True:
            event = parse(self._monitor.recv_multipart())
            if event["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                established = True
            elif event["event"] == self._zmq.EVENT_DISCONNECTED and established:
                if descriptor in (None, event["value"]):
                    self._gone = True
                    if not self._parted:
                        self._on_lost(self.rank)
                        return
            elif event["event"] == self._zmq.EVENT_MONITOR_STOPPED:
                self._monitor.close()
                return


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

    A process that is gone ends all others within ten seconds: the rest cannot continue without its part of the model.

    `lost`: sentence that names the rank that is gone; None as long as there is none.
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

        `options`: further facts that must be equal on all ranks.
        """
        require_optional("zmq")
        self = cls(config.node_rank, config.nnodes)
        _join_jax(config)
        self._connect(_numeric(config.coordinator))
        # A follower that ends by itself, before `dispatches` has, leaves the others without its part of the model.
        atexit.register(self._at_exit if self.leads else _exit)
        versions = {name: version(name) for name in ("verax", "jax", "jaxlib")}
        own = {field.name: str(getattr(config, field.name)) for field in fields(config) if field.name not in _PLACES}
        self.agree({**versions, **own, **options})
        return self

    @property
    def leads(self) -> bool:
        """True on rank 0, which schedules."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """The value of each rank, on every rank. All ranks call it in the same order, and wait for the last."""
        if self.leads:
            values = [value, *(msgspec.msgpack.decode(self._receive(link)) for link in self._links)]
            self._send(msgspec.msgpack.encode(values))
            return values
        self._send(msgspec.msgpack.encode(value))
        return msgspec.msgpack.decode(self._receive(self._links[0]))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Compare what must be equal on all ranks."""
        first, *others = self.exchange({name: str(value) for name, value in facts.items()})
        differences = [
            f"{name} is {first.get(name)} on rank 0 and {found.get(name)} on rank {rank}"
            for rank, found in enumerate(others, start=1)
            for name in dict.fromkeys((*first, *found))
            if found.get(name) != first.get(name)
        ]
        if differences:
            if not self.leads:  # rank 0 ends first, or it would take the end of a connection for a loss
                self._links[0].wait_for_end(LINGER)
            self.end()
            raise HostsError(f"nnodes: the hosts must be equal, but {'; '.join(differences)}")

    def send(self, dispatch: Dispatch) -> None:
        """Send a dispatch to all followers, before it is made here."""
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

    def end(self) -> bool:
        """End the group, on all ranks; rank 0 ends the followers. The process ends here if a rank is gone.

        Returns:
            False on rank 0 if a follower ends without an answer, by an error of its own: the process must end by
            `_exit` then, which it does at its end.
        """
        atexit.unregister(self._at_exit if self.leads else _exit)
        if self.lost is not None:
            _exit()
        for link in self._links:
            link.part()
            with contextlib.suppress(HostsError):  # a rank that has ended too
                link.send(END)
        # Followers expect the end of their connections once they have answered.
        answered = [link.wait_for_end(LINGER) for link in self._links] if self.leads else []
        for link in self._links:
            link.close(LINGER)
        self._links = []
        if all(answered):
            _compat.leave_processes()
        else:  # JAX would wait for them in vain, and abort the process
            atexit.register(_exit)
        return all(answered)

    def _at_exit(self) -> None:
        """End the group of rank 0 with the process."""
        if not self.end():
            _exit()

    def _connect(self, host: str) -> None:
        """Make the links. The coordination service's key-value store has the address where rank 0 listens."""
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
            self.end()
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
    """Join JAX's processes, on a thread: the wait is native, and could not be interrupted."""
    if config.node_rank == 0:
        _check_free(config.coordinator)
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


def _check_free(coordinator: str) -> None:
    """Check that rank 0 can listen at its address: JAX would crash, or wait with another rank 0 for the same ranks.

    A name that is this host alone is a warning: the name of a host often is, by its own /etc/hosts.
    """
    try:
        host, name = _numeric(coordinator), urlsplit(f"//{coordinator}").hostname
        if ipaddress.ip_address(host).is_loopback and name not in (host, "localhost"):
            _log.warning(
                "master_addr: %s is %s here, where no other host can connect; if there are others, give its number",
                name,
                host,
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, urlsplit(f"//{coordinator}").port or 0), family=family).close()
    except OSError as error:
        raise HostsError(f"master_addr: rank 0 cannot listen at {coordinator}: {error.strerror}") from error


def _numeric(coordinator: str) -> str:
    """The number of the coordinator's host, which ZeroMQ needs."""
    host = urlsplit(f"//{coordinator}").hostname
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
