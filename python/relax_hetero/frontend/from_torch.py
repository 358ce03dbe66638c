"""PyTorch import that keeps the names of modules and takes placement rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tvm

from .import_devices import importing_for
from .import_limits import ImportLimits
from .parallel_devices import parallel_devices
from .placed_import import ImportSource, check_placement, placed_module
from .torch.exporting import dimension_names, exported_program, torch_package
from .torch.torch_importer import import_program

if TYPE_CHECKING:
    from ..target.make_vdevice import VDeviceEntry
    from .auto.auto_placement import MemoryLimit
    from .auto.cost_model import CostModel, Objective
    from .onnx.placement_rules import PlacementRules


def from_torch(
    module_or_program: Any,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | Literal["auto"] | None = None,
    cost_model: CostModel | None = None,
    objective: Objective = "latency",
    limits: ImportLimits | None = None,
    memory_limit: MemoryLimit | None = None,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
) -> tvm.IRModule:
    """Import a PyTorch module as a Relax module, placed over several devices if any are named.

    Parameters
    ----------
    module_or_program : torch.nn.Module or torch.export.ExportedProgram
        A module is exported with ``torch.export.export``; call ``module.eval()`` before.
    example_args : tuple, optional
        Arguments to export a module with: tensors, and tuples, lists, dictionaries and dataclasses of them.
        Numbers, strings and None become constants.
    example_kwargs : mapping, optional
        Keyword arguments to export a module with.
    dynamic_shapes : mapping or tuple, optional
        See ``torch.export.export``. A ``torch.export.Dim`` names a symbolic size; a call with a size outside of its
        range, or of the range that torch inferred, is refused.
    vdevices, cost_model, objective, limits, memory_limit, data_parallel, tensor_parallel
        See `from_onnx`.
    placement : mapping, list of (pattern, device) pairs, or "auto", optional
        Glob patterns over names of nodes (``encoder.layer.3.output.dense.linear``), paths of modules
        (``encoder.layer.3``), their classes (``BertLayer``) and ops (``linear``), in order.

    Returns
    -------
    mod : tvm.IRModule
        Module with one function, "main". Its parameters are the flattened tensor arguments with torch.export's names,
        its results the flattened tensor results; the attributes "input_names" and "output_names" have the names.
        Weights are constants that share torch's memory: compile before the module is trained further.

    Raises
    ------
    FrontendError
        If torch is not installed or cannot export the module, an op cannot be imported, or a pattern matches nothing.
    VDeviceError
        If a device string is not in `vdevices`.
    PlacementError
        If `objective` is invalid, or no placement fits `memory_limit`.
    """
    vdevices, placement = parallel_devices(
        vdevices, placement, data_parallel=data_parallel, tensor_parallel=tensor_parallel
    )
    devices = check_placement(vdevices, placement, cost_model, objective, memory_limit)
    program = exported_program(module_or_program, example_args, example_kwargs, dynamic_shapes)
    names = _size_names(
        program,
        example_args,
        example_kwargs,
        dimension_names(module_or_program, example_args, example_kwargs, dynamic_shapes),
    )
    with importing_for(devices):
        graph, nodes, outputs = import_program(program, names, limits)
    source = ImportSource(graph, nodes, outputs)
    parallel = data_parallel, tensor_parallel
    return placed_module(source, devices, placement, cost_model, objective, memory_limit, parallel)


def _size_names(
    program: Any,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    axis_names: Mapping[int, Mapping[int, str]],
) -> dict[str, str]:
    """Symbol of torch -> name of its `Dim`."""
    if not axis_names:
        return {}
    torch = torch_package()
    tensors = program._get_flat_args_with_check(tuple(args or ()), dict(kwargs or {}))[0]
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    names: dict[str, str] = {}
    for placeholder, tensor in zip(placeholders[len(placeholders) - len(tensors) :], tensors, strict=True):
        value = placeholder.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        for axis, name in axis_names.get(id(tensor), {}).items():
            size = value.shape[axis]
            if not isinstance(size, int) and size.node.expr.is_Symbol and name not in names.values():
                names.setdefault(str(size.node.expr), name)
    return names
