"""ONNX import that keeps node names and takes placement rules.

Stock TVM's importer converts single ops well, but loses two things that a placement needs: the names of the nodes, and
the device on which a shape is read. This importer keeps its converters (with corrections, in ``ops/``) and replaces the
walk over the graph.
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
from .onnx.model import ModelSource, OnnxModel, errors_of, load_model
from .onnx.node_names import name_nodes
from .onnx.placement_rules import PlacementRules, assign_devices
from .onnx_decoder.decoder_module import decoder_module
from .paged_cache import PagedCache
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
) -> tvm.IRModule:
    """Import an ONNX model as a Relax module, placed over several devices if any are named.

    Parameters
    ----------
    model_or_path : str, PathLike, bytes or onnx.ModelProto
        External data lies in the file's folder; bytes and protos have none, and so no external data.
    vdevices : list of str, dict, Target or VDevice, optional
        The devices, the first one the default. Without them the module is free, and compiles for the native CPU.
    placement : mapping, or list of (pattern, device) pairs, or "auto", optional
        Glob patterns over node names and op types, in order: the first that matches a node fixes the
        bindings made from it to its device; a node that none matches goes to the default device. ``"auto"`` lets
        `cost_model` choose.
    shapes : mapping, optional
        ``{"input": [1, 128]}`` or ``{"batch": 1}``: sizes of inputs, or of named dimensions, which may be arithmetic of
        others: ``{"total": "past + seq"}``. Others stay symbolic.
    cost_model : CostModel, optional
        For ``placement="auto"``; default ``CostModel.measured(vdevices, objective)``.
    objective : str, optional
        For ``placement="auto"``. "latency": the least time for one call. "throughput": the least time between calls,
        of which several are in flight (``vm.submit``).
    limits : ImportLimits, optional
        The most nodes and computed constants that the model may become, default ``rh.ImportLimits()``. A small file can
        ask for more than any machine has; raise them for a large model that you trust.
    memory_limit : int, str or mapping, optional
        For ``placement="auto"``: the most that weights and values may take on each device, bytes or text (``"4GB"``),
        or a mapping from devices to these, as ``VirtualMachine(memory_limit=)`` takes it.
    cache : PagedCache, optional
        For decoders with nodes of GroupQueryAttention, as onnxruntime-genai writes them: inputs and outputs
        ``past_key_values`` and ``present`` become a cache of pages, and the module has the functions ``decode_B`` and
        ``prefill_C`` of `from_gguf` in the place of "main". Not with `shapes` nor ``placement="auto"``.

    Returns
    -------
    mod : tvm.IRModule
        With one function, "main". Its parameters are the graph's inputs, in order, under their names; its attributes
        "input_names" and "output_names" hold the ONNX names. A binding has the name of the node it comes from, a
        nameless node being ``OpType_index`` (its position in the graph). Weights are constants. With vdevices,
        transfers are in place: an input lives on the device of its first use, an output where it is made.

    Raises
    ------
    FrontendError
        If the model cannot be read or imported (naming file, node and op), or a shape or pattern does not fit it, or it
        becomes larger than `limits` allow, or `cache` is given for a model that is no such decoder.
    VDeviceError
        If a device string names nothing in `vdevices`.
    PlacementError
        If `objective` is neither, or no placement that is found fits `memory_limit`.
    """
    devices = check_placement(vdevices, placement, cost_model, objective, memory_limit)
    model = load_model(model_or_path, limits)
    if cache is not None:
        return _decoder(model, devices, placement, shapes, cache)
    with errors_of(model.source), importing_for(devices):
        model, strings = with_coded_strings(model)
        nodes = name_nodes(model.proto)
        if devices is not None and not isinstance(placement, str):
            assign_devices(nodes, placement or {}, devices)  # patterns are looked at before the work of importing
        graph = import_nodes(model, nodes, shapes)
        source = ImportSource(graph, nodes, [output.name for output in model.proto.graph.output], strings)
        return placed_module(source, devices, placement, cost_model, objective, memory_limit)


def _decoder(
    model: OnnxModel,
    devices: list[tvm.relax.VDevice] | None,
    placement: PlacementRules | Literal["auto"] | None,
    shapes: Shapes | None,
    cache: PagedCache,
) -> tvm.IRModule:
    """The placed functions of a decoder with a cache of pages."""
    if shapes is not None or isinstance(placement, str):
        found = "shapes" if shapes is not None else f"placement={placement!r}"
        raise FrontendError(f"{found} is given, which does not go with cache, whose functions have known sizes")
    with errors_of(model.source), importing_for(devices):
        mod = decoder_module(model, name_nodes(model.proto), cache)
    return mod if devices is None else place(mod, placement or {}, devices)
