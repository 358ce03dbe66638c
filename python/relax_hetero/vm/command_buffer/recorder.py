"""The recorder of a command buffer, which checks commands and stores them with their requirements."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi

from ...artifact.commands import (
    DIRECT,
    READ,
    READ_WRITE,
    SLOT,
    WRITE,
    Barrier,
    Command,
    Copy,
    Dispatch,
    Fill,
    KernelSpec,
    Reference,
    SlotSpec,
    TensorParam,
)
from ...artifact.signature import Dim
from ...errors import BindingError
from ..region.walk_commands import SCALARS, Kernel
from .borrowed_buffer import BYTES, BorrowedBuffer
from .operands import (
    INT64_RANGE,
    Integer,
    Limit,
    Limits,
    MemoryRange,
    Number,
    as_float,
    dim,
    divided,
    integer,
    names_in,
    parameter_name,
    size_name,
    substituted,
)


@dataclass
class Requirement:
    """The requirements of all commands on one slot or one direct buffer."""

    static: int = 0  # bytes required by ranges with constant ends
    dynamic: dict[str, None] = field(default_factory=dict)  # distinct other ends, which submissions evaluate, in order
    alignment: int = 1
    access: str = ""
    dtypes: set[str] = field(default_factory=set)

    def add(self, end: Integer, alignment: int, access: str, dtype: str) -> None:
        """Add a use of the bytes before `end`; `dtype` is empty for untyped bytes."""
        if isinstance(end, Number):
            self.dynamic[end.text] = None
        else:
            self.static = max(self.static, end)
        self.alignment = max(self.alignment, alignment)
        self.access = access if self.access in ("", access) else READ_WRITE
        if dtype:
            self.dtypes.add(dtype)

    @property
    def is_written(self) -> bool:
        """True if any command writes the memory."""
        return self.access in (WRITE, READ_WRITE)

    @property
    def nbytes(self) -> Dim:
        """The required size: a number, or text over parameters and sizes."""
        if not self.dynamic:
            return self.static
        ends = [*([self.static] if self.static else []), *self.dynamic]
        return str(ends[0]) if len(ends) == 1 else f"max({', '.join(map(str, ends))})"

    def slot(self, index: int, device: int) -> SlotSpec:
        """The requirement of a slot, as plain data."""
        dtype = next(iter(self.dtypes)) if len(self.dtypes) == 1 else ""
        return SlotSpec(f"slot {index}", device, self.nbytes, self.alignment, self.access, dtype)


def end_of(offset: Integer, length: Integer) -> Integer:
    """The offset after the last byte of a range."""
    return length if isinstance(offset, int) and offset == 0 else offset + length


def text_of(value: Integer) -> str:
    """A number, as messages show it."""
    return str(dim(value))


@dataclass(frozen=True)
class DispatchArguments:
    """A kernel and its arguments."""

    kernel: Kernel
    operands: tuple[MemoryRange, ...]
    scalars: tuple[Any, ...]  # scalars, without the workgroup indices
    extents: tuple[tuple[tuple[Integer, ...], Integer], ...]  # extents and bytes of each tensor


def dispatch_arguments(kernel: Kernel, operands: Sequence[MemoryRange], scalars: object) -> DispatchArguments:
    """Check the arguments of a kernel call.

    Raises BindingError for a wrong number of operands or scalars; a missing or unknown scalar, or one of a wrong type.
    """
    spec, where = kernel.spec, f"kernel {kernel.spec.name!r}"
    if len(operands) != len(spec.tensors):
        names = ", ".join(tensor.name for tensor in spec.tensors)
        raise BindingError(f"{where} is given {len(operands)} operands, expected {len(spec.tensors)}: {names}")
    by_name = _scalars_by_name(spec, scalars, where)
    values: dict[str, Integer] = {
        name: value for name, value in by_name.items() if isinstance(value, int | Number)  # floats cannot be extents
    }  # fmt: skip
    extents = tuple(_extents(tensor, values, f"tensor {tensor.name!r} of {where}") for tensor in spec.tensors)
    return DispatchArguments(kernel, tuple(operands), tuple(by_name.values()), extents)


def _scalars_by_name(spec: KernelSpec, scalars: object, where: str) -> dict[str, Any]:
    params = spec.scalars[: len(spec.scalars) - spec.workgroups]
    names = [scalar.name for scalar in params]
    expected = f"expected {', '.join(f'{scalar.name}: {scalar.dtype}' for scalar in params) or 'none'}"
    if isinstance(scalars, Mapping):
        if set(scalars) != set(names):
            raise BindingError(f"{where} is given the scalars {', '.join(map(str, scalars)) or 'none'}, {expected}")
        values = [scalars[name] for name in names]
    elif isinstance(scalars, Sequence) and not isinstance(scalars, str):
        if len(scalars) != len(names):
            raise BindingError(f"{where} is given {len(scalars)} scalars, {expected}")
        values = list(scalars)
    else:
        raise BindingError(f"{where} is given scalars {scalars!r}, expected a mapping or a sequence")
    for scalar in spec.scalars:
        if scalar.dtype not in SCALARS:
            raise BindingError(
                f"{where} takes scalar {scalar.name!r} of {scalar.dtype}, expected one of {', '.join(SCALARS)}"
            )
    pairs = zip(params, values, strict=True)
    return {scalar.name: _value(value, scalar.dtype, f"scalar {scalar.name!r} of {where}") for scalar, value in pairs}


def _value(value: object, dtype: str, what: str) -> Any:
    if isinstance(value, Number):
        if dtype.startswith("float") and not value.text.isidentifier():
            raise BindingError(f"{what} ({dtype}) is {value.text}, expected a float or a parameter itself")
        return value
    if dtype == "bool" and isinstance(value, bool):
        return int(value)
    if dtype.startswith("float"):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise BindingError(f"{what} is {value!r} ({type(value).__name__}), expected a {dtype}")
        return as_float(value, dtype, what)
    return integer(value, what)


def _extents(tensor: TensorParam, values: dict[str, Integer], what: str) -> tuple[tuple[Integer, ...], Integer]:
    extents = tuple(substituted(extent, values, what) for extent in tensor.shape)
    dtype = tvm_ffi.dtype(tensor.dtype)
    bits = int(dtype.bits) * int(dtype.lanes)
    count: Integer = 1
    for extent in extents:
        count = extent if isinstance(count, int) and count == 1 else count * extent
    nbytes: Integer = (count * bits + 7) // 8 if bits % 8 else count * (bits // 8)
    return extents, nbytes


COUNT_BYTES = 4  # bytes of a workgroup count or a predicate in memory, an int32


@dataclass(frozen=True)
class Recording:
    """A finished recording."""

    device: int  # manifest index
    commands: tuple[Command, ...]
    slots: tuple[SlotSpec, ...]
    # Type of each parameter: ``"int64"`` if any command uses it as an integer, else ``"float64"``.
    parameters: tuple[str, ...]
    directs: tuple[BorrowedBuffer, ...]  # direct buffers: memory that is the same in each submission
    written_directs: frozenset[int]  # indices of the direct buffers that commands write
    kernels: Mapping[str, Kernel]  # kernels of the commands, by name
    limits: tuple[Limit, ...]  # conditions that each submission must meet
    may_overlap: frozenset[tuple[int, int]]  # pairs of slots whose bindings may overlap


class Recorder:
    """Collects and checks commands."""

    def __init__(
        self,
        device: int,  # manifest index
        slots: int,  # number of slots
        parameters: int,  # number of parameters
        may_overlap: frozenset[tuple[int, int]],  # pairs of slots whose bindings may overlap
    ) -> None:
        self._device, self._parameters, self._may_overlap = device, parameters, may_overlap
        self._commands: list[Command] = []
        self._slot_requirements = [Requirement() for _ in range(slots)]
        self._directs: list[BorrowedBuffer] = []
        self._direct_requirements: list[Requirement] = []
        self._kernels: dict[str, Kernel] = {}
        self._limits = Limits()
        # Uses of the current command: requirement, end, alignment, access, dtype.
        self._uses: list[tuple[Requirement, Integer, int, str, str]] = []
        self._integer_parameters: set[str] = set()

    def keep(self, borrowed: BorrowedBuffer) -> int:
        """Add a direct buffer, kept alive by the recording; returns its index."""
        self._directs.append(borrowed)
        self._direct_requirements.append(Requirement())
        return len(self._directs) - 1

    def fill(self, target: MemoryRange, pattern: bytes) -> None:
        """Record a fill."""
        self._begin()
        reference, length = self._resolve_range(target, len(pattern), WRITE, "the target of fill")
        self._limits.require(f"the length of fill in {_name(target)}", length, 0, multiple=len(pattern))
        self._end(Fill(reference, pattern.hex()))

    def copy(self, source: MemoryRange, target: MemoryRange) -> None:
        """Record a copy."""
        self._begin()
        if source.length is not None and target.length is not None and source.length != target.length:
            raise BindingError(
                f"copy from {_name(source)} to {_name(target)}: {text_of(source.length)} and "
                f"{text_of(target.length)} bytes, expected the same length"
            )
        if source.length is None and target.length is not None:
            source = MemoryRange(source.owner, source.space, source.index, source.offset, target.length)
        source_reference, length = self._resolve_range(source, 1, READ, "the source of copy")
        target = MemoryRange(target.owner, target.space, target.index, target.offset, length)
        target_reference, _ = self._resolve_range(target, 1, WRITE, "the target of copy")
        uses = [("the source", source_reference, READ), ("the target", target_reference, WRITE)]
        self._refuse_overlap(uses, "copy")
        self._end(Copy(source_reference, target_reference))

    def barrier(self) -> None:
        """Record a barrier."""
        self._commands.append(Barrier())

    def dispatch(
        self,
        call: DispatchArguments,
        grid: tuple[Integer, ...],
        count: MemoryRange | None,
        when: MemoryRange | None,
        unless: MemoryRange | None,
    ) -> None:
        """Record a kernel call."""
        self._begin()
        spec, where = call.kernel.spec, f"kernel {call.kernel.spec.name!r}"
        for direction, number in zip("xyz", grid, strict=False):
            self._require_integer(f"the workgroup count of {where} along {direction}", number, 0, INT64_RANGE[1])
        operands = []
        for param, memory, (extents, nbytes) in zip(spec.tensors, call.operands, call.extents, strict=True):
            what = f"tensor {param.name!r} of {where}"
            for axis, extent in enumerate(extents):
                self._require_integer(f"the extent of {what} along axis {axis}", extent, 0)
            operands.append(self._add_use(memory, nbytes, param.alignment, param.access, param.dtype, what))
        pairs = zip(spec.tensors, operands, strict=True)
        self._refuse_overlap([(param.name, operand, param.access) for param, operand in pairs], where)
        for scalar, value in zip(spec.scalars, call.scalars, strict=False):
            self._require_scalar(f"scalar {scalar.name!r} of {where}", scalar.dtype, value)
        scalars = tuple(value.text if isinstance(value, Number) else value for value in call.scalars)
        counts = self._add_int32s(count, len(grid), f"the count of {where}")
        predicates = self._add_int32s(when, 1, f"when of {where}"), self._add_int32s(unless, 1, f"unless of {where}")
        self._kernels[spec.name] = call.kernel
        self._end(Dispatch(spec.name, tuple(operands), scalars, tuple(map(dim, grid)), counts, *predicates))

    def _begin(self) -> None:
        """Begin a command; drops the requirements of a previous command that was refused."""
        self._uses.clear()
        self._limits.roll_back()

    def _end(self, command: Command) -> None:
        for requirement, end, alignment, access, dtype in self._uses:
            requirement.add(end, alignment, access, dtype)
        self._limits.commit()
        self._commands.append(command)

    def finish(self) -> Recording:
        """The finished recording."""
        parameters = [parameter_name(index) for index in range(self._parameters)]
        written = [i for i, requirement in enumerate(self._direct_requirements) if requirement.is_written]
        return Recording(
            self._device,
            tuple(self._commands),
            tuple(required.slot(index, self._device) for index, required in enumerate(self._slot_requirements)),
            tuple("int64" if name in self._integer_parameters else "float64" for name in parameters),
            tuple(self._directs),
            frozenset(written),
            self._kernels,
            self._limits.all(),
            self._may_overlap,
        )

    def _resolve_range(self, memory: MemoryRange, alignment: int, access: str, what: str) -> tuple[Reference, Integer]:
        """Add a use of a range, by default of all bytes from its offset on; returns its reference and length."""
        length = memory.length
        if length is not None:
            return self._add_use(memory, length, alignment, access, "", what), length
        if memory.space == DIRECT:
            length = self._directs[memory.index].nbytes - memory.offset
            return self._add_use(memory, length, alignment, access, "", what), length
        size = Number(size_name(memory.index))
        length = size - memory.offset if memory.offset != 0 else size
        # The range ends where the binding ends, so only the offset needs a check.
        self._add_use(memory, 0, alignment, access, "", what)
        return Reference(memory.space, memory.index, dim(memory.offset), dim(length)), length

    def _add_use(
        self, memory: MemoryRange, nbytes: Integer, alignment: int, access: str, dtype: str, what: str
    ) -> Reference:
        """Add a use of `nbytes` bytes of a range to its slot or buffer; returns the reference to them."""
        location, offset, length = _name(memory), memory.offset, memory.length
        self._require_integer(f"the offset of {what} in {location}", offset, 0)
        if length is None:
            length = nbytes
        elif length != nbytes:
            self._require_integer(f"the length that {what} has in {location}, beyond the {text_of(nbytes)} it needs,",
                          length - nbytes, 0)  # fmt: skip
        self._require_integer(f"the length of {what} in {location}", length, 0)
        end = end_of(offset, length)
        if memory.space == SLOT:
            self._limits.require(f"the offset of {what} in {location}", offset, multiple=alignment)
            self._uses.append((self._slot_requirements[memory.index], end, alignment, access, dtype))
        else:
            buffer = self._directs[memory.index]
            if access != READ and not buffer.writable:
                raise BindingError(f"{what} writes to {location}, which is read-only; expected writable memory")
            if dtype and buffer.dtype not in (dtype, BYTES):
                raise BindingError(f"{what} has dtype {buffer.dtype} in {location}, expected {dtype}, or {BYTES}")
            self._limits.require(
                f"the address of {what} in {location}", offset + buffer.address % alignment, multiple=alignment
            )
            self._require_integer(f"the end of {what} in {location}", end, 0, buffer.nbytes)
            self._uses.append((self._direct_requirements[memory.index], end, alignment, access, dtype))
        return Reference(memory.space, memory.index, dim(offset), dim(nbytes))

    def _add_int32s(self, memory: MemoryRange | None, count: int, what: str) -> Reference | None:
        if memory is None:
            return None
        return self._add_use(memory, count * COUNT_BYTES, COUNT_BYTES, READ, "int32", what)

    def _require_integer(self, what: str, value: Integer, low: int | None, high: int | None = None) -> None:
        self._integer_parameters |= names_in(value)
        self._limits.require(what, value, low, high)
        for dividend in divided(value):
            self._limits.require(f"a dividend in {what}", dividend, *INT64_RANGE)

    def _require_scalar(self, what: str, dtype: str, value: Integer | float) -> None:
        if dtype.startswith("float"):
            return
        assert isinstance(value, int | Number), f"{what} is an integer (dispatch_arguments)"
        bits = 1 if dtype == "bool" else int(dtype.lstrip("uint"))
        is_signed = dtype.startswith("int")
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)
        self._require_integer(what, value, low, high)

    def _refuse_overlap(self, uses: Sequence[tuple[str, Reference, str]], what: str) -> None:
        for (name, a, access), (other, b, other_access) in itertools.combinations(uses, 2):
            if access == other_access == READ or a.space != b.space or (a.space == SLOT and a.index != b.index):
                continue  # bindings of two slots are compared when they are bound
            if a.space == SLOT and (a.index, b.index) in self._may_overlap:
                continue
            locations = " and ".join(sorted({_name(a), _name(b)}))
            (begin, end), (other_begin, other_end) = self._bounds(a), self._bounds(b)
            gaps = [begin - other_end, other_begin - end]
            constant_gaps = [gap for gap in gaps if isinstance(gap, int)]
            if any(gap >= 0 for gap in constant_gaps):
                continue
            if len(constant_gaps) == len(gaps):
                hint = f" unless may_overlap has ({a.index}, {b.index})" if a.space == SLOT else ""
                raise BindingError(
                    f"{what}: {name} and {other} share bytes of {locations}, and one is written; "
                    f"expected disjoint ranges{hint}"
                )
            gap = Number(f"max({', '.join(str(dim(gap)) for gap in gaps)})")
            self._limits.require(
                f"{what}: the gap between {name} and {other} in {locations}, of which one is written,", gap
            )

    def _bounds(self, reference: Reference) -> tuple[Integer, Integer]:
        """Begin and end of a range: offsets in a slot, or addresses of a direct buffer."""
        offset, length = (
            Number(number) if isinstance(number, str) else number for number in (reference.offset, reference.length)
        )
        base = self._directs[reference.index].address if reference.space == DIRECT else 0
        begin = offset + base if base else offset
        return begin, end_of(begin, length)


def _name(memory: MemoryRange | Reference) -> str:
    return f"slot {memory.index}" if memory.space == SLOT else f"buffer {memory.index}"
