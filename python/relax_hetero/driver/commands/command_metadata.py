"""Metadata of command buffers: regions, kernels that can be called by address, and constants of CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm import relax

from ...artifact.commands import KernelSpec, RegionSpec, SlotSpec
from ...artifact.metadata import DeviceSpec, DispatchSpec
from ...target.vdevice import is_cpu, vdevices_of
from ...tir.core.raw_kernel import raw_signature
from ...transform.ir.kernels import operations_of, precision_of, tensor_bytes
from ...transform.ir.module_attrs import COMMANDS, public_kernels
from ...transform.ir.rewriting import copy_module, is_tensor_constant, relax_functions, walk_bindings
from ...transform.record.form_cuda_graphs import GRAPH_CONSTANTS
from ...transform.record.region_attrs import kernel_functions, kernel_spec, kernels_of, regions_of
from ..link.address_table import AddressTable, with_pointer_functions
from ..link.lift_constants import LiftedConstants
from ..link.link import argument_alignment


def with_public_kernels(
    mod: tvm.IRModule,
    devices: Sequence[DeviceSpec],  # manifest; a kernel belongs to the first device of its target
) -> tuple[tvm.IRModule, dict[str, KernelSpec]]:
    """Make the public kernels of a lowered module callable by address; returns also the kernels of command buffers.

    Raises BuildError if a kernel's workgroup indices are not among its parameters.
    """
    targets = [device.target for device in devices]
    kernels = kernels_of(mod)
    public: dict[str, KernelSpec] = {}
    for name in public_kernels(mod):
        func = mod[name]
        signature = raw_signature(func)
        if name not in kernels and signature is not None and str(func.attrs["target"]) in targets:
            public[name] = kernel_spec(name, func, signature, targets.index(str(func.attrs["target"])))
    mod, symbols = with_pointer_functions(mod, list(public))
    kernels.update({name: replace(spec, symbol=symbols.get(name, "")) for name, spec in public.items()})
    return mod, kernels


def linked_regions(lifted: LiftedConstants) -> tuple[RegionSpec, ...]:
    """The regions of a lowered module, with the indices of their constants in the lifted tuple."""
    directs = _directs(lifted)
    regions = regions_as_linked(lifted.mod)
    return tuple(replace(region, directs=directs.get(region.name, ())) for region in regions)


def regions_as_linked(mod: tvm.IRModule) -> list[RegionSpec]:
    """The regions of a module, with the alignments of slots that code of `link` requires."""
    alignment = argument_alignment(mod)
    on_cpu = [is_cpu(vdevice) for vdevice in vdevices_of(mod)]

    def align(slot: SlotSpec) -> SlotSpec:
        return replace(slot, alignment=min(slot.alignment, alignment)) if on_cpu[slot.device] else slot

    return [replace(region, slots=tuple(map(align, region.slots))) for region in regions_of(mod)]


def _directs(lifted: LiftedConstants) -> dict[str, tuple[int, ...]]:
    """The constants that each region reads, from its address table or as arguments."""
    directs: dict[str, tuple[int, ...]] = {}
    for _, func in relax_functions(lifted.mod):
        fetched: dict[relax.Var, int] = {}
        for binding in walk_bindings(func):
            call = binding.value
            if not isinstance(call, relax.Call):
                continue
            if _is_fetch(call) and call.args[0].same_as(func.params[-1]):
                fetched[binding.var] = int(call.args[1].value)
            elif isinstance(call.op, tvm.ir.GlobalVar) and COMMANDS in lifted.mod[call.op].attrs:
                directs[call.op.name_hint] = tuple(
                    index for arg in call.args if arg in fetched for index in _constants(lifted, fetched[arg])
                )
    return directs


def _is_fetch(call: relax.Call) -> bool:
    return isinstance(call.op, relax.ExternFunc) and call.op.global_symbol == "vm.builtin.tuple_getitem"


def _constants(lifted: LiftedConstants, index: int) -> list[int]:
    addresses = lifted.specs[index].addresses
    return [index] if addresses is None else [entry for entry in addresses if isinstance(entry, int)]


def region_dispatches(mod: tvm.IRModule) -> dict[str, DispatchSpec]:
    """The kernels that command buffers call."""
    devices: dict[str, dict[int, None]] = {}
    for region in regions_of(mod):
        for name in region.kernels:
            devices.setdefault(name, {})[region.device] = None
    return {
        spec.name: DispatchSpec(
            spec.device,
            spec.ops,
            operations_of(func),
            _bytes(spec),
            precision_of(func, [tensor.dtype for tensor in spec.tensors]),
            tuple(device for device in devices.get(spec.name, ()) if device != spec.device),
        )
        for spec, func in kernel_functions(mod)
    }


def _bytes(kernel: KernelSpec) -> int:
    """Total bytes of a kernel's tensors; 0 if an extent is symbolic."""
    total = 0
    for tensor in kernel.tensors:
        if any(isinstance(extent, str) for extent in tensor.shape):
            return 0
        total += tensor_bytes([int(extent) for extent in tensor.shape], tvm.DataType(tensor.dtype))
    return total


def graph_tables(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[AddressTable]]:
    """Remove the attributes with graphs' constants from a lowered module; returns also each graph's address table."""
    graphs = {gv: func for gv, func in mod.functions.items() if GRAPH_CONSTANTS in func.attrs}
    if not graphs:
        return mod, []
    tables: dict[str, AddressTable] = {}
    for _, relax_func in relax_functions(mod):
        for binding in walk_bindings(relax_func):
            call = binding.value
            if not isinstance(call, relax.Call) or call.op not in graphs:
                continue
            name = call.op.name_hint
            if name not in tables:  # the steps of a schedule call the same graphs
                # The state comes after the inputs, some of which may be constants.
                state = [arg for arg in call.args if is_tensor_constant(arg)][-1]
                tables[name] = AddressTable(state, list(graphs[call.op].attrs[GRAPH_CONSTANTS]), [], name)
    plain = {gv: func.without_attr(GRAPH_CONSTANTS) for gv, func in graphs.items()}
    return copy_module(mod, {**dict(mod.functions.items()), **plain}), list(tables.values())
