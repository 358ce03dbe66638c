"""RealizeTargets: vdevices whose target names only a kind get this machine's CPU or GPU.

Before::

    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("c", 1)]})

After, on a machine with such a CPU::

    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "mcpu": "znver5", "num-cores": 16}),
                                       I.vdevice("c", 1)]})

Thus ``I.vdevice("llvm")`` means what ``vdevices=["llvm"]`` means; TVM's own default is the oldest CPU of this
architecture, which ``{"kind": "llvm", "mcpu": "generic"}`` names. All references to the vdevices are updated.

Assumes nothing. A lowered module is returned as it is, and so is one whose targets say more; a second run changes
nothing. A vdevice stays as it is where it would be like another one of the list.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ...target.native_target import check_cpu_names, with_hardware
from ...target.vdevice import same_vdevice, vdevices_of
from ..ir.declare import declare_pass
from ..ir.module_attrs import is_lowered
from ..ir.remarks import remarks_of, with_remarks
from .update_vdevice import succeed_vdevices


def realize_targets(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    VDeviceError
        When it runs: a CPU or an architecture that LLVM does not know.
    """
    old = vdevices_of(mod)
    new: list[relax.VDevice] = []
    for vdevice in old:
        check_cpu_names(vdevice.target)
        made = with_hardware(vdevice)
        new.append(vdevice if any(same_vdevice(made, other) for other in (*old, *new)) else made)
    if is_lowered(mod) or all(same_vdevice(*pair) for pair in zip(old, new, strict=True)):
        return mod
    placement = remarks_of(mod).placement  # the names of the devices are the same
    return with_remarks(succeed_vdevices(mod, new, new), placement=placement)


RealizeTargets = declare_pass("RealizeTargets", realize_targets)
