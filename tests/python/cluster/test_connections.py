"""Connections between processes: messages arrive, nobody waits forever, and only who knows the token connects."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import relax_hetero as rh
from relax_hetero.cluster import connections
from relax_hetero.cluster.connections import (
    BLOCKS,
    Connection,
    Listener,
    Peers,
    SharedBlocks,
    connect,
    create_blocks,
    new_token,
)
from relax_hetero.cluster.wire import Message

MANY_BYTES = 8 << 20
"""More than the buffers of a socket take."""


def _pair(shares: bool = True) -> tuple[Connection, Connection]:
    one, other = socket.socketpair()
    if not shares:
        return Connection(one, "b"), Connection(other, "a")
    descriptor = create_blocks()
    return (
        Connection(one, "b", SharedBlocks(os.dup(descriptor), 0)),
        Connection(other, "a", SharedBlocks(descriptor, 1)),
    )


def _message(*values: Any, call: int = 0) -> Message:
    return Message(0, 1, "main", call, values)


def _receive(peers: Peers, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += peers.receive(60)
    return messages


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        (),
        ("text", 1, None, (2.5, True)),
        (np.arange(6, dtype="float32").reshape(2, 3), np.float16(3) + np.zeros((), "float16")),
        (np.zeros((0, 3), "int64"), np.array([True, False]), np.arange(3, dtype="uint8")),
        tuple(np.full(3, index, "int32") for index in range(1500)),  # more pieces than a system call takes
        (np.arange(2000, dtype="uint8"), "text", np.arange(5000, dtype="int16"), np.ones((100, 7), "float16")),
        (np.random.default_rng(0).random(300_000),),
    ],
)
def test_messages_arrive_in_order_and_own_their_memory(values: Any, shares: bool) -> None:
    ours, theirs = _pair(shares)
    sender, receiver = Peers({"b": ours}, True), Peers({"a": theirs}, True)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [sender.send("b", _message(*values, call=call)) for call in range(3)])
        for call, arrived in enumerate(_receive(receiver, 3)):
            assert arrived[:4] == (0, 1, "main", call) and len(arrived.values) == len(values)
            for value, expected in zip(arrived.values, values, strict=True):
                if isinstance(expected, np.ndarray):
                    assert value.dtype == expected.dtype and value.shape == expected.shape
                    assert value.flags.writeable
                    assert not value.size or value.__array_interface__["data"][0] % 64 == 0
                np.testing.assert_array_equal(value, expected)
        sent.result(60)


def test_messages_that_are_too_large_for_a_block_go_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BLOCK_BYTES", 1 << 16)
    ours, theirs = _pair()
    sender, receiver = Peers({"b": ours}, True), Peers({"a": theirs}, True)
    assert ours._blocks is not None
    for array in (np.arange(1 << 16, dtype="uint8"), np.arange((1 << 16) + 1, dtype="uint8")):
        sender.send("b", _message(array))
        assert ours._blocks._memory[0] == (array.nbytes <= 1 << 16)
        assert np.array_equal(_receive(receiver, 1)[0].values[0], array)


def test_arrays_stay_as_they_are_in_shared_memory_while_they_are_held() -> None:
    ours, theirs = _pair()
    sender, receiver = Peers({"b": ours}, True), Peers({"a": theirs}, True)
    shared, held = theirs._blocks, list[Message]()
    assert shared is not None
    for call in range(3 * BLOCKS):  # the later ones go through the socket
        sender.send("b", _message(np.full(20_000, call), np.full(3, -call), call=call))
        held += _receive(receiver, 1)
    assert shared._memory[: 2 * BLOCKS] == b"\1" * BLOCKS + bytes(BLOCKS)
    for call, message in enumerate(held):
        assert (message.values[0] == call).all() and (message.values[1] == -call).all()
    (last,) = held[0].values[1:]
    held.clear()
    del message
    assert shared._memory[:BLOCKS] == b"\1" + bytes(BLOCKS - 1) and (last == 0).all()
    del last
    for call in range(3 * BLOCKS):
        sender.send("b", _message(np.full(20_000, call)))
        assert (_receive(receiver, 1)[0].values[0] == call).all()
    assert shared._memory[: 2 * BLOCKS] == bytes(2 * BLOCKS)


def test_copies_leave_shared_memory_free() -> None:
    descriptor = create_blocks()
    sender, receiver = SharedBlocks(os.dup(descriptor), 0), SharedBlocks(descriptor, 1, copies=True)
    arrays = [np.random.default_rng(0).integers(0, 255, size, "uint8") for size in (70, 10_000, 0)]
    index = sender.write([memoryview(array) for array in arrays])
    copies = receiver.read(index, [array.nbytes for array in arrays])
    assert receiver._memory[: 2 * BLOCKS] == bytes(2 * BLOCKS)
    assert sender.write([memoryview(np.zeros(20_000, "uint8"))]) == index
    for copy, array in zip(copies, arrays, strict=True):
        np.testing.assert_array_equal(copy, array)
        assert not copy.size or copy.__array_interface__["data"][0] % 64 == 0


def test_a_process_that_the_reader_forked_frees_no_blocks() -> None:
    ours, theirs = _pair()
    held, shared = list[Message](), theirs._blocks
    assert shared is not None
    Peers({"b": ours}, True).send("b", _message(np.arange(20_000)))
    held += _receive(Peers({"a": theirs}, True), 1)
    child = os.fork()
    if not child:
        held.clear()
        os._exit(len(held))
    assert os.waitpid(child, 0)[1] == 0 and shared._memory[0] == 1
    held.clear()
    assert shared._memory[0] == 0


def test_two_that_send_large_messages_to_each_other_do_not_wait_forever() -> None:
    ours, theirs = _pair(shares=False)
    message = _message(np.random.default_rng(0).integers(0, 255, MANY_BYTES, "uint8"))

    def exchange(peers: Peers, peer: str) -> list[Message]:
        for _ in range(3):
            peers.send(peer, message)
        return _receive(peers, 3)

    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(exchange, Peers({"b": ours}, True), "b"),
            pool.submit(exchange, Peers({"a": theirs}, True), "a"),
        ]
        for future in both:
            assert all(np.array_equal(arrived.values[0], message.values[0]) for arrived in future.result(60))


@pytest.mark.parametrize("when", ["idle", "within a message", "while sending"])
def test_the_end_of_a_process_is_an_error_that_names_it(when: str) -> None:
    ours, theirs = _pair(shares=False)
    peers = Peers({"b": ours}, False)
    if when == "within a message":
        theirs._socket.send(b"\1\0\0")
        assert peers.receive(60) == []
    action: Callable[[], Any] = lambda: peers.receive(60)  # noqa: E731
    if when == "while sending":
        action = lambda: peers.send("b", _message(np.zeros(MANY_BYTES, "uint8")))  # noqa: E731
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
    gc.collect()  # descriptors of earlier tests
    descriptors = len(os.listdir("/proc/self/fd"))
    strangers = [connect(listener.address, node, wrong, 1, "a") for wrong in (new_token(), b"short")]
    unknown = connect(listener.address, node, token, 7, "a")  # an index that no process has
    ours = connect(listener.address, node, token, 1, "a")
    accepted = listener.accept({1: "b"})
    assert list(accepted) == ["b"]
    array = np.arange(10_000)
    Peers(accepted, True).send("b", _message(1, array))
    (arrived,) = _receive(Peers({"a": ours}, False), 1)
    assert arrived.values[0] == 1 and np.array_equal(arrived.values[1], array)
    assert (ours._blocks is not None) == (accepted["b"]._blocks is not None) == (node == "here")
    assert not ours.problem and not accepted["b"].problem
    for stranger in (*strangers, unknown):
        with pytest.raises(rh.HostError, match="the connection with host 'a' has ended"):
            Peers({"a": stranger}, False).receive(60)
    del stranger, strangers, unknown
    gc.collect()
    # Instead of one or two listening sockets: two ends of a connection, and Python's descriptors of shared memory.
    assert len(os.listdir("/proc/self/fd")) - descriptors == (4 - 1 if node == "here" else 2 - 2)
    with pytest.raises(rh.HostError, match="host 'a' cannot be reached (on this node|at 127.0.0.1:)"):
        connect(listener.address, node, token, 1, "a")  # it listens no more


def _no_files(name: str) -> int:
    raise PermissionError(1, "Operation not permitted")  # as seccomp lets it fail


def _no_mapping(*_: Any) -> None:
    raise OSError(12, "Cannot allocate memory")


def _drop_descriptors(sock: socket.socket, pieces: list[bytes], _: list[int]) -> None:
    sock.sendall(pieces[0])  # as the kernel does if the receiver has too many open files


@pytest.mark.parametrize(
    ("patch", "problems"),
    [
        ("os.memfd_create", ("Operation not permitted", "its descriptor did not come")),
        ("socket.send_fds", ("the other process cannot map it", "its descriptor did not come")),
        ("mmap.mmap", ("Cannot allocate memory", "its descriptor did not come")),
        ("mmap.mmap of the listener", ("the other process cannot map it", "Cannot allocate memory")),
        ("unix", ("no Unix socket connects them", "")),
        ("no memfd_create", ("this system has no files without a name", "its descriptor did not come")),
    ],
)
def test_where_memory_cannot_be_shared_tensors_go_through_sockets(
    patch: str, problems: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connections._warn_of_sockets.cache_clear()
    token, calls, real = new_token(), itertools.count(), mmap.mmap
    listener = Listener("here", "127.0.0.1" if patch == "unix" else None, token)
    if patch == "no memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    elif patch == "mmap.mmap of the listener":
        monkeypatch.setattr(mmap, "mmap", lambda *args: real(*args) if next(calls) < 2 else _no_mapping())
    elif patch != "unix":
        fails = {"os.memfd_create": _no_files, "socket.send_fds": _drop_descriptors, "mmap.mmap": _no_mapping}
        monkeypatch.setattr(patch, fails[patch])
    address = listener.address._replace(unix=b"\0nobody") if patch == "unix" else listener.address
    ours = [connect(address, "here", token, index, "a") for index in (1, 2)]
    theirs = listener.accept({1: "b", 2: "c"})
    array = np.arange(10_000)
    for name, connection in zip(theirs, ours, strict=True):
        for sender, peer, receiver in ({"a": connection}, "a", theirs), (theirs, name, {"a": connection}):
            Peers(sender, True).send(peer, _message(array))
            (arrived,) = _receive(Peers(receiver, True), 1)
            assert np.array_equal(arrived.values[0], array)
        assert connection._blocks is None and theirs[name]._blocks is None
        for each, problem in zip((connection, theirs[name]), problems, strict=True):
            assert problem in each.problem and bool(problem) == bool(each.problem)
    lines = [record.message for record in caplog.records if "as they share no memory" in record.message]
    assert len(lines) == len(set(lines)) == sum(map(bool, problems))


def test_processes_that_do_not_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 0.05)
    with pytest.raises(rh.HostError, match="'b', 'the caller' did not connect within 0.05 s"):
        Listener("here", None, new_token()).accept({1: "b", 2: connections.CALLER})
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 60)
    listener = Listener("here", None, new_token())
    listener.is_cancelled = True
    with pytest.raises(rh.HostError, match="being connected again"):
        listener.accept({1: "b"})
