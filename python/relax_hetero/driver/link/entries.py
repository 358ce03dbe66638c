"""Entries: the functions that programs without this package call, with the model's inputs alone.

Before, in a lowered module (`with_bodies` then renames the function)::

    @R.function
    def main(x, constants): ...

After, in the bytecode::

    main(x):
        storage = vm.builtin.alloc_storage(vm, (1,), 0, "uint8", "global")   # for each device
        probe = vm.builtin.alloc_tensor(storage, ...)
        constants = relax_hetero.enter(0, probe, ..., x)
        result = relax_hetero.body.main(x, constants)
        return relax_hetero.leave(0, result, x)

`enter` and `leave` are part of exported files (`vm/file/standalone.c`): `enter` checks the arguments and places the
constants on the devices of TVM's virtual machine, which the probes show. `rh.vm.VirtualMachine` does that itself, and
calls the bodies.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax
from tvm_ffi import structural_map

from ...artifact.metadata import body_symbol
from ...artifact.signature import FunctionSignature
from ...transform.ir.rewriting import copy_module

ENTER, ARGUMENT, LEAVE = "relax_hetero.enter", "relax_hetero.argument", "relax_hetero.leave"


def with_bodies(mod: tvm.IRModule, signatures: Mapping[str, FunctionSignature]) -> tvm.IRModule:
    """Rename the functions of `signatures` in a lowered module, so that entries can have their names.

    `mod`: lowered module with lifted constants; `signatures`: functions that users call, by name.
    """
    renamed = {gv: tvm.ir.GlobalVar(body_symbol(gv.name_hint)) for gv in mod.functions if gv.name_hint in signatures}
    rename = (tvm.ir.GlobalVar, lambda gv: renamed.get(gv, gv))
    functions = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function):
            func = structural_map(func, rename)
        if gv in renamed:
            func = func.with_attr("global_symbol", renamed[gv].name_hint)
        functions[renamed.get(gv, gv)] = func
    return copy_module(mod, functions)


def emit_entries(
    builder: relax.ExecBuilder,
    signatures: Mapping[str, FunctionSignature],  # as `with_bodies` takes them
    # Number of devices of TVM's virtual machine: the vdevices of the module, and the host if it is not one of them.
    num_devices: int,
) -> None:
    """Add an entry for each body to bytecode."""
    byte, scope = tvm.DataType("uint8"), builder.convert_constant("global")
    for number, (name, signature) in enumerate(signatures.items()):
        count = len(signature.inputs)
        args = [builder.r(i) for i in range(count)]
        constants = count
        probes = [builder.r(count + 1 + i) for i in range(num_devices)]
        storage = builder.r(count + 1 + num_devices)
        with builder.function(name, count, list(signature.input_names)):
            for device, probe in enumerate(probes):
                allocation = [builder.vm_state(), (1,), builder.imm(device), byte, scope]
                builder.emit_call("vm.builtin.alloc_storage", allocation, storage)
                tensor = [storage, builder.imm(0), (1,), byte, scope]
                builder.emit_call("vm.builtin.alloc_tensor", tensor, probe)
            builder.emit_call(ENTER, [builder.imm(number), *probes, *args], constants)
            for index, spec in enumerate(signature.inputs):
                if spec.name in signature.copied or spec.name in signature.defaults:
                    builder.emit_call(ARGUMENT, [builder.imm(number), builder.imm(index), args[index]], args[index])
            operands = [*args, builder.r(constants)] if signature.takes_constants else args
            builder.emit_call(body_symbol(name), operands, constants)
            builder.emit_call(LEAVE, [builder.imm(number), builder.r(constants), *args], constants)
            builder.emit_ret(builder.r(constants))
