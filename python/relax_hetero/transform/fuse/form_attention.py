"""FormAttention: fuse scores, mask, softmax and weighted sum into one op where the device has a kernel for it.

Before::

    q = R.permute_dims(R.reshape(xq, R.shape([1, 128, 12, 64])), axes=[0, 2, 1, 3])
    k = R.permute_dims(R.reshape(xk, R.shape([1, 128, 12, 64])), axes=[0, 2, 3, 1])
    v = R.permute_dims(R.reshape(xv, R.shape([1, 128, 12, 64])), axes=[0, 2, 1, 3])
    p = R.nn.softmax(R.add(R.multiply(R.matmul(q, k), R.const(0.125)), mask), axis=-1)
    y = R.reshape(R.permute_dims(R.matmul(p, v), axes=[0, 2, 1, 3]), R.shape([1, 128, 768]))

After::

    y = R.hetero.attention(xq, xk, xv, mask, heads="(b, m, h*d) * (b, n, g*d) * (b, n, g*e) -> (b, m, h*e); b=1, ...",
                           scores="add(multiply(x0, 0.125), x1)")

Products of one tensor with constant weights whose results only attention reads are merged to one product, and attention
reads its slices (`merge_products`). TVM's CombineParallelMatmul merges products for any reader, which would then copy
its slice. The match starts at the softmax: TVM's dataflow patterns name each op of a match, and models write attention
in too many ways.

Assumes a placed module (RealizeVDevice). A second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ...encoding.problem import AttentionProblem
from ...encoding.resolver import resolver_or_default
from ...op.attention import attention
from ...target.element_types import TF32
from ..ir.blocks import Block, rewrite_function, without_unused
from ..ir.callee_devices import target_of
from ..ir.declare import declare_pass
from ..ir.module_attrs import WITHOUT_TF32
from ..ir.remarks import record_missed
from ..ir.rewriting import op_name, relax_functions, typed, with_functions
from .attention_patterns import ATTENTION_OPS, Attention, NoAttention, find_attention, find_attention_op
from .merge_products import merge_products


def form_attention(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; it returns the same module if nothing changes."""
    return with_functions(mod, {gv: _form_in_function(func, gv.name_hint) for gv, func in relax_functions(mod)})


FormAttention = declare_pass("FormAttention", form_attention)


def _form_in_function(func: relax.Function, name: str) -> relax.Function:
    while True:
        exact = frozenset(map(str, func.attrs[WITHOUT_TF32])) if WITHOUT_TF32 in func.attrs else None
        formed = rewrite_function(func, lambda block, exact=exact: _form(block, name, exact))  # type: ignore[misc]
        if formed is func:
            return rewrite_function(func, merge_products)
        func = formed


def _form(block: Block, function: str, exact: frozenset[str] | None) -> list[relax.Binding] | None:
    """The block with its attention formed; `exact` names the float32 products that stay exact (None: all of them)."""
    matches: dict[int, Attention] = {}
    uses_tf32: dict[int, bool] = {}
    removed: set[int] = set()
    for index, binding in enumerate(block.bindings):
        name = op_name(binding.value)
        if name not in ("relax.nn.softmax", *ATTENTION_OPS):
            continue
        target = target_of(binding.var.ty.vdevice)
        if AttentionProblem not in resolver_or_default(target).problems:
            continue
        try:
            is_op = name in ATTENTION_OPS
            match = find_attention_op(block, index) if is_op else find_attention(block, index, "gpu" in target.keys)
        except NoAttention as reason:
            record_missed(function, binding.var.name, "attention", str(reason))
            continue
        if match is None:
            continue
        tf32 = _may_round(block, match, exact, target)
        unsupported = _unsupported_reason(match, target, tf32)
        if unsupported:
            record_missed(function, binding.var.name, "attention", unsupported)
            continue
        # A match that reads an inner value of another one, through views, is formed in the next iteration.
        inner = removed - matches.keys()
        if not any(isinstance(x, relax.Var) and block.positions.get(x, -1) in inner for x in match.operands):
            matches[match.end] = match
            uses_tf32[match.end] = tf32
            removed.update(match.inside)
    if not matches:
        return None
    bindings = [
        _formed(binding, matches[index], uses_tf32[index]) if index in matches else binding
        for index, binding in enumerate(block.bindings)
        if index in matches or index not in removed
    ]
    return without_unused(bindings, block, _is_view)


def _width(attention: Attention) -> int:
    return max(attention.heads.size("d"), attention.heads.size("e"))


def _may_round(block: Block, attention: Attention, exact: frozenset[str] | None, target: tvm.target.Target) -> bool:
    """True if an attention of float32 tensors may round them to tf32, and its device has such a kernel."""
    if exact is None or str(attention.operands[0].ty.dtype) != "float32":
        return False
    names = {block.bindings[index].var.name for index in (*attention.inside, attention.end)}
    return not names & exact and TF32 in resolver_or_default(target).attention_types(target, _width(attention))


def _unsupported_reason(attention: Attention, target: tvm.target.Target, tf32: bool) -> str:
    """The reason why a device should compute an attention by separate ops; empty if one kernel is better."""
    if "gpu" in target.keys and 0 in attention.heads.sizes:
        return "an extent is 0"
    width = _width(attention)
    types, dtype = resolver_or_default(target).attention_types(target, width), str(attention.operands[0].ty.dtype)
    if tf32 or dtype in types:
        return ""
    return f"found {dtype}, heads of {width}; expected one of {sorted(types)}, for which the device has a kernel"


def _formed(binding: relax.Binding, match: Attention, tf32: bool) -> relax.Binding:
    call = attention(
        *match.operands,
        heads=match.heads,
        scores=match.scores,
        causal=match.causal,
        nan_to_zero=match.nan_to_zero,
        tf32=tf32,
    )
    return relax.VarBinding(binding.var, typed(call, binding.var.ty), binding.span)


def _is_view(value: relax.Expr) -> bool:
    """Return whether a value is a view that attention absorbs, so that it is removed without users."""
    name = op_name(value)
    return isinstance(value, relax.TupleGetItem) or name in _VIEWS


_VIEWS = frozenset(
    """relax.permute_dims relax.reshape relax.expand_dims relax.squeeze relax.strided_slice relax.take relax.split
    relax.multiply relax.divide relax.broadcast_to relax.repeat relax.astype""".split()
)
