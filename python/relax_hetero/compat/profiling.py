"""Profiles of a session in the format of ONNX Runtime's, which ``about:tracing`` and Perfetto read."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from relax_hetero.vm.machine import VirtualMachine


class SessionProfile:
    """Events of a session since it was made, in a file whose name begins with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.start = time.perf_counter_ns()
        self._path = f"{prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S')}.json"
        self._events: list[dict[str, Any]] = []

    def note(self, category: str, name: str, begin: int, nanoseconds: float, args: Mapping[str, Any]) -> None:
        """Add an event that began at a time of `time.perf_counter_ns`."""
        self._events.append(
            {
                "cat": category,
                "pid": os.getpid(),
                "tid": threading.get_ident(),
                "dur": round(nanoseconds / 1000),
                "ts": round((begin - self.start) / 1000),
                "ph": "X",
                "name": name,
                "args": dict(args),
            }
        )

    def note_kernels(self, machine: VirtualMachine, feed: Mapping[str, Any]) -> None:
        """Call the model once more, and add the time of each kernel, one after the other."""
        begin = time.perf_counter_ns()
        profile = machine.profile("main", **feed)
        measured = [(c.variable, c.kernel, c.microseconds) for c in profile.commands]
        inside = {kernel for _, kernel, _ in measured}
        measured += [
            (", ".join(row.ops) or row.symbol, row.symbol, row.microseconds)
            for row in profile.rows
            if row.symbol not in inside
        ]
        devices = {row.symbol: row.device for row in profile.rows}
        for name, kernel, microseconds in measured:
            args = {"op_name": kernel, "provider": devices.get(kernel, "")}
            self.note("Node", f"{name}_kernel_time", begin, microseconds * 1000, args)
            begin += round(microseconds * 1000)

    def write(self) -> str:
        """Write the file and return its path."""
        with open(self._path, "w") as file:
            json.dump(self._events, file)
        return self._path
