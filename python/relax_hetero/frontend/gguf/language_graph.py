"""Relax functions of a language model: ``decode_B`` and ``prefill_C``.

``decode_B`` takes one token of each of B sequences; ``prefill_C`` takes C consecutive tokens of one sequence and
returns the logits of one of them. Both write keys and values into the pages of the cache, a parameter and a result for
each layer. Variables are named after the file's tensors (``blk.3.attn_q``), for placement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import tvm
from tvm import relax

from ...encoding.pages import TABLES
from ...op.cached_attention import cached_attention
from ...op.functions import apply_function
from ...op.quantized_matmul import dequantize_blocks
from ..paged_cache import DECODE, PagedCache
from .activations import ActivationTypes
from .hyperparameters import Hyperparameters
from .weights import Weights


def language_module(
    model: Hyperparameters, weights: Weights, cache: PagedCache, activation_bits: int, types: ActivationTypes
) -> tvm.IRModule:
    """Build all functions of a model, without placement.

    Residual sums, norms and results of products are float32. Only operands of products and attention have the types in
    `types`, so that activations of models trained in bfloat16 do not overflow float16 between layers.
    """
    functions = {
        tvm.ir.GlobalVar(name): _Function(model, weights, cache, rows, kind, activation_bits, types).build(name)
        for name, rows, kind in cache.functions
    }
    return tvm.IRModule(functions)


class _Function:
    """Builder of one function."""

    def __init__(
        self,
        model: Hyperparameters,
        weights: Weights,
        cache: PagedCache,
        rows: int,
        kind: str,
        activation_bits: int,
        types: ActivationTypes,
    ) -> None:
        self.model, self.weights, self.rows, self.kind = model, weights, rows, kind
        self.activation_bits, self.types = activation_bits, types
        self.row_kind = kind
        self._casts: dict[tuple[relax.Expr, str], relax.Expr] = {}
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.Binding] = []
        self.rotations: dict[tuple[float, float, relax.VDevice | None], relax.Expr] = {}
        kv_heads = [model.kv_heads] * model.layers
        self.params = cache.parameters(rows, kind, model.windows, kv_heads, model.size)

    def build(self, name: str) -> relax.Function:
        """The function of a name."""
        x = self._embedding()
        pages = []
        for layer in range(self.model.layers):
            x, layer_pages = self._layer(x, layer)
            pages.append(layer_pages)
        # The result is a tuple expression: a tuple variable would have one device, and move all pages there.
        logits = self._logits(x)
        self.bindings[-1] = relax.VarBinding(relax.Var(logits.name, logits.ty), self.bindings[-1].value)
        result = relax.Tuple([self.bindings[-1].var, *pages])
        attributes = {
            "global_symbol": name,
            "num_input": len(self.params),
            "input_names": list(self.params),
            "output_names": ["logits", *(f"pages_{layer}" for layer in range(self.model.layers))],
        }
        body = relax.SeqExpr([relax.DataflowBlock(self.bindings)], result)
        return relax.Function(
            list(self.params.values()), body, result.ty, attrs=tvm.ir.make_node("ir.DictAttrs", **attributes)
        )

    def emit(self, value: relax.Expr, name: str, is_output: bool = False) -> relax.Var:
        """Bind a value to a variable; its name may contain dots."""
        value = self.builder.normalize(value)
        var = (relax.Var if is_output else relax.DataflowVar)(name, value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def _embedding(self) -> relax.Expr:
        """The embeddings of the tokens, (rows, width)."""
        model = self.model
        table = self._matrix("token_embd", [model.vocabulary, model.width])
        x = self.emit(relax.op.take(table, self.params["tokens"], axis=0), "token_embd")
        if model.architecture.scaled_embedding:
            x = self.emit(relax.op.multiply(x, _number(math.sqrt(model.width))), "token_embd.scaled")
        return x

    def _layer(self, x: relax.Expr, layer: int) -> tuple[relax.Expr, relax.Expr]:
        """The output of a layer, and its pages."""
        name, model = f"blk.{layer}", self.model
        attention, pages = self._attention(self._norm(x, f"{name}.attn_norm"), layer)
        projection = self._product(attention, f"{name}.attn_output", model.width, model.heads * model.size)
        if model.architecture.post_norms:
            projection = self._norm(projection, f"{name}.post_attention_norm")
        x = self.emit(relax.op.add(x, projection), f"{name}.attn_sum")
        normalized = self._norm(x, f"{name}.ffn_norm")
        feed_forward = self._experts(normalized, name) if model.experts else self._feed_forward(normalized, name)
        if model.architecture.post_norms:
            feed_forward = self._norm(feed_forward, f"{name}.post_ffw_norm")
        return self.emit(relax.op.add(x, feed_forward), f"{name}.ffn_sum"), pages

    def _attention(self, x: relax.Expr, layer: int) -> tuple[relax.Expr, relax.Expr]:
        name, model = f"blk.{layer}", self.model
        widths = {"q": model.heads * model.size, "k": model.kv_heads * model.size, "v": model.kv_heads * model.size}
        if self._try_join(f"{name}.attn_qkv", {f"{name}.attn_{part}": width for part, width in widths.items()}):
            qkv = self._product(x, f"{name}.attn_qkv", sum(widths.values()), model.width)
        else:
            parts = [self._product(x, f"{name}.attn_{part}", width, model.width) for part, width in widths.items()]
            qkv = self.emit(relax.op.concat(parts, axis=1), f"{name}.attn_qkv")
        qkv = self._cast(qkv, self.types.of(f"{name}.attn"))
        window = model.window_of(layer)
        norms = "".join(part for part in "qk" if f"{name}.attn_{part}_norm.weight" in self.weights)
        operands = [self._rotation(layer)]
        operands += [self.weights.vector(f"{name}.attn_{part}_norm.weight", model.size) for part in norms]
        call = cached_attention(
            qkv,
            *(self.params[key] for key in (f"pages_{layer}", TABLES[bool(window)], "sequences", "positions")),
            *operands,
            heads=model.heads,
            kv_heads=model.kv_heads,
            size=model.size,
            scale=model.scale,
            window=window,
            softcap=model.attention_cap,
            rotary=model.architecture.rotary,
            norms=norms,
            eps=model.eps,
            rows=self.kind,
        )
        result = self.emit(call, f"{name}.attn")
        output = self.emit(relax.TupleGetItem(result, 0), f"{name}.attn.kqv")
        return output, self.emit(relax.TupleGetItem(result, 1), f"{name}.attn.pages", is_output=True)

    def _try_join(self, name: str, tensors: dict[str, int]) -> bool:
        """Join matrices of products with the same operand, which saves launches on GPUs; return True if it did."""
        if not self.types.are_alike([name, *tensors]) or self.types.of(name) == "float32":
            return False
        weights, biases = self.weights, [(f"{part}.bias", rows) for part, rows in tensors.items()]
        if any(bias in weights for bias, _ in biases) and not weights.join(f"{name}.bias", biases):
            return False
        matrices = [(f"{part}.weight", rows) for part, rows in tensors.items()]
        return weights.join(f"{name}.weight", matrices, self.model.width)

    def _rotation(self, layer: int) -> relax.Expr:
        """Cosines and sines of the rotary angles of each row's position, (rows, rotated).

        They are computed on each device, which costs less than a copy, and named after the first layer that reads them.
        """
        base, scale = self.model.base_of(layer)
        key = base, scale, self.types.device_of(f"blk.{layer}.attn")
        if key not in self.rotations:
            name = f"blk.{layer}.attn_rope"
            positions = self.emit(relax.op.astype(self.params["positions"], "float32"), f"{name}.positions")
            column = self.emit(relax.op.expand_dims(positions, 1), f"{name}.column")
            frequencies = relax.const(self._frequencies(base, scale)[None])
            angles = self.emit(relax.op.multiply(column, frequencies), f"{name}.angles")
            parts = [self.emit(op(angles), f"{name}.{op.__name__}") for op in (relax.op.cos, relax.op.sin)]
            self.rotations[key] = self.emit(relax.op.concat(parts, axis=1), name)
        return self.rotations[key]

    def _frequencies(self, base: float, scale: float) -> np.ndarray:
        """Rotary frequencies: radians per position for each pair of elements."""
        rotated = self.model.rotated
        frequencies = scale * base ** (-np.arange(0, rotated, 2, dtype="float64") / rotated)
        if "rope_freqs.weight" in self.weights:
            frequencies = frequencies / self.weights.numbers("rope_freqs.weight", [rotated // 2])
        return np.asarray(frequencies, "float32")

    def _feed_forward(self, x: relax.Expr, name: str) -> relax.Expr:
        model = self.model
        gate = self._product(x, f"{name}.ffn_gate", model.feed_forward, model.width)
        active = self.emit(_activation(model)(gate), f"{name}.ffn_act")
        up = self._product(x, f"{name}.ffn_up", model.feed_forward, model.width)
        gated = self.emit(relax.op.multiply(active, up), f"{name}.ffn_par")
        return self._product(gated, f"{name}.ffn_down", model.width, model.feed_forward)

    def _experts(self, x: relax.Expr, name: str) -> relax.Expr:
        """The weighted sum of the chosen experts of each row, (rows, width)."""
        model, rows = self.model, self.rows
        used = model.experts_used
        # float32 on all devices: rounding would change the order of experts with nearly equal scores.
        scores = self._product(x, f"{name}.ffn_gate_inp", model.experts, model.width, dtype="float32")
        probs = self.emit(relax.op.nn.softmax(scores, axis=-1), f"{name}.ffn_moe_probs")
        best = self.emit(relax.op.topk(probs, used, axis=-1, ret_type="both", dtype="int32"), f"{name}.ffn_moe_topk")
        top = self.emit(relax.TupleGetItem(best, 0), f"{name}.ffn_moe_weights")
        total = self.emit(relax.op.sum(top, [-1], keepdims=True), f"{name}.ffn_moe_sum")
        weights = self.emit(relax.op.divide(top, total), f"{name}.ffn_moe_share")
        if model.expert_scale != 1.0:
            weights = self.emit(relax.op.multiply(weights, _number(model.expert_scale)), f"{name}.ffn_moe_scaled")
        ids = self.emit(relax.TupleGetItem(best, 1), f"{name}.ffn_moe_ids")
        expert_input = self.emit(relax.op.reshape(x, [rows, 1, 1, model.width]), f"{name}.ffn_moe_in")
        gate = self._expert_product(expert_input, ids, f"{name}.ffn_gate_exps", model.feed_forward, model.width)
        active = self.emit(_activation(model)(gate), f"{name}.ffn_moe_act")
        up = self._expert_product(expert_input, ids, f"{name}.ffn_up_exps", model.feed_forward, model.width)
        gated = self.emit(relax.op.multiply(active, up), f"{name}.ffn_moe_par")
        down = self._expert_product(gated, ids, f"{name}.ffn_down_exps", model.width, model.feed_forward)
        flat = self.emit(relax.op.reshape(down, [rows, used, model.width]), f"{name}.ffn_moe_down")
        column = self.emit(relax.op.reshape(weights, [rows, used, 1]), f"{name}.ffn_moe_column")
        weighted = self.emit(relax.op.multiply(flat, column), f"{name}.ffn_moe_weighted")
        return self.emit(relax.op.sum(weighted, [1]), f"{name}.ffn_moe_out")

    def _expert_product(self, x: relax.Expr, ids: relax.Expr, name: str, columns: int, depth: int) -> relax.Expr:
        """The product of each row with the matrices of its experts, (rows, used, 1, columns)."""
        rows = self._matrix(name, [self.model.experts, columns, depth])
        table = self.emit(relax.op.reshape(rows, [self.model.experts, columns, depth]), f"{name}.tables")
        expert_matrices = self.emit(relax.op.take(table, ids, axis=0), f"{name}.chosen")
        transposed = self.emit(relax.op.permute_dims(expert_matrices, [0, 1, 3, 2]), f"{name}.turned")
        return self.emit(relax.op.matmul(x, transposed), name)

    def _logits(self, x: relax.Expr) -> relax.Expr:
        model = self.model
        if "last" in self.params:
            x = self.emit(relax.op.take(x, self.params["last"], axis=0, mode="clip"), "last_row")
            self.row_kind = DECODE  # one row per chunk
        name = "output" if "output.weight" in self.weights else "token_embd"
        logits = self._product(self._norm(x, "output_norm"), name, model.vocabulary, model.width, "output")
        if not model.logit_cap:
            return logits
        scaled = self.emit(relax.op.multiply(logits, _number(1.0 / model.logit_cap)), "output.small")
        squashed = self.emit(relax.op.tanh(scaled), "output.bent")
        return self.emit(relax.op.multiply(squashed, _number(model.logit_cap)), "output.capped")

    def _norm(self, x: relax.Expr, name: str) -> relax.Expr:
        """``x / sqrt(mean(x * x) + eps) * weight``, row by row."""
        weight = self.weights.vector(f"{name}.weight", self.model.width)
        squares = self.emit(relax.op.multiply(x, x), f"{name}.squares")
        mean = self.emit(relax.op.mean(squares, [-1], keepdims=True), f"{name}.mean")
        stable = self.emit(relax.op.add(mean, _number(self.model.eps)), f"{name}.stable")
        inverse = self.emit(relax.op.rsqrt(stable), f"{name}.inverse")
        normal = self.emit(relax.op.multiply(x, inverse), f"{name}.normal")
        return self.emit(relax.op.multiply(normal, weight), name)

    def _matrix(self, tensor: str, shape: Sequence[int], name: str | None = None) -> relax.Expr:
        """Dequantize a matrix with rows of ``shape[-1]``; each use has its own variable, which may be on any device."""
        data, form = self.weights.matrix(f"{tensor}.weight", shape)
        if not form:
            return data
        bits, rows = self.activation_bits, self.row_kind
        matrix = dequantize_blocks(data, depth=shape[-1], format=form, activation_bits=bits, rows=rows)
        return self.emit(matrix, f"{name or tensor}.numbers")

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """Cast a value to an element type, once for all readers."""
        if str(x.ty.dtype) == dtype:
            return x
        if (x, dtype) not in self._casts:
            self._casts[x, dtype] = self.emit(relax.op.astype(x, dtype), f"{x.name}.{dtype}")
        return self._casts[x, dtype]

    def _product(
        self, x: relax.Expr, tensor: str, columns: int, depth: int, name: str | None = None, dtype: str = ""
    ) -> relax.Expr:
        """The product with a matrix of the file, plus its bias if it has one, (rows, columns)."""
        name = name or tensor
        dtype = dtype or self.types.of(name)
        x = self._cast(x, dtype)
        matrix = self.weights.plain_matrix(f"{tensor}.weight", [columns, depth], dtype)
        if matrix is None:
            matrix = self._matrix(tensor, [columns, depth], name)
            x = self._cast(x, "float32")  # FormQuantizedMatmuls expects a cast operand
        turned = self.emit(relax.op.permute_dims(matrix, [1, 0]), f"{name}.turned")
        result = self.emit(relax.op.matmul(x, turned, out_dtype="float32"), name)
        if f"{tensor}.bias" in self.weights:
            bias = self.weights.vector(f"{tensor}.bias", columns)
            result = self.emit(relax.op.add(result, bias), f"{name}.biased")
        return result


def _number(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def _activation(model: Hyperparameters) -> Callable[[relax.Expr], relax.Expr]:
    return partial(apply_function, model.architecture.activation)
