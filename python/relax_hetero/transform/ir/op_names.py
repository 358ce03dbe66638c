"""Names of the Relax ops that several passes look for."""

from __future__ import annotations

from ...op.cached_attention import CACHED_ATTENTION

HINT = "relax.hint_on_device"
TRANSFER = "relax.to_vdevice"
PERMUTE = "relax.permute_dims"
RESHAPE = "relax.reshape"
CAST = "relax.astype"
CONCAT = "relax.concat"
CALL_TIR_INPLACE = "relax.call_tir_inplace"
CALL_TIR = "relax.call_tir"
CALL_TIR_OPS = (CALL_TIR, CALL_TIR_INPLACE, "relax.call_tir_with_grad")
IN_PLACE = (CALL_TIR_INPLACE, "relax.call_inplace_packed", CACHED_ATTENTION)
"""Ops that write to an operand."""


_OWN_PREFIXES = ("vm.", "relax.", "relax_hetero.", "runtime.")


def is_own_function(name: str) -> bool:
    """Return whether a packed function belongs to the virtual machine, TVM or this library."""
    return name.startswith(_OWN_PREFIXES)


def relax_ops(names: str) -> list[str]:
    """Names of ops, separated by blanks, with ``relax.`` before each."""
    return [f"relax.{name}" for name in names.split()]


ELEMENTWISE = frozenset(
    relax_ops(
        """abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh erf exp floor isfinite isinf isnan log
        logical_not negative round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc clip astype nn.relu
        nn.gelu nn.gelu_tanh nn.silu nn.leakyrelu nn.softplus nn.selu
        add subtract multiply divide floor_divide mod floor_mod power atan2 maximum minimum log_add_exp
        equal not_equal greater greater_equal less less_equal logical_and logical_or logical_xor
        bitwise_and bitwise_or bitwise_xor left_shift right_shift where"""
    )
)
