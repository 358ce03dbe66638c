"""Command buffers of a model (regions) as attributes of PrimFuncs, until the executable is built.

The host function of a region carries its `RegionSpec`, and each kernel that it calls its `KernelSpec`, as JSON text
(`artifact.commands`). A kernel's access to its tensors is read off its body.
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
)
from ...artifact.typed_data import from_data, to_data
from ...errors import BuildError
from ...target.backend import backend_of
from ...target.vdevice import is_cpu, vdevice_index
from ...tir.core.raw_kernel import RawSignature
from ..ir.extents import NoTextError, dim_text
from ..ir.kernels import ops_of
from ..ir.module_attrs import COMMANDS, KERNEL
from .region_ir import OutlinedRegion, RegionStep, RegionValue

WORKGROUPS = "relax_hetero.workgroups"
"""PrimFunc attribute: number of trailing parameters that are workgroup indices x, y, z (CUDA's ``blockIdx``)."""

_ALLOCATION_ALIGNMENT_BYTES = 64  # alignment of TVM's allocations, which its generated code expects by default


class _ExpressionTexts:
    """Expressions as text, with a unique identifier for each symbol."""

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

    def text(self, expr: Any) -> Any:
        """An integer or float for a constant, else the expression's text with the unique identifiers."""
        if isinstance(expr, tirx.FloatImm):
            return float(expr.value)
        try:
            return dim_text(expr, self.names)
        except NoTextError:
            return str(expr)


def region_spec(outlined: OutlinedRegion, vdevices: list[relax.VDevice]) -> RegionSpec:
    """Description of a command buffer; its `directs` are indices of `outlined.constants` until constants are lifted."""
    texts = _ExpressionTexts(outlined.symbols())
    device = vdevice_index(outlined.vdevice, vdevices)
    # Values in the same memory (in-place kernels) have the same root, and so one slot.
    slots = {value.root: (SLOT, i) for i, value in enumerate((*outlined.inputs, *outlined.results))}
    slots.update({value: (DIRECT, i) for i, value in enumerate(outlined.constants)})
    operands = [pair for step in outlined.steps for pair in zip(step.operands, step.access, strict=True)]
    written_roots = {value.root for value, access in operands if access != READ}

    def reference(value: RegionValue) -> Reference:
        space, index = slots.get(value.root, (ARENA, 0))
        offset = texts.text(value.root.offset) if space == ARENA else 0
        return Reference(space, index, offset, texts.text(value.nbytes))

    def command(step: RegionStep) -> Dispatch:
        operands = tuple(map(reference, step.operands))
        scalars = tuple(map(texts.text, step.scalars))
        return Dispatch(step.kernel.name_hint, operands, scalars, variable=step.variable)

    def slot(value: RegionValue, access: str) -> SlotSpec:
        shape = tuple(map(texts.text, value.shape))
        return SlotSpec(
            value.name, device, texts.text(value.nbytes), _ALLOCATION_ALIGNMENT_BYTES, access, value.dtype, shape
        )

    backend = backend_of(outlined.vdevice.target)
    return RegionSpec(
        name=outlined.gv.name_hint,
        function=outlined.function,
        device=device,
        slots=(
            *(slot(v, READ_WRITE if v in written_roots else READ) for v in outlined.inputs),
            *(slot(v, WRITE) for v in outlined.results),
        ),
        parameters=tuple(texts.names.values()),
        directs=tuple(range(len(outlined.constants))),
        arena=texts.text(outlined.arena),
        commands=tuple(map(command, outlined.steps)),
        runs="host function" if is_cpu(outlined.vdevice) else backend.submission(outlined.vdevice.target),
        ended_by=outlined.ended_by,
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
    name: str,
    func: tirx.PrimFunc,  # kernel with tensor parameters, before it becomes raw
    signature: RawSignature,  # signature of the raw kernel
    device: int,  # index of its device in the manifest
    access: Sequence[str] | None = None,  # access to each tensor; by default read off the body
) -> KernelSpec:
    """Description of a kernel that command buffers call as a raw kernel (`tir.core.raw_kernel`).

    Raises BuildError if the attribute `WORKGROUPS` exceeds 3, or the number of trailing integer parameters.
    """
    texts = _ExpressionTexts(signature.scalars)
    accesses = buffer_access(func) if access is None else dict(zip(signature.buffers, access, strict=True))
    # A raw kernel of LLVM assumes that tensors are aligned to one element, other kernels to their declared alignment.
    tensors = tuple(
        TensorParam(
            str(buffer.name),
            dtype,
            tuple(map(texts.text, extents)),
            _element_alignment(dtype) if is_llvm(func) else int(buffer.ty.data_alignment),
            accesses[buffer],
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
    trailing = list(func.params)[len(func.params) - count :]
    if not 0 <= count <= 3 or any(p in signature.buffers or "int" not in str(p.ty.dtype) for p in trailing):
        raise BuildError(
            f"kernel {name!r} has {WORKGROUPS!r} = {count}, but takes ({', '.join(p.name for p in func.params)}); "
            "expected 0 to 3, at most the number of trailing integer parameters"
        )
    return count


def _element_alignment(dtype: str) -> int:
    return 1 << max(0, (tvm.DataType(dtype).bits + 7) // 8 - 1).bit_length()


def with_region(host_function: tirx.PrimFunc, region: RegionSpec) -> tirx.PrimFunc:
    """Annotate the host function of a command buffer with its description."""
    return host_function.with_attr(COMMANDS, json.dumps(to_data(region)))


def with_kernel(raw: tirx.PrimFunc, kernel: KernelSpec, symbol: str) -> tirx.PrimFunc:
    """Annotate a raw kernel with its description; LLVM's can be called by the address of `symbol`."""
    addressable = replace(kernel, symbol=symbol if is_llvm(raw) else "")
    return raw.with_attr(KERNEL, json.dumps(to_data(addressable)))


def regions_of(mod: tvm.IRModule) -> list[RegionSpec]:
    """The command buffers of a module, sorted by name."""
    texts = {gv.name_hint: func.attrs[COMMANDS] for gv, func in mod.functions.items() if COMMANDS in func.attrs}
    return [from_data(RegionSpec, json.loads(str(texts[name]))) for name in sorted(texts, key=_natural_key)]


def kernel_functions(mod: tvm.IRModule) -> list[tuple[KernelSpec, tirx.PrimFunc]]:
    """The kernels that the command buffers of a module call, sorted by name."""
    annotated = [func for func in mod.functions.values() if KERNEL in func.attrs]
    kernels = [(from_data(KernelSpec, json.loads(str(func.attrs[KERNEL]))), func) for func in annotated]
    return sorted(kernels, key=lambda pair: _natural_key(pair[0].name))


def kernels_of(mod: tvm.IRModule) -> dict[str, KernelSpec]:
    """The kernels that the command buffers of a module call, by name."""
    return {kernel.name: kernel for kernel, _ in kernel_functions(mod)}


def _natural_key(name: str) -> list[Any]:
    """A key that sorts ``x2`` before ``x10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def buffer_access(func: tirx.PrimFunc) -> dict[tirx.Var, str]:
    """Access to each tensor parameter (read, write or both), from the loads and stores in the body.

    Accesses through other buffers that view its memory count too. A tensor whose address is taken, or which another
    function gets, counts as read and written; a tensor without any access counts as read.
    """
    occurrences: Counter[tirx.Var] = Counter()
    loads: Counter[tirx.Var] = Counter()
    stores: Counter[tirx.Var] = Counter()
    declarations: Counter[tirx.Var] = Counter()
    views: dict[tirx.Var, tirx.Var] = {}

    def visit_block(block: s_tir.SBlock) -> None:
        declarations.update(region.source for region in (*block.reads, *block.writes))

    def visit_view(view: tirx.DeclBuffer) -> None:
        data = view.data
        if isinstance(data, tvm.ir.Call) and isinstance(data.op, tvm.ir.Op) and data.op.name == "tirx.buffer_data":
            views[view.buffer] = data.args[0]
            declarations.update((view.buffer, data.args[0]))

    visitors = [
        (tvm.ir.Var, lambda var: occurrences.update((var,))),
        (TensorLoad, lambda load: loads.update((load.source,))),
        (tirx.BufferStore, lambda store: stores.update((store.buffer,))),
        (s_tir.SBlock, visit_block),
        (tirx.DeclBuffer, visit_view),
    ]
    structural_walk(func.body, visitors)

    def access(param: tirx.Var) -> str:
        buffers = [param, *(view for view in views if _viewed_parameter(view, views) == param)]
        escapes = any(occurrences[b] > loads[b] + stores[b] + declarations[b] for b in buffers)
        is_read, is_written = (any(counts[b] for b in buffers) for counts in (loads, stores))
        if escapes or (is_read and is_written):
            return READ_WRITE
        return WRITE if is_written else READ

    return {param: access(param) for param in func.params}


def _viewed_parameter(view: tirx.Var, views: dict[tirx.Var, tirx.Var]) -> tirx.Var:
    """The parameter whose memory a buffer views."""
    while view in views:
        view = views[view]
    return view
