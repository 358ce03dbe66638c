"""Back ends of CPUs: LLVM, or a C compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..target.backend import CPU, Backend

if TYPE_CHECKING:
    import tvm


class CBackend(Backend):
    """Back end that generates C."""

    checks_values = True
    records_by_hand = True

    def __init__(self, kind: str = "c", description: str = "", words: str = "") -> None:
        super().__init__(kind, CPU, "cpu", description, words)

    def native_target(self, index: int) -> tvm.target.Target:
        """The default target, because the C compiler chooses the CPU."""
        return self.default_target()

    def product_rate(self, target: tvm.target.Target, dtype: str) -> float:
        """Throughput of the CPU's instructions for a type."""
        from ..target.product_rates import cpu_product_rate

        return cpu_product_rate(target, dtype)

    def resolvers(self) -> Sequence[tuple[Any, tuple[str, ...]]]:
        """The resolver of generic tiles, which any compiler vectorizes."""
        from ..resolvers import GenericResolver

        return ((GenericResolver(), ()),)

    def build(self, kernels: tvm.IRModule, target: tvm.target.Target) -> Any:
        """Generate C source."""
        import tvm

        from ..driver.link.c_literals import with_c_literals
        from ..driver.link.llvm_kernels import loosen_alignment

        changed = {gv: with_c_literals(loosen_alignment(func)) for gv, func in kernels.functions.items()}
        return super().build(tvm.IRModule(changed), target)

    def load(self) -> bool:
        """Do nothing: TVM's runtime includes CPUs."""
        return True

    def runner(self, machine: Any, recording: Any, compiled: bool) -> Any:
        """A runner in the calling thread."""
        from ..vm.command_buffer.runners import HostRunner

        return HostRunner(machine, recording, compiled)


class LlvmBackend(CBackend):
    """Back end that compiles with LLVM."""

    callable_by_hand = True

    def __init__(self) -> None:
        words = """c++ host native x86 x86_64 x86-64 x64 i386 amd64 arm arm64 arm64v8 armv8 aarch64 riscv riscv64 intel
            core cores processor mkl onednn openmp sse avx avx2 avx512 avx512f amx neon sve cpuexecutionprovider"""
        super().__init__("llvm", "the CPU", words)

    def native_target(self, index: int) -> tvm.target.Target:
        """A target with the name, features and number of cores of this CPU."""
        from ..target.native_target import native_llvm

        return native_llvm()

    def completed(self, target: tvm.target.Target, index: int) -> tvm.target.Target | None:
        """The target of this CPU, unless `target` has ``mcpu``, ``mattr`` or another triple."""
        from ..target.native_target import completed_llvm

        return completed_llvm(target)

    def resolvers(self) -> Sequence[tuple[Any, tuple[str, ...]]]:
        """The resolvers of panels for known instruction sets, and of generic tiles for others."""
        from ..resolvers import CpuResolver
        from ..target.cpu_target import INSTRUCTION_SETS

        cpu = CpuResolver()
        rows = [(cpu, (f"isa={isa.name}",)) for isa in INSTRUCTION_SETS if isa.vector_bytes]
        return (*super().resolvers(), *rows)

    def build(self, kernels: tvm.IRModule, target: tvm.target.Target) -> Any:
        """Compile with LLVM (`driver.link.llvm_kernels`)."""
        from ..driver.link.llvm_kernels import build_llvm

        return build_llvm(target, kernels)
