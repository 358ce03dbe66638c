"""Connections between the processes of a cluster, by which messages are sent directly.

Processes of one node use Unix sockets and shared memory, those of different nodes TCP. Tensors are not serialized:
they are copied from the sender's memory into shared memory, or by the kernel into memory that the receiver allocates. A
process that waits sleeps, and the connections of a process that dies close at once.

Whoever connects first sends a token, which Ray distributes, and the descriptor of the shared memory; listeners end once
all processes are connected. Within a node they answer with a byte whether they share the memory. If one of the two
cannot, all tensors go through the socket.

Memory that both ends of a connection within a node share: arrays are copied once, and read where they are.

Each direction has a few blocks. The sender copies the arrays of a message to a free block and sends the block's index;
the receiver's arrays are views of the block, which is free again when the last of them is dropped. The memory is a file
without a name, whose descriptor is sent when the processes connect, so nothing is left of it when they have ended.
Pages are allocated when they are first written.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import HostError
from ..vm.device.tensors import ALIGNMENT
from .wire import Message, MessageCodec

_log = logging.getLogger("relax_hetero")

CALLER = ""  # name of the caller's process among those of hosts
CONNECT_SECONDS = 30.0  # time within which all processes of a replica are connected

_TOKEN_BYTES = 32
_TOKEN_SECONDS = 5.0  # time within which a process that has connected sends the token
_INDEX = struct.Struct("<I")  # index of the process that connects, which it sends after the token
_SHARES, _SHARES_NOT = b"\1", b"\0"  # answers within a node
_HEADER = struct.Struct("<QQq")  # number of the call, bytes of the body, and index of the block with the arrays
_HEAD_BYTES = 512  # bytes that are received at once: the header, and the body, if it is small
_MAX_PIECES = 512  # maximum pieces of one system call; Linux allows 1024
_ACCEPT_MILLISECONDS = 100
_BUFFER_BYTES = 4 << 20
"""Bytes of a Unix socket's buffer, where the system allows as many. A smaller one needs more switches of threads."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""Linux's options, in seconds and tries, by which an idle connection to a machine that has vanished ends."""


class Address(NamedTuple):
    """Addresses at which a process listens."""

    node: str  # Ray's id of its node
    unix: bytes  # abstract name of its Unix socket, for processes of the same node
    tcp: tuple[str, int] | None  # IP address and port, for processes of other nodes; None if there are none


class Connection:
    """One end of a connection: one thread may send while another one receives."""

    def __init__(
        self,
        sock: socket.socket,  # connected socket
        peer: str,  # name of the process at the other end
        blocks: SharedBlocks | None = None,  # memory that both ends share
        awaits_answer: bool = False,  # whether the other end first says if it shares the memory, too
        problem: str = "",  # reason why this end shares no memory, though both are on one node
    ) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # `problem`: reason why tensors go through the socket within a node; empty if they do not, or the answer has not
        # come.
        self._socket, self.peer, self._codec, self.problem = sock, peer, MessageCodec(), problem
        self._awaits_answer, self._offered = awaits_answer, blocks
        self._blocks = None if awaits_answer else blocks  # of messages that are sent
        self._messages = _read(sock, self._codec, blocks)
        if problem:
            _warn_of_sockets(problem)

    def __del__(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._socket.fileno()

    def send(self, message: Message, wait: Callable[[Connection], None]) -> None:
        """Send a message, whose arrays may change once this returns.

        `message`: message whose arrays are contiguous; `wait`: waits until the connection can take more.
        """
        body, arrays = self._codec.encode(message)
        block = NO_BLOCK if self._blocks is None else self._blocks.write(arrays)
        head = (_HEADER.pack(message.call, len(body), block) + body).ljust(_HEAD_BYTES)
        pieces = [memoryview(head), *(arrays if block == NO_BLOCK else ())]
        first = 0
        while first < len(pieces):
            try:
                sent = self._socket.sendmsg(pieces[first : first + _MAX_PIECES])
            except BlockingIOError:
                wait(self)
                continue
            except OSError as error:
                raise self._ended() from error
            while first < len(pieces) and sent >= pieces[first].nbytes:
                sent -= pieces[first].nbytes
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def receive(self) -> Message | None:
        """Return the next message, or None if it has not come as a whole; HostError if the connection has ended."""
        try:
            return None if self._awaits_answer and not self._take_answer() else next(self._messages)
        except (OSError, StopIteration) as error:
            raise self._ended() from error

    def close(self) -> None:
        """End the connection for both ends, which wakes threads that wait for it; the descriptor closes with `self`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take_answer(self) -> bool:
        """Read whether the other end shares the memory; False if that has not come."""
        try:
            answer = self._socket.recv(1)
        except BlockingIOError:
            return False
        if not answer:
            raise ConnectionError
        self._awaits_answer = False
        if answer == _SHARES:
            self._blocks = self._offered
        elif not self.problem:
            self.problem = "the other process cannot map it"
            _warn_of_sockets(self.problem)
        return True

    def _ended(self) -> HostError:
        return HostError(f"the connection with {f'host {self.peer!r}' if self.peer else 'the caller'} has ended")


