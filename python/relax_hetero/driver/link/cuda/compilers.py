"""The CUDA compiler of this computer: NVRTC, or nvcc as a fallback.

Both generate the same code. NVRTC takes a third of the time (0.4 s for a kernel in half precision; nvcc takes 1.2 s),
mostly because headers of a few lines replace libcu++'s, which the generated code includes for names of integers.

Two of TVM's options are left out: ``--use_fast_math`` silently computes a wrong sin(1e5), and
``--register-usage-level=10`` makes kernels that prefetch weights spill 72 bytes per thread (15 us instead of 11).
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ....errors import BuildError, pip_install
from ....target.runtime_libraries import cuda_includes, cuda_libraries, nvcc_path
from . import nvrtc_worker

CHOICE = "TVM_CUDA_COMPILE_MODE"  # TVM's environment variable of the preferred compiler, ``nvcc`` or ``nvrtc``

_HEADER = "cuda_fp16.h"
_WORKER = Path(nvrtc_worker.__file__)
_STOCK_ARCH = "sm_50"
_PTXAS = ("-v",)
# Unused variables, and inexact constants; such warnings would quote lines of a thousand characters.
_SUPPRESSED_WARNINGS = "177,1046"
# The declarations of libcu++'s headers that TVM's code uses.
_INTEGERS = """#pragma once
namespace cuda { namespace std {
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
} }
"""
_TRAITS = """#pragma once
namespace cuda { namespace std {
template <class T, T v> struct integral_constant { static constexpr T value = v; };
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct is_floating_point : false_type {};
template <> struct is_floating_point<float> : true_type {};
template <> struct is_floating_point<double> : true_type {};
template <class T> struct is_integral : false_type {};
template <> struct is_integral<bool> : true_type {};
template <> struct is_integral<char> : true_type {};
template <> struct is_integral<signed char> : true_type {};
template <> struct is_integral<unsigned char> : true_type {};
template <> struct is_integral<short> : true_type {};
template <> struct is_integral<unsigned short> : true_type {};
template <> struct is_integral<int> : true_type {};
template <> struct is_integral<unsigned int> : true_type {};
template <> struct is_integral<long> : true_type {};
template <> struct is_integral<unsigned long> : true_type {};
template <> struct is_integral<long long> : true_type {};
template <> struct is_integral<unsigned long long> : true_type {};
template <class T> struct is_signed : integral_constant<bool, (T(-1) < T(0))> {};
template <class T> struct is_unsigned : integral_constant<bool, (T(0) < T(-1))> {};
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool, class T, class> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
} }
"""
_BRIEF_HEADERS = {"cuda/std/cstdint": _INTEGERS, "cuda/std/type_traits": _TRAITS}
_LIBCUPP = re.compile(r"#include <(cuda/[^>]+|cooperative_groups[^>]*)>")
_PRELUDE = """#ifdef __CUDACC_RTC__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
#endif
"""


@dataclass(frozen=True)
class Compiled:
    """The machine code of a source, and the compiler's log."""

    code: bytes
    log: str


class CompileError(Exception):
    """Errors in a source, as text of the compiler."""


class CudaCompiler:
    """A compiler, used in a `with` statement; `compile` is thread-safe.

    `name`: name in messages; `identity`: text that differs between compilers that may generate different code.
    """

    name: str
    identity: str

    def compile(self, source: str, arch: str) -> Compiled:
        """Compile for an architecture such as ``sm_90a``; CompileError if either is invalid."""
        raise NotImplementedError

    def settings(self, source: str, arch: str) -> str:
        """Text of everything but the source that this compiler's code depends on."""
        raise NotImplementedError

    def __enter__(self) -> CudaCompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class NvrtcCompiler(CudaCompiler):
    """NVRTC in worker processes, one for each thread that compiles.

    `library`: ``libnvrtc.so`` of any version; `includes`: folders of CUDA's headers.
    """

    def __init__(self, library: Path, includes: tuple[Path, ...]) -> None:
        self.library, self.includes = library, includes
        self.name = f"NVRTC ({library})"
        self.identity = f"nvrtc {_stamp(library)} {' '.join(_stamp(path / _HEADER) for path in includes)}"
        self._idle_workers: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def compile(self, source: str, arch: str) -> Compiled:
        """Compile CUDA C++ to machine code of one architecture, ``sm_90``."""
        request = {"source": _PRELUDE + source, **self._request(source, arch)}
        worker = self._idle_worker()
        code, log = worker.compile(request)
        with self._lock:
            self._idle_workers.append(worker)
        if code is None:
            raise CompileError(_with_archs(log, arch, worker.archs))
        return Compiled(code, log)

    def settings(self, source: str, arch: str) -> str:
        """Everything besides the source that the machine code depends on."""
        return _PRELUDE + json.dumps(self._request(source, arch))

    def _request(self, source: str, arch: str) -> dict[str, Any]:
        headers = {} if set(_LIBCUPP.findall(source)) - set(_BRIEF_HEADERS) else _BRIEF_HEADERS
        folders = [*self.includes, *([] if headers else [path / "cccl" for path in self.includes])]
        options = [
            f"--gpu-architecture={arch}",
            "-default-device",
            "--device-int128",
            f"--diag-suppress={_SUPPRESSED_WARNINGS}",
            *(f"--ptxas-options={option}" for option in _PTXAS),
            *(f"-I{folder}" for folder in folders),
        ]
        return {"options": options, "headers": headers}

    def _idle_worker(self) -> _Worker:
        with self._lock:
            if self._closed:  # the caller was interrupted
                raise BuildError("the compilation has ended")
            if self._idle_workers:
                return self._idle_workers.pop()
            worker = _Worker(self.library)
            self._workers.append(worker)
        worker.start()
        return worker

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        with self._lock:
            workers, self._workers, self._idle_workers, self._closed = self._workers, [], [], True
        for worker in workers:
            worker.end()


