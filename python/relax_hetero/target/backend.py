"""Kinds of devices, an object each: what the library asks of a kind, from its native target to its queue.

A new kind is a package with a subclass of `Backend`, and a line in `relax_hetero.backends` that registers it. Methods
that run a model must not import the compiler; those that compile may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..providers import provided

if TYPE_CHECKING:
    import tvm
    from tvm import runtime

CPU = 1
"""DLPack device type of CPUs."""


class Backend:
    """A kind of device; the defaults are those of a kind that TVM knows and this library does not.

    Parameters
    ----------
    kind : str
        TVM target kind.
    device_type : int
        DLPack device type (dlpack.h, DLDeviceType); -1: no device runs code of this kind.
    type_name : str, optional
        Name of the device type, as ``tvm.device`` takes it and TVM's runtime libraries are called.
    description : str
        Name in a sentence: "an NVIDIA GPU".
    words : str
        Other names that people write for it, lower case.

    Attributes
    ----------
    is_gpu : bool
        Whether kernels have blocks and threads.
    callable_by_hand : bool
        Whether kernels can be called alone, with addresses.
    records_by_hand : bool
        Whether `vm.CommandBuffer` runs here.
    records_graphs : bool
        Whether command buffers become graphs of the driver.
    checks_values : bool
        Whether kernels can refuse values at run time.
    has_sorts : bool
        Whether sorts, scans and scatters are kernels of `tir.cuda.loops` rather than TVM's.
    pins_memory : bool
        Whether copies from and to pinned memory of the host are faster.
    has_links : bool
        Whether tensors go to devices of other hosts without passing through memory of the CPU.
    needs_workers : bool
        Whether copies use worker threads of the host.
    dlpack_stream : int, optional
        Stream that a DLPack producer is asked to order its work before.
    """

    is_gpu = False
    callable_by_hand = False
    records_by_hand = False
    records_graphs = False
    checks_values = False
    has_sorts = False
    pins_memory = False
    has_links = False
    needs_workers = False
    dlpack_stream: int | None = None

    def __init__(
        self, kind: str, device_type: int = -1, type_name: str = "", description: str = "", words: str = ""
    ) -> None:
        self.kind, self.device_type, self.type_name = kind, device_type, type_name or kind
        self.description, self.words = description, words

    # Targets.

    def default_target(self) -> tvm.target.Target:
        """TVM's target for the kind alone."""
        from tvm.target import Target

        return Target(self.kind)

    def native_target(self, index: int) -> tvm.target.Target:
        """Target for device `index` of this machine, or the default where it is absent."""
        import tvm

        device = tvm.runtime.device(self.kind, index)
        return tvm.target.Target.from_device(device) if device.exist else self.default_target()

    def completed(self, target: tvm.target.Target, index: int) -> tvm.target.Target | None:
        """Native target with what `target` says, where that says no more than the kind; None: it says enough."""
        return None

    def completed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Target in JSON, completed with facts about this machine."""
        return config

    def target_hint(self, text: str) -> str:
        """End of an error about text that may describe a whole target; begins with "; ", empty for other text."""
        return ""

    # Costs.

    def product_rate(self, target: tvm.target.Target, dtype: str) -> float:
        """Multiply-adds of `dtype` operands, summed in float32, in the time of one of float32."""
        return 1.0

    def peaks(self, target: tvm.target.Target) -> tuple[float, float, float]:
        """Peak float32 flop/s, bytes/s of its memory, and how many times as fast products of 16-bit floats are."""
        return 5e12, 0.3e12, 1.0

    # Compiling.

    def resolvers(self) -> Sequence[tuple[Any, tuple[str, ...]]]:
        """Resolvers of encodings, each with the features that it needs (`encoding.register_resolver`)."""
        return ()

    def schedule(self, kernel: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
        """Give loops of a kernel that no generator wrote blocks and threads."""
        return kernel

    def build(self, kernels: tvm.IRModule, target: tvm.target.Target) -> Any:
        """Compile kernels of one target, as far as that can be done alone; called from several threads."""
        from tvm import tirx

        return tirx.build(kernels, target=target)

    def link(
        self, built: Sequence[Any], progress: Callable[[str, int, int], None] | None, folder: Any
    ) -> tuple[list[tvm.runtime.Module], dict[str, bytes]]:
        """Finish what `build` returned, all of a model together.

        Parameters
        ----------
        built : sequence
        progress : callable, optional
            Told a step, how many parts of it are done, and how many there are.
        folder : CacheFolder, optional
            Compile cache.

        Returns
        -------
        list of Module, dict of str to bytes
            Modules to be linked, in order; machine code of kernels that they hold as source, by its key.
        """
        return list(built), {}

    def compiler_identity(self) -> str:
        """Version of a compiler outside of TVM that makes the code; empty for none."""
        return ""

    def why_uncached(self) -> str:
        """Reason why code cannot be kept in the compile cache; empty for none."""
        return ""

    # Running.

    def load_dependencies(self) -> bool:
        """Load the libraries that TVM's runtime library has not found; whether another try is worthwhile."""
        return False

    def load(self) -> bool:
        """Load TVM's runtime library for the device type, if it is there; whether it is loaded now."""
        from .runtime_libraries import load_library

        return load_library(f"tvm_runtime_{self.type_name}", self.load_dependencies)

    def count(self) -> int:
        """Devices of this machine that `relax-hetero devices` lists."""
        return 0

    def why_absent(self) -> str:
        """Reason why a device is not here; empty where nothing is known."""
        return ""

    def check_device(self, name: str, spec: Any, device: runtime.Device) -> None:
        """BindingError if code for `spec` (called `name`) does not run on a device that is here."""

    def connect(self, devices: Sequence[runtime.Device]) -> None:
        """Prepare devices of one machine, all of this type, for copies between each other."""

    def copy(self, source: runtime.Tensor, target: runtime.Tensor, wait: bool) -> bool:
        """Copy between contiguous tensors as `vm.device.tensors.copy_into` does; False: TVM is to do it."""
        return False

    def error_record(self, index: int) -> Any:
        """Record that kernels of a device write refused values to; None where they write none."""
        return None

    def queue(self, device: runtime.Device, name: str) -> Any:
        """Queue of a device whose thread only issues work (`vm.queue.stream_queue`); None: the thread waits for it."""
        return None

    def copy_queues(self, indices: Sequence[int]) -> Any:
        """Queues for copies from and to devices (`vm.queue.cuda_copy_queues`); None: those of the devices copy."""
        return None

    def runner(self, machine: Any, recording: Any, compiled: bool) -> Any:
        """Runner of a command buffer that was recorded by hand (`vm.command_buffer.runners`)."""
        raise NotImplementedError(self.kind)


@cache
def _table() -> dict[str, Backend]:
    return {backend.kind: backend for backend in provided("backends")}


def register_backend(backend: Backend) -> None:
    """Add a kind of device, or replace one."""
    _table()[backend.kind] = backend
    backend_of_type.cache_clear()


def backends() -> list[Backend]:
    """All kinds of devices, in order of their registration."""
    return list(_table().values())


def backend_of(what: str | tvm.target.Target) -> Backend:
    """The back end of a target or its kind; one with all defaults where none is registered."""
    kind = what if isinstance(what, str) else str(what.kind.name)
    return _table().get(kind) or Backend(kind)


def backend_of_device(device: runtime.Device) -> Backend:
    """The back end that runs a device."""
    return backend_of_type(device.dlpack_device_type())


@cache
def backend_of_type(device_type: int) -> Backend:
    """The back end that runs devices of a DLPack device type: the first that is registered for it."""
    unknown = Backend(f"device type {device_type}", device_type)
    return next((backend for backend in backends() if backend.device_type == device_type), unknown)
