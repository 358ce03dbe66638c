"""Decompositions of the whole layers that torch.nn's Transformer calls in inference, where torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PER_KEY = 1
"""Type of a mask (batch, keys); others have the shape of the scores, or (queries, keys)."""


def fast_path_decompositions(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Functions by op, for `torch.export.ExportedProgram.run_decompositions`."""
    functional = torch.nn.functional

    def attention(
        query: Any,
        key: Any,
        value: Any,
        embed_dim: int,
        num_head: int,
        qkv_weight: Any,
        qkv_bias: Any,
        proj_weight: Any,
        proj_bias: Any,
        mask: Any = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        mask_type: int | None = None,
    ) -> tuple[Any, Any]:
        parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        width = embed_dim // num_head
        q, k, v = (
            functional.linear(x, weight, bias).unflatten(-1, (num_head, width)).transpose(1, 2)
            for x, weight, bias in parts
        )
        if mask is not None:
            mask = mask[:, None, None, :] if mask_type == PER_KEY else mask
            mask = torch.where(mask, float("-inf"), 0.0).to(q.dtype) if mask.dtype == torch.bool else mask
        if need_weights:
            scores = (q * width**-0.5) @ k.transpose(-1, -2)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed, weights = weights @ v, weights.mean(1) if average_attn_weights else weights
        else:
            mixed, weights = functional.scaled_dot_product_attention(q, k, v, mask), query.new_empty(0)
        return functional.linear(mixed.transpose(1, 2).flatten(-2), proj_weight, proj_bias), weights

    def encoder_layer(
        src: Any,
        embed_dim: int,
        num_heads: int,
        qkv_weight: Any,
        qkv_bias: Any,
        proj_weight: Any,
        proj_bias: Any,
        use_gelu: bool,
        norm_first: bool,
        eps: float,
        norm_weight_1: Any,
        norm_bias_1: Any,
        norm_weight_2: Any,
        norm_bias_2: Any,
        ffn_weight_1: Any,
        ffn_bias_1: Any,
        ffn_weight_2: Any,
        ffn_bias_2: Any,
        mask: Any = None,
        mask_type: int | None = None,
    ) -> Any:
        def attend(x: Any) -> Any:
            layer = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
            return attention(x, x, x, *layer, mask, need_weights=False, mask_type=mask_type)[0]

        def feed_forward(x: Any) -> Any:
            hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
            hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
            return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

        def norm(x: Any, weight: Any, bias: Any) -> Any:
            return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

        if norm_first:
            x = src + attend(norm(src, norm_weight_1, norm_bias_1))
            return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
        x = norm(src + attend(src), norm_weight_1, norm_bias_1)
        return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)

    ops = torch.ops.aten
    return {
        ops._native_multi_head_attention.default: attention,
        ops._transformer_encoder_layer_fwd.default: encoder_layer,
    }
