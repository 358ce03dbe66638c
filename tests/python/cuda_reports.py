"""Reports of ptxas on CUDA kernels: registers, spills, shared memory, how wgmma is waited for; needs no GPU.

``reports_of(kernel, target)`` compiles a PrimFunc as `rh.compile` does and skips the test, visibly, where no CUDA
compiler is.
"""

import re
from dataclasses import dataclass, replace

import pytest
import tvm

from machine_code import disassembled, nvdisasm, touched_too_early
from relax_hetero.driver.link.cuda.compilers import Compiled, find_compiler
from relax_hetero.driver.link.cuda.kernel_sources import KernelSource, generate
from relax_hetero.errors import BuildError

_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized.*")
_IN_FUNCTION = re.compile(r"in (?:the )?function '(\w+)'")


@dataclass(frozen=True)
class Report:
    """Report of ptxas on a kernel.

    Attributes
    ----------
    registers : int
        Registers of each thread.
    stack, spill_stores, spill_loads : int
        Bytes of each thread in local memory.
    shared : int
        Bytes of static shared memory.
    serialized : str
        Why wgmma waits for each other, empty where it does not.
    touched : tuple of str
        Instructions that touch registers of products that still run; none where nvdisasm is missing.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    serialized: str
    touched: tuple[str, ...] = ()


def reports_of(kernel: tvm.tirx.PrimFunc, target: tvm.target.Target) -> list[Report]:
    """Reports of the launches of a PrimFunc, in order of their names."""
    reports = []
    for source in sources_of(kernel, target):
        compiled = compile_source(source)
        touched = touched_too_early(disassembled(compiled.code)) if nvdisasm() and "wgmma" in source.text else []
        reports += [replace(report, touched=tuple(touched)) for report in parse_reports(compiled.log)]
    return reports


def sources_of(kernel: tvm.tirx.PrimFunc, target: tvm.target.Target) -> tuple[KernelSource, ...]:
    """The CUDA sources of the launches of a PrimFunc."""
    name = str(kernel.attrs["global_symbol"]) if "global_symbol" in kernel.attrs else "kernel"
    kernel = kernel.with_attr("global_symbol", name).with_attr("target", target)
    return generate(tvm.IRModule({name: kernel}), target.with_host("llvm")).sources


def compile_source(source: KernelSource) -> Compiled:
    """Machine code of a source; skips the test without a compiler."""
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    with compiler:
        return compiler.compile(source.text, source.arch)


def parse_reports(log: str) -> list[Report]:
    """The reports of all kernels in a compiler's log, in order of their names."""
    serialized = {
        (name[1] if (name := _IN_FUNCTION.search(line)) else ""): found[0]
        for line in log.splitlines()
        if (found := _SERIALIZED.search(line))
    }
    parts = _KERNEL.split(log)
    reports = []
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        stack = _STACK.search(text)
        shared = _SHARED.search(text)
        reports.append(
            Report(
                name,
                int(_REGISTERS.search(text)[1]),
                *(int(stack[i]) for i in (1, 2, 3)),
                int(shared[1]) if shared else 0,
                serialized.get(name, serialized.get("", "")),
            )
        )
    return sorted(reports, key=lambda report: report.name)
