"""What the machine needs to record CUDA graphs: the state of each, and the constants that its launches read."""

from __future__ import annotations

import tvm
from tvm import relax

from ...transform.ir.rewriting import copy_module, is_tensor_constant, relax_functions, walk_bindings
from ...transform.record.form_cuda_graphs import GRAPH_CONSTANTS
from ..link.address_table import AddressTable


def graph_tables(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[AddressTable]]:
    """A lowered module whose graphs' constants are no attributes any more, and the table of each graph."""
    graphs = {gv: func for gv, func in mod.functions.items() if GRAPH_CONSTANTS in func.attrs}
    if not graphs:
        return mod, []
    tables: dict[str, AddressTable] = {}
    for _, relax_func in relax_functions(mod):
        for binding in walk_bindings(relax_func):
            call = binding.value
            if not isinstance(call, relax.Call) or call.op not in graphs:
                continue
            name = call.op.name_hint
            if name not in tables:  # the steps of a schedule call the same graphs
                (state,) = (arg for arg in call.args if is_tensor_constant(arg))
                tables[name] = AddressTable(state, list(graphs[call.op].attrs[GRAPH_CONSTANTS]), [], name)
    plain = {gv: func.without_attr(GRAPH_CONSTANTS) for gv, func in graphs.items()}
    return copy_module(mod, {**dict(mod.functions.items()), **plain}), list(tables.values())
