"""Worker processes: if one dies, runs out of memory or hangs, only its current case is lost."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from select import select

from .outcome import CRASHED, Outcome

APP = Path(__file__).resolve().parent.parent
MEMORY_BYTES = 8 << 30
START_SECONDS = 120.0  # importing TVM and generating the suite's cases, on a busy machine


class Worker:
    """One worker process, started on first use and again after every crash.

    Parameters
    ----------
    command : sequence of str
        Command line of the process, which reads names and answers each with an outcome, like `conformance.worker`.
    timeout : float
        Seconds one case may take.
    """

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command = list(command)
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()
        self._fresh = True

    def run(self, name: str) -> Outcome:
        """Run one case; a crash or a timeout is an outcome, not an error."""
        process = self._running() or self._start()
        assert process.stdin is not None and process.stdout is not None
        self._log.seek(0)
        self._log.truncate()
        try:
            process.stdin.write(name.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._lost(name, "the process was gone before the case began")
        limit = self._timeout + (START_SECONDS if self._fresh else 0.0)
        self._fresh = False
        ready, _, _ = select([process.stdout], [], [], limit)
        if not ready:
            return self._lost(name, f"no answer within {self._timeout:g} s")
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            return self._lost(name, None)
        return Outcome(**json.loads(line))

    def _running(self) -> subprocess.Popen[bytes] | None:
        """The process, unless it ended by itself after its last case, as one without a usable GPU does."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        return self._process

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [str(APP), os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in paths if path))
        environment.setdefault("TVM_NUM_THREADS", "2")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self._fresh = True
        return self._process

    def _lost(self, name: str, reason: str | None) -> Outcome:
        assert self._process is not None
        self._process.kill()
        code = self._process.wait()
        self._process = None
        if reason is None:
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._log.seek(0)
        tail = self._log.read()[-500:].decode(errors="replace").strip()
        return Outcome(name, CRASHED, [], f"{reason}; last words: {tail}")


def run_cases(
    names: Iterable[str],
    configuration: str,
    report: Callable[[Outcome], None],
    workers: int = 2,
    timeout: float = 120.0,
    budget: float = math.inf,
) -> None:
    """Run `names` in `configuration` over `workers` processes and hand every outcome to `report`.

    Parameters
    ----------
    report : callable
        Called from one thread at a time, in order of completion.
    timeout : float
        Seconds one case may take.
    budget : float
        Seconds after which no further case begins.
    """
    end = time.monotonic() + budget
    command = [sys.executable, "-m", "conformance.worker", configuration, str(MEMORY_BYTES)]
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    lock = threading.Lock()

    def serve() -> None:
        worker = Worker(command, timeout)
        try:
            while time.monotonic() < end:
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                outcome = worker.run(name)
                with lock:
                    report(outcome)
        finally:
            worker.close()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
