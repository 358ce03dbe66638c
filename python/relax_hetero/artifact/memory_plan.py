"""Memory plans (`Executable.memory_plan`): bytes that calls need, and lower bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..display.html import Column, Markup, device_html, folded, paragraph, table, view
from ..display.text import bytes_text, text_table
from ..errors import BindingError
from ..target.element_types import bytes_for
from .commands import GRAPH
from .memory_spec import ARENA, RESULT, TRANSFER
from .memory_use import (
    AllocationWalk,
    Need,
    UnknownSizeError,
    call_needs,
    evaluate,
    max_alive,
    pool_bytes,
    queued_needs,
)
from .messages import unknown_name
from .metadata import Metadata, device_names
from .schedule import Schedule, Step
from .signature import TensorSpec, tensors_of


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a call of one function on one device."""

    device: str  # ``kind:i``, or ``host`` for the implicit one
    # Bytes of the executable's constants on the device, and of parameters that are bound once. Machines on the same
    # devices share constants; constants of a CPU are in the executable's own memory.
    weights: int
    transient: int  # bytes of a call from the machine's pool besides its results
    # Bytes of `transient` for arenas of command buffers, and for tensors from other devices.
    arenas: int
    transfers: int
    results: int  # bytes that the call returns
    # Maximum bytes of transient tensors that are live at one kernel: a lower bound for this order of kernels.
    lower_bound: int
    largest: tuple[tuple[str, int], ...] = ()  # tensors with the most transient bytes, largest first

    @property
    def ratio(self) -> float:
        """`transient` over `lower_bound`; 1 if the latter is 0."""
        return self.transient / self.lower_bound if self.lower_bound else 1.0


@dataclass(frozen=True)
class FunctionUse:
    """The memory of a call of one function; printing it gives a table."""

    function: str
    sizes: dict[str, int]  # values of symbolic dimensions
    devices: tuple[DeviceMemory, ...]

    @property
    def transient(self) -> int:
        """Transient bytes on all devices."""
        return sum(memory.transient for memory in self.devices)

    @property
    def lower_bound(self) -> int:
        """Sum of the lower bounds of all devices."""
        return sum(memory.lower_bound for memory in self.devices)

    def to_json(self) -> dict[str, Any]:
        """The use as JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        return _table(self.rows())

    def _repr_html_(self) -> str:
        return view(*self._html_tables())

    def _html_tables(self) -> list[Markup]:
        """HTML tables with a row for each device, and with the largest buffers."""
        names = [memory.device for memory in self.devices if memory.device != "host"]
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        rows = [
            (
                device_html(memory.device, names),
                *(bytes_text(getattr(memory, column)) for column in _NUMBERS),
                f"{memory.ratio:.3f}" if memory.lower_bound else "",
            )
            for memory in self.devices
        ]
        largest = [
            (device_html(memory.device, names), what, bytes_text(nbytes))
            for memory in self.devices
            for what, nbytes in memory.largest[:_LARGEST]
        ]
        tables = [table(f"Memory of a call of {self.function}({sizes})", _COLUMNS, rows)]
        if largest:
            columns = [Column("device"), Column("what"), Column("bytes", True)]
            tables.append(folded("What takes the transient bytes", table("", columns, largest)))
        return tables

    def rows(self) -> list[tuple[str, ...]]:
        """A row of the table for each device."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        name = f"{self.function}({sizes})" if sizes else self.function
        return [
            (
                name,
                memory.device,
                *(f"{getattr(memory, column):,}" for column in _NUMBERS),
                f"{memory.ratio:.3f}" if memory.lower_bound else "",
            )
            for memory in self.devices
        ]


_NUMBERS = ("weights", "transient", "arenas", "transfers", "results", "lower_bound")
_COLUMNS = [
    *(Column("device"), Column("weights", True), Column("transient", True), Column("of it arenas", True)),
    *(
        Column("of it transfers", True),
        Column("results", True),
        Column("lower bound", True),
        Column("over lower bound", True),
    ),
]
_LARGEST = 12


