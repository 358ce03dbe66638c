"""LaunchTogether: the command buffers of a mesh's GPUs are launched right after one another.

Before::

    cls.main_commands(x, addresses, state, alloc)                                # on cuda:0
    R.memory.kill_tensor(addresses)
    storage = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
    alloc_1 = R.memory.alloc_tensor(storage, 0, ...)
    cls.main_commands_1(x_1, addresses_1, state_1, alloc_1)                      # on cuda:1

After::

    storage = R.memory.alloc_storage(R.shape([64]), 1, "global", "uint8")
    alloc_1 = R.memory.alloc_tensor(storage, 0, ...)
    cls.main_commands(x, addresses, state, alloc)
    cls.main_commands_1(x_1, addresses_1, state_1, alloc_1)
    R.call_packed("relax_hetero.await_launches")
    R.memory.kill_tensor(addresses)

Kernels of the first GPU wait for those of the others, so the host allocates before it launches any of them, and waits
for launches that threads of the GPUs make (`vm.device.graph_launches`) after the last one. Only allocations move before
launches, and each GPU has at most one of the launches that then follow one another: memory that is released between two
launches of the same GPU is released before the second one, as without this pass.

Assumes PlanMemoryPerDevice and KillAfterLastUse. Modules without memory that GPUs of a mesh share stay as they are;
others change as a whole, as threads also launch the command buffers of functions that one with such memory calls. A
second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ...artifact.nccl_layout import NCCL_MEMORY
from ...artifact.peer_layout import AWAIT_LAUNCHES, PEER_MEMORY
from ..ir.blocks import Block, rewrite_function
from ..ir.declare import declare_pass
from ..ir.rewriting import effect, op_name, relax_functions, walk_bindings, with_functions
from ..record.region_attrs import regions_of

_ALLOCATIONS = ("relax.memory.alloc_storage", "relax.memory.alloc_tensor")
_RELEASES = ("relax.memory.kill_storage", "relax.memory.kill_tensor", "relax.vm.kill_object")


def launch_together(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    devices = {region.name: region.device for region in regions_of(mod)}

    def rewrite(block: Block) -> list[relax.Binding] | None:
        return _together(block, devices)

    if not any(_is_shared(binding) for _, func in relax_functions(mod) for binding in walk_bindings(func)):
        return mod
    return with_functions(mod, {gv: rewrite_function(func, rewrite) for gv, func in relax_functions(mod)})


LaunchTogether = declare_pass("LaunchTogether", launch_together)


def _is_shared(binding: relax.Binding) -> bool:
    """Return whether a binding asks for memory that the GPUs of a mesh share."""
    return _callee(binding) in (PEER_MEMORY, NCCL_MEMORY)


def _callee(binding: relax.Binding) -> str:
    """Name of the packed function that a binding calls; empty for other bindings."""
    function = getattr(binding.value, "op", None)
    return str(function.global_symbol) if isinstance(function, relax.ExternFunc) else ""


def _together(block: Block, devices: dict[str, int]) -> list[relax.Binding] | None:
    result: list[relax.Binding] = []
    launches: list[relax.Binding] = []
    after: list[relax.Binding] = []  # releases, and tuples of results
    launched: set[int] = set()

    def flush() -> None:
        result.extend([*launches, *([effect(AWAIT_LAUNCHES)] if launches else []), *after])
        for pending in (launches, after, launched):
            pending.clear()

    for binding in block.bindings:
        value = binding.value
        if _callee(binding) == AWAIT_LAUNCHES:
            continue
        device = devices.get(value.op.name_hint) if isinstance(getattr(value, "op", None), tvm.ir.GlobalVar) else None
        if device is not None:
            if device in launched:
                flush()
            launches.append(binding)
            launched.add(device)
        elif launches and (op_name(value) in _RELEASES or isinstance(value, relax.Tuple)):
            after.append(binding)
        else:
            if op_name(value) not in _ALLOCATIONS:
                flush()
            result.append(binding)
    flush()
    return result if any(_callee(binding) == AWAIT_LAUNCHES for binding in result) else None
