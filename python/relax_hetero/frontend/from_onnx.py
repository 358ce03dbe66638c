"""ONNX import that keeps node names and takes placement rules.

Stock TVM's importer loses two things that placement needs: the names of nodes, and the device on which a shape is read.
This importer keeps its converters of single ops (with corrections, in ``ops/``) and replaces the walk over the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import tvm

from ..errors import FrontendError
from .import_devices import importing_for
from .import_limits import ImportLimits
from .onnx.coded_strings import with_coded_strings
from .onnx.importer import import_nodes
from .onnx.inputs import Shapes
from .onnx.node_names import name_nodes
from .onnx.onnx_model import ModelSource, OnnxModel, errors_of, load_model
from .onnx.placement_rules import PlacementRules, assign_devices
from .onnx_decoder.decoder_module import decoder_module
from .paged_cache import PagedCache
from .parallel_devices import parallel_devices
from .place import place
from .placed_import import ImportSource, check_placement, placed_module

if TYPE_CHECKING:
    from ..target.make_vdevice import VDeviceEntry
    from .auto.auto_placement import MemoryLimit
    from .auto.cost_model import CostModel, Objective


def from_onnx(
    model_or_path: ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | Literal["auto"] | None = None,
    shapes: Shapes | None = None,
    cost_model: CostModel | None = None,
    objective: Objective = "latency",
    limits: ImportLimits | None = None,
    memory_limit: MemoryLimit | None = None,
    cache: PagedCache | None = None,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
) -> tvm.IRModule:
    """Import an ONNX model as a Relax module, placed over several devices if any are named.

    Parameters
    ----------
    model_or_path : str, PathLike, bytes or onnx.ModelProto
        External data is in the file's folder; bytes and protos cannot have external data.
    vdevices : list of str, dict, Target or VDevice, optional
        Devices; the first one is the default. Without them the module is not placed, and compiles for the native CPU.
    placement : mapping, or list of (pattern, device) pairs, or "auto", optional
        Glob patterns over node names and op types. The first pattern that matches a node decides the device of its
        bindings; other nodes go to the default device. ``"auto"`` lets `cost_model` choose.
    shapes : mapping, optional
        ``{"input": [1, 128]}`` or ``{"batch": 1}``: sizes of inputs, or of named dimensions, which may be expressions
        of other dimensions: ``{"total": "past + seq"}``. All other dimensions stay symbolic.
    cost_model : CostModel, optional
        For ``placement="auto"``; default ``CostModel.measured(vdevices, objective)``.
    objective : str, optional
        For ``placement="auto"``. "latency" minimizes the time of one call, "throughput" the time between calls with
        several in flight (``vm.submit``).
    limits : ImportLimits, optional
        Maximum nodes and computed constants, default ``rh.ImportLimits()``: a small malicious file could exhaust the
        machine. Raise them for a large model that you trust.
    memory_limit : int, str or mapping, optional
        For ``placement="auto"``: maximum memory for weights and values on each device, bytes or text (``"4GB"``), or a
        mapping from devices to these, as in ``VirtualMachine(memory_limit=)``.
    cache : PagedCache, optional
        For decoders with GroupQueryAttention, as onnxruntime-genai exports them: inputs and outputs
        ``past_key_values`` and ``present`` become a paged cache, and the module has the functions ``decode_B`` and
        ``prefill_C`` of `from_gguf` instead of "main". Not together with `shapes` or ``placement="auto"``.
    data_parallel : int, optional
        Number of equal devices that share each batch: every one has all weights, and computes its part of the rows.
        These are the first ones of `vdevices`, or as many of its only one. `shapes` makes the batch a multiple of it.
        Not together with `placement` or `cache`.
    tensor_parallel : int, optional
        Number of equal devices that share the work of every op, by columns and rows of weights. With `data_parallel`,
        so many devices share the work on each part of a batch, on a mesh of both axes: ``vdevice[0:4](2, 2)``.

    Returns
    -------
    mod : tvm.IRModule
        Module with one function, "main". Its parameters are the graph's inputs in order; its attributes "input_names"
        and "output_names" have the ONNX names. A binding has the name of its node, or ``OpType_index`` (its position in
        the graph) for a nameless node. Weights are constants. With vdevices, transfers are inserted: an input is on the
        device of its first use, an output on the device that computes it.

    Raises
    ------
    FrontendError
        If the model cannot be read or imported (the text has file, node and op), a shape or pattern does not fit it, it
        exceeds `limits`, or `cache` is given for a model that is not such a decoder.
    VDeviceError
        If a device string is not in `vdevices`.
    PlacementError
        If `objective` is invalid, or no placement fits `memory_limit`.
    """
    vdevices, placement = parallel_devices(
        vdevices, placement, data_parallel=data_parallel, tensor_parallel=tensor_parallel
    )
    devices = check_placement(vdevices, placement, cost_model, objective, memory_limit)
    if cache is not None and (data_parallel, tensor_parallel) != (1, 1):
        raise FrontendError(
            f"data_parallel is {data_parallel} and tensor_parallel {tensor_parallel}, which do not go with cache; "
            "leave out cache, or start a process for each device"
        )
    model = load_model(model_or_path, limits)
    if cache is not None:
        return _decoder(model, devices, placement, shapes, cache)
    with errors_of(model.source), importing_for(devices):
        model, strings = with_coded_strings(model)
        nodes = name_nodes(model.proto)
        if devices is not None and not isinstance(placement, str):
            assign_devices(nodes, placement or {}, devices)  # checks the patterns before the import
        graph = import_nodes(model, nodes, shapes)
        source = ImportSource(graph, nodes, [output.name for output in model.proto.graph.output], strings)
        parallel = data_parallel, tensor_parallel
        return placed_module(source, devices, placement, cost_model, objective, memory_limit, parallel)


def _decoder(
    model: OnnxModel,
    devices: list[tvm.relax.VDevice] | None,
    placement: PlacementRules | Literal["auto"] | None,
    shapes: Shapes | None,
    cache: PagedCache,
) -> tvm.IRModule:
    """Import a decoder with a paged cache, and place its functions."""
    if shapes is not None or isinstance(placement, str):
        argument = "shapes" if shapes is not None else f"placement={placement!r}"
        raise FrontendError(f"{argument} is given, which does not go with cache, whose functions have static sizes")
    with errors_of(model.source), importing_for(devices):
        mod = decoder_module(model, name_nodes(model.proto), cache)
    return mod if devices is None else place(mod, placement or {}, devices)
