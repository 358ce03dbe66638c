"""The back end of OpenCL devices, whose kernels TVM writes in OpenCL C, and pyopencl runs (`devices`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import BindingError, pip_install
from ..gpu import GpuBackend
from ..managed import ManagedBackend
from .driver import EXTENSION

if TYPE_CHECKING:
    import tvm
    from tvm import runtime

    from ...artifact.device_code import DeviceCode, KernelLaunch, LaunchSequence
    from .devices import OpenClMemory

_MAX_LOCAL_BYTES = 48 << 10
"""Maximum local memory of a group: more would leave a compute unit with few groups."""


class OpenClBackend(ManagedBackend, GpuBackend):
    """Back end of OpenCL devices with shared virtual memory; GPUs come before CPUs."""

    has_sorts = True
    submits_sequences = True

    def __init__(self) -> None:
        super().__init__("opencl", 4, "", "an OpenCL device", "cl ocl pocl")

    def native_target(self, index: int) -> tvm.target.Target:
        """The target of a device, or that of all devices if it is absent."""
        import tvm

        memory = self.memory()
        if memory is None or not 0 <= index < memory.count():
            return self.default_target()
        return tvm.target.Target({
            "kind": self.kind,
            "max_shared_memory_per_block": min(memory.local_bytes(index), _MAX_LOCAL_BYTES),
            "model": str(memory.facts(index)),
        })  # fmt: skip

    def completed(self, target: tvm.target.Target, index: int) -> tvm.target.Target | None:
        """The native target, unless `target` differs from TVM's default."""
        import tvm_ffi

        return self.native_target(index) if tvm_ffi.structural_equal(target, self.default_target()) else None

    def peaks(self, target: tvm.target.Target) -> tuple[float, float, float]:
        """Peaks of a plain GPU, or of OpenCL on a CPU."""
        from ...target.gpu_target import device_facts_of

        facts = device_facts_of(target)
        return (1e10 * facts.units, 1e10, 1.0) if facts.is_cpu else super().peaks(target)

    def may_share_memory(self, target: tvm.target.Target) -> bool:
        """Return whether the target is of a device in the host's memory."""
        from ...target.gpu_target import device_facts_of

        return device_facts_of(target).in_host_memory

    def submission(self, target: tvm.target.Target) -> str:
        """The driver's command buffers, or launches with kept arguments."""
        from ...target.gpu_target import device_facts_of

        return EXTENSION if device_facts_of(target).has_command_buffers else "recorded launches"

    def computes(self, dtype: str, index: int) -> bool:
        """Ask the device for the type's extension."""
        from .devices import opencl_memory

        return opencl_memory().computes(index, dtype)

    def check_device(self, name: str, spec: Any, device: runtime.Device) -> None:
        """Require the local memory that kernels were written for."""
        from .devices import opencl_memory

        needed = json.loads(spec.target).get("max_shared_memory_per_block", 0)
        local_bytes = opencl_memory().local_bytes(device.index)
        if local_bytes < needed:
            raise BindingError(
                f"{name} is to run on {device}, which has {local_bytes:,} bytes of local memory, expected {needed:,}: "
                f'compile for the target {{"kind": "{self.kind}", "max_shared_memory_per_block": {local_bytes}}}'
            )

    def resolvers(self) -> Sequence[tuple[Any, tuple[str, ...]]]:
        """The resolver of products and convolutions by plain threads."""
        from ...resolvers import SimtResolver

        return ((SimtResolver(), ()),)

    def build(self, kernels: tvm.IRModule, target: tvm.target.Target) -> Any:
        """Compile the host code, and generate the kernels' text."""
        from .text import with_own_functions

        return super().build(with_own_functions(kernels), target)

    def generate(self, kernel: tvm.IRModule, target: tvm.target.Target) -> str:
        """OpenCL C of a kernel."""
        from .text import generate

        return generate(kernel, super().generate, target)

    def driver_version(self, index: int) -> str:
        """Version that the driver states."""
        from .devices import opencl_memory

        return opencl_memory().driver_version(index)

    def memory(self) -> OpenClMemory | None:
        """Memory of all devices that can be used; None without pyopencl."""
        from .devices import opencl_memory

        try:
            return opencl_memory()
        except ImportError:
            return None

    def why_absent(self) -> str:
        """The absent package, driver or ability."""
        memory = self.memory()
        if memory is None:
            return f"pyopencl is not installed; expected {pip_install('opencl')}"
        return memory.why_absent

    def copy_queues(self, indices: Sequence[int]) -> Any:
        """Threads of copies, unless the devices are in the host's memory."""
        from ...vm.queue.device_queue import CopyThreads
        from .devices import opencl_memory

        shares = all(map(opencl_memory().host_reads, indices))
        return None if shares else CopyThreads(self.device_type)

    def launcher(self, code: DeviceCode, kernel: KernelLaunch) -> Callable[..., None]:
        """A launch in the device's queue."""
        from .devices import opencl_memory
        from .launches import KernelLauncher

        return KernelLauncher(opencl_memory(), code, kernel)

    def sequence_launcher(self, code: DeviceCode, sequence: LaunchSequence) -> Callable[..., None]:
        """Launches in the device's queue, as a command buffer of the driver where it has any."""
        from .devices import opencl_memory
        from .launches import SequenceLauncher

        return SequenceLauncher(opencl_memory(), code, sequence)

    def load_code(self, code: DeviceCode, indices: Sequence[int]) -> None:
        """Compile the text for the devices that will run it."""
        from .devices import opencl_memory

        for index in indices:
            opencl_memory().opened(index).program(code.text)
        super().load_code(code, indices)
