"""Attributes that passes leave on a module, for changes that its text does not show."""

from __future__ import annotations

import tvm

LOWERED = "relax_hetero.lowered"
PUBLIC = "relax_hetero.public"
PUBLIC_KERNELS = "relax_hetero.public_kernels"
COMMANDS = "relax_hetero.commands"
"""On a PrimFunc: it is a command buffer, and this says what it does (`region_attrs`)."""
KERNEL = "relax_hetero.kernel"
"""On a PrimFunc: command buffers call it, and this says how."""
STRICT = "relax_hetero.strict"
"""On a module: GPUs report values that are out of range, too, in a record that the host reads (`CheckValues`)."""
DIVISORS_CHECKED = "relax_hetero.divisors_checked"
"""On a PrimFunc: by what sizes are divided has been checked (`CheckSizeDivisors`), or cannot be 0."""
WITHOUT_TF32 = "relax_hetero.tf32_kept"
"""On a Relax function: its products of float32 may round their operands to tfloat32, but for variables named here."""
ACCURACY = "relax_hetero.accuracy"
"""On a module: pairs of a pattern of names and how exact the convolutions of those names are (`SetEncoding`)."""
DEFAULTS = "defaults"
"""On a Relax function: parameter after `num_input` -> its tensor where a caller gives none."""
MEMORY = "relax_hetero.memory"
"""On a Relax function: what it allocates (`annotate_memory`)."""


def mark_lowered(mod: tvm.IRModule, vdevices: int, public: list[str], kernels: list[str]) -> tvm.IRModule:
    """`mod`, marked as in the virtual machine's form.

    Parameters
    ----------
    mod : tvm.IRModule
    vdevices : int
        How many vdevices it has.
    public : list of str
        The functions a caller may use; lowering gives private ones a symbol too.
    kernels : list of str
        The kernels that command buffers recorded by hand may use.
    """
    return mod.with_attrs({LOWERED: vdevices, PUBLIC: public, PUBLIC_KERNELS: kernels})


def is_lowered(mod: tvm.IRModule) -> bool:
    """Return whether LowerToVM has been applied."""
    return bool(mod.attrs and LOWERED in mod.attrs)


def device_count(mod: tvm.IRModule) -> int:
    """How many vdevices a lowered module has; 0 for any other module."""
    return int(mod.attrs[LOWERED]) if is_lowered(mod) else 0


def public_functions(mod: tvm.IRModule) -> list[str]:
    """Names of the functions of a lowered module that a caller may use."""
    return [str(name) for name in mod.attrs[PUBLIC]]


def public_kernels(mod: tvm.IRModule) -> list[str]:
    """Names of the kernels of a lowered module that command buffers recorded by hand may use."""
    return [str(name) for name in mod.attrs[PUBLIC_KERNELS]]
