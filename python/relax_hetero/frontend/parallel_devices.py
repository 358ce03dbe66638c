"""Arguments ``tensor_parallel=`` and ``data_parallel=``: the mesh of devices that shares a model, and its inputs."""

from __future__ import annotations

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
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None, placement: Any, count: int, argument: str
) -> tuple[Any, Any]:
    """Devices and placement rules of a number of devices that share the work of every op.

    Parameters
    ----------
    vdevices, placement
        As for `from_onnx` and `from_gguf`.
    count : int
        Number of devices; 1 leaves the other arguments as they are.
    argument : str
        Name of the argument with the number, for errors.

    Raises
    ------
    FrontendError
        If the number is invalid, rules are given besides, or the devices are fewer.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise FrontendError(f"{argument} is {count!r}, expected a number of devices, 1 or more")
    if count == 1:
        return vdevices, placement
    if placement is not None:
        raise FrontendError(
            f"found {argument}={count} and placement, expected one of them; a mesh in rules, such as "
            "{'*': 'cuda[0:2]'}, shares the work of the nodes that it names"
        )
    is_single = vdevices is None or isinstance(vdevices, (str, dict, Target, relax.VDevice))
    entries: list[Any] = [vdevices or "llvm"] if is_single else list(vdevices)  # type: ignore[arg-type]
    if len(entries) == 1 and (isinstance(entries[0], (dict, Target)) or ":" not in str(entries[0])):
        entries *= count
    devices = parse_vdevices(entries)
    if len(devices) < count:
        raise FrontendError(
            f"{argument} is {count}, but vdevices has {len(devices)}; expected so many equal devices, "
            "or one kind, such as 'cuda', that stands for all of them"
        )
    return devices, {"*": f"vdevice[0:{count}]"}


def with_split_batches(mod: tvm.IRModule, count: int) -> tvm.IRModule:
    """Give each of the first devices its part of a batch: shard the inputs of "main" along their first axis.

    Inputs with another extent there than the first input stay whole on every device.

    Parameters
    ----------
    mod : tvm.IRModule
        Its values are on the mesh of its first `count` devices.
    count : int

    Raises
    ------
    FrontendError
        If the batch is not known, or the devices do not divide it.
    """
    func, vdevices = mod["main"], vdevices_of(mod)
    mesh, split = lookup(f"vdevice[0:{count}]", vdevices), Sharding(0)
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
        call, ty = shard(param, str(split)), relax.TensorType(param.ty.shape, param.ty.dtype, mesh)
        names[param] = relax.DataflowVar(f"{param.name}_part", ty)
        relax.expr._update_type(call, ty)
        bindings.append(relax.VarBinding(names[param], call))
    blocks = [type(block)([renamed(each, names) for each in block.bindings]) for block in func.body.blocks]
    body = relax.SeqExpr([relax.DataflowBlock(bindings), *blocks], func.body.body)
    relax.expr._update_type(body, func.body.ty)
    out = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)
    return copy_module(mod, {gv: out if gv.name_hint == "main" else each for gv, each in mod.functions.items()})
