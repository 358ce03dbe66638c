"""The back end of NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..target.backend import LinkedCode
from .gpu import GpuBackend

if TYPE_CHECKING:
    import tvm
    from tvm import runtime

_log = logging.getLogger("relax_hetero")

DEFAULT_ARCH = "sm_90a"
"""Default architecture without a GPU (H100, H200)."""

_STOCK_ARCH = "sm_50"
"""TVM's default architecture without a GPU."""
_ARCH = re.compile(r"(?:cuda|nvidia)?[\s:_-]*(?:sm|compute)[\s_-]?([0-9]{2,3}[af]?)")
_MAX_DEVICES = 64
_POSTPROCESS = "tvm_callback_cuda_postproc"
"""TVM's callback that changes CUDA code, if one is registered."""


class CudaBackend(GpuBackend):
    """Back end that compiles CUDA source with NVRTC or nvcc; queues are streams, and command buffers are graphs."""

    KIND = "cuda"
    callable_by_hand = True
    records_by_hand = True
    records_graphs = True
    checks_values = True
    has_sorts = True
    pins_memory = True
    has_links = True
    counted_by_ray = True
    needs_workers = True
    dlpack_stream = 1  # the legacy default stream, with which our streams synchronize

    def __init__(self) -> None:
        words = """nvidia geforce rtx gtx tesla quadro hopper blackwell ada ampere volta turing tensorrt trt cudnn
            cublas cudaexecutionprovider tensorrtexecutionprovider nvtensorrtrtxexecutionprovider"""
        super().__init__(self.KIND, 2, "", "an NVIDIA GPU", words)

    def default_target(self) -> tvm.target.Target:
        """TVM's target, without TVM's warning that it guesses a GPU."""
        import tvm

        if self.load() and tvm.cuda(0).exist:
            return super().default_target()
        return tvm.target.Target({"kind": self.kind, "arch": _STOCK_ARCH})

    def native_target(self, index: int) -> tvm.target.Target:
        """A target with the architecture and limits of a GPU, or the first one if it is absent; else `DEFAULT_ARCH`."""
        from tvm.target import Target

        return Target(_native_config(self, index))

    def completed(self, target: tvm.target.Target, index: int) -> tvm.target.Target | None:
        """The native target, unless `target` differs from TVM's guess."""
        import tvm_ffi

        from ..target.native_target import default_target, native

        is_default = tvm_ffi.structural_equal(target, default_target(self.kind))
        return native(self.kind, index) if is_default else None

    def completed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Add facts about this computer's first GPU to a target without ``arch``."""
        return config if "arch" in config else {**self.native_target(0).export(), **config}

    def target_hint(self, text: str) -> str:
        """Advice for an architecture alone, as ``sm_90``."""
        arch = _ARCH.fullmatch(text)
        if arch is None:
            return ""
        target = json.dumps({"kind": self.kind, "arch": f"sm_{arch[1]}"})
        return f"; {self.description} of that architecture is {target}"

    def product_rate(self, target: tvm.target.Target, dtype: str) -> float:
        """Throughput of the tensor cores."""
        from ..target.product_rates import gpu_product_rate

        return gpu_product_rate(target, dtype)

    def peaks(self, target: tvm.target.Target) -> tuple[float, float, float]:
        """Peaks of the GPU's generation."""
        from ..target.gpu_target import peaks_of

        return peaks_of(target)

    def resolvers(self) -> Sequence[tuple[Any, tuple[str, ...]]]:
        """The resolver of tiles of tensor cores."""
        from ..resolvers import CudaResolver

        return ((CudaResolver(), ()),)

    def build(self, kernels: tvm.IRModule, target: tvm.target.Target) -> Any:
        """Generate CUDA source, and compile the host code that launches the kernels."""
        from ..driver.link.cuda.kernel_sources import generate

        return generate(kernels, target)

    def link(self, built: Sequence[Any], progress: Callable[[str, int, int], None] | None, folder: Any) -> LinkedCode:
        """Compile all sources in parallel, and import the kernels into the host code."""
        from ..driver.link.cuda.machine_code import link_parts

        return link_parts(built, progress, folder)

    def compiler_identity(self) -> str:
        """Version of NVRTC or nvcc; empty without a compiler."""
        from ..driver.link.cuda.compilers import find_compiler
        from ..errors import BuildError

        try:
            return find_compiler().identity
        except BuildError:
            return ""

    def why_uncached(self) -> str:
        """The reason if a registered callback changes the code, or an empty text."""
        import tvm

        is_registered = tvm.get_global_func(_POSTPROCESS, allow_missing=True) is not None
        return f"CUDA code goes through {_POSTPROCESS}, which somebody has registered" if is_registered else ""

    def load_dependencies(self) -> bool:
        """Load CUDA's runtime library from pip's packages, which the dynamic loader does not search."""
        from ..target.runtime_libraries import cuda_libraries

        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
        for path in cuda_libraries("libcudart.so.*[0-9]"):
            with contextlib.suppress(OSError):  # unusable; loading TVM's library reports what is missing
                ctypes.CDLL(str(path))
        return True

    def count(self) -> int:
        """Number of GPUs that this process may use."""
        import tvm

        if not self.load():
            return 0
        return next(index for index in range(_MAX_DEVICES + 1) if index == _MAX_DEVICES or not tvm.cuda(index).exist)

    def why_not_loaded(self) -> str:
        """Reason why `load` failed, or empty."""
        from ..target.runtime_libraries import why_not_loaded

        return why_not_loaded(f"tvm_runtime_{self.type_name}")

    def accesses_peer(self, index: int, peer: int) -> bool | None:
        """See the base class."""
        from ..vm.device.cuda_copies import can_access_peer

        return can_access_peer(index, peer)

    def why_absent(self) -> str:
        """State of the driver, and the number of GPUs."""
        from ..vm.device.cuda_driver import why_no_gpu

        return why_no_gpu(self.why_not_loaded())

    def check_device(self, name: str, spec: Any, device: runtime.Device) -> None:
        """Require that a GPU can run the architecture's code; BindingError otherwise."""
        from ..vm.device.cuda_driver import check_gpu

        check_gpu(name, spec, device)

    def connect(self, devices: Sequence[runtime.Device]) -> None:
        """Enable peer access between all pairs of GPUs that support it."""
        from ..vm.device.cuda_copies import enable_peer_access

        enable_peer_access(devices)

    def copy(self, source: runtime.Tensor, target: runtime.Tensor, wait: bool) -> bool:
        """Copy on the current stream, staged through pinned buffers for pageable memory."""
        from ..vm.device.cuda_copies import copy_on_current_stream

        return copy_on_current_stream(source, target, wait)

    def copies_within(self, target: runtime.Tensor) -> Callable[[int, int], None] | None:
        """Copies on the current stream."""
        from ..vm.device.cuda_copies import copies_within

        return copies_within(target)

    def stream(self, source: runtime.Tensor, target: runtime.Tensor, age: int) -> bool:
        """Copy through pinned memory, while work that was launched before may still run."""
        from ..vm.device.cuda_copies import stream_constant

        return stream_constant(source, target, age)

    def error_record(self, index: int) -> Any:
        """The GPU's record in pinned memory."""
        from ..vm.device.error_records import error_record

        return error_record(index)

    def queue(self, device: runtime.Device, name: str) -> Any:
        """A queue that puts work into a stream; None if CUDA does not work."""
        from ..vm.device.cuda_library import cuda_library
        from ..vm.device.cuda_streams import shared_stream
        from ..vm.queue.stream_queue import StreamQueue

        library = cuda_library()
        if library is None:
            return None
        return StreamQueue(name, shared_stream(library, device.index, "kernels"))

    def copy_queues(self, indices: Sequence[int]) -> Any:
        """Queues that copy on streams of their own; None if CUDA does not work."""
        from ..vm.device.cuda_library import cuda_library
        from ..vm.queue.stream_queue import CopyQueues

        library = cuda_library()
        return None if library is None else CopyQueues(library, set(indices))

    def runner(self, machine: Any, recording: Any, compiled: bool) -> Any:
        """A runner with CUDA graphs, or on a stream."""
        from ..vm.command_buffer.cuda_runner import CudaRunner

        return CudaRunner(machine, recording)


