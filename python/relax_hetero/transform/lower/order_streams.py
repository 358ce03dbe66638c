"""OrderStreams: a copy of a constant to a GPU waits only for the readers of the memory that it overwrites.

Before::

    s = R.memory.alloc_storage(R.shape([1024]), 1, "streamed", "uint8")
    a_buffer = R.memory.alloc_tensor(s, 0, ...)
    a = R.call_packed("relax_hetero.stream_to_device", constant_a, 1, 0, a_buffer)
    ...                                                                            # readers of a
    b = R.call_packed("relax_hetero.stream_to_device", constant_b, 1, 0, b_buffer)   # another storage
    ...
    c_buffer = R.memory.alloc_tensor(s, 0, ...)
    c = R.call_packed("relax_hetero.stream_to_device", constant_c, 1, 0, c_buffer)

After, with storage in the scope "global"::

    c = R.call_packed("relax_hetero.stream_to_device", constant_c, 1, 1, c_buffer)

All readers of `a` were launched before `b` was copied. The third operand of the copy of `c` says so: it may begin after
the work that was launched before the copy one ago (0: before itself), so that it overlaps the readers of `b`. Copies
are counted for each device.

Functions with control flow, or that call functions, keep the order.

Assumes PlanMemoryPerDevice, which lets storage alternate. A second run changes nothing.
"""

from __future__ import annotations

from collections import defaultdict

import tvm
from tvm import relax

from ..ir.blocks import used_vars
from ..ir.declare import declare_pass
from ..ir.rewriting import map_bindings, op_name, relax_functions, typed, walk_bindings, with_args, with_functions
from ..ir.tensor_aliases import is_view
from .lower_transfers import STREAM_TO_DEVICE, STREAMED


def order_streams(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    return with_functions(mod, {gv: _ordered(func, mod) for gv, func in relax_functions(mod)})


OrderStreams = declare_pass("OrderStreams", order_streams)


def _ordered(func: relax.Function, mod: tvm.IRModule) -> relax.Function:
    values = [binding.value for binding in walk_bindings(func)]
    is_straight = not any(isinstance(value, relax.If) or _calls_function(value, mod) for value in values)
    storages: dict[relax.Var, relax.Var] = {}  # of buffers, and of values in them
    released: dict[relax.Var, int] = {}  # storage -> the first copy after its last reader
    devices: dict[relax.Var, int] = {}  # of storages
    counts: defaultdict[int, int] = defaultdict(int)  # device -> copies so far

    def change(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        used = [storages[var] for var in used_vars(value) if var in storages]
        if op_name(value) == "relax.memory.alloc_storage":
            devices[binding.var] = int(value.args[1].value)
        if op_name(value) == "relax.memory.alloc_storage" and value.args[2].value == STREAMED:
            operands = [*value.args[:2], tvm.ir.StringImm("global"), value.args[3]]
        elif _is_copy(value) and is_straight and used:
            storages[binding.var] = storage = used[-1]
            number = counts[devices[storage]]
            operands = [*value.args[:2], relax.prim_value(number - released.get(storage, number)), value.args[3]]
            released[storage] = counts[devices[storage]] = number + 1
        else:
            if op_name(value) == "relax.memory.alloc_tensor" and value.args[0] in devices:
                storages[binding.var] = value.args[0]
            for storage in used:
                released[storage] = counts[devices[storage]]
            if used and (is_view(value) or isinstance(value, relax.Var)):
                storages[binding.var] = used[0]
            return binding
        return relax.VarBinding(binding.var, typed(with_args(value, operands), value.ty), binding.span)

    return map_bindings(func, change)


def _is_copy(value: relax.Expr) -> bool:
    is_packed = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
    return is_packed and str(value.op.global_symbol) == STREAM_TO_DEVICE


def _calls_function(value: relax.Expr, mod: tvm.IRModule) -> bool:
    return isinstance(value, relax.Call) and isinstance(mod.functions.get(value.op), relax.Function)
