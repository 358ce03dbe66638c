"""Residuals of Gemma 3n and 4: embeddings of each layer, and several streams of which layers change one (AltUp).

AltUp (arXiv:2301.13310): before a layer, each stream is predicted from all; after it, the difference of the changed
stream from its prediction corrects all of them. Low-rank residuals (LAuReL, arXiv:2411.07501) are beside attention.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from .feed_forward_graph import FeedForwardGraph
from .graph_ops import scalar

_MIN_MEAN_SQUARE = 1e-5  # minimum mean of squares of a new stream


class ResidualGraph(FeedForwardGraph):
    """Residuals beside that of attention and feed-forward."""

    def _read_layer_inputs(self, x: relax.Expr) -> None:
        """Compute the inputs of all layers from tokens and their embeddings, (rows, layers * layer_width)."""
        model, rows, width = self.model, self.rows, self.model.layer_width
        if not width:
            return
        name, columns = "token_embd.layers", model.layers * width
        table = self._matrix(
            "per_layer_token_embd", [self.weights.rows_of("per_layer_token_embd.weight"), columns], name
        )
        tokens = self.emit(relax.op.take(table, self.params["tokens"], axis=0, mode="clip"), f"{name}_rows")
        tokens = self._scaled(tokens, width**0.5, f"{name}_scaled")
        product = self._linear(x, "per_layer_model_proj", columns, model.hidden_size, f"{name}_proj")
        product = self._scaled(product, model.hidden_size**-0.5, f"{name}_proj_scaled")
        heads = self._reshaped(product, [rows, model.layers, width], f"{name}_heads")
        factors = self.weights.vector("per_layer_proj_norm.weight", width)
        normal = self.emit(self._normal(heads, f"{name}_norm") * factors, f"{name}_norm")
        total = self.emit(tokens + self._reshaped(normal, [rows, columns], f"{name}_flat"), f"{name}_sum")
        self.layer_inputs = self._scaled(total, 0.5**0.5, f"{name}_inputs")

    def _layer_input(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Summand of a layer's result from its embeddings of the tokens, gated by the result, (rows, hidden_size)."""
        model, width, name = self.model, self.model.layer_width, f"blk.{layer}"
        gate = self._linear(x, f"{name}.inp_gate", width, model.hidden_size)
        inputs = self._current(self.layer_inputs, "token_embd.layers_row")
        own = self._sliced(inputs, layer * width, (layer + 1) * width, f"{name}.inp_rows")
        gated = self._activated([gate, own], f"{name}.inp{{}}")
        return self._norm(self._linear(gated, f"{name}.proj", model.hidden_size, width), f"{name}.post_norm")

    def _with_laurel(self, total: relax.Expr, x: relax.Expr, name: str) -> relax.Expr:
        """The mean of a sum and of the layer's input with its product of low rank, times the square root of 2."""
        model, rank = self.model, self.weights.rows_of(f"{name}.laurel_l.weight")
        low = self._linear(x, f"{name}.laurel_l", rank, model.hidden_size)
        product = self._norm(self._linear(low, f"{name}.laurel_r", model.hidden_size, rank), f"{name}.laurel_post_norm")
        laurel = self.emit(x + product, f"{name}.laurel")
        return self._scaled(self.emit(total + laurel, f"{name}.laurel_sum"), 0.5**0.5, f"{name}.laurel_mean")

    def _streams(self, x: relax.Expr) -> relax.Expr:
        """Streams of the embeddings, (rows, streams, hidden_size): themselves, and products of their magnitude."""
        products = self._stream_products([x] * (self.model.streams - 1), "altup_proj", "token_embd.altup", x)
        return self._stacked([x, *products], "token_embd.altup")

    def _merged(self, x: relax.Expr) -> relax.Expr:
        """The mean of streams, whose others are multiplied by matrices and get the magnitude of the first."""
        count = self.model.streams
        first, *others = (self._stream(x, index, "output.altup") for index in range(count))
        products = self._stream_products(others, "altup_unembd_proj", "output.altup", first)
        return self.emit(relax.op.mean(self._stacked([first, *products], "output.altup"), [1]), "output.altup_mean")

    def _stream_products(
        self, streams: list[relax.Expr], tensor: str, name: str, first: relax.Expr
    ) -> list[relax.Expr]:
        """The product of each stream with a matrix of its own, with the magnitude of the first stream."""
        size = self.model.hidden_size
        parts = [f"{tensor}_{number}" for number in range(len(streams))]
        self.weights.split_stack(tensor, parts, (size, size))
        magnitude = self.emit(relax.op.sqrt(self._mean_square(first, f"{name}.first")), f"{name}.magnitude")
        results = []
        for stream, part in zip(streams, parts, strict=True):
            product = self._linear(stream, part, size, size, f"{name}_{part}")
            square = relax.op.maximum(self._mean_square(product, f"{name}_{part}"), scalar(_MIN_MEAN_SQUARE))
            factor = self.emit(relax.op.rsqrt(self.emit(square, f"{name}_{part}.least")), f"{name}_{part}.inverse")
            factor = self.emit(factor * magnitude, f"{name}_{part}.factor")
            results.append(self.emit(product * factor, f"{name}_{part}.scaled"))
        return results

    def _predicted(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Each stream plus a sum of all streams, by coefficients of the active one."""
        count, name = self.model.streams, f"blk.{layer}.altup_predict"
        shares = self._modalities(self._active(x, name), layer, name)
        coefficients = self._small_linear(shares, f"blk.{layer}.altup_predict_coef", count * count, count)
        matrices = self._reshaped(coefficients, [self.rows, count, count], f"{name}_matrices")
        sums = self.emit(relax.op.matmul(matrices, x), f"{name}_sums")
        return self.emit(x + sums, name)

    def _corrected(self, x: relax.Expr, result: relax.Expr, layer: int) -> relax.Expr:
        """Streams corrected by the result of a layer; all but the first get the layer's input, too."""
        model, count, name = self.model, self.model.streams, f"blk.{layer}.altup_correct"
        shares = self._modalities(result, layer, name)
        change = self.emit(result - self._active(x, name), f"{name}_change")
        coefficients = self._small_linear(shares, f"blk.{layer}.altup_correct_coef", count, count)
        coefficients = self.emit(coefficients + scalar(1.0), f"{name}_shares")
        products = self.emit(
            self._reshaped(coefficients, [self.rows, count, 1], f"{name}_column")
            * self._reshaped(change, [self.rows, 1, model.hidden_size], f"{name}_row"),
            f"{name}_products",
        )
        x = self.emit(x + products, name)
        factors = self.weights.vector(f"blk.{layer}.altup_correct_scale.weight", model.hidden_size)
        active = self.emit(self._active(x, f"{name}ed") * factors, f"{name}_scaled")
        row = self._reshaped(self._layer_input(active, layer), [self.rows, 1, model.hidden_size], f"{name}_input")
        others = relax.const(np.arange(count, dtype="float32").clip(0, 1).reshape(1, count, 1))
        return self.emit(x + self.emit(row * others, f"{name}_inputs"), f"blk.{layer}.altup_out")

    def _modalities(self, x: relax.Expr, layer: int, name: str) -> relax.Expr:
        """Numbers from -1 to 1 for each stream, by which streams are mixed."""
        model = self.model
        normal = self._norm(x, f"blk.{layer}.altup_router_norm")
        scaled = self._scaled(normal, 1.0 / model.hidden_size, f"{name}_router_in")
        product = self._small_linear(scaled, f"blk.{layer}.altup_router", model.streams, model.hidden_size)
        return self.emit(relax.op.tanh(product), f"{name}_modalities")

    def _small_linear(self, x: relax.Expr, tensor: str, out_features: int, in_features: int) -> relax.Expr:
        """The product with a matrix of few numbers, of float32."""
        matrix = self.weights.vector(f"{tensor}.weight", out_features, in_features)
        transposed = self.emit(relax.op.permute_dims(matrix, [1, 0]), f"{tensor}.transposed")
        return self.emit(relax.op.matmul(x, transposed), tensor)

    def _active(self, x: relax.Expr, name: str) -> relax.Expr:
        """The stream that layers change."""
        return self._stream(x, self.model.active_stream, name)

    def _stream(self, x: relax.Expr, index: int, name: str) -> relax.Expr:
        stream = self.emit(relax.op.strided_slice(x, [1], [index], [index + 1]), f"{name}_stream")
        return self._reshaped(stream, [self.rows, self.model.hidden_size], f"{name}_stream_rows")

    def _stacked(self, streams: list[relax.Expr], name: str) -> relax.Expr:
        rows = [self._reshaped(each, [self.rows, 1, self.model.hidden_size], f"{name}_part") for each in streams]
        return self.emit(relax.op.concat(rows, axis=1), f"{name}_streams")
