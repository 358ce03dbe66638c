"""Metadata of executables: devices, signatures, constants, dispatches, command buffers and memory.

Written by the compiler, read where only TVM's runtime is: plain data, no TVM object inside.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import BuildError
from ..target.backend import CPU as CPU
from ..target.backend import Backend, backend_of, backends
from ..target.cpu_cores import NUMA_NODE
from .checks import CheckSpec
from .commands import (
    KernelSpec,
    RegionSpec,
    SingleCall,
    kernel_from_json,
    kernel_to_json,
    region_from_json,
    region_to_json,
)
from .memory_spec import FunctionMemory, memory_from_json, memory_to_json
from .model_graph import ModelGraph
from .schedule import Schedule
from .signature import FunctionSignature
from .typed_data import read_json

_HOST_KEY = "host:"  # as `target.hosts` writes it

HIT, MISS, UNUSED = "hit", "miss", "unused"
"""Found in the compile cache; compiled, and stored there unless something speaks against it; not looked for."""


@dataclass(frozen=True)
class DeviceSpec:
    """One entry of the manifest: a vdevice of the model.

    Attributes
    ----------
    target : str
        The compilation target as JSON text, with at least ``kind``.
    vdevice_id : int
        Which physical device of that type it is by default.
    memory_scope : str
        Memory on that device (``"global"``).
    default : bool
        Whether values without any annotation were placed here; true for the first entry.
    cpu_features : tuple of str, optional
        LLVM's names of the instruction sets that the code may use; exporting fills it in.
    """

    target: str
    vdevice_id: int = 0
    memory_scope: str = "global"
    default: bool = False
    cpu_features: tuple[str, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.cpu_features is not None:
            object.__setattr__(self, "cpu_features", tuple(self.cpu_features))

    @property
    def kind(self) -> str:
        """The target kind: ``llvm``, ``cuda``."""
        data = json.loads(self.target)
        return data if isinstance(data, str) else str(data["kind"])

    @property
    def host(self) -> str | None:
        """The host that the device is on; None where its target names none."""
        data = json.loads(self.target)
        keys = () if isinstance(data, str) else data.get("keys", ())
        return next((key.removeprefix(_HOST_KEY) for key in keys if key.startswith(_HOST_KEY)), None)

    @property
    def backend(self) -> Backend:
        """Back end of the kind."""
        return backend_of(self.kind)

    @property
    def device_type(self) -> int:
        """The DLPack device type its kernels run on; BuildError for a kind without one."""
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
        """How many cores its code is cut for; 0 where the target does not say."""
        data = json.loads(self.target)
        return 0 if isinstance(data, str) else int(data.get("num-cores", 0))

    @property
    def numa_node(self) -> int | None:
        """The NUMA node whose CPUs it is; None where it is not bound to one."""
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
        Its Relax name.
    shape : tuple of int
        Extents.
    dtype : str
        Element type.
    device : int
        Manifest index; -1: the implicit host.
    addresses : tuple of (int or str), optional
        Contents of a table that the machine fills with addresses: of constants, by their index, and of kernels, by
        symbol.
    region : str
        The command buffer whose state it stands for, where that runs as a CUDA graph: each machine makes its own.
    is_record : bool
        Whether it stands for the error record of its GPU (`artifact.checks`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: int
    addresses: tuple[int | str, ...] | None = None
    region: str = ""
    is_record: bool = False

    def __post_init__(self) -> None:
        if self.addresses is not None:
            object.__setattr__(self, "addresses", tuple(self.addresses))


@dataclass(frozen=True)
class DispatchSpec:
    """A kernel symbol.

    Attributes
    ----------
    device : int
        The manifest index it runs on; -1: the implicit host.
    ops : tuple of str
        The model ops it computes.
    operations : int
        Multiplications and additions of its products, in one call; 0 where there are none or nobody counted.
    bytes : int
        Bytes of its arguments, each once; 0 where an extent is symbolic.
    precision : str
        The element types of its products (``"u8*s8->s32"``, ``"bf16"``, ``"int4*f32"``), else those of its arguments.
    other_devices : tuple of int
        Further devices that it runs on; their targets equal that of `device`.
    """

    device: int
    ops: tuple[str, ...] = ()
    operations: int = 0
    bytes: int = 0
    precision: str = ""
    other_devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ops", "other_devices"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices it runs on."""
        return self.device, *self.other_devices


@dataclass(frozen=True)
class RepeatedCall:
    """Code that runs when a function is called with arguments that look like those of an earlier call.

    Attributes
    ----------
    function : str
        Its name. Its parameters are tensors.
    repeated : str
        The symbol of a function that checks nothing, of these tensors and of what such calls share.
    shares : str
        The symbol of a function of the same parameters as `function` that checks them, and gives what they share as a
        tuple; empty where there is nothing to check or share.
    """

    function: str
    repeated: str
    shares: str = ""


