"""PropagateEncodings: work around products and convolutions is done on their encoded operands and results.

Before::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    y = R.hetero.unset_encoding(out, "matmul[2]<...>")
    z = R.nn.relu(R.add(y, bias))

After::

    out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]<...>")
    z_encoded = R.hetero.elementwise(out, bias, expression="relu(add(x0, x1))", encoding="matmul[2]<...>")
    z = R.hetero.unset_encoding(z_encoded, "matmul[2]<...>")

What moves, and where it stops:

- Permutations of operands and results of a matrix product become index maps (`absorb_permutes`).
- Elementwise work on the result of either becomes one expression (`elementwise_regions`), up to the last value through
  which all uses of it go: nothing is computed or stored twice for it.
- `unset_encoding` moves below a transfer if everything on the other side sets that encoding again; work never moves
  from one device to another.
- A pair of unset and set with one encoding cancels.

TVM's FuseTransposeMatmul makes a kernel of loops for a product with a transposed right operand; an index map lets the
device's own kernel read either operand, and write the result, in any order.

Assumes SetEncoding, and asks no device anything: SpecializeEncodings undoes all of it where a device has no layout.
Linear in the number of bindings; a second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from ...op import encoded as op
from ...op.encoded import encoded_op
from ..ir.blocks import Block, Emitter, renamed, rewrite_blocks, without_unused
from ..ir.declare import declare_pass
from ..ir.op_names import TRANSFER
from ..ir.rewriting import op_name
from ..quantize.quantized_operands import is_part_of_quantized
from .absorb_permutes import absorb_permutes
from .elementwise_regions import absorb_elementwise

Step = Callable[[Block], "list[relax.Binding] | None"]


def propagate_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    return rewrite_blocks(mod, _propagate)


PropagateEncodings = declare_pass("PropagateEncodings", propagate_encodings)


def _propagate(block: Block) -> list[relax.Binding] | None:
    if not any(encoded_op(binding.value) for binding in block.bindings):
        return None
    changed = False
    for step in _STEPS:
        bindings = step(block)
        if bindings is not None:
            kept = without_unused(bindings, block, _is_droppable)
            block, changed = Block(kept, block.is_dataflow, block.used_later), True
    return block.bindings if changed else None


def drop_unused(block: Block) -> list[relax.Binding] | None:
    """Without what nobody reads, so that it does not count as a reader of what work moves away from."""
    kept = without_unused(block.bindings, block, _is_droppable)
    return kept if len(kept) < len(block.bindings) else None


def _is_droppable(value: relax.Expr) -> bool:
    return op_name(value) in (op.SET, op.UNSET) or is_part_of_quantized(value)


def unset_below_transfers(block: Block) -> list[relax.Binding] | None:
    """``to_vdevice(unset(x))`` becomes ``unset(to_vdevice(x))`` where only `set_encoding` of that encoding uses it."""
    emitter, changed = Emitter(block.is_dataflow), False
    definitions = dict(block.definitions)
    for binding in block.bindings:
        var, value = binding.var, binding.value
        source = definitions.get(value.args[0]) if op_name(value) == TRANSFER else None
        users = [block.bindings[index].value for index in block.users.get(var, [])]
        if source is None or op_name(source) != op.UNSET or not _all_set(users, source) or not block.is_local(var):
            emitter.bindings.append(binding)
            continue
        encoded = source.args[0]
        shape = encoded.ty.shape
        ty = relax.TensorType(shape, encoded.ty.dtype, var.ty.vdevice, -1 if shape is not None else encoded.ty.ndim)
        moved = emitter.emit(relax.Call(value.op, [encoded], value.attrs), ty, f"{var.name}_encoded")
        unset = relax.Call(source.op, [moved], source.attrs, ret_ty=var.ty)
        emitter.bind(var, unset)
        definitions[var] = unset
        changed = True
    return emitter.bindings if changed else None


def _all_set(users: list[relax.Expr], source: relax.Call) -> bool:
    """Return whether there are users and all set the encoding that `source` unsets.

    For another one it would be laid out on one side, undone on the other, and laid out again.
    """
    return bool(users) and all(op_name(user) == op.SET and _same_attrs(user, source) for user in users)


def cancel_pairs(block: Block) -> list[relax.Binding] | None:
    """``set(unset(x))`` and ``unset(set(x))`` of one encoding and layout become ``x``."""
    kept: list[relax.Binding] = []
    same: dict[relax.Var, relax.Expr] = {}
    for binding in block.bindings:
        value = binding.value
        undone = {op.SET: op.UNSET, op.UNSET: op.SET}.get(op_name(value) or "")
        source = block.definition(value.args[0]) if undone else None
        if source is None or op_name(source) != undone or not _same_attrs(value, source):
            kept.append(binding)
            continue
        original = source.args[0]
        same[binding.var] = same.get(original, original) if isinstance(original, relax.Var) else original
        if not block.is_local(binding.var):
            kept.append(relax.VarBinding(binding.var, original))
    return [renamed(binding, same) for binding in kept] if same else None


def _same_attrs(first: relax.Call, second: relax.Call) -> bool:
    return (first.attrs.encoding, first.attrs.layout) == (second.attrs.encoding, second.attrs.layout)


# Permutations first, so that elementwise work behind them is seen; again, for those behind elementwise work.
_STEPS: tuple[Step, ...] = (
    drop_unused,
    cancel_pairs,
    absorb_permutes,
    absorb_elementwise,
    absorb_permutes,
    unset_below_transfers,
    cancel_pairs,
)
