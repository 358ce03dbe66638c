"""Traits of Relax ops: one row for each op, with all properties that passes, placement and reports read.

Functions of expressions have their rows in `encoding.functions`, and become rows here. Where a property is the name of
a rule (`permute`, `sizes`), the package that applies the rule has a function of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..encoding.functions import FUNCTIONS


@dataclass(frozen=True)
class Traits:
    """Properties of one op; the defaults hold for an op without a row."""

    # Family whose members passes treat alike: "product" (of matrices), "conv", "conv_transpose", "attention", "einsum",
    # "max_pool", "avg_pool", "row_norm", "channel_norm", "softmax", "reduction", "moment".
    kind: str = ""
    # Whether an element of the result depends only on the (broadcast) operands' elements at its index.
    is_elementwise: bool = False
    moves: bool = False  # whether all elements of the result are elements of the operands
    keeps_order: bool = False  # whether it only changes the shape: the elements stay in the same order in memory
    # Whether it does not compute with elements, so that it also works on raw bytes; true for all `moves`.
    ignores_numbers: bool = False
    # Whether the result may be the operand itself, if the op changes nothing; true for all `moves`.
    may_return_operand: bool = False
    is_exact: bool = False  # whether the result is an operand's value or has its precision, so that nothing is rounded
    # Whether it may be fused into the kernel that computes an operand; true for all elementwise ops.
    joins_operand: bool = False
    flops: int = 1  # instructions for one element; 0 for an op without a kernel
    # Role in `ToMixedPrecision`: "product", "moved", "stored" or "exact"; see `transform.quantize.precision_rules`.
    precision: str = ""
    # Names of the rules in `transform.permute.permute_rules` and `transform.sizes.op_sizes`; empty without one.
    permute: str = ""
    sizes: str = ""
    takes_callee: bool = False  # whether the first argument is a function that the op calls
    writes: bool = False  # whether it writes to an operand
    needs_no_kernel: bool = False  # whether later passes or the virtual machine carry it out, without a kernel


_DEFAULT = Traits()


def _rows(names: str, **facts: Any) -> dict[str, Traits]:
    return dict.fromkeys(relax_ops(names), Traits(**facts))


def _elementwise(names: str, **facts: Any) -> dict[str, Traits]:
    return _rows(names, is_elementwise=True, joins_operand=True, permute="elementwise", **facts)


def _moving(names: str, precision: str = "moved", **facts: Any) -> dict[str, Traits]:
    moving = Traits(moves=True, ignores_numbers=True, may_return_operand=True, is_exact=True, precision=precision)
    return dict.fromkeys(relax_ops(names), replace(moving, **facts))


def relax_ops(names: str) -> list[str]:
    """Names of ops, split at blanks and prefixed with ``relax.``."""
    return [f"relax.{name}" for name in names.split()]


TRAITS: dict[str, Traits] = {
    # Elementwise work.
    **{
        name: traits
        for function in FUNCTIONS.values()
        for name, traits in _elementwise(function.op, is_exact=function.is_exact, flops=function.cost).items()
    },
    **_elementwise("power", flops=30),
    **_elementwise(
        """acos acosh asin asinh atan atanh bitwise_not cos cosh isfinite isinf isnan logical_not sign sin sinh tan
        trunc nn.softplus nn.selu floor_divide mod floor_mod atan2 log_add_exp equal not_equal greater greater_equal
        less less_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor left_shift right_shift"""
    ),
    **_elementwise("where", is_exact=True, ignores_numbers=True, may_return_operand=True),
    **_elementwise("astype", is_exact=True, may_return_operand=True),
    **_rows("nn.dropout", joins_operand=True, may_return_operand=True, permute="same"),
    **_rows("nn.prelu", joins_operand=True, permute="along", sizes="per_axis"),
    **_rows("quantize dequantize", permute="quantize", sizes="per_axis"),
    **_rows("zeros_like", ignores_numbers=True, permute="same"),
    **_rows("ones_like full_like", permute="same"),
    **_rows("ewise_fma nn.cross_entropy_with_logits", sizes="equal_shapes"),
    **_rows("nn.nll_loss", sizes="nll_loss"),
    # Moves of elements.
    **_moving("reshape", keeps_order=True, flops=0, permute="reshape", sizes="reshape", needs_no_kernel=True),
    **_moving("expand_dims squeeze flatten", keeps_order=True, flops=0, permute="reshape"),
    **_moving("nn.batch_flatten", keeps_order=True, permute="reshape"),
    **_moving("permute_dims stack dynamic_strided_slice"),
    **_moving("layout_transform", precision=""),
    **_moving("concat", permute="concat"),
    **_moving("split", permute="split"),
    **_moving("strided_slice", permute="strided_slice"),
    **_moving("take", permute="take"),
    **_moving("broadcast_to", permute="broadcast_to", sizes="broadcast_to"),
    **_moving("repeat flip", permute="along"),
    **_moving("tile", permute="tile"),
    **_moving("gather_elements", sizes="gather_elements"),
    **_moving("gather_nd", sizes="gather_nd"),
    **_moving("nn.pixel_shuffle", sizes="pixel_shuffle"),
    **_moving("to_vdevice", may_return_operand=False, permute="same", needs_no_kernel=True),
    **_moving("hint_on_device", needs_no_kernel=True),
    **_rows("scatter_elements", ignores_numbers=True, may_return_operand=True, sizes="scatter_elements"),
    **_rows("scatter_nd", ignores_numbers=True, may_return_operand=True, sizes="scatter_nd"),
    **_rows(
        """slice_scatter index_put collapse_sum_like collapse_sum_to wrap_param stop_lift_params hetero.set_encoding
        hetero.unset_encoding hetero.relayout""",
        may_return_operand=True,
    ),
    **_rows("nn.pad", may_return_operand=True, precision="moved", permute="pad", sizes="pad"),
    **_rows("reverse_sequence", sizes="reverse_sequence"),
    # Products.
    **_rows("matmul", kind="product", precision="product", sizes="matmul"),
    **_rows("nn.conv1d nn.conv2d nn.conv3d", kind="conv", precision="product", sizes="convolution"),
    **_rows("nn.conv1d_transpose nn.conv2d_transpose nn.conv3d_transpose", kind="conv_transpose", sizes="convolution"),
    **_rows("nn.attention nn.attention_bias", kind="attention", precision="product", sizes="attention"),
    **_rows("nn.attention_var_len", kind="attention"),
    **_rows("hetero.attention", sizes="own_attention"),
    **_rows("einsum", kind="einsum", sizes="einsum"),
    # Pools and images.
    **_rows("nn.max_pool1d nn.max_pool2d nn.max_pool3d", kind="max_pool", precision="moved", permute="pool"),
    **_rows("nn.avg_pool1d nn.avg_pool2d nn.avg_pool3d", kind="avg_pool", precision="stored", permute="pool"),
    **_rows("nn.adaptive_avg_pool1d nn.adaptive_avg_pool2d nn.adaptive_avg_pool3d", precision="stored", permute="pool"),
    **_rows("image.resize2d image.resize3d", precision="stored", permute="resize"),
    **_rows("image.grid_sample", sizes="batch_only"),
    # Rows and channels.
    **_rows("nn.softmax nn.log_softmax", kind="softmax", flops=20, precision="exact", permute="along_rows"),
    **_rows("nn.layer_norm", kind="row_norm", flops=10, precision="exact", permute="rows_norm", sizes="last_norm"),
    **_rows("nn.rms_norm", kind="row_norm", precision="exact", permute="rows_norm", sizes="last_norm"),
    **_rows(
        "nn.group_norm nn.instance_norm",
        kind="channel_norm",
        precision="exact",
        permute="channels_norm",
        sizes="channel_norm",
    ),
    **_rows("nn.batch_norm", flops=4, joins_operand=True, permute="batch_norm", sizes="channel_norm"),
    **_rows("sum mean prod", kind="reduction", precision="exact", permute="reduction"),
    **_rows("max min", kind="reduction", is_exact=True, precision="exact", permute="reduction"),
    **_rows("variance std", kind="moment", precision="exact", permute="reduction"),
    **_rows("argmax argmin", permute="extreme"),
    **_rows("cumsum cumprod", permute="along"),
    **_rows("topk", sizes="topk"),
    # Shapes and calls.
    **_rows("shape_of", flops=0, ignores_numbers=True, needs_no_kernel=True),
    **_rows("tensor_to_shape memory.view", ignores_numbers=True, needs_no_kernel=True),
    **_rows("inspect.tensor_shape_i", ignores_numbers=True),
    **_rows(
        "memory.ensure_zero_offset null_value make_closure invoke_closure invoke_pure_closure", needs_no_kernel=True
    ),
    **_rows("call_tir call_tir_with_grad", takes_callee=True, needs_no_kernel=True),
    **_rows("call_tir_inplace call_inplace_packed", takes_callee=True, writes=True, needs_no_kernel=True),
    **_rows("call_dps_packed call_builtin_with_ctx call_py_func", takes_callee=True, needs_no_kernel=True),
    **_rows("call_pure_packed", takes_callee=True, ignores_numbers=True, needs_no_kernel=True),
    **_rows("vm.call_tir_dyn dist.call_tir_local_view", takes_callee=True),
    **_rows("hetero.cached_attention", writes=True),
}


def traits_of(name: str | None) -> Traits:
    """The traits of an op by its name; the defaults for an op without a row and for None."""
    return TRAITS.get(name or "", _DEFAULT)


def ops_where(predicate: Callable[[Traits], bool]) -> frozenset[str]:
    """Names of the ops whose traits satisfy a predicate."""
    return frozenset(name for name, traits in TRAITS.items() if predicate(traits))


ELEMENTWISE = ops_where(lambda traits: traits.is_elementwise)
MOVES = ops_where(lambda traits: traits.moves)
