"""One connection between rank 0 and a follower: ordered, encrypted by CURVE, and watched.

A pair of ZeroMQ sockets of the kind PAIR: messages arrive once and in order, and a broken connection is not made again.
Rank 0 listens at its own address, with a port and a CURVE key for each follower. Only who has the public key can
connect; it reaches the follower by the key-value store of JAX's coordination service.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from verax._optional import require_optional
from verax.errors import HostsError

__all__ = ["Address", "Link", "bracketed"]

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

    Args:
        socket: a PAIR socket, before it listens or connects.
        rank: the rank at the other end.
        on_lost: called once, on a thread of the link's own, when the other side is gone before `part`.
    """

    def __init__(self, socket: Any, rank: int, on_lost: Callable[[int], None]):
        self.rank = rank
        self._zmq = require_optional("zmq")
        self._socket = socket
        self._on_lost = on_lost
        self._parted = False
        self._gone = False
        self._monitor = socket.get_monitor_socket()

    @classmethod
    def listen(cls, host: str, rank: int, on_lost: Callable[[int], None]) -> tuple[Link, Address]:
        """Listen for a rank at an address of this host, on a free port."""
        zmq = require_optional("zmq")
        socket = _socket(zmq, host)
        public, secret = zmq.curve_keypair()
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = public, secret
        link = cls(socket, rank, on_lost)
        address = Address(host, socket.bind_to_random_port(f"tcp://{bracketed(host)}"), public.decode())
        return link, address

    @classmethod
    def connect(cls, address: Address, rank: int, on_lost: Callable[[int], None]) -> Link:
        """Connect to a rank that listens."""
        zmq = require_optional("zmq")
        socket = _socket(zmq, address.host)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = address.public_key.encode()
        link = cls(socket, rank, on_lost)
        socket.connect(address.endpoint)
        link.send(b"")
        link._start_watch(None)
        return link

    def accept(self, address: Address, timeout: float) -> None:
        """Wait for the other side's first message, which is empty.

        Raises:
            HostsError: if none arrives within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._socket.poll(100):
            if time.monotonic() > deadline:
                raise HostsError(
                    f"node_rank: rank {self.rank} has joined and did not connect to {address.endpoint} within "
                    f"{timeout:.0f} s; a firewall between the hosts must let their ports through"
                )
        self._start_watch(self._socket.recv(copy=False).get(self._zmq.SRCFD))

    def send(self, message: bytes) -> None:
        """Send a message, without waiting.

        Raises:
            HostsError: if the other side is gone.
        """
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
        """Expect the end of the connection, which is no loss from now on."""
        self._parted = True

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a message, and drop it."""
        if self._socket.poll(round(timeout * 1000)):
            self._socket.recv()

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

        Args:
            descriptor: its file descriptor; None if the socket has no other connection. Others come to a port where
                somebody listens. They have no key, so that the first handshake that succeeds is that of the connection.
        """
        parse = require_optional("zmq.utils.monitor").parse_monitor_message
        established = False
        while True:
            event = parse(self._monitor.recv_multipart())
            if event["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                established = True
            elif event["event"] == self._zmq.EVENT_DISCONNECTED and established and not self._parted:
                if descriptor in (None, event["value"]):
                    self._gone = True
                    self._on_lost(self.rank)
                    return
            elif event["event"] == self._zmq.EVENT_MONITOR_STOPPED:
                self._monitor.close()
                return


def _socket(zmq: Any, host: str) -> Any:
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.ipv6 = ":" in host
    socket.sndhwm = socket.rcvhwm = 0  # what is on its way is bounded by the steps, each of which needs all ranks
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT, SILENCE
    return socket
