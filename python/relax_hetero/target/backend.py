"""The interface of device kinds (back ends), from native targets to queues, and their registry.

A new kind is a package with a subclass of `Backend`, and a line in `relax_hetero.backends` that registers it. Methods
that run a model must not import the compiler; methods that compile may.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from ..providers import provided

if TYPE_CHECKING:
    import tvm
    from tvm import runtime

_log = logging.getLogger("relax_hetero")

CPU = 1
"""DLPack device type of CPUs."""


class Location(NamedTuple):
    """An address in the memory of a device, or of the host.

    Attributes
    ----------
    device : int or None
        Device of the type; None for the host.
    """

    device: int | None
    address: int


class DeviceMemory:
    """Memory of the devices of one type, a base class for back ends.

    Addresses are numbers that a device's kernels accept, and that compiled host code may add byte offsets to.
    Work and copies of a device run in the order of the calls.
    """

    def count(self) -> int:
        """Number of devices of this computer."""
        raise NotImplementedError

    def allocate(self, index: int, nbytes: int, alignment: int) -> int:
        """The address of new memory of a device; MemoryError if there is none."""
        raise NotImplementedError

    def free(self, index: int, address: int) -> None:
        """Free memory after the work that was submitted before."""
        raise NotImplementedError

    def copy(self, source: Location, target: Location, nbytes: int) -> None:
        """Copy bytes between devices of the type, or from or to the host, whose memory is free afterwards."""
        raise NotImplementedError

    def synchronize(self, index: int) -> None:
        """Wait for all work of a device."""
        raise NotImplementedError

    def memory_bytes(self, index: int) -> int:
        """Bytes of a device's memory; 0 if unknown."""
        return 0

    def host_reads(self, index: int) -> bool:
        """Return whether the host reads a device's memory in place, once its work is done."""
        return False

    def lend(self, index: int, address: int, nbytes: int) -> None:
        """Let the host write new memory of such a device until it is freed, after the device's earlier work."""
        raise NotImplementedError

    def is_lent(self, index: int, address: int) -> bool:
        """Return whether an address of the host is in memory that a device has lent."""
        return False

    def name(self, index: int) -> str:
        """Name of a device for people."""
        return ""

    def num_units(self, index: int) -> int:
        """Number of a device's cores; 0 if unknown."""
        return 0


class LinkedCode(NamedTuple):
    """Code of all targets of a kind."""

    modules: list[Any]  # modules to link, in order of the targets' parts
    machine_code: dict[str, bytes] = {}  # machine code, by key, of kernels that the modules contain as source
    # Kernels that the back end builds when a machine is made (`artifact.device_code`).
    device_code: tuple[Any, ...] = ()