@cache
def _warn_of_sockets(problem: str) -> None:
    """Say once for each reason that memory is not shared."""
    _log.warning("tensors go through sockets between processes of this node, as they share no memory: %s", problem)


def _read(
    sock: socket.socket, codec: MessageCodec, blocks: SharedBlocks | None
) -> Generator[Message | None, None, None]:
    """Yield messages, and None whenever nothing more has come; ends with the connection."""
    start = memoryview(bytearray(_HEAD_BYTES))
    while True:
        yield from _fill(sock, start)
        call, body_bytes, block = _HEADER.unpack_from(start)
        head, end = start, _HEADER.size + body_bytes
        if end > _HEAD_BYTES:
            head = memoryview(bytearray(end))
            head[:_HEAD_BYTES] = start
            yield from _fill(sock, head[_HEAD_BYTES:])
        body = codec.decode_body(bytes(head[_HEADER.size : end]))
        if block == NO_BLOCK:
            buffers = [aligned_bytes(nbytes) for nbytes in body.sizes]
            for index in range(len(buffers)):
                yield from _fill(sock, buffers[index].data)
        else:
            assert blocks is not None
            buffers = blocks.read(block, body.sizes)
        messages = [codec.decode(body, call, buffers)]
        buffers.clear()
        yield messages.pop()  # which alone refers to the arrays from now on


def _fill(sock: socket.socket, view: memoryview) -> Generator[None, None, None]:
    while view.nbytes:
        try:
            received = sock.recv_into(view)
        except BlockingIOError:
            yield None
            continue
        if not received:
            raise ConnectionError
        view = view[received:]


