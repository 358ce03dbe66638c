"""Ops of a language model's functions: bindings, products with a file's matrices, norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...op.quantized_matmul import dequantize_blocks
from ...op.streamed import stream
from ..paged_cache import CHUNK, DECODE
from .activation_types import ActivationTypes
from .expert_rules import ExpertGroup
from .hyperparameters import Hyperparameters
from .stream_experts import ExpertStreams
from .weights import Weights


class GraphOps:
    """Builder of one function, which takes `rows` tokens: those of a decode step or a prefill chunk (`kind`)."""

    def __init__(
        self,
        model: Hyperparameters,
        weights: Weights,
        params: dict[str, relax.Var],
        context: int,
        rows: int,
        kind: str,
        activation_bits: int,
        types: ActivationTypes,
        expert_groups: Mapping[str, Sequence[ExpertGroup]],
        streams: ExpertStreams,
        builder: relax.BlockBuilder,
    ) -> None:
        self.model, self.weights, self.rows, self.kind = model, weights, rows, kind
        self.activation_bits, self.types, self.expert_groups = activation_bits, types, expert_groups
        self.streams = streams
        self.row_kind = CHUNK if kind == CHUNK else DECODE  # of the rows that products take
        self._casts: dict[tuple[relax.Expr, str], relax.Expr] = {}
        self._last_rows: dict[tuple[relax.Expr, relax.VDevice | None], relax.Expr] = {}
        self.builder = builder
        self.counters: dict[str, relax.Expr] = {}  # by the prefix of the layer
        self.bindings: list[relax.Binding] = []
        self.rotary_tables: dict[tuple[Any, ...], relax.Expr] = {}
        self._output_gates: dict[int, relax.Expr] = {}  # by layer
        self.params, self.context = params, context
        # Caches by their number, and keys and values of the layers whose cache others read.
        self.caches = {index: params[f"pages_{index}"] for index in range(len(model.caches)) if "sequences" in params}
        self.shared_keys: dict[int, list[relax.Expr]] = {}
        self.layer_inputs: relax.Expr | None = None

    def function(self, name: str, outputs: Mapping[str, relax.Expr]) -> relax.Function:
        """The function of all bindings, with `name` as its global symbol."""
        result = relax.Tuple(list(outputs.values()))
        attributes = {
            "global_symbol": name,
            "num_input": len(self.params),
            "input_names": list(self.params),
            "output_names": list(outputs),
        }
        body = relax.SeqExpr([relax.DataflowBlock(self.bindings)], result)
        return relax.Function(
            list(self.params.values()), body, result.ty, attrs=tvm.ir.make_node("ir.DictAttrs", **attributes)
        )

    def emit(self, value: relax.Expr, name: str, is_output: bool = False) -> relax.Var:
        """Bind a value to a variable, local to the dataflow block unless `is_output`; its name may contain dots."""
        value = self.builder.normalize(value)
        var = (relax.Var if is_output else relax.DataflowVar)(name, value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def _scaled(self, x: relax.Expr, factor: float, name: str) -> relax.Expr:
        """Multiply by a factor, unless it is 1."""
        return x if factor == 1.0 else self.emit(x * scalar(factor), name)

    def _optional_norm(self, x: relax.Expr, name: str) -> relax.Expr:
        """The norm of a name; without a name, the value."""
        return self._norm(x, name) if name else x

    def _norm(self, x: relax.Expr, name: str) -> relax.Expr:
        """RMS norm ``x / sqrt(mean(x * x) + eps) * weight`` or layer norm, row by row."""
        size = int(x.ty.shape.values[-1])
        weight = self.weights.vector(f"{name}.weight", size)
        if self.model.architecture.norms.kind == "layer":
            has_bias = f"{name}.bias" in self.weights
            bias = self.weights.vector(f"{name}.bias", size) if has_bias else relax.const(np.zeros(size, "float32"))
            return self.emit(relax.op.nn.layer_norm(x, weight, bias, axes=[-1], epsilon=self.model.eps), name)
        return self.emit(self._normal(x, name) * weight, name)

    def _normal(self, x: relax.Expr, name: str) -> relax.Expr:
        """RMS norm without factors."""
        stable = self.emit(self._mean_square(x, name) + scalar(self.model.eps), f"{name}.stable")
        inverse = self.emit(relax.op.rsqrt(stable), f"{name}.inverse")
        return self.emit(x * inverse, f"{name}.normal")

    def _mean_square(self, x: relax.Expr, name: str) -> relax.Expr:
        """Mean of the squares of each row."""
        squares = self.emit(x * x, f"{name}.squares")
        return self.emit(relax.op.mean(squares, [-1], keepdims=True), f"{name}.mean")

    def _reshaped(self, x: relax.Expr, shape: list[int], name: str) -> relax.Expr:
        """Reshape a value, unless it has the shape."""
        return (
            x if [int(extent) for extent in x.ty.shape.values] == shape else self.emit(relax.op.reshape(x, shape), name)
        )

    def _sliced(self, x: relax.Expr, begin: int, end: int, name: str) -> relax.Expr:
        """Elements from `begin` to `end` of the last axis."""
        return self.emit(relax.op.strided_slice(x, [len(x.ty.shape.values) - 1], [begin], [end]), name)

    def _end_full_rows(self, layer: int) -> None:
        """Compute one row of a chunk from here on, in the attention of the last layer that needs all of them.

        Functions that return the logits of all rows, or count the experts of all, need all to the end.
        """
        if "last" in self.params and layer == self.model.full_layers(bool(self.counters)):
            self._take_last()

    def _take_last(self) -> None:
        """Compute the row whose logits are returned from here on, with the kernels of decode functions."""
        self.rows, self.kind, self.row_kind = 1, DECODE, DECODE

    def _current(self, x: relax.Expr, name: str) -> relax.Expr:
        """The rows of a value that are computed from here on, once for all readers on the device of `name`."""
        if int(x.ty.shape.values[0]) == self.rows:
            return x
        key = x, self.types.device_of(name)
        if key not in self._last_rows:
            row = relax.op.take(x, self.params["last"], axis=0, mode="clip")
            self._last_rows[key] = self.emit(row, name)
        return self._last_rows[key]

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """Cast a value to an element type, once for all readers."""
        if str(x.ty.dtype) == dtype:
            return x
        if (x, dtype) not in self._casts:
            self._casts[x, dtype] = self.emit(relax.op.astype(x, dtype), f"{x.name}.{dtype}")
        return self._casts[x, dtype]

    def _matrix(self, tensor: str, shape: Sequence[int], name: str = "", dtype: str = "float32") -> relax.Expr:
        """A matrix as float32, (rows, shape[-1]), with all other dimensions flattened into rows.

        Unquantized numbers are rounded to `dtype`.

        Each use dequantizes into a variable of its own, because uses may be on different devices.
        """
        data, form = self.weights.matrix(f"{tensor}.weight", shape, dtype)
        if form is None:
            return data[0]
        matrix = dequantize_blocks(
            *data,
            depth=shape[-1],
            block=form.block,
            bits=form.bits,
            format=form.name if form.superblock_bytes else "",
            activation_bits=self.activation_bits,
            rows=self.row_kind,
        )
        return self.emit(matrix, f"{name or tensor}.dequantized")

    def _linear(
        self,
        x: relax.Expr,
        tensor: str,
        out_features: int,
        in_features: int,
        name: str = "",
        dtype: str = "",
        has_scale: bool = True,
    ) -> relax.Expr:
        """The product with a matrix of the file, times its scale and plus its bias if any, (rows, out_features)."""
        name = name or tensor
        dtype = dtype or self.types.dtype_of(name)
        x = self._cast(x, dtype)
        matrix = self.weights.unquantized_matrix(f"{tensor}.weight", [out_features, in_features], dtype)
        if matrix is None:
            matrix = self._matrix(tensor, [out_features, in_features], name)
            x = self._cast(x, "float32")  # the pass FormQuantizedMatmuls matches this cast, and removes it
        transposed = self.emit(relax.op.permute_dims(matrix, [1, 0]), f"{name}.transposed")
        result = self.emit(relax.op.matmul(x, transposed, out_dtype="float32"), name)
        if has_scale and f"{tensor}.scale" in self.weights:
            result = self.emit(result * self.weights.vector(f"{tensor}.scale", 1), f"{name}.scaled")
        if f"{tensor}.bias" in self.weights:
            bias = self.weights.vector(f"{tensor}.bias", out_features)
            result = self.emit(result + bias, f"{name}.biased")
        return result

    def _expert_linear(
        self,
        x: relax.Expr,
        ids: relax.Expr,
        name: str,
        experts: int,
        out_features: int,
        in_features: int,
        tensor: str = "",
    ) -> relax.Expr:
        """The product of each row with the matrices of its experts, (rows, experts of a row, 1, out_features).

        Results of ids outside, such as -1 for an expert of another device, are undefined. The matrices of a `tensor`
        that does not have the product's name are copied to the product's device in each call.
        """
        tensor = tensor or name
        x = self._cast(self._cast(x, self.types.dtype_of(name)), "float32")
        shape = [experts, out_features, in_features]
        matrix = self._matrix(tensor, shape, dtype=self.types.dtype_of(tensor))
        if tensor != name:
            matrix = self.emit(stream(matrix, ids), f"{name}.copy")
        stacked = self.emit(relax.op.reshape(matrix, shape), f"{name}.stacked")
        selected = self.emit(relax.op.take(stacked, ids, axis=0, mode="nan"), f"{name}.selected")
        transposed = self.emit(relax.op.permute_dims(selected, [0, 1, 3, 2]), f"{name}.transposed")
        result = self.emit(relax.op.matmul(x, transposed), name)
        rows, used = ids.ty.shape.values
        for part, done, op, size in (
            ("scale", "scaled", relax.op.multiply, []),
            ("bias", "biased", relax.op.add, [out_features]),
        ):
            if f"{tensor}.{part}" in self.weights:
                numbers = self.weights.vector(f"{tensor}.{part}", experts, *size)
                numbers = self.emit(relax.op.take(numbers, ids, axis=0, mode="nan"), f"{name}.{part}")
                column = self.emit(relax.op.reshape(numbers, [rows, used, 1, *(size or [1])]), f"{name}.{part}_row")
                result = self.emit(op(result, column), f"{name}.{done}")
        return result


def scalar(value: float) -> relax.Expr:
    """A number as a constant of float32."""
    return relax.const(value, "float32")
