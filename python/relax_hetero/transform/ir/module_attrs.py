"""Attributes that passes set on modules and functions."""

from __future__ import annotations

import tvm

LOWERED = "relax_hetero.lowered"
PUBLIC = "relax_hetero.public"
PUBLIC_KERNELS = "relax_hetero.public_kernels"
COMMANDS = "relax_hetero.commands"  # PrimFunc attribute: the commands of a command buffer (`record.region_attrs`)
KERNEL = "relax_hetero.kernel"  # PrimFunc attribute: the call of a kernel by command buffers
STRICT = "relax_hetero.strict"
"""Module attribute: GPUs report values that are out of range, too, in a record that the host reads (`CheckValues`)."""
DIVISORS_CHECKED = "relax_hetero.divisors_checked"
"""PrimFunc attribute: divisors of sizes are checked (`CheckSizeDivisors`), or cannot be 0."""
WITHOUT_TF32 = "relax_hetero.tf32_kept"
"""Function attribute: products of float32 may round their operands to tfloat32, except for the variables named here."""
ACCURACY = "relax_hetero.accuracy"
"""Module attribute: pairs of a pattern of names and the accuracy of their convolutions (`SetEncoding`)."""
DEFAULTS = "defaults"  # function attribute: default tensors by parameter after `num_input`
MEMORY = "relax_hetero.memory"  # function attribute: its allocations (`AnnotateMemory`)


def mark_lowered(
    mod: tvm.IRModule,
    vdevices: int,  # number of vdevices of the module
    public: list[str],  # the functions that a caller may use; lowering gives private ones a symbol too
    kernels: list[str],  # the kernels that command buffers recorded by hand may use
) -> tvm.IRModule:
    """Mark a module as lowered to the virtual machine's form."""
    return mod.with_attrs({LOWERED: vdevices, PUBLIC: public, PUBLIC_KERNELS: kernels})


def is_lowered(mod: tvm.IRModule) -> bool:
    """Return whether LowerToVM has been applied."""
    return bool(mod.attrs and LOWERED in mod.attrs)


def device_count(mod: tvm.IRModule) -> int:
    """Number of vdevices of a lowered module; 0 for any other module."""
    return int(mod.attrs[LOWERED]) if is_lowered(mod) else 0


def public_functions(mod: tvm.IRModule) -> list[str]:
    """Names of the functions of a lowered module that a caller may use."""
    return [str(name) for name in mod.attrs[PUBLIC]]


def public_kernels(mod: tvm.IRModule) -> list[str]:
    """Names of the kernels of a lowered module that command buffers recorded by hand may use."""
    return [str(name) for name in mod.attrs[PUBLIC_KERNELS]]
