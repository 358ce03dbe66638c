"""Compiles workloads in parallel, each in a process of its own, and runs them in one process."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

import relax_hetero as rh

from .device_time import torch_on_gpu
from .workloads import Workload


def parsed_gpu(text: str) -> Any:
    """The target that the command line names: a kind, or JSON."""
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
        Compile time.
    failure : str
        Reason why it was not compiled or loaded, or empty.
    """

    def __init__(self, workload: Workload, seconds: float, failure: str, file: Path) -> None:
        self.workload, self.seconds, self.failure, self._file = workload, seconds, failure, file
        self._main: Any = None
        self._tensors: list[Any] = []
        self._results: Any = None

    def load(self, gpu: Any) -> Program:
        """Load it and place its arguments, or set `failure`."""
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
        """Queue one call; its results are kept until the next call."""
        self._results = self._main(*self._tensors)

    @property
    def graphs(self) -> int:
        """The number of CUDA graphs that a call launches."""
        return len(self._machine.graphs)

    def results(self) -> list[Any]:
        """Results of the last call: PyTorch tensors if PyTorch has their GPU, else arrays."""
        tensors = self._results if isinstance(self._results, tuple) else (self._results,)
        torch = torch_on_gpu()
        if torch is None or device_of("llvm") == tensors[0].device:
            return [tensor.numpy() for tensor in tensors]
        tensors[0].device.sync()
        return [torch.from_dlpack(tensor) for tensor in tensors]


def compiled(
    workloads: Sequence[Workload], gpu: Any, folder: Path, workers: int, meanwhile: Callable[[], None] | None = None
) -> list[Program]:
    """Compile and export all workloads in `workers` processes, and call `meanwhile` in this one at the same time.

    Processes are spawned: CUDA does not survive a fork.
    """
    files = [folder / f"program{index}.so" for index in range(len(workloads))]
    meanwhile = meanwhile or (lambda: None)
    if workers == 1 or len(workloads) == 1:
        outcomes = [_compile(one, gpu, file) for one, file in zip(workloads, files, strict=True)]
        meanwhile()
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(workers, len(workloads)), mp_context=context) as pool:
            answers = pool.map(_compile, workloads, [gpu] * len(files), files)
            meanwhile()
            outcomes = list(answers)
    return [Program(one, *outcome, file) for one, outcome, file in zip(workloads, outcomes, files, strict=True)]


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


def error_of(result: Any, expected: Any) -> float:
    """The largest difference over the largest expected number; infinity for other shapes or NaN.

    Each is an array or a PyTorch tensor; two tensors are compared on their device.
    """
    if tuple(result.shape) != tuple(expected.shape):
        return float("inf")
    if isinstance(expected, np.ndarray) and not isinstance(result, np.ndarray):
        result = result.float().cpu().numpy()
    if isinstance(result, np.ndarray):
        ours, theirs = result.astype("float32"), expected.astype("float32")
    else:
        ours, theirs = result.float(), expected.float()
    error = float(abs(ours - theirs).max()) / max(float(abs(theirs).max()), 1e-30)
    return error if np.isfinite(error) else float("inf")
