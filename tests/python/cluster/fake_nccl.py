"""NCCL and CUDA's driver as far as links use them, in threads of this process: memory of GPUs is memory of the host."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from typing import Any

from relax_hetero.vm.device.cuda_library import NOT_READY
from relax_hetero.vm.device.nccl import Nccl


class FakeDriver:
    """Stand-in for `CudaLibrary` with a note of every call; an event is reached when `busy` threads have ended.

    Attributes
    ----------
    notes : list of tuple of object
        Names of functions and their arguments, in order.
    busy : list of threading.Thread
        Operations of NCCL.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.busy: list[threading.Thread] = []
        self._handles = itertools.count(1000)
        self._memory: dict[int, Any] = {}

    def use(self, gpu: int) -> None:
        pass

    def create(self, name: str, *args: Any) -> int:
        if name != "cuMemAlloc_v2":
            return next(self._handles)
        memory = ctypes.create_string_buffer(args[0] + 256)
        address = ctypes.addressof(memory)
        self._memory[address] = memory
        return address

    def call(self, name: str, *args: Any) -> None:
        if name == "cuStreamSynchronize":
            for thread in self.busy:
                thread.join(10)

    def quick(self, name: str, *args: Any) -> None:
        self.notes.append((name, *args))

    def status(self, name: str, *args: Any, quick: bool = True) -> int:
        if name in ("cuEventQuery", "cuStreamQuery"):
            return NOT_READY if any(thread.is_alive() for thread in self.busy) else 0
        return 0


class FakeCommunicator:
    """An end of two; the other is in another thread."""

    def __init__(self, meeting: Meeting, rank: int, driver: FakeDriver) -> None:
        self._meeting, self._rank, self._driver = meeting, rank, driver
        self._is_over = threading.Event()
        self.error: Exception | None = None

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._driver.notes.append(("send", count, stream))
        self._meeting.sent[self._rank].put(ctypes.string_at(address, count))

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._driver.notes.append(("recv", count, stream))
        before = list(self._driver.busy)
        thread = threading.Thread(target=self._take, args=(address, count, peer, before), daemon=True)
        thread.start()
        self._driver.busy.append(thread)

    def _take(self, address: int, count: int, peer: int, before: list[threading.Thread]) -> None:
        for thread in before:
            thread.join()
        while not self._is_over.is_set():
            try:
                data = self._meeting.sent[peer].get(timeout=0.01)
            except queue.Empty:
                continue
            assert len(data) == count
            ctypes.memmove(address, data, count)
            return

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self._driver.notes.append(("abort",))
        self._is_over.set()

    destroy = abort


class Meeting:
    """Meeting point of the ends of a communicator."""

    def __init__(self, ranks: int) -> None:
        self.arrived = threading.Barrier(ranks)
        self.sent: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(ranks)]


class FakeNccl:
    """NCCL for some processes, each with a driver."""

    def __init__(self) -> None:
        self._meetings: dict[int, Meeting] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count()

    def seen_from(self, driver: FakeDriver) -> Nccl:
        """NCCL as one process sees it."""

        def communicator(ranks: int, link_id: int, rank: int) -> FakeCommunicator:
            with self._lock:
                meeting = self._meetings.setdefault(link_id, Meeting(ranks))
            meeting.arrived.wait()
            return FakeCommunicator(meeting, rank, driver)

        def start() -> None:
            driver.notes.append(("start",))

        def end() -> None:
            driver.notes.append(("end",))

        def communicators(gpus: list[int]) -> list[Any]:
            raise NotImplementedError("links have one end in a process")

        abort = FakeCommunicator.abort
        return Nccl(lambda: next(self._ids), communicator, communicators, abort, start, end, byte=1, float32=7, sum=0)