class Peers:
    """All connections of a process."""

    def __init__(
        self,
        connections: Mapping[str, Connection],  # connections by the name of the other process
        # Whether `send` takes what comes while it waits, because no other thread does. Otherwise two processes that
        # send large messages to each other would wait forever.
        receives_while_sending: bool,
    ) -> None:
        self._connections, self._receives_while_sending = dict(connections), receives_while_sending
        self._by_descriptor = {connection.fileno(): connection for connection in connections.values()}
        self._arrived: list[Message] = []
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def send(self, peer: str, message: Message) -> None:
        """Send a message; HostError if a connection has ended."""
        self._connections[peer].send(message, self._wait_to_send)

    def receive(self, seconds: float | None = None) -> list[Message]:
        """Wait for something to come.

        `seconds`: maximum time to wait, None for no limit. Returns the messages that have come; empty if there are only
        parts of one. Raises HostError if a connection has ended.
        """
        if not self._arrived:
            self._take(self._poll.poll(None if seconds is None else 1e3 * seconds))
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """End all connections; thread-safe."""
        for connection in self._connections.values():
            connection.close()

    def _take(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, _ in ready:
            message = self._by_descriptor[descriptor].receive()
            if message is not None:
                self._arrived.append(message)

    def _wait_to_send(self, connection: Connection) -> None:
        poll, descriptor = select.poll(), connection.fileno()
        events = select.POLLIN if self._receives_while_sending else 0
        for other in self._by_descriptor if events else ():
            poll.register(other, events)
        poll.register(descriptor, select.POLLOUT | events)
        ready = poll.poll()
        if self._receives_while_sending:
            self._take([(each, event) for each, event in ready if event & ~select.POLLOUT])


class Listener:
    """Sockets at which a process waits for those of others."""

    def __init__(
        self,
        node: str,  # Ray's id of this process's node
        # IP address for processes of other nodes; None if there are none, so that no port is opened.
        ip_address: str | None,
        token: bytes,  # token that processes send
    ) -> None:
        self.token = token
        self.is_cancelled = False  # set by another thread to end `accept` soon
        self._sockets = [socket.socket(socket.AF_UNIX)]
        unix = b"\0relax_hetero-" + secrets.token_hex(16).encode()
        self._sockets[0].bind(unix)
        if ip_address is not None:
            family = socket.AF_INET6 if ":" in ip_address else socket.AF_INET
            self._sockets.append(socket.create_server((ip_address, 0), family=family))
        for listening in self._sockets:
            listening.listen()
        # Where it listens.
        self.address = Address(node, unix, self._sockets[1].getsockname()[:2] if ip_address else None)

    def accept(self, names: Mapping[int, str]) -> dict[str, Connection]:
        """Wait for other processes, and stop listening.

        `names`: names of the processes by index. Raises HostError if they have not connected within `CONNECT_SECONDS`,
        or it is cancelled.
        """
        connections: dict[str, Connection] = {}
        end = time.monotonic() + CONNECT_SECONDS
        poll, sockets = select.poll(), {listening.fileno(): listening for listening in self._sockets}
        for descriptor in sockets:
            poll.register(descriptor, select.POLLIN)
        while len(connections) < len(names):
            if self.is_cancelled:
                raise HostError("the replica is being connected again")
            if time.monotonic() > end:
                missing = ", ".join(repr(name or "the caller") for name in names.values() if name not in connections)
                raise HostError(
                    f"{missing} did not connect within {CONNECT_SECONDS:g} s; expected open ports between hosts"
                )
            for descriptor, _ in poll.poll(_ACCEPT_MILLISECONDS):
                sock, _ = sockets[descriptor].accept()
                index, blocks, problem = _read_greeting(sock, self.token)
                name = names.get(index)
                if name is None:
                    sock.close()
                    continue
                if sock.family == socket.AF_UNIX:
                    with suppress(OSError):  # its end is an error of the first message
                        sock.sendall(_SHARES if blocks is not None else _SHARES_NOT)
                connections[name] = Connection(sock, name, blocks, problem=problem)
        self.close()
        return connections

    def close(self) -> None:
        """Close the sockets."""
        for listening in self._sockets:
            listening.close()

    __del__ = close


def connect(
    address: Address,  # where the other process listens
    node: str,  # Ray's id of this process's node
    token: bytes,  # token of the replica
    index: int,  # index of this process
    peer: str,  # name of the other process
    copies: bool = False,  # whether to copy received arrays, for `SharedBlocks`
) -> Connection:
    """Connect to a process. Raises HostError if it cannot be reached."""
    sock, blocks, greeting = None, None, token + _INDEX.pack(index)
    try:
        sock, problem = _reach(address, node)
        is_near = sock.family == socket.AF_UNIX
        if is_near:
            blocks, problem = _send_with_memory(sock, greeting, copies)
        else:
            sock.sendall(greeting)
    except OSError as error:
        if sock is not None:
            sock.close()
        where, expected = "on this node", "both processes in one container"
        if address.tcp is not None:
            where, expected = "at {}:{}".format(*address.tcp), "open ports between hosts"
        raise HostError(f"host {peer!r} cannot be reached {where}: {error}; expected {expected}") from error
    return Connection(sock, peer, blocks, is_near, problem)


def _reach(address: Address, node: str) -> tuple[socket.socket, str]:
    """Connect to a process; returns the socket, and the reason if it is not a Unix socket within a node."""
    problem = ""
    if address.node == node:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address.unix)
            return sock, ""
        except OSError as error:  # such as processes of two containers
            sock.close()
            if address.tcp is None:
                raise
            problem = f"no Unix socket connects them ({error})"
    assert address.tcp is not None, "processes of other nodes have addresses"
    return socket.create_connection(address.tcp, timeout=CONNECT_SECONDS), problem


def _send_with_memory(sock: socket.socket, greeting: bytes, copies: bool) -> tuple[SharedBlocks | None, str]:
    """Send a greeting with the descriptor of new memory; returns the memory, or None and the reason."""
    try:
        descriptor = create_blocks()
        try:
            blocks = SharedBlocks(os.dup(descriptor), 0, copies)
            socket.send_fds(sock, [greeting], [descriptor])
        finally:
            os.close(descriptor)
    except OSError as error:
        sock.sendall(greeting)
        return None, f"{error}"
    return blocks, ""


def new_token() -> bytes:
    """Make the token of a replica's connections."""
    return secrets.token_bytes(_TOKEN_BYTES)