@cache
def _native_config(backend: CudaBackend, index: int) -> dict[str, object]:
    import tvm

    from ..target.gpu_target import arch_of

    backend.load()
    device = tvm.cuda(index)
    if not device.exist and 0 < (count := backend.count()) <= index:
        first = _native_config(backend, 0)
        _log.warning(
            "cuda:%d: found %d %s in this machine, expected %d; code for the absent one is compiled for %s, as for "
            'cuda:0; for another one give its target, such as {"kind": "cuda", "arch": "sm_80"}',
            *(index, count, "GPU" if count == 1 else "GPUs", index + 1, first["arch"]),
        )
        return first
    if not device.exist:
        _warn_of_default_arch()
        return {"kind": backend.kind, "arch": DEFAULT_ARCH}
    return {
        "kind": backend.kind,
        "arch": arch_of(str(device.compute_version)),
        "max_threads_per_block": int(device.max_threads_per_block),
        "max_shared_memory_per_block": int(device.max_shared_memory_per_block),
        "thread_warp_size": int(device.warp_size),
    }


@cache
def _warn_of_default_arch() -> None:
    _log.warning(
        "cuda: there is no GPU here to ask, so code is compiled for %s (H100, H200); for another one give its target, "
        'such as {"kind": "cuda", "arch": "sm_80"}',
        DEFAULT_ARCH,
    )
