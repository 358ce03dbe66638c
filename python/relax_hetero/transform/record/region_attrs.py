"""Command buffers as data (`artifact.commands`) on functions; and the tensors that a kernel reads or writes.

Each host function of a command buffer carries its `RegionSpec`, each kernel that one calls its `KernelSpec`, as JSON
text, so that both last until the executable is made.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, s_tir, tirx
from tvm.ir.expr import TensorLoad
from tvm_ffi import structural_walk

from ...artifact.commands import (
    ARENA,
    DIRECT,
    READ,
    READ_WRITE,
    SLOT,
    WRITE,
    Dispatch,
    KernelSpec,
    Reference,
    RegionSpec,
    ScalarParam,
    SlotSpec,
    TensorParam,
    kernel_from_json,
    kernel_to_json,
    region_from_json,
    region_to_json,
)
from ...errors import BuildError
from ...target.vdevice import is_cpu, vdevice_index
from ...tir.core.raw_kernel import RawSignature
from ..ir.extents import NoTextError, dim_text
from ..ir.kernels import ops_of
from ..ir.module_attrs import COMMANDS, KERNEL
from .region_ir import OutlinedRegion, RegionStep, RegionValue

WORKGROUPS = "relax_hetero.workgroups"
"""On a PrimFunc: how many of its last parameters are workgroup numbers (x, y, z)."""

_ALLOCATED = 64
"""Alignment of TVM's allocations, which its code expects unless it is told otherwise."""


class _Texts:
    """Expressions as text, in which every symbol has a name of its own."""

    def __init__(self, symbols: Iterable[tirx.Var]) -> None:
        self.names: dict[tirx.Var, str] = {}
        for symbol in symbols:
            plain = base = re.sub(r"\W", "_", str(symbol.name))
            taken = {*self.names.values(), "min", "max"}
            count = 0
            while plain in taken or not plain.isidentifier():
                count += 1
                plain = f"{base}_{count}" if base.isidentifier() else f"_{base}_{count}"
            self.names[symbol] = plain

    def of(self, expr: Any) -> Any:
        """A number, or text over the names."""
        if isinstance(expr, tirx.FloatImm):
            return float(expr.value)
        try:
            return dim_text(expr, self.names)
        except NoTextError:
            return str(expr)


def region_spec(outlined: OutlinedRegion, vdevices: list[relax.VDevice]) -> RegionSpec:
    """Description of a command buffer; its `directs` count the constants it reads."""
    texts = _Texts(outlined.symbols())
    device = vdevice_index(outlined.vdevice, vdevices)
    places = {value.home: (SLOT, i) for i, value in enumerate((*outlined.inputs, *outlined.results))}
    places.update({value: (DIRECT, i) for i, value in enumerate(outlined.constants)})
    written = {v.home for s in outlined.steps for v, access in zip(s.operands, s.access, strict=True) if access != READ}

    def reference(value: RegionValue) -> Reference:
        space, index = places.get(value.home, (ARENA, 0))
        offset = texts.of(value.home.offset) if space == ARENA else 0
        return Reference(space, index, offset, texts.of(value.nbytes))

    def command(step: RegionStep) -> Dispatch:
        operands = tuple(map(reference, step.operands))
        scalars = tuple(map(texts.of, step.scalars))
        return Dispatch(step.kernel.name_hint, operands, scalars, variable=step.variable)

    def slot(value: RegionValue, access: str) -> SlotSpec:
        shape = tuple(map(texts.of, value.shape))
        return SlotSpec(value.name, device, texts.of(value.nbytes), _ALLOCATED, access, value.dtype, shape)

    is_host = is_cpu(outlined.vdevice)
    return RegionSpec(
        name=outlined.gv.name_hint,
        function=outlined.function,
        device=device,
        slots=(
            *(slot(v, READ_WRITE if v in written else READ) for v in outlined.inputs),
            *(slot(v, WRITE) for v in outlined.results),
        ),
        parameters=tuple(texts.names.values()),
        directs=tuple(range(len(outlined.constants))),
        arena=texts.of(outlined.arena),
        commands=tuple(map(command, outlined.steps)),
        runs="host function" if is_host else "stream",
        ended_by=outlined.ended,
    )


def kernel_specs(
    outlined: OutlinedRegion,
    kernels: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc],
    signatures: Mapping[tvm.ir.GlobalVar, RawSignature],
    vdevices: list[relax.VDevice],
) -> dict[tvm.ir.GlobalVar, KernelSpec]:
    """The kernels of a command buffer."""
    device = vdevice_index(outlined.vdevice, vdevices)
    found: dict[tvm.ir.GlobalVar, KernelSpec] = {}
    for step in outlined.steps:
        if step.kernel not in found:
            func, signature = kernels[step.kernel], signatures[step.kernel]
            found[step.kernel] = kernel_spec(step.kernel.name_hint, func, signature, device, step.access)
    return found


