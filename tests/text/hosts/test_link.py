"""Links between ranks, within one process."""

import socket
import threading

import pytest

from verax.errors import HostsError
from verax.text.hosts import Address, Link

zmq = pytest.importorskip("zmq")


@pytest.fixture
def linked():
    """Rank 0's link, the follower's, their address, and an event for each that is set when the other is gone."""
    gone = threading.Event(), threading.Event()
    listening, address = Link.listen("127.0.0.1", 1, lambda rank: gone[0].set())
    follower = Link.connect(address, 0, lambda rank: gone[1].set())
    listening.accept(address, timeout=20)
    yield listening, follower, address, gone
    for link in (listening, follower):
        if not link._socket.closed:
            link.close(0)


def test_messages_arrive_once_and_in_order(linked):
    leader, follower, _, _ = linked
    for i in range(2_000):
        leader.send(b"%d" % i)
    assert [follower.receive() for _ in range(2_000)] == [b"%d" % i for i in range(2_000)]
    follower.send(b"done")
    assert leader.receive() == b"done"


def test_a_connection_without_the_key_is_no_peer_and_its_end_is_no_loss(linked):
    leader, follower, address, gone = linked
    socket.create_connection((address.host, address.port)).close()
    public, _ = zmq.curve_keypair()
    stranger = Link.connect(Address(address.host, address.port, public.decode()), 0, lambda rank: None)
    leader.send(b"for the follower")
    assert follower.receive() == b"for the follower"
    assert not stranger._socket.poll(200)
    stranger.close(0)
    assert not gone[0].wait(0.2)


@pytest.mark.parametrize("ends", [0, 1])
def test_the_end_of_one_side_is_known_to_the_other(linked, ends):
    *links, _, gone = linked
    links[ends].close(0)
    assert gone[1 - ends].wait(20)
    assert not gone[ends].is_set()


def test_rank_0_cannot_send_to_a_rank_that_is_gone(linked):
    leader, follower, _, gone = linked
    follower.close(0)
    assert gone[0].wait(20)
    with pytest.raises(HostsError, match=r"^node_rank: rank 1 is gone"):
        leader.send(b"too late")


def test_an_end_that_is_expected_is_no_loss(linked):
    leader, follower, _, gone = linked
    follower.part()
    leader.close(0)
    assert not gone[1].wait(0.3)


def test_a_rank_that_never_connects_is_named():
    link, address = Link.listen("127.0.0.1", 3, lambda rank: None)
    with pytest.raises(HostsError, match=rf"rank 3 .* did not connect to tcp://127.0.0.1:{address.port} within 0 s"):
        link.accept(address, timeout=0.2)
    link.close(0)
