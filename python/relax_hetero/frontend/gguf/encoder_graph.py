"""Relax functions ``encode_C``, which return the embedding of a text of up to C tokens.

They share layers with ``decode_B`` and ``prefill_C``, but keep nothing: all tokens of a text come in one call. Encoders
(BERT) attend in both directions; the embeddings of other models are results of their last token, for example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from ..paged_cache import CHUNK
from .activation_types import ActivationTypes
from .hyperparameters import Hyperparameters
from .language_graph import LanguageFunction
from .stream_experts import ExpertStreams
from .weights import Weights

_MASKED = -1e30  # score of a key that a query does not attend to; finite, so that rows without keys stay so


def encoder_module(
    model: Hyperparameters, weights: Weights, lengths: Sequence[int], activation_bits: int, types: ActivationTypes
) -> tvm.IRModule:
    """Build functions for texts of up to so many tokens, without placement.

    They take ``tokens``, ``positions`` (-1 after the end of the text), both (rows,) of int32, and ``pooling``, (rows,)
    of float32: the factors of the tokens' results, whose sum they return, (embedding_size,).
    """
    builder = relax.BlockBuilder()
    functions = {}
    for rows in lengths:
        dtypes = {"tokens": "int32", "positions": "int32", "pooling": "float32"}
        params = {name: relax.Var(name, relax.TensorType([rows], dtype)) for name, dtype in dtypes.items()}
        function = _Encoder(
            model, weights, params, rows, rows, CHUNK, activation_bits, types, {}, ExpertStreams(), builder
        )
        functions[tvm.ir.GlobalVar(f"encode_{rows}")] = function.build(f"encode_{rows}")
    return tvm.IRModule({**functions, **builder.get().functions})


class _Encoder(LanguageFunction):
    """Builder of one function."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._masks: dict[tuple[int, relax.VDevice | None], relax.Expr] = {}

    def build(self, name: str) -> relax.Function:
        """Build the function, with `name` as its global symbol."""
        x, model = self._embedding(), self.model
        for layer in range(model.layers):
            x = self._layer(x, layer)
        if not model.architecture.norms.feed_forward_sum:
            x = self._norm(x, "output_norm")
        factors = self.emit(relax.op.expand_dims(self.params["pooling"], 0), "output.factors")
        x = self.emit(relax.op.matmul(factors, x), "output.pooled")
        width = model.hidden_size
        for tensor in ("dense_2", "dense_3"):
            if f"{tensor}.weight" in self.weights:
                rows = self.weights.rows_of(f"{tensor}.weight")
                x, width = self._linear(x, tensor, rows, width, f"output.{tensor}"), rows
        result = self.emit(relax.op.reshape(x, [width]), "output.embedding", is_output=True)
        return self.function(name, {"embedding": result})

    def _attention(self, x: relax.Expr, layer: int) -> relax.Expr:
        """The values that each token attends to, (rows, heads * head_size); there are no pages.

        The ops are those that `FormAttention` makes one kernel of.
        """
        name, model, rows, size = f"blk.{layer}", self.model, self.rows, self.model.head_sizes[layer]
        kv_width = model.kv_heads[layer] * size
        qkv, widths = self._qkv(x, layer), (model.heads * size, kv_width, kv_width)
        parts, end = [], 0
        for part, width in zip("qkv", widths, strict=True):
            begin, end = end, end + width
            value = self._sliced(qkv, begin, end, f"{name}.attn_{part}_part")
            heads = self._reshaped(value, [rows, width // size, size], f"{name}.attn_{part}_split")
            heads = heads if part == "v" else self._turned_heads(heads, layer, part)
            heads = self._cast(heads, self.types.dtype_of(f"{name}.attn"))
            heads = self._reshaped(heads, [1, rows, width // size, size], f"{name}.attn_{part}_batch")
            heads = self.emit(relax.op.permute_dims(heads, [0, 2, 1, 3]), f"{name}.attn_{part}_turned")
            if width < widths[0]:
                heads = self.emit(relax.op.repeat(heads, widths[0] // width, 1), f"{name}.attn_{part}_repeated")
            parts.append(heads)
        query, key, value = parts
        key = self.emit(relax.op.permute_dims(key, [0, 1, 3, 2]), f"{name}.attn_keys")
        product = self._cast(self.emit(relax.op.matmul(query, key), f"{name}.attn"), "float32")
        scores = self._scaled(product, model.scale_of(layer), f"{name}.attn_scaled")
        scores = self.emit(scores + self._mask(layer), f"{name}.attn_masked")
        shares = self.emit(relax.op.nn.softmax(scores, axis=-1), f"{name}.attn_shares")
        shares = self._cast(shares, str(value.ty.dtype))
        result = self._cast(self.emit(relax.op.matmul(shares, value), f"{name}.attn_heads"), "float32")
        result = self.emit(relax.op.permute_dims(result, [0, 2, 1, 3]), f"{name}.attn_rows")
        return self._reshaped(result, [rows, model.heads * size], f"{name}.attn.kqv")

    def _turned_heads(self, x: relax.Expr, layer: int, part: str) -> relax.Expr:
        """Queries or keys with the norms and the rotation that the attention kernel of decoders computes."""
        name, norms = f"blk.{layer}.attn_{part}", self.model.architecture.norms
        if norms.heads == "each" and f"{name}_norm.weight" in self.weights:
            x = self._norm(x, f"{name}_norm")
        is_turned = self._has_rotated_norms(layer) or not self.model.is_rotated(layer)
        return x if is_turned else self._rotated(x, layer, name)

    def _mask(self, layer: int) -> relax.Expr:
        """Summands of the scores of each query (rows) and key (columns)."""
        window = self.model.window_of(layer)
        key = window, self.types.device_of(f"blk.{layer}.attn")
        if key not in self._masks:
            name, positions = f"blk.{layer}.attn_mask", self.params["positions"]
            queries = self.emit(relax.op.expand_dims(positions, 1), f"{name}.queries")
            keys = self.emit(relax.op.expand_dims(positions, 0), f"{name}.keys")
            distance = self.emit(queries - keys, f"{name}.distance")
            first, last = -self.rows, self.rows
            if self.model.is_causal:
                first, last = 0, window - 1 if window else last
            elif window:
                first, last = -(window // 2), window // 2
            bounds = [keys >= _integer(0), distance >= _integer(first)]
            bounds.append(distance <= _integer(last))
            visible, *others = [self.emit(bound, f"{name}.bound") for bound in bounds]
            for other in others:
                visible = self.emit(relax.op.logical_and(visible, other), f"{name}.visible")
            values = [relax.const(value, "float32") for value in (0.0, _MASKED)]
            self._masks[key] = self.emit(relax.op.where(visible, *values), name)
        return self._masks[key]


def _integer(value: int) -> relax.Expr:
    return relax.const(value, "int32")