class _Worker:
    """A process of `nvrtc_worker`.

    Raises BuildError if the process cannot be started or has died, or the library cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        self._library = library
        self._errors = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WORKER), str(library)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._errors.close()
            raise BuildError(f"NVRTC ({library}): no process for it could be started: {error}") from error
        self.archs: list[int] = []

    def start(self) -> None:
        """Wait until it is ready."""
        self.archs = self._reply()["archs"]

    def compile(self, request: dict[str, Any]) -> tuple[bytes | None, str]:
        """Compile as `nvrtc_worker.Nvrtc.compile` does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            nvrtc_worker.write_message(self._process.stdin, request)
        except OSError:
            pass  # the process has died, and `_reply` raises
        reply = self._reply()
        size = reply["bytes"]
        code = None if size < 0 else self._process.stdout.read(size)
        if code is not None and len(code) < size:
            raise self._death()
        return code, reply["log"]

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        reply = nvrtc_worker.read_message(self._process.stdout)
        if reply is None:
            raise self._death()
        return reply

    def _death(self) -> BuildError:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return BuildError(
            f"NVRTC ({self._library}): its process ended with {status}: {lines[-1] if lines else 'no message'}"
        )

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # an unread request
                    pass


class NvccCompiler(CudaCompiler):
    """The toolkit's compiler, which also needs a C++ compiler."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"nvcc ({path})"
        self.identity = f"nvcc {_stamp(path)} {_version(path)}"

    def compile(self, source: str, arch: str) -> Compiled:
        """Compile CUDA C++ to machine code of one architecture, ``sm_90``."""
        with tempfile.TemporaryDirectory(prefix="relax_hetero_") as folder:
            text, code = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
            text.write_text(_PRELUDE + source)
            command = [str(self.path), *self._options(arch), "-o", str(code), str(text)]
            status, log = _run(command)
            if "Unsupported gpu architecture" in log:
                raise CompileError(f"error: this nvcc makes no code for {arch}{_default_arch_note(arch)}")
            if status or not code.exists():
                raise CompileError(log or f"{shlex.join(command)} ended with {status}")
            return Compiled(code.read_bytes(), log)

    def settings(self, source: str, arch: str) -> str:
        """Everything besides the source that the machine code depends on."""
        return _PRELUDE + json.dumps(self._options(arch))

    def _options(self, arch: str) -> list[str]:
        return [
            *("-cubin", "-std=c++17", f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}"),
            *("--expt-relaxed-constexpr", "--expt-extended-lambda", f"-diag-suppress={_SUPPRESSED_WARNINGS}"),
            *(f"--ptxas-options={option}" for option in _PTXAS),
        ]


def find_compiler() -> CudaCompiler:
    """The CUDA compiler of this computer. Raises BuildError without one; the message tells how to install one."""
    paths = _find_paths(os.environ.get(CHOICE, ""))
    if paths is None:
        raise BuildError(
            "code for CUDA devices needs a compiler: found neither NVRTC with its headers (pip's nvidia-cuda-nvrtc and "
            f"nvidia-cuda-runtime) nor nvcc; expected one of them: {pip_install('cuda')}, or a CUDA toolkit "
            "with its nvcc on PATH"
        )
    # Not cached, because each object has processes of its own.
    return NvrtcCompiler(*paths) if isinstance(paths, tuple) else NvccCompiler(paths)


@functools.cache
def _find_paths(preferred: str) -> tuple[Path, tuple[Path, ...]] | Path | None:
    libraries, includes = cuda_libraries("libnvrtc.so.*[0-9]"), cuda_includes(_HEADER)
    nvcc = nvcc_path()
    if libraries and includes and not (nvcc is not None and preferred.lower() == "nvcc"):
        # Prefer the headers of the library's own version.
        same_version = [path for path in includes if path.parent in libraries[0].parents]
        return libraries[0], tuple((same_version or includes)[:1])
    return nvcc


def _with_archs(log: str, arch: str, archs: list[int]) -> str:
    if "gpu-architecture" not in log:
        return log
    expected = f"expected sm_{archs[0]} to sm_{archs[-1]}"
    return f"error: this NVRTC makes no code for {arch}{_default_arch_note(arch)}; {expected}"


def _default_arch_note(arch: str) -> str:
    """A clause for messages if the target does not name an architecture."""
    return ", which TVM takes where a target names none: see rh.native('cuda')" if arch == _STOCK_ARCH else ""


@functools.cache
def _version(path: Path) -> str:
    return _run([str(path), "--version"])[1]


def _run(command: list[str]) -> tuple[int, str]:
    """Status and output of a command; BuildError if it cannot be started."""
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except OSError as error:
        raise BuildError(f"nvcc ({command[0]}) cannot be started: {error}") from error
    return process.returncode, process.stdout.decode(errors="replace")


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return f"{path.name} absent"
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"
