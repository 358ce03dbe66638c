"""Metadata of executables: devices, signatures, constants, dispatches, command buffers and memory.

Plain data without TVM objects, which the compiler writes and a process with TVM's runtime only can read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import BuildError
from ..target.backend import CPU as CPU
from ..target.backend import Backend, backend_of, backends
from ..target.cpu_cores import NUMA_NODE
from .checks import CheckSpec
from .collectives import CollectiveSpec
from .commands import KernelSpec, RegionSpec, SingleCall
from .device_code import DeviceCode
from .mailboxes import MailboxSpec
from .memory_spec import FunctionMemory
from .model_graph import ModelGraph
from .schedule import Schedule
from .signature import FunctionSignature
from .typed_data import from_data, read_json, to_data

RELEASE_RESULT = "relax_hetero.release_result"
"""Function of the bytecode that makes the machine drop its reference to the last function's result."""
BODY_PREFIX = "relax_hetero.body."
_HOST_KEY = "host:"  # as `target.hosts` writes it


def body_symbol(function: str) -> str:
    """The bytecode's name of a function that takes the constants; `function` itself is its entry without them.

    `function`: name of one of `Metadata.signatures`.
    """
    return BODY_PREFIX + function


HIT, MISS, UNUSED = "hit", "miss", "unused"  # states of `CacheUse`


@dataclass(frozen=True)
class DeviceSpec:
    """One entry of the manifest: a vdevice of the model.

    Attributes
    ----------
    target : str
        The compilation target as JSON text, with at least ``kind``.
    vdevice_id : int
        Default index of the physical device of that type.
    memory_scope : str
        Memory scope on that device (``"global"``).
    default : bool
        Whether unannotated values are placed here; true for the first entry.
    cpu_features : tuple of str, optional
        LLVM features that the code may use, set when exporting.
    """

    target: str
    vdevice_id: int = 0
    memory_scope: str = "global"
    default: bool = False
    cpu_features: tuple[str, ...] | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """The target kind: ``llvm``, ``cuda``."""
        data = json.loads(self.target)
        return data if isinstance(data, str) else str(data["kind"])

    @property
    def host(self) -> str | None:
        """The host of the device, or None."""
        data = json.loads(self.target)
        keys = () if isinstance(data, str) else data.get("keys", ())
        return next((key.removeprefix(_HOST_KEY) for key in keys if key.startswith(_HOST_KEY)), None)

    @property
    def backend(self) -> Backend:
        """The back end of the kind."""
        return backend_of(self.kind)

    @property
    def device_type(self) -> int:
        """The DLPack device type of the kind; BuildError for a kind without one."""
        backend = self.backend
        if backend.device_type < 0:
            known = ", ".join(other.kind for other in backends())
            raise BuildError(f"device target kind {backend.kind!r} is unknown; expected one of {known}")
        return backend.device_type

    @property
    def type_name(self) -> str:
        """The device type's name: ``"cpu"`` for ``llvm`` and ``c``."""
        return self.backend.type_name

    @property
    def num_cores(self) -> int:
        """The number of cores that code is compiled for; 0 if unspecified."""
        data = json.loads(self.target)
        return 0 if isinstance(data, str) else int(data.get("num-cores", 0))

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that the device is bound to, or None."""
        data = json.loads(self.target)
        model = "" if isinstance(data, str) else str(data.get("model", ""))
        number = model.removeprefix(NUMA_NODE)
        return int(number) if model.startswith(NUMA_NODE) and number.isdecimal() else None


@dataclass(frozen=True)
class ConstantSpec:
    """A lifted constant.

    Attributes
    ----------
    name : str
        Name in Relax.
    shape : tuple of int
        Extents.
    dtype : str
        Element type.
    device : int
        Manifest index; -1 for the implicit host.
    addresses : tuple of (int or str), optional
        Entries of an address table, which the machine fills: indices of constants, and symbols of kernels.
    region : str
        Command buffer whose CUDA graph state it is a placeholder for.
    is_record : bool
        Whether it is a placeholder for the error record of its GPU (`artifact.checks`).
    mailbox : MailboxSpec, optional
        The mailbox that it is a placeholder for one end of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: int
    addresses: tuple[int | str, ...] | None = None
    region: str = ""
    is_record: bool = False
    mailbox: MailboxSpec | None = None

    @property
    def is_placeholder(self) -> bool:
        """True if a machine makes the value."""
        return self.addresses is not None or bool(self.region) or self.is_record or self.mailbox is not None


