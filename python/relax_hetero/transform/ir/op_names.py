"""Names of the Relax ops that several passes look for."""

from __future__ import annotations

from ...op.streamed import STREAM
from ...op.traits import ops_where

HINT = "relax.hint_on_device"
TRANSFER = "relax.to_vdevice"
TRANSFERS = (TRANSFER, STREAM)
PERMUTE = "relax.permute_dims"
RESHAPE = "relax.reshape"
CAST = "relax.astype"
CONCAT = "relax.concat"
CALL_TIR_INPLACE = "relax.call_tir_inplace"
CALL_TIR = "relax.call_tir"
CALL_TIR_OPS = (CALL_TIR, CALL_TIR_INPLACE, "relax.call_tir_with_grad")
IN_PLACE = ops_where(lambda traits: traits.writes)  # ops that write to an operand


_OWN_PREFIXES = ("vm.", "relax.", "relax_hetero.", "runtime.")


def is_own_function(name: str) -> bool:
    """Return whether a packed function belongs to the virtual machine, TVM or this library."""
    return name.startswith(_OWN_PREFIXES)
