"""Parallel compilation of CUDA sources to machine code, with a cache.

The key of a kernel covers its source, the options and the compiler, so that a model with one changed kernel compiles
only that one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import tvm
from tvm import runtime

from ....artifact.cache_folder import CacheFolder
from ....artifact.kernel_cache import load_code, store_code
from ....errors import BuildError
from ....target.backend import LinkedCode
from ....target.cpu_cores import num_cores
from ....transform.ir.reasons import reason
from ....vm.device.interruptible import run_in_threads
from ....vm.file.cuda_modules import KIND, source_key
from .compilers import CompileError, CudaCompiler, find_compiler
from .kernel_sources import CudaPart, KernelSource, is_source

_MAX_PROCESSES = 32


def compile_kernels(
    sources: Sequence[KernelSource],
    folder: CacheFolder | None = None,  # cache of machine code
    # Called in this thread with the number of further sources that are done.
    on_done: Callable[[int], None] | None = None,
) -> list[bytes]:
    """Compile sources, equal ones once; returns their machine code in order.

    Raises BuildError without a compiler, or for a kernel that does not compile; the message has the kernel, the target
    and the first error.
    """
    if not sources:
        return []
    compiler = find_compiler()
    keys = [_key(compiler, source) for source in sources]
    cached = {key: code for key in dict.fromkeys(keys) if folder is not None and (code := load_code(folder, key))}
    missing = {key: source for key, source in zip(keys, sources, strict=True) if key not in cached}
    if on_done is not None and cached:
        on_done(sum(key in cached for key in keys))
    with compiler:
        tasks = [partial(_compile, compiler, source) for source in missing.values()]
        counts = [keys.count(key) for key in missing]

        def done(index: int) -> None:
            if on_done is not None:
                on_done(counts[index])

        codes = run_in_threads(tasks, min(num_cores(), _MAX_PROCESSES), "relax_hetero.cuda", done)
    compiled = dict(zip(missing, codes, strict=True))
    if folder is not None and compiled:
        store_code(folder, compiled)
    available = {**cached, **compiled}
    return [available[key] for key in keys]


def _compile(compiler: CudaCompiler, source: KernelSource) -> bytes:
    try:
        return compiler.compile(source.text, source.arch).code
    except CompileError as error:
        raise BuildError(
            f"kernel {', '.join(map(repr, source.names))} does not compile for target {source.target}: "
            f"{reason(error)} ({compiler.name})"
        ) from error


def _key(compiler: CudaCompiler, source: KernelSource) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for text in (compiler.identity, compiler.settings(source.text, source.arch), source.text):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def link_parts(
    parts: Sequence[CudaPart], progress: Callable[[str, int, int], None] | None, folder: CacheFolder | None
) -> LinkedCode:
    """Compile the kernels of all parts, and import them into the parts' host code; see `Backend.link`."""
    sources = [source for part in parts for source in part.sources]
    count = 0

    def on_done(more: int) -> None:
        nonlocal count
        count += more
        if progress is not None:
            progress("CUDA kernels", count, len(sources))

    codes = iter(compile_kernels(sources, folder, on_done))
    machine_code: dict[str, bytes] = {}
    for part in parts:
        machine_code.update(import_kernels(part, [next(codes) for _ in part.sources]))
    return LinkedCode([part.host for part in parts], machine_code)


def import_kernels(part: CudaPart, codes: Sequence[bytes]) -> dict[str, bytes]:
    """Import the kernels of a part into its host code.

    `codes`: machine code of each of the part's sources. Returns the code by `source_key` of kernels that TVM can only
    import as source, because its CUDA runtime is absent; it is inserted when a file is written.
    """
    machine_code = {}
    for source, code in zip(part.sources, codes, strict=True):
        module = source.module
        if is_source(source.data):
            machine_code[source_key(source.data.code)] = code
        else:
            module = _load(source, code)
        for host in part.launching(source):
            host.import_module(module)
    return machine_code


def _load(source: KernelSource, code: bytes) -> runtime.Module:
    load = tvm.get_global_func(f"ffi.Module.load_from_bytes.{KIND}")
    return load(source.data.compiled(code).to_bytes())
