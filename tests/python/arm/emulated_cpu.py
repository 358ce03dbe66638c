"""Kernels for AArch64, compiled by this machine and called in a process that qemu emulates.

After `install`, an executable of ``tvm.compile`` for AArch64 is called like one for this machine: it is linked, and its
functions run in the emulated process, with copies of their arguments, which are copied back. So tests of kernels run
for AArch64 as they stand, at the speed of this machine but for the kernels themselves.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from arm.environment import PYTHON

VARIABLE = "RELAX_HETERO_EMULATED_CPU"
"""Environment variable with the CPU that qemu emulates, such as "max"; while it is set, tests run for AArch64."""


class EmulatedCpu:
    """A process that calls functions of libraries on a CPU that qemu emulates.

    Parameters
    ----------
    cpu : str
        The CPU by qemu's name, with properties: "max", "neoverse-n1", "max,sve-default-vector-length=32".
    """

    def __init__(self, cpu: str) -> None:
        environment = {**os.environ, "QEMU_CPU": cpu, "TVM_NUM_THREADS": "2"}
        command = [str(PYTHON), str(Path(__file__).with_name("guest.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        atexit.register(self.close)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def call(self, library: Path, name: str, arguments: tuple[Any, ...]) -> None:
        """Call a function of a library with tensors, whose contents change as the call changes them, and numbers."""
        distinct: dict[int, int] = {}
        values: list[Any] = []
        for argument in arguments:
            if _identity(argument) not in distinct:
                distinct[_identity(argument)] = len(values)
                values.append(argument)
        sent = [value.numpy() if isinstance(value, tvm.runtime.Tensor) else value for value in values]
        repeats = [distinct[_identity(argument)] for argument in arguments]
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((str(library), name, sent, repeats), self._process.stdin)
        self._process.stdin.flush()
        try:
            answer = pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError(f"{name} ended the emulated process: {self._process.wait()}") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        for value, result in zip(values, answer, strict=True):
            if isinstance(value, tvm.runtime.Tensor):
                value.copyfrom(result)
            elif isinstance(value, np.ndarray):
                value[...] = result


def _identity(argument: Any) -> int:
    return int(argument.data_ptr()) if isinstance(argument, tvm.runtime.Tensor) else id(argument)


def link(executable: Any, library: Path) -> None:
    """Link an executable for AArch64 into a library."""

    def run_linker(output: str, objects: list[str], options: object = None) -> None:
        subprocess.run(["aarch64-linux-gnu-ld", "-shared", "-o", output, *objects], check=True)

    executable.export_library(str(library), fcompile=run_linker)


class _EmulatedModule:
    """An executable's functions, as ``Executable.jit`` returns them."""

    def __init__(self, executable: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="emulated_")
        self._library = Path(self._folder.name) / "kernels.so"
        link(executable, self._library)

    def get_function(self, name: str, query_imports: bool = False) -> Callable[..., None]:
        return lambda *arguments: emulated_cpu(os.environ[VARIABLE]).call(self._library, name, arguments)

    __getitem__ = get_function


@cache
def emulated_cpu(cpu: str) -> EmulatedCpu:
    """The process of a CPU, which all tests of this process share."""
    return EmulatedCpu(cpu)


def install() -> None:
    """Let executables for AArch64 run in the emulated process."""
    executable, module = tvm.runtime.Executable, tvm.runtime.Module
    jit, getitem = executable.jit, module.__getitem__

    def is_foreign(module: Any) -> bool:
        return module.kind == "llvm" and "aarch64" in module.get_function("_get_target_string")()

    def jit_or_emulate(self: Any, **options: Any) -> Any:
        if not is_foreign(self.mod):
            return jit(self, **options)
        if self._jitted_mod is None:
            self._jitted_mod = _EmulatedModule(self)
        return self._jitted_mod

    @cache
    def emulated(module: Any) -> _EmulatedModule:
        return _EmulatedModule(executable(module))

    executable.jit = jit_or_emulate
    module.__getitem__ = lambda self, name: emulated(self)[name] if is_foreign(self) else getitem(self, name)
