"""Arguments ``tensor_parallel=`` and ``data_parallel=``: the mesh of devices that shares a model, and its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax
from tvm.target import Target

from ..errors import FrontendError
from ..op.sharding import shard
from ..target.vdevice import lookup, parse_vdevices, vdevices_of
from ..transform.ir.blocks import renamed, shape_of
from ..transform.ir.rewriting import copy_module
from ..transform.shard.sharding import Sharding, known

if TYPE_CHECKING:
    from ..target.make_vdevice import VDeviceEntry


def parallel_devices(
    # As for `from_onnx` and `from_gguf`.
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None,
    placement: Any,
    # Number of devices along each axis of their mesh, by the name of the argument; 1 leaves out the axis.
    **counts: int,
) -> tuple[Any, Any]:
    """Devices and placement rules of a number of devices that share the work of every op.

    Raises FrontendError if a number is invalid, rules are given besides, or the devices are fewer.
    """
    for argument, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise FrontendError(f"{argument} is {count!r}, expected a number of devices, 1 or more")
    axes = {argument: count for argument, count in counts.items() if count > 1}
    if not axes:
        return vdevices, placement
    given = " and ".join(f"{argument}={count}" for argument, count in axes.items())
    if placement is not None:
        raise FrontendError(
            f"found {given} and placement, expected one of them; a mesh in rules, such as {{'*': 'cuda[0:2]'}}, shares "
            "the work of the nodes that it names"
        )
    is_single = vdevices is None or isinstance(vdevices, (str, dict, Target, relax.VDevice))
    entries: list[Any] = [vdevices or "llvm"] if is_single else list(vdevices)  # type: ignore[arg-type]
    total = math.prod(axes.values())
    if len(entries) == 1 and (isinstance(entries[0], (dict, Target)) or ":" not in str(entries[0])):
        entries *= total
    devices = parse_vdevices(entries)
    if len(devices) < total:
        needed = f" need {total} devices" if len(axes) > 1 else ""
        raise FrontendError(
            f"{given}{needed}, but vdevices has {len(devices)}; expected so many equal devices, "
            "or one kind, such as 'cuda', that stands for all of them"
        )
    return devices, {"*": _mesh_name(axes.values())}


def _mesh_name(counts: Iterable[int]) -> str:
    """Name of the mesh of the first devices."""
    shape = [count for count in counts if count > 1]
    return f"vdevice[0:{math.prod(shape)}]" + (f"({', '.join(map(str, shape))})" if len(shape) > 1 else "")


def with_split_batches(mod: tvm.IRModule, count: int, replicas: int = 1) -> tvm.IRModule:
    """Give each of the first devices its part of a batch: shard the inputs of "main" along their first axis.

    Inputs with another extent there than the first input stay whole on every device. `mod`: its values are on the mesh
    of its first ``count * replicas`` devices; `count`: number of parts; `replicas`: devices that share the work on each
    part. Raises FrontendError if the batch is not known, or the devices do not divide it.
    """
    func, vdevices = mod["main"], vdevices_of(mod)
    mesh, split = lookup(_mesh_name((count, replicas)), vdevices), Sharding(0)
    placement = "S[0], R" if replicas > 1 else "S[0]"
    shapes = {param: shape for param in func.params if (shape := shape_of(param))}
    batch = next((known(shape[0]) for shape in shapes.values()), None)
    parts = [param for param, shape in shapes.items() if known(shape[0]) == batch and split.divides(shape, count)]
    if not parts:
        inputs = ", ".join(f"{param.name}: {param.ty}" for param in func.params)
        raise FrontendError(
            f"data_parallel is {count}, found inputs {inputs or 'none'}; expected a first input whose first extent "
            f"is a multiple of {count}, which `shapes` gives to an input of any batch size"
        )
    names, bindings = {}, []
    for param in parts:
        call, ty = shard(param, placement), relax.TensorType(param.ty.shape, param.ty.dtype, mesh)
        names[param] = relax.DataflowVar(f"{param.name}_part", ty)
        relax.expr._update_type(call, ty)
        bindings.append(relax.VarBinding(names[param], call))
    blocks = [type(block)([renamed(each, names) for each in block.bindings]) for block in func.body.blocks]
    body = relax.SeqExpr([relax.DataflowBlock(bindings), *blocks], func.body.body)
    relax.expr._update_type(body, func.body.ty)
    out = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)
    return copy_module(mod, {gv: out if gv.name_hint == "main" else each for gv, each in mod.functions.items()})