class Backend:
    """A kind of device; the defaults serve any kind that TVM supports.

    Parameters
    ----------
    kind : str
        TVM target kind.
    device_type : int
        DLPack device type (dlpack.h, DLDeviceType); -1 if no device runs code of this kind.
    type_name : str, optional
        Name of the device type in ``tvm.device`` and in names of TVM's runtime libraries.
    description : str
        Name in a sentence: "an NVIDIA GPU".
    words : str
        Other names that people use for it, in lower case.

    Attributes
    ----------
    is_gpu : bool
        Whether kernels have blocks and threads.
    callable_by_hand : bool
        Whether single kernels can be called with addresses.
    records_by_hand : bool
        Whether `vm.CommandBuffer` supports it.
    records_graphs : bool
        Whether command buffers become driver graphs, such as CUDA graphs.
    checks_values : bool
        Whether kernels can refuse values at run time.
    has_sorts : bool
        Whether sorts, scans and scatters are kernels of `tir.cuda.loops` rather than TVM's.
    pins_memory : bool
        Whether copies from and to pinned host memory are faster.
    has_links : bool
        Whether tensors can go to devices of other hosts without a copy to host memory.
    counted_by_ray : bool
        Whether Ray counts the devices as GPUs, and hides from a process those that it does not have.
    needs_workers : bool
        Whether copies use CPU worker threads.
    dlpack_stream : int, optional
        Stream to pass to DLPack producers, which order their work before it.
    """

    is_gpu = False
    callable_by_hand = False
    records_by_hand = False
    records_graphs = False
    checks_values = False
    has_sorts = False
    pins_memory = False
    has_links = False
    counted_by_ray = False
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
        """Target for device `index` of this computer, or the default if it is absent."""
        import tvm

        device = tvm.runtime.device(self.kind, index)
        return tvm.target.Target.from_device(device) if device.exist else self.default_target()

    def completed(self, target: tvm.target.Target, index: int) -> tvm.target.Target | None:
        """Native target in place of one that specifies only the kind; None if `target` is specific enough."""
        return None

    def completed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """A target's JSON data, completed with facts about this computer."""
        return config

    def target_hint(self, text: str) -> str:
        """End of an error message for text that may describe a whole target: "; " and advice, or empty."""
        return ""

    # Costs.

    def product_rate(self, target: tvm.target.Target, dtype: str) -> float:
        """Throughput of products of `dtype` with sums in float32, relative to float32."""
        return 1.0

    def peaks(self, target: tvm.target.Target) -> tuple[float, float, float]:
        """Peak float32 flop/s, memory bytes/s, and speed-up of products of 16-bit floats."""
        return 5e12, 0.3e12, 1.0

    def computes(self, dtype: str, index: int) -> bool:
        """Return whether device `index` of this computer computes with an element type."""
        return True

    # Compiling.

    def resolvers(self) -> Sequence[tuple[Any, tuple[str, ...]]]:
        """Resolvers of encodings, each with its required features (`encoding.register_resolver`)."""
        return ()

    def schedule(self, kernel: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
        """Bind loops of a kernel without a generator to blocks and threads."""
        return kernel

    def can_build(self) -> bool:
        """Return whether there is a code generator; `build` needs none of TVM's if it is overridden."""
        import tvm

        return tvm.get_global_func(f"target.build.{self.kind}", allow_missing=True) is not None

    def build(self, kernels: tvm.IRModule, target: tvm.target.Target) -> Any:
        """Compile kernels of one target, called from several threads; `link` completes them."""
        from tvm import tirx

        return tirx.build(kernels, target=target)

    def link(self, built: Sequence[Any], progress: Callable[[str, int, int], None] | None, folder: Any) -> LinkedCode:
        """Complete the results of `build` for all targets of a model.

        Parameters
        ----------
        built : sequence
            Results of `build`.
        progress : callable, optional
            Called with a stage, the number of its tasks that are done, and their total number.
        folder : CacheFolder, optional
            Compile cache.
        """
        return LinkedCode(list(built))

    def compiler_identity(self) -> str:
        """Version of an external compiler; empty without one."""
        return ""

    def why_uncached(self) -> str:
        """Reason why code must not be cached, or empty."""
        return ""

    def may_share_memory(self, target: tvm.target.Target) -> bool:
        """Return whether host and device may use memory of a target's devices in place (`DeviceMemory.host_reads`)."""
        return False

    def submission(self, target: tvm.target.Target) -> str:
        """Word for how devices of a target run command buffers (`artifact.commands.RegionSpec.runs`)."""
        return "stream"

    # Running.

    def load_dependencies(self) -> bool:
        """Load libraries that TVM's runtime library did not find; returns whether to try again."""
        return False

    def load(self) -> bool:
        """Load TVM's runtime library for the device type; returns whether it is loaded."""
        from .runtime_libraries import load_library

        return load_library(f"tvm_runtime_{self.type_name}", self.load_dependencies)

    def memory(self) -> DeviceMemory | None:
        """Memory of the devices; None if TVM's runtime library manages it."""
        return None

    def load_code(self, code: Any, indices: Sequence[int]) -> None:
        """Make kernels (`artifact.device_code.DeviceCode`) callable on devices, before a machine runs."""
        raise NotImplementedError(self.kind)

    def count(self) -> int:
        """Number of devices of this computer that `relax-hetero devices` lists."""
        return 0

    def device_name(self, index: int) -> str:
        """Name of a device of this computer."""
        import tvm

        return str(tvm.runtime.device(self.type_name, index).device_name)

    def accesses_peer(self, index: int, peer: int) -> bool | None:
        """Return whether a device can access the memory of another one of this kind; None if that is not known."""
        return None

    def in_order_of_links(self, count: int) -> list[int]:
        """Devices of this computer, ordered so that each `count` of them access each other's memory, if possible.

        Devices of no such group come last.
        """
        rest, ordered = list(range(self.count())), list[int]()
        for index in range(self.count()):
            if index in rest:
                peers = [peer for peer in rest if peer > index and self._are_linked(index, peer)]
                groups = itertools.combinations(peers, count - 1)
                group = next((each for each in groups if self._are_all_linked(each)), None)
                if group is not None:
                    ordered += [index, *group]
                    rest = [other for other in rest if other not in ordered]
        return [*ordered, *rest]

    def _are_all_linked(self, indices: Sequence[int]) -> bool:
        return all(self._are_linked(*pair) for pair in itertools.combinations(indices, 2))

    def _are_linked(self, index: int, peer: int) -> bool:
        return False not in (self.accesses_peer(index, peer), self.accesses_peer(peer, index))

    def driver_version(self, index: int) -> str:
        """Version of a device's driver, on which measured figures depend; empty if unknown."""
        return ""

    def why_absent(self) -> str:
        """Reason why a device is absent, or empty if unknown."""
        return ""

    def check_device(self, name: str, spec: Any, device: runtime.Device) -> None:
        """Require that a present device can run code for `spec` (called `name`); BindingError otherwise."""

    def connect(self, devices: Sequence[runtime.Device]) -> None:
        """Prepare a machine's devices of this type for copies between each other."""

    def copy(self, source: runtime.Tensor, target: runtime.Tensor, wait: bool) -> bool:
        """Copy between contiguous tensors as `vm.device.tensors.copy_into` does; False to let TVM copy."""
        return False

    def copies_within(self, target: runtime.Tensor) -> Callable[[int, int], None] | None:
        """Function of the address and bytes of memory on the device of a tensor, which it copies there without waiting.

        It does little work of the host, and the caller keeps the tensor alive. None if there is only `copy`.
        """
        return None

    def stream(self, source: runtime.Tensor, target: runtime.Tensor, age: int) -> bool:
        """Copy a constant of the host as `vm.device.cuda_copies.stream_constant` does; False to copy in order."""
        return False

    def error_record(self, index: int) -> Any:
        """Record in which kernels of a device report refused values, or None."""
        return None

    def queue(self, device: runtime.Device, name: str) -> Any:
        """Asynchronous queue of a device (`vm.queue.stream_queue`); None if its thread waits for each piece of work."""
        return None

    def copy_queues(self, indices: Sequence[int]) -> Any:
        """Queues of copies from and to devices; None if the devices' own queues copy.

        They are `vm.queue.stream_queue.CopyQueues` of streams, or `vm.queue.device_queue.CopyThreads`.
        """
        return None

    def runner(self, machine: Any, recording: Any, compiled: bool) -> Any:
        """Runner of a command buffer recorded by hand (`vm.command_buffer.runners`)."""
        raise NotImplementedError(self.kind)


ENTRY_POINTS = "relax_hetero.backends"  # group of entry points by which other packages add back ends


@cache
def _table() -> dict[str, Backend]:
    table = {backend.kind: backend for backend in provided("backends")}
    origins: dict[str, str] = {}  # of kinds of other packages
    # Sorted, so that the choice among packages with one kind does not depend on the order of folders.
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: (_package(entry), entry.name)):
        origin = f"{entry.name!r} of the package {_package(entry)!r} ({entry.value})"
        try:
            backend = entry.load()()
            if not isinstance(backend, Backend):
                raise TypeError(f"found a {type(backend).__name__}")
        except Exception as error:  # whatever a foreign package raises, which must not end work on other devices
            _log.warning(
                "the back end %s is left out: %s: %s; expected a subclass of relax_hetero.backends.Backend that is "
                "called without arguments", origin, type(error).__name__, error,
            )  # fmt: skip
            continue
        if backend.kind in origins:
            _log.warning(
                "the back end %s is left out: %s has the same kind of devices, %r; expected one package for a kind: "
                "uninstall one of them", origin, origins[backend.kind], backend.kind,
            )  # fmt: skip
            continue
        origins[backend.kind] = origin
        table.pop(backend.kind, None)
        table = {backend.kind: backend, **table}  # the first one of a device type runs its devices
    return table


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"


def register_backend(backend: Backend) -> None:
    """Register a kind of device, or replace it."""
    _table()[backend.kind] = backend
    backend_of_type.cache_clear()


def backends() -> list[Backend]:
    """All kinds of devices, in order of registration."""
    return list(_table().values())


def backend_of(target: str | tvm.target.Target) -> Backend:
    """The back end of a target or a kind; for unregistered kinds one with all defaults."""
    kind = target if isinstance(target, str) else str(target.kind.name)
    return _table().get(kind) or Backend(kind)


def backend_of_device(device: runtime.Device) -> Backend:
    """The back end that runs a device."""
    return backend_of_type(device.dlpack_device_type())


@cache
def backend_of_type(device_type: int) -> Backend:
    """The back end that runs devices of a DLPack device type: the first registered one."""
    unknown = Backend(f"device type {device_type}", device_type)
    return next((backend for backend in backends() if backend.device_type == device_type), unknown)
