"""Compiling many workloads side by side, each in a process of its own, and running them in one."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

import relax_hetero as rh

from .workloads import Array, Workload


def parsed_gpu(text: str) -> Any:
    """A target as the command line names it: a kind, or JSON."""
    return json.loads(text) if text.startswith("{") else text


def device_of(gpu: Any) -> Any:
    """The device that runs a target's code."""
    kind = gpu if isinstance(gpu, str) else gpu["kind"]
    return tvm.cpu() if kind == "llvm" else tvm.runtime.device(kind, 0)


class Program:
    """A compiled workload on its device.

    Attributes
    ----------
    workload : Workload
    seconds : float
        That compiling took.
    failure : str
        Why there is none; empty where it was compiled.
    """

    def __init__(self, workload: Workload, seconds: float, failure: str, file: Path) -> None:
        self.workload, self.seconds, self.failure, self._file = workload, seconds, failure, file
        self._main: Any = None
        self._tensors: list[Any] = []
        self._results: Any = None

    def load(self, gpu: Any) -> Program:
        """Load it and place its arguments; `failure` says why it could not."""
        if not self.failure:
            try:
                self._machine = rh.vm.VirtualMachine(rh.load(str(self._file)))
                self._main = self._machine["main"]
                self._tensors = [tvm.runtime.tensor(array, device_of(gpu)) for array in self.workload.inputs()]
                self.launch()
            except Exception as error:  # of one program: the others are measured
                self.failure = f"{type(error).__name__}: {error}"[:600]
        return self

    def launch(self) -> None:
        """Queue one call; its results live until the next call."""
        self._results = self._main(*self._tensors)

    @property
    def graphs(self) -> int:
        """How many CUDA graphs a call launches."""
        return len(self._machine.graphs)

    def results(self) -> list[Array]:
        """Of the last call."""
        found = self._results
        return [tensor.numpy() for tensor in (found if isinstance(found, tuple) else (found,))]


def compiled(workloads: Sequence[Workload], gpu: Any, folder: Path, workers: int) -> list[Program]:
    """Compile and export all workloads over so many processes.

    Processes are spawned: CUDA does not survive a fork.
    """
    files = [folder / f"program{index}.so" for index in range(len(workloads))]
    if workers == 1 or len(workloads) == 1:
        found = [_compile(one, gpu, file) for one, file in zip(workloads, files, strict=True)]
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(workers, len(workloads)), mp_context=context) as pool:
            found = list(pool.map(_compile, workloads, [gpu] * len(files), files))
    return [Program(one, *said, file) for one, said, file in zip(workloads, found, files, strict=True)]


def _compile(workload: Workload, gpu: Any, file: Path) -> tuple[float, str]:
    os.environ.setdefault("TVM_NUM_THREADS", "2")
    try:
        begin = time.perf_counter()
        executable = rh.compile(workload.module(gpu), cache=False)
        seconds = time.perf_counter() - begin
        executable.export_library(str(file))
    except Exception as error:  # of one program: the others are measured
        return 0.0, f"{type(error).__name__}: {error}"[:600]
    return seconds, ""


def error_of(found: Array, wanted: Array) -> float:
    """The largest difference over the largest number wanted; infinity for other shapes or NaN."""
    if found.shape != wanted.shape:
        return float("inf")
    ours, theirs = found.astype("float32"), wanted.astype("float32")
    error = float(np.abs(ours - theirs).max() / max(float(np.abs(theirs).max()), 1e-30))
    return error if np.isfinite(error) else float("inf")