class MemoryPlan:
    """The memory of each function of an executable on each device; printing it gives a table.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._memory = {memory.name: memory for memory in metadata.memory}
        self._devices = [*range(len(metadata.devices)), *([-1] if metadata.host_index < 0 else [])]

    @property
    def functions(self) -> list[str]:
        """Names of the functions that can be called."""
        return list(self._metadata.signatures)

    def to_json(self) -> list[dict[str, Any]]:
        """JSON data of the plan: an object for each function, which names the sizes that it depends on."""
        return [
            {"function": name, "depends_on": list(missing)}
            if (missing := self.symbolic_dims(name))
            else self.at(name).to_json()
            for name in self.functions
        ]

    def weights(self, device: int) -> int:
        """Bytes of constants on a device, and of the arena that its CUDA graphs share.

        Parameters
        ----------
        device : int
            Manifest index.
        """
        specs = [spec for spec in self._metadata.constants if spec.device == device]
        graphs = [region for region in self._metadata.regions if region.runs == GRAPH and region.device == device]
        arenas = [region.arena for region in graphs if isinstance(region.arena, int)]
        return sum(bytes_for(spec.shape, spec.dtype) for spec in specs) + max(arenas, default=0)

    def symbolic_dims(self, function: str = "main") -> tuple[str, ...]:
        """Names of the symbolic dimensions whose values `at` needs, without those with an upper bound.

        Parameters
        ----------
        function : str
            Name of the function.
        """
        try:
            self._walk(function, self._bounds(function))
        except UnknownSizeError as error:
            return tuple(sorted(error.names))
        return ()

    def at(self, function: str = "main", /, **sizes: int) -> FunctionUse:
        """The memory of a call of `function`.

        Parameters
        ----------
        function : str
            Name of the function.
        **sizes : int
            Symbolic dimensions; by default their upper bounds, if the module has any.

        Raises
        ------
        BindingError
            An unknown function, or a missing dimension.
        """
        if function not in self._memory:
            raise unknown_name("function", function, self._memory, "the memory plan")
        all_sizes = {**self._bounds(function), **sizes}
        try:
            walk = self._walk(function, all_sizes)
        except UnknownSizeError as error:
            raise BindingError(
                f"the memory of {function!r} depends on {error}: give its value, as in "
                f"memory_plan.at({function!r}, {sorted(error.names)[0]}=1)"
            ) from None
        devices = tuple(self._on(device, function, walk, all_sizes) for device in self._devices)
        used = tuple(memory for memory in devices if memory.device != "host" or memory.transient or memory.results)
        return FunctionUse(function, all_sizes, used)

    def needs(self, function: str, sizes: Mapping[str, int], max_in_flight: int) -> dict[int, Need]:
        """Memory that a machine needs on each device, by manifest index, to run calls of `function`.

        It consists of the weights, and the maximum of one plain call and of `max_in_flight` submitted calls.

        Parameters
        ----------
        function : str
            Name of the function.
        sizes : mapping of str to int
            Symbolic dimensions by name.
        max_in_flight : int
            Maximum number of calls in flight.

        Raises
        ------
        UnknownSizeError
            Dimensions without a value or an upper bound.
        """
        all_sizes = {**self._bounds(function), **sizes}
        schedule = next((s for s in self._metadata.schedules if s.function == function), None)
        if schedule is None:
            schedule = Schedule(function, 0, 1, (Step(0, (), (0,), function=function),), 0)
        by_device: dict[int, Need] = {}
        for device in range(len(self._metadata.devices)):
            plain = call_needs(self._metadata, function, all_sizes, device)
            queued = queued_needs(self._metadata, schedule, all_sizes, device, max_in_flight)
            weights = self.weights(device) + self._params(device, function, all_sizes)
            by_device[device] = replace(max(plain, queued, key=lambda need: need.total), weights=weights)
        return by_device

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for name in self.functions:
            missing = self.symbolic_dims(name)
            rows += self.at(name).rows() if not missing else [(name, f"depends on {', '.join(missing)}: at(...)")]
        return _table(rows)

    def _repr_html_(self) -> str:
        tables: list[Markup] = []
        for name in self.functions:
            if missing := self.symbolic_dims(name):
                sizes = ", ".join(f"{size}=1" for size in missing)
                text = f"The memory of {name!r} depends on {', '.join(missing)}: memory_plan.at({name!r}, {sizes})."
                tables.append(paragraph(text))
            else:
                tables += self.at(name)._html_tables()
        return view(*tables)

    def _bounds(self, function: str) -> Mapping[str, int]:
        return self._memory[function].upper_bounds if function in self._memory else {}

    def _walk(self, function: str, sizes: Mapping[str, int]) -> AllocationWalk:
        walk = AllocationWalk(self._metadata)
        walk.visit(function, sizes)
        return walk

    def _on(self, device: int, function: str, walk: AllocationWalk, sizes: Mapping[str, int]) -> DeviceMemory:
        results = [a for a in walk.allocations if a.use == RESULT]
        transient = [a for a in walk.allocations if a.use != RESULT]
        buffers = pool_bytes(transient, device)

        def bytes_for_use(use: str) -> int:
            return sum(nbytes for _, nbytes in pool_bytes([a for a in transient if a.use == use], device))

        return DeviceMemory(
            ([*device_names(self._metadata.devices), "host"])[device],
            self.weights(device) + self._params(device, function, sizes),
            sum(nbytes for _, nbytes in buffers),
            bytes_for_use(ARENA),
            bytes_for_use(TRANSFER),
            sum(a.nbytes for a in results if a.device == device),
            max_alive(walk.tensors, device),
            tuple(sorted(buffers, key=lambda buffer: -buffer[1])),
        )

    def _params(self, device: int, function: str, sizes: Mapping[str, int]) -> int:
        """Bytes of the parameters of `VirtualMachine.set_params`."""
        signature = self._metadata.signatures.get(function)
        if signature is None or signature.num_input < 0:
            return 0
        params = [spec for spec in signature.inputs[signature.num_input :] if spec.name not in signature.defaults]
        tensors = [t for spec in params for t in tensors_of(spec)]
        return sum(_tensor_bytes(t, sizes) for t in tensors if t.device == device)


def _tensor_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    if spec.shape is None or spec.dtype is None:
        return 0
    return bytes_for(tuple(evaluate(extent, sizes) for extent in spec.shape), spec.dtype)


def _table(rows: Sequence[Sequence[str]]) -> str:
    numbers = (name.replace("_", " ") for name in _NUMBERS)
    return text_table(("function", "device", *numbers, "ratio"), rows, left=2)