def kernel_spec(
    name: str, func: tirx.PrimFunc, signature: RawSignature, device: int, access: Sequence[str] | None = None
) -> KernelSpec:
    """A kernel that can be called raw.

    Parameters
    ----------
    name : str
    func : tirx.PrimFunc
    signature : RawSignature
        Its own.
    device : int
        Manifest index.
    access : sequence of str, optional
        Access to each tensor; taken from the body where it is not given.

    Raises
    ------
    BuildError
        A number of workgroup numbers that its parameters do not have.
    """
    texts = _Texts(signature.scalars)
    used = buffer_access(func) if access is None else dict(zip(signature.buffers, access, strict=True))
    # LLVM's code of a raw kernel relies on whole elements only; others', on what its buffers are declared to be.
    tensors = tuple(
        TensorParam(
            str(buffer.name),
            dtype,
            tuple(map(texts.of, extents)),
            _element_alignment(dtype) if is_llvm(func) else int(buffer.ty.data_alignment),
            used[buffer],
        )
        for buffer, extents, dtype in zip(signature.buffers, signature.extents, signature.dtypes, strict=True)
    )
    scalars = tuple(ScalarParam(texts.names[scalar], str(scalar.ty.dtype)) for scalar in signature.scalars)
    return KernelSpec(name, device, tensors, scalars, _workgroups(name, func, signature), ops_of(func))


def is_llvm(func: tirx.PrimFunc) -> bool:
    """Return whether a function with a target is one of LLVM's."""
    return bool(func.attrs["target"].kind.name == "llvm")


def _workgroups(name: str, func: tirx.PrimFunc, signature: RawSignature) -> int:
    count = int(func.attrs.get(WORKGROUPS, 0))
    numbers = [param for param in func.params if param not in signature.buffers]
    last = list(func.params)[len(func.params) - count :]
    if not 0 <= count <= 3 or any(param not in numbers or "int" not in str(param.ty.dtype) for param in last):
        raise BuildError(
            f"kernel {name!r} has {WORKGROUPS!r} = {count}, but takes ({', '.join(p.name for p in func.params)}); "
            "expected 0 to 3, as many as its last parameters are integers"
        )
    return count


def _element_alignment(dtype: str) -> int:
    element = tvm.DataType(dtype)
    return 1 << max(0, (element.bits + 7) // 8 - 1).bit_length()


def with_region(host: tirx.PrimFunc, region: RegionSpec) -> tirx.PrimFunc:
    """The host function of a command buffer, with what it does noted on it."""
    return host.with_attr(COMMANDS, json.dumps(region_to_json(region)))


def with_kernel(raw: tirx.PrimFunc, kernel: KernelSpec, symbol: str) -> tirx.PrimFunc:
    """A kernel that command buffers call, with how it is called noted on it."""
    named = replace(kernel, symbol=symbol if is_llvm(raw) else "")
    return raw.with_attr(KERNEL, json.dumps(kernel_to_json(named)))


def regions_of(mod: tvm.IRModule) -> list[RegionSpec]:
    """The command buffers of a module, in order of their names."""
    noted = {gv.name_hint: func.attrs[COMMANDS] for gv, func in mod.functions.items() if COMMANDS in func.attrs}
    return [region_from_json(json.loads(str(noted[name]))) for name in sorted(noted, key=_in_order)]


def kernel_functions(mod: tvm.IRModule) -> list[tuple[KernelSpec, tirx.PrimFunc]]:
    """The kernels that the command buffers of a module call, in order of their names."""
    noted = [func for func in mod.functions.values() if KERNEL in func.attrs]
    kernels = [(kernel_from_json(json.loads(str(func.attrs[KERNEL]))), func) for func in noted]
    return sorted(kernels, key=lambda pair: _in_order(pair[0].name))


def kernels_of(mod: tvm.IRModule) -> dict[str, KernelSpec]:
    """The kernels that the command buffers of a module call, by name."""
    return {kernel.name: kernel for kernel, _ in kernel_functions(mod)}


def _in_order(name: str) -> list[Any]:
    """A key that sorts ``x2`` before ``x10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def buffer_access(func: tirx.PrimFunc) -> dict[tirx.Var, str]:
    """Return whether each tensor parameter is read, written or both, by the elements that the body names.

    The body may name the same memory by other buffers. Memory that is handed on otherwise (its address, another
    function) counts as read and written; memory that nothing names counts as read.
    """
    seen: Counter[tirx.Var] = Counter()
    loads: Counter[tirx.Var] = Counter()
    stores: Counter[tirx.Var] = Counter()
    declared: Counter[tirx.Var] = Counter()
    views: dict[tirx.Var, tirx.Var] = {}

    def on_block(block: s_tir.SBlock) -> None:
        declared.update(region.source for region in (*block.reads, *block.writes))

    def on_view(view: tirx.DeclBuffer) -> None:
        data = view.data
        if isinstance(data, tvm.ir.Call) and isinstance(data.op, tvm.ir.Op) and data.op.name == "tirx.buffer_data":
            views[view.buffer] = data.args[0]
            declared.update((view.buffer, data.args[0]))

    on_nodes = [
        (tvm.ir.Var, lambda var: seen.update((var,))),
        (TensorLoad, lambda load: loads.update((load.source,))),
        (tirx.BufferStore, lambda store: stores.update((store.buffer,))),
        (s_tir.SBlock, on_block),
        (tirx.DeclBuffer, on_view),
    ]
    structural_walk(func.body, on_nodes)

    def access(param: tirx.Var) -> str:
        names = [param, *(view for view in views if _viewed(view, views) == param)]
        handed_on = any(seen[name] > loads[name] + stores[name] + declared[name] for name in names)
        read, written = (any(uses[name] for name in names) for uses in (loads, stores))
        if handed_on or (read and written):
            return READ_WRITE
        return WRITE if written else READ

    return {param: access(param) for param in func.params}


def _viewed(view: tirx.Var, views: dict[tirx.Var, tirx.Var]) -> tirx.Var:
    """The parameter that a buffer names the memory of."""
    while view in views:
        view = views[view]
    return view
