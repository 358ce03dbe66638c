"""``take`` whose indices are known to be in bounds, without a check and without a warning about that.

Stock TVM warns at every compilation of one; importers ask for it where they have made the indices themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, tirx

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_INJECTIVE = 2
"""The pattern of ops that FuseOps joins with elementwise ones; it cannot see that of an op that reads its indices."""


def legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`."""
    stock = tvm.ir.Op.get("relax.take").get_attr("FLegalize")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, index = call.args
        is_known = isinstance(index.ty, relax.TensorType) and min(int(data.ty.ndim), int(index.ty.ndim)) >= 0
        if str(call.attrs.mode) != "fast" or call.attrs.axis is None or not is_known:
            return stock(builder, call)
        axis = int(call.attrs.axis) % int(data.ty.ndim)
        return builder.call_te(
            _take, data, index, axis, primfunc_name_hint="take", primfunc_attrs={"op_pattern": _INJECTIVE}
        )

    return {"relax.take": legalize}


def _take(x: te.Tensor, index: te.Tensor, axis: int) -> te.Tensor:
    rank = len(index.shape)

    def element(*place: tirx.Var) -> tirx.PrimExpr:
        return x(*place[:axis], index(*place[axis : axis + rank]), *place[axis + rank :])

    return te.compute([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]], element, name="take")