def _read_greeting(sock: socket.socket, token: bytes) -> tuple[int, SharedBlocks | None, str]:
    """Index of the process that has connected, the memory that it shares, and the reason if it should, and does not.

    The index is -1 if it does not send the token soon.
    """
    received, descriptors, end = b"", list[int](), time.monotonic() + _TOKEN_SECONDS
    with suppress(OSError):
        while len(received) < _TOKEN_BYTES + _INDEX.size:
            sock.settimeout(max(end - time.monotonic(), 1e-3))
            piece, more, *_ = socket.recv_fds(sock, _TOKEN_BYTES + _INDEX.size - len(received), 1)
            descriptors += more
            if not piece:
                break
            received += piece
    if len(received) < _TOKEN_BYTES + _INDEX.size or not hmac.compare_digest(received[:_TOKEN_BYTES], token):
        for descriptor in descriptors:
            os.close(descriptor)
        return -1, None, ""
    (index,), blocks, problem = _INDEX.unpack(received[_TOKEN_BYTES:]), None, ""
    if descriptors:
        try:
            blocks = SharedBlocks(descriptors[0], 1)
        except OSError as error:
            problem = f"{error}"
    elif sock.family == socket.AF_UNIX:
        problem = "its descriptor did not come: the other process has none, or this one has too many open files"
    return index, blocks, problem


BLOCKS = 16  # blocks of each direction: the messages that may wait for the receiver, such as those of calls in flight
BLOCK_BYTES = 32 << 20  # maximum bytes of a message's arrays in a block; larger messages go through the socket
MIN_BYTES = 4 << 10  # bytes from which arrays go through a block; fewer are faster in the socket
NO_BLOCK = -1  # index of a message whose arrays go through the socket
_FLAGS_BYTES = mmap.PAGESIZE  # bytes before the blocks: the first ones are 1 for each block that is in use
_BYTES = _FLAGS_BYTES + 2 * BLOCKS * BLOCK_BYTES


def create_blocks() -> int:
    """Create the memory of a connection; returns its file descriptor. OSError where the system does not allow it."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files without a name (memfd_create)")
    descriptor = os.memfd_create("relax_hetero")
    os.ftruncate(descriptor, _BYTES)
    return descriptor


class SharedBlocks:
    """One end of a connection's memory.

    `descriptor`: result of `create_blocks`, which the constructor closes; `end`: 0 in one of the two processes, and 1
    in the other; `copies`: whether `read` returns copies, because received arrays may live for long. Raises OSError if
    the process may not map so much memory.
    """

    def __init__(self, descriptor: int, end: int, copies: bool = False) -> None:
        try:
            self._memory = memory = mmap.mmap(descriptor, _BYTES)
        finally:
            os.close(descriptor)
        self._first, self._copies = end * BLOCKS, copies
        # References to blocks that this end reads, whose callbacks free them.
        self._in_use: dict[int, weakref.ref[np.ndarray]] = {}
        self._free = [partial(_free, memory, index, os.getpid()) for index in range(2 * BLOCKS)]

    def write(self, arrays: Sequence[memoryview]) -> int:
        """Copy the bytes of arrays to a free block.

        Returns the index of the block; `NO_BLOCK` if there are too few bytes or too many, or no block is free.
        """
        nbytes = sum([_padded(array.nbytes) for array in arrays])
        if not MIN_BYTES <= nbytes <= BLOCK_BYTES:
            return NO_BLOCK
        memory = self._memory
        index = memory.find(b"\0", self._first, self._first + BLOCKS)
        if index < 0:
            return NO_BLOCK
        begin = _FLAGS_BYTES + index * BLOCK_BYTES
        for array in arrays:
            memory[begin : begin + array.nbytes] = array
            begin += _padded(array.nbytes)
        memory[index] = 1
        return index

    def read(self, index: int, sizes: Sequence[int]) -> list[np.ndarray]:
        """Make arrays of bytes of a block that the other end has written, once for each message.

        `index`: result of `write`; `sizes`: bytes of each array.
        """
        block = np.ndarray(BLOCK_BYTES, np.uint8, self._memory, _FLAGS_BYTES + index * BLOCK_BYTES)
        arrays, begin = [], 0
        for size in sizes:
            arrays.append(block[begin : begin + size])
            begin += _padded(size)
        if self._copies:
            arrays = [*map(_copy, arrays)]
            self._free[index]()
        else:
            self._in_use[index] = weakref.ref(block, self._free[index])
        return arrays


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Allocate uninitialised bytes that kernels can read in place."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[begin : begin + nbytes]


def _copy(array: np.ndarray) -> np.ndarray:
    copy = aligned_bytes(array.nbytes)
    copy[:] = array
    return copy


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _free(memory: mmap.mmap, index: int, owner: int, _: Any = None) -> None:
    """Let the sender write to a block; system calls, which both make in between, order this after the last read.

    A process that `owner`, the reader, has forked drops copies of its arrays, whose memory the reader still uses.
    """
    if os.getpid() == owner:
        memory[index] = 0
