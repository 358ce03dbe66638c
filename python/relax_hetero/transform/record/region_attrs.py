"""Command buffers as attributes of functions (`artifact.commands`), and a kernel's access to its tensors.

The host function of a command buffer has its `RegionSpec`, each kernel that it calls its `KernelSpec`, as JSON text,
until the executable is built.
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
"""PrimFunc attribute: how many of its last parameters are workgroup numbers (x, y, z)."""

_ALLOCATION_ALIGNMENT = 64
"""Alignment of TVM's allocations in bytes, which its code expects by default."""


class _Texts:
    """Texts of expressions, with a unique name for each symbol."""

    def __init__(self, symbols: Iterable[tirx.Var]) -> None:
        self.names: dict[tirx.Var, str] = {}
        for symbol in symbols:
            name = base = re.sub(r"\W", "_", str(symbol.name))
            used = {*self.names.values(), "min", "max"}
            count = 0
            while name in used or not name.isidentifier():
                count += 1
                name = f"{base}_{count}" if base.isidentifier() else f"_{base}_{count}"
            self.names[symbol] = name

    def of(self, expr: Any) -> Any:
        """An expression as a number, or as text over the names."""
        if isinstance(expr, tirx.FloatImm):
            return float(expr.value)
        try:
            return dim_text(expr, self.names)
        except NoTextError:
            return str(expr)


def region_spec(outlined: OutlinedRegion, vdevices: list[relax.VDevice]) -> RegionSpec:
    """Description of a command buffer; its `directs` number the constants that it reads."""
    texts = _Texts(outlined.symbols())
    device = vdevice_index(outlined.vdevice, vdevices)
    slots = {value.root: (SLOT, i) for i, value in enumerate((*outlined.inputs, *outlined.results))}
    slots.update({value: (DIRECT, i) for i, value in enumerate(outlined.constants)})
    written = {v.root for s in outlined.steps for v, access in zip(s.operands, s.access, strict=True) if access != READ}

    def reference(value: RegionValue) -> Reference:
        space, index = slots.get(value.root, (ARENA, 0))
        offset = texts.of(value.root.offset) if space == ARENA else 0
        return Reference(space, index, offset, texts.of(value.nbytes))

    def command(step: RegionStep) -> Dispatch:
        operands = tuple(map(reference, step.operands))
        scalars = tuple(map(texts.of, step.scalars))
        return Dispatch(step.kernel.name_hint, operands, scalars, variable=step.variable)

    def slot(value: RegionValue, access: str) -> SlotSpec:
        shape = tuple(map(texts.of, value.shape))
        return SlotSpec(value.name, device, texts.of(value.nbytes), _ALLOCATION_ALIGNMENT, access, value.dtype, shape)

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
    """Descriptions of the kernels of a command buffer."""
    device = vdevice_index(outlined.vdevice, vdevices)
    specs: dict[tvm.ir.GlobalVar, KernelSpec] = {}
    for step in outlined.steps:
        if step.kernel not in specs:
            func, signature = kernels[step.kernel], signatures[step.kernel]
            specs[step.kernel] = kernel_spec(step.kernel.name_hint, func, signature, device, step.access)
    return specs


def kernel_spec(
    name: str, func: tirx.PrimFunc, signature: RawSignature, device: int, access: Sequence[str] | None = None
) -> KernelSpec:
    """Description of a raw kernel.

    Parameters
    ----------
    name : str
    func : tirx.PrimFunc
    signature : RawSignature
        Raw signature of the kernel.
    device : int
        Index of its device in the manifest.
    access : sequence of str, optional
        Access to each tensor; default: as in the body.

    Raises
    ------
    BuildError
        The attribute `WORKGROUPS` does not fit its parameters.
    """
    texts = _Texts(signature.scalars)
    used = buffer_access(func) if access is None else dict(zip(signature.buffers, access, strict=True))
    # LLVM's code of a raw kernel relies on the alignment of elements only, other code on that of the declared buffers.
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
    """Return whether the target of a function is llvm."""
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
    """Annotate the host function of a command buffer with its commands."""
    return host.with_attr(COMMANDS, json.dumps(region_to_json(region)))


def with_kernel(raw: tirx.PrimFunc, kernel: KernelSpec, symbol: str) -> tirx.PrimFunc:
    """Annotate a kernel that command buffers call with its description."""
    named = replace(kernel, symbol=symbol if is_llvm(raw) else "")
    return raw.with_attr(KERNEL, json.dumps(kernel_to_json(named)))


def regions_of(mod: tvm.IRModule) -> list[RegionSpec]:
    """The command buffers of a module, sorted by name."""
    texts = {gv.name_hint: func.attrs[COMMANDS] for gv, func in mod.functions.items() if COMMANDS in func.attrs}
    return [region_from_json(json.loads(str(texts[name]))) for name in sorted(texts, key=_natural_key)]


def kernel_functions(mod: tvm.IRModule) -> list[tuple[KernelSpec, tirx.PrimFunc]]:
    """The kernels that the command buffers of a module call, sorted by name."""
    annotated = [func for func in mod.functions.values() if KERNEL in func.attrs]
    kernels = [(kernel_from_json(json.loads(str(func.attrs[KERNEL]))), func) for func in annotated]
    return sorted(kernels, key=lambda pair: _natural_key(pair[0].name))


def kernels_of(mod: tvm.IRModule) -> dict[str, KernelSpec]:
    """The kernels that the command buffers of a module call, by name."""
    return {kernel.name: kernel for kernel, _ in kernel_functions(mod)}


def _natural_key(name: str) -> list[Any]:
    """A key that sorts ``x2`` before ``x10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def buffer_access(func: tirx.PrimFunc) -> dict[tirx.Var, str]:
    """Access to each tensor parameter: read, written or both, by the loads and stores in the body.

    The body may access the same memory by other buffers. Memory that escapes (by its address, or to another function)
    counts as read and written; memory without any access counts as read.
    """
    mentions: Counter[tirx.Var] = Counter()
    loads: Counter[tirx.Var] = Counter()
    stores: Counter[tirx.Var] = Counter()
    declared: Counter[tirx.Var] = Counter()
    views: dict[tirx.Var, tirx.Var] = {}

    def visit_block(block: s_tir.SBlock) -> None:
        declared.update(region.source for region in (*block.reads, *block.writes))

    def visit_view(view: tirx.DeclBuffer) -> None:
        data = view.data
        if isinstance(data, tvm.ir.Call) and isinstance(data.op, tvm.ir.Op) and data.op.name == "tirx.buffer_data":
            views[view.buffer] = data.args[0]
            declared.update((view.buffer, data.args[0]))

    visitors = [
        (tvm.ir.Var, lambda var: mentions.update((var,))),
        (TensorLoad, lambda load: loads.update((load.source,))),
        (tirx.BufferStore, lambda store: stores.update((store.buffer,))),
        (s_tir.SBlock, visit_block),
        (tirx.DeclBuffer, visit_view),
    ]
    structural_walk(func.body, visitors)

    def access(param: tirx.Var) -> str:
        names = [param, *(view for view in views if _view_root(view, views) == param)]
        escapes = any(mentions[name] > loads[name] + stores[name] + declared[name] for name in names)
        read, written = (any(uses[name] for name in names) for uses in (loads, stores))
        if escapes or (read and written):
            return READ_WRITE
        return WRITE if written else READ

    return {param: access(param) for param in func.params}


def _view_root(view: tirx.Var, views: dict[tirx.Var, tirx.Var]) -> tirx.Var:
    """The parameter whose memory a buffer views."""
    while view in views:
        view = views[view]
    return view