@dataclass(frozen=True)
class DispatchSpec:
    """A kernel.

    Attributes
    ----------
    device : int
        Manifest index of its device; -1 for the implicit host.
    ops : tuple of str
        The model's ops that it computes.
    operations : int
        Multiplications and additions of its products in one call; 0 if there are none or their number is unknown.
    bytes : int
        Total bytes of its arguments; 0 if an extent is symbolic.
    precision : str
        Element types of its products (``"u8*s8->s32"``, ``"bf16"``, ``"int4*f32"``), else of its arguments.
    other_devices : tuple of int
        Further devices that run it, whose targets equal that of `device`.
    """

    device: int
    ops: tuple[str, ...] = ()
    operations: int = 0
    bytes: int = 0
    precision: str = ""
    other_devices: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that run it."""
        return self.device, *self.other_devices


@dataclass(frozen=True)
class RepeatedCall:
    """Entry points of a function for repeated calls with arguments of the same devices, types and shapes."""

    function: str  # name of the function, whose parameters are tensors
    repeated: str  # symbol of the function of these tensors and the shared values, without checks
    # Symbol of the function that checks the parameters of `function`, and returns the shared values as a tuple; empty
    # if there is nothing to check or share.
    shares: str = ""


@dataclass(frozen=True)
class CacheUse:
    """Use of the compile cache by a compilation."""

    # ``"hit"``: found in the cache; ``"miss"``: compiled, and stored unless there is a reason `why` not; ``"unused"``:
    # not looked up, for the reason `why`.
    state: str = UNUSED
    key: str = ""  # key of the module, its devices, the options and the versions; empty if not looked up
    seconds: float = 0.0  # compile time; on a hit that of the stored compilation
    why: str = ""  # reason why it was not looked up or not stored

    def __str__(self) -> str:
        parts = [self.state, self.key[:12], f"compiled in {self.seconds:.2f} s" if self.seconds else "", self.why]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Metadata:
    """Everything an executable knows besides code and weights.

    Attributes
    ----------
    devices : tuple of DeviceSpec
        Manifest, in the order of the module's vdevices.
    host_index : int
        Index of the host device; -1 for the implicit ``cpu(0)``.
    signatures : dict of str to FunctionSignature
        Signatures of the functions that users can call.
    constants : tuple of ConstantSpec
        Constants, in the order of the tuple that functions take.
    placement : object
        The placement report as JSON data, or None.
    encodings : object
        Encodings and their layouts on each device, as JSON data of `relax_hetero.transform.EncodingReport`, or None.
    fusions : object
        Fusions and missed fusions, as JSON data of `transform.FusionReport`, or None.
    dispatches : dict of str to DispatchSpec
        Kernels by symbol.
    alignment : int
        Required alignment of an argument's address in bytes, a power of two.
    writes_arguments : bool
        Whether functions may write to their arguments.
    regions : tuple of RegionSpec
        Command buffers that functions call.
    kernels : dict of str to KernelSpec
        Kernels that command buffers can run, by name: kernels of regions, and public kernels.
    single_calls : tuple of SingleCall
        Kernel calls outside of regions, if there are regions.
    schedules : tuple of Schedule
        Schedules of the functions that use several devices.
    memory : tuple of FunctionMemory
        Allocations of each function, including private ones.
    placement_estimate : object
        Estimate of automatic placement, as JSON data of `frontend.AutoPlacement`, or None.
    cache : CacheUse
        Use of the compile cache.
    checks : tuple of CheckSpec
        Run-time checks of kernels, by number.
    optional : tuple of int
        Manifest indices of optional devices, which versions of the executable omit.
    repeated : tuple of RepeatedCall
        Functions with entry points for repeated calls.
    graph : ModelGraph, optional
        Graph of the placed model's ops; None in executables of earlier versions.
    device_code : tuple of DeviceCode
        Kernels that back ends build when a machine is made.
    collectives : tuple of CollectiveSpec
        Collectives over GPUs, in the order of functions.
    """

    devices: tuple[DeviceSpec, ...]
    host_index: int
    signatures: dict[str, FunctionSignature]
    constants: tuple[ConstantSpec, ...] = ()
    placement: Any = None
    dispatches: dict[str, DispatchSpec] = field(default_factory=dict)
    encodings: Any = None
    fusions: Any = None
    alignment: int = 64
    writes_arguments: bool = True
    regions: tuple[RegionSpec, ...] = ()
    kernels: dict[str, KernelSpec] = field(default_factory=dict)
    single_calls: tuple[SingleCall, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    memory: tuple[FunctionMemory, ...] = ()
    placement_estimate: Any = None
    cache: CacheUse = field(default_factory=CacheUse)
    checks: tuple[CheckSpec, ...] = ()
    optional: tuple[int, ...] = ()
    repeated: tuple[RepeatedCall, ...] = ()
    graph: ModelGraph | None = None
    device_code: tuple[DeviceCode, ...] = ()
    collectives: tuple[CollectiveSpec, ...] = ()

    def has_mailboxes(self, region: RegionSpec) -> bool:
        """Return whether a command buffer exchanges values with one of another device while both run.

        Parameters
        ----------
        region : RegionSpec
            One of `regions`.
        """
        return any(self.constants[index].mailbox is not None for index in region.directs)

    def to_json(self) -> str:
        """JSON text of the metadata."""
        listed = {name: list(getattr(self, name).values()) for name in _LISTED}
        return json.dumps(to_data({**vars(self), **listed}), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Metadata:
        """The inverse of `to_json`; various exceptions for invalid data (use `check_metadata.read_metadata` for files).

        Parameters
        ----------
        text : str
            JSON text.
        """
        data = read_json(text)
        known = {each.name: data[each.name] for each in fields(Metadata) if each.name in data}
        listed = {name: {each["name"]: each for each in known[name]} for name in _LISTED & known.keys()}
        metadata: Metadata = from_data(Metadata, {**known, **listed})
        return metadata


_LISTED = {"signatures", "kernels"}  # mappings that are lists in JSON, because their values have the names


def device_names(devices: tuple[DeviceSpec, ...]) -> list[str]:
    """The names of devices, ``kind:i`` for the i-th of its kind; in a cluster ``host/kind:i``."""
    counts: dict[str, int] = {}
    names: list[str] = []
    for device in devices:
        kind = device.kind if device.host is None else f"{device.host}/{device.kind}"
        index = counts.get(kind, 0)
        counts[kind] = index + 1
        names.append(f"{kind}:{index}")
    return names
