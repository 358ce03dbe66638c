"""Connections between processes: messages arrive, nobody waits forever, and only who knows the token connects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import relax_hetero as rh
from relax_hetero.cluster import connections
from relax_hetero.cluster.connections import Connection, Listener, Peers, connect, new_token

MANY_BYTES = 8 << 20
"""More than the buffers of a socket take."""


def _pair() -> tuple[Connection, Connection]:
    one, other = socket.socketpair()
    return Connection(one, "b"), Connection(other, "a")


def _receive(peers: Peers, count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        messages += peers.receive(60)
    return messages


@pytest.mark.parametrize(
    "message",
    [
        (),
        ("text", 1, None, (2.5, True)),
        (np.arange(6, dtype="float32").reshape(2, 3), np.float16(3) + np.zeros((), "float16")),
        (np.zeros((0, 3), "int64"), np.array([True, False]), np.arange(3, dtype="uint8")),
        tuple(np.full(3, index, "int32") for index in range(1500)),  # more pieces than a system call takes
        (np.random.default_rng(0).random(300_000),),
    ],
)
def test_messages_arrive_in_order_and_own_their_memory(message: Any) -> None:
    ours, theirs = _pair()
    sender, receiver = Peers({"b": ours}, True), Peers({"a": theirs}, True)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [sender.send("b", message) for _ in range(3)])
        for arrived in _receive(receiver, 3):
            assert len(arrived) == len(message)
            for value, expected in zip(arrived, message, strict=True):
                if isinstance(expected, np.ndarray):
                    assert value.dtype == expected.dtype and value.shape == expected.shape
                    assert value.flags.writeable and value.__array_interface__["data"][0] % 64 == 0
                np.testing.assert_array_equal(value, expected)
        sent.result(60)


def test_two_that_send_large_messages_to_each_other_do_not_wait_forever() -> None:
    ours, theirs = _pair()
    message = (np.random.default_rng(0).integers(0, 255, MANY_BYTES, "uint8"),)

    def exchange(peers: Peers, peer: str) -> list[Any]:
        for _ in range(3):
            peers.send(peer, message)
        return _receive(peers, 3)

    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(exchange, Peers({"b": ours}, True), "b"),
            pool.submit(exchange, Peers({"a": theirs}, True), "a"),
        ]
        for future in both:
            assert all(np.array_equal(arrived[0], message[0]) for arrived in future.result(60))


@pytest.mark.parametrize("when", ["idle", "within a message", "while sending"])
def test_the_end_of_a_process_is_an_error_that_names_it(when: str) -> None:
    ours, theirs = _pair()
    peers = Peers({"b": ours}, False)
    if when == "within a message":
        theirs._socket.send(b"\1\0\0")
        assert peers.receive(60) == []
    action: Callable[[], Any] = lambda: peers.receive(60)  # noqa: E731
    if when == "while sending":
        action = lambda: peers.send("b", (np.zeros(MANY_BYTES, "uint8"),))  # noqa: E731
        timer = threading.Timer(0.05, theirs.close)
        timer.start()
    else:
        theirs.close()
    for _ in range(2):
        with pytest.raises(rh.HostError, match="the connection with host 'b' has ended"):
            action()


def test_a_wait_ends_when_another_thread_closes_the_connections() -> None:
    ours, theirs = _pair()
    peers = Peers({"b": ours}, False)
    timer = threading.Timer(0.05, peers.close)
    timer.start()
    with pytest.raises(rh.HostError, match="has ended"):
        peers.receive(60)
    assert theirs._socket.recv(1) == b""


@pytest.mark.parametrize("node", ["here", "elsewhere"])
def test_processes_connect_with_the_token_alone(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_TOKEN_SECONDS", 0.05)
    token = new_token()
    listener = Listener("here", "127.0.0.1" if node == "elsewhere" else None, token)
    assert (listener.address.tcp is None) == (node == "here")
    strangers = [connect(listener.address, node, wrong, 1, "a") for wrong in (new_token(), b"short")]
    unknown = connect(listener.address, node, token, 7, "a")  # an index that no process has
    ours = connect(listener.address, node, token, 1, "a")
    accepted = listener.accept({1: "b"})
    assert list(accepted) == ["b"]
    Peers(accepted, True).send("b", (1,))
    assert Peers({"a": ours}, False).receive(60) == [(1,)]
    for stranger in (*strangers, unknown):
        with pytest.raises(rh.HostError, match="the connection with host 'a' has ended"):
            Peers({"a": stranger}, False).receive(60)
    with pytest.raises(rh.HostError, match="host 'a' cannot be reached (on this node|at 127.0.0.1:)"):
        connect(listener.address, node, token, 1, "a")  # it listens no more


def test_processes_that_do_not_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 0.05)
    with pytest.raises(rh.HostError, match="'b', 'the caller' did not connect within 0.05 s"):
        Listener("here", None, new_token()).accept({1: "b", 2: connections.CALLER})
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 60)
    listener = Listener("here", None, new_token())
    listener.is_cancelled = True
    with pytest.raises(rh.HostError, match="'b' did not connect"):
        listener.accept({1: "b"})