@dataclass(frozen=True)
class CacheUse:
    """Use of the compile cache by a compilation.

    Attributes
    ----------
    state : str
        ``"hit"``: it was found there; ``"miss"``: it was compiled, and can be found from now on unless `why` says
        otherwise; ``"unused"``: nobody looked, for the reason `why`.
    key : str
        Key of the module, its devices, the options and the versions; empty where nobody looked.
    seconds : float
        Compile time; on a hit that of the compilation that it stands for.
    why : str
        Why it was not looked for, or not stored.
    """

    state: str = UNUSED
    key: str = ""
    seconds: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        parts = [self.state, self.key[:12], f"compiled in {self.seconds:.2f} s" if self.seconds else "", self.why]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Metadata:
    """Everything an executable knows besides code and weights.

    Attributes
    ----------
    devices : tuple of DeviceSpec
        The manifest, in the module's vdevice order.
    host_index : int
        Which of them is the host; -1 where the host is the implicit ``cpu(0)``.
    signatures : dict of str to FunctionSignature
        The functions a user can call.
    constants : tuple of ConstantSpec
        The module's constants, in the order of the tuple that functions take.
    placement : object
        The placement report as JSON data, or None.
    encodings : object
        Encodings and their layouts on each device, as JSON data of `relax_hetero.transform.EncodingReport`, or None.
    fusions : object
        Which kernel computes what and what was not fused, as JSON data of `transform.FusionReport`, or None.
    dispatches : dict of str to DispatchSpec
        Kernel symbol to where it runs and what it computes.
    alignment : int
        Alignment in bytes that kernels need of an argument's address; a power of two.
    writes_arguments : bool
        Whether functions may write to their arguments.
    regions : tuple of RegionSpec
        The command buffers that functions call.
    kernels : dict of str to KernelSpec
        Kernels that command buffers can run, by name: those of the regions, and those that the module made public.
    single_calls : tuple of SingleCall
        The kernel calls that are in no region, where there are regions.
    schedules : tuple of Schedule
        How functions that use several devices go through queues.
    memory : tuple of FunctionMemory
        Allocations of each function, private ones too.
    placement_estimate : object
        Estimate by the cost model that placed the module, as JSON data of `frontend.AutoPlacement`, or None.
    cache : CacheUse
        Whether it was compiled or found in the compile cache.
    checks : tuple of CheckSpec
        Checks of values that kernels make, by number.
    optional : tuple of int
        Manifest indices of the devices that a machine may lack: versions of the executable do without them.
    repeated : tuple of RepeatedCall
        The functions of which not every call is checked.
    graph : ModelGraph, optional
        The ops of the placed model and what each reads; None in executables of earlier versions.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "constants", tuple(self.constants))
        object.__setattr__(self, "regions", tuple(self.regions))
        object.__setattr__(self, "single_calls", tuple(self.single_calls))
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "memory", tuple(self.memory))
        object.__setattr__(self, "checks", tuple(self.checks))
        object.__setattr__(self, "optional", tuple(self.optional))
        object.__setattr__(self, "repeated", tuple(self.repeated))

    def to_json(self) -> str:
        """JSON text of the metadata."""
        data = {
            "devices": [asdict(device) for device in self.devices],
            "host_index": self.host_index,
            "signatures": [signature.to_json() for signature in self.signatures.values()],
            "constants": [asdict(constant) for constant in self.constants],
            "placement": self.placement,
            "placement_estimate": self.placement_estimate,
            "encodings": self.encodings,
            "fusions": self.fusions,
            "dispatches": {symbol: asdict(dispatch) for symbol, dispatch in self.dispatches.items()},
            "alignment": self.alignment,
            "writes_arguments": self.writes_arguments,
            "regions": [region_to_json(region) for region in self.regions],
            "kernels": [kernel_to_json(kernel) for kernel in self.kernels.values()],
            "single_calls": [asdict(call) for call in self.single_calls],
            "schedules": [schedule.to_json() for schedule in self.schedules],
            "memory": [memory_to_json(memory) for memory in self.memory],
            "cache": asdict(self.cache),
            "checks": [asdict(check) for check in self.checks],
            "optional": self.optional,
            "repeated": [asdict(call) for call in self.repeated],
            "graph": None if self.graph is None else self.graph.to_json(),
        }
        return json.dumps(data, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Metadata:
        """The inverse of `to_json`; for anything else ValueError, or another error of access to data.

        What comes from a file is read by `check_metadata.read_metadata`.

        Parameters
        ----------
        text : str
            JSON text.
        """
        data = read_json(text)
        signatures = [FunctionSignature.from_json(signature) for signature in data["signatures"]]
        return Metadata(
            devices=tuple(DeviceSpec(**device) for device in data["devices"]),
            host_index=data["host_index"],
            signatures={signature.name: signature for signature in signatures},
            constants=tuple(
                ConstantSpec(**{**constant, "shape": tuple(constant["shape"])}) for constant in data["constants"]
            ),
            placement=data["placement"],
            placement_estimate=data.get("placement_estimate"),
            encodings=data.get("encodings"),
            fusions=data.get("fusions"),
            dispatches={symbol: DispatchSpec(**dispatch) for symbol, dispatch in data["dispatches"].items()},
            alignment=data.get("alignment", 64),
            writes_arguments=data.get("writes_arguments", True),
            regions=tuple(region_from_json(region) for region in data.get("regions", ())),
            kernels={kernel["name"]: kernel_from_json(kernel) for kernel in data.get("kernels", ())},
            single_calls=tuple(SingleCall(**call) for call in data.get("single_calls", ())),
            schedules=tuple(map(Schedule.from_json, data.get("schedules", ()))),
            memory=tuple(memory_from_json(memory) for memory in data.get("memory", ())),
            cache=CacheUse(**data.get("cache", {})),
            checks=tuple(CheckSpec(**check) for check in data.get("checks", ())),
            optional=tuple(data.get("optional", ())),
            repeated=tuple(RepeatedCall(**call) for call in data.get("repeated", ())),
            graph=ModelGraph.from_json(data.get("graph")),
        )


def device_names(devices: tuple[DeviceSpec, ...]) -> list[str]:
    """``kind:i`` of every entry: the i-th of its kind, as messages and placement rules write it; with its host before.

    An executable's devices have no hosts, those of a module that is explained may.
    """
    seen: dict[str, int] = {}
    names: list[str] = []
    for device in devices:
        kind = device.kind if device.host is None else f"{device.host}/{device.kind}"
        index = seen.get(kind, 0)
        seen[kind] = index + 1
        names.append(f"{kind}:{index}")
    return names
