"""Attention of a language model's layers: queries, keys and values, their norms and rotation, and compressed keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from ...encoding.pages import TABLES
from ...errors import FrontendError
from ...op.cached_attention import cached_attention
from ...tir.delta_rule import DeltaRuleProblem, convolution_kernel, delta_rule_kernel
from ...transform.ir.kernels import opaque_kernel
from ..paged_cache import CHUNK
from .graph_ops import GraphOps, scalar
from .hyperparameters import Yarn


class AttentionGraph(GraphOps):
    """Attention of layers."""

    def _attention(self, x: relax.Expr, layer: int) -> relax.Expr:
        """The results of all heads, (rows, result_size); the layer's cache gets the new keys and values."""
        name, model = f"blk.{layer}", self.model
        index = self._cache_index(layer)
        qkv = self._latent_qkv(x, layer) if model.latent else self._qkv(x, layer)
        qkv = self._cast(qkv, self.types.dtype_of(f"{name}.attn"))
        window = model.window_of(layer)
        page_table = TABLES[window > 0]
        norms, rotary = "", model.architecture.rotary if model.is_rotated(layer) else ""
        if model.architecture.norms.heads == "each":
            norms = "".join(part for part in "qk" if f"{name}.attn_{part}_norm.weight" in self.weights)
        elif self._has_rotated_norms(layer):  # `_normalized_heads` rotates
            rotary = ""
        has_sinks = f"{name}.attn_sinks.weight" in self.weights
        operands = [self._rotary_table(layer)] if rotary else []
        size = model.head_sizes[layer]
        owners = {"q": name, "k": f"blk.{index}"}  # of the norms
        operands += [self.weights.vector(f"{owners[part]}.attn_{part}_norm.weight", size) for part in norms]
        if has_sinks:
            operands.append(self.weights.vector(f"{name}.attn_sinks.weight", model.heads))
        call = cached_attention(
            qkv,
            self.caches[index],
            self.params[page_table],
            *(self._integers(key, layer) for key in ("sequences", "positions")),
            *operands,
            heads=model.heads,
            kv_heads=model.kv_heads[layer],
            size=size,
            scale=model.scale_of(layer),
            window=window,
            softcap=model.attention_softcap,
            rotary=rotary,
            norms=norms,
            eps=model.eps,
            rows=self.kind,
            sinks=has_sinks,
            shared_values=model.latent.rank if model.latent else 0,
        )
        result = self.emit(call, f"{name}.attn")
        output = self.emit(relax.TupleGetItem(result, 0), f"{name}.attn.kqv")
        self._end_full_rows(layer)
        output = self._current(output, f"{name}.attn.row")
        if model.latent:
            output = self._latent_values(output, name)
        if layer in self._output_gates:
            output = self._cast(output, "float32")
            gates = self._current(self._output_gates[layer], f"{name}.attn.gates")
            output = self.emit(output * gates, f"{name}.attn.gated")
        is_last = layer == max(other for other in range(model.layers) if model.cache_index(other) == index)
        self.caches[index] = self.emit(relax.TupleGetItem(result, 1), f"{name}.attn.pages", is_output=is_last)
        return output

    def _integers(self, key: str, layer: int) -> relax.Expr:
        """Positions or sequences of the rows of a layer's attention."""
        return self._current(self.params[key], f"blk.{layer}.attn_{key}")

    def _cache_index(self, layer: int) -> int:
        """Number of the cache that a layer reads, which is on the layer's device."""
        index = self.model.cache_index(layer)
        own, other = (self.types.device_of(f"blk.{number}.attn") for number in (layer, index))
        if own != other:
            raise FrontendError(
                f"blk.{layer}.attn reads the keys and values of blk.{index}.attn, expected both on one device"
            )
        return index

    def _qkv(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Queries, keys and values of all heads, (rows, (heads + 2 * kv_heads) * head_size)."""
        model, name = self.model, f"blk.{layer}"
        index = model.cache_index(layer)
        kv_size = model.kv_heads[layer] * model.head_sizes[layer]
        sizes = {"q": model.heads * model.head_sizes[layer], "k": kv_size, "v": kv_size}
        joined, names = f"{name}.attn_qkv", {f"{name}.attn_{part}": size for part, size in sizes.items()}
        has_norms = model.architecture.norms.heads != "each" and f"{name}.attn_q_norm.weight" in self.weights
        has_norms |= self._has_rotated_norms(layer)
        has_gate = model.architecture.has_output_gate
        is_changed = has_norms or model.is_tempered(layer) or has_gate or model.architecture.norms.values
        if f"{joined}.weight" in self.weights or (not is_changed and self._try_merge(joined, names)):
            product = self._linear(x, joined, sum(sizes.values()), model.hidden_size)
            if not is_changed:
                return product
            parts, end = [], 0
            for part, size in names.items():
                begin, end = end, end + size
                parts.append(self._sliced(product, begin, end, part))
        elif index != layer:
            shared = zip("kv", self.shared_keys[index], strict=True)
            parts = [self._linear(x, f"{name}.attn_q", sizes["q"], model.hidden_size)]
            parts += [self._current(each, f"{name}.attn_{part}_row") for part, each in shared]
        else:
            parts = [self._gated_queries(x, layer)] if has_gate else []
            for part, size in [*names.items()][len(parts) :]:
                is_key = part.endswith("_v") and self._values_are_keys(layer)
                parts.append(parts[-1] if is_key else self._linear(x, part, size, model.hidden_size))
        if index == layer and model.architecture.norms.values:
            parts[2] = self._normal_heads(parts[2], layer)
        self.shared_keys[layer] = parts[1:]
        if has_norms:
            parts[:2] = [self._normalized_heads(part, layer, key) for part, key in zip(parts, "qk", strict=False)]
        if model.is_tempered(layer):
            parts[0] = self.emit(parts[0] * self._temperature(layer), f"{name}.attn_q_tempered")
        return self.emit(relax.op.concat(parts, axis=1), joined)

    def _values_are_keys(self, layer: int) -> bool:
        """Return whether values are the products of keys before their norm, where files lack a matrix of values."""
        may_be = self.model.architecture.may_lack_values and not self.model.window_of(layer)
        return may_be and not self.weights.has_tensor(f"blk.{layer}.attn_v.weight")

    def _normal_heads(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Values whose heads have an RMS norm without factors."""
        name, width, size = f"blk.{layer}.attn_v_norm", int(x.ty.shape.values[-1]), self.model.head_sizes[layer]
        heads = self._reshaped(x, [self.rows, width // size, size], f"{name}_heads")
        return self._reshaped(self._normal(heads, name), [self.rows, width], f"{name}_rows")

    def _try_merge(self, name: str, tensors: dict[str, int]) -> bool:
        """Merge linear layers of the same input into layer `name` if possible; returns whether it was.

        One product instead of three saves launches on GPUs. `tensors` has the output size of each layer by its name.
        """
        if not self.types.have_same_rules([name, *tensors]) or self.types.dtype_of(name) == "float32":
            return False
        weights, biases = self.weights, [(f"{tensor}.bias", rows) for tensor, rows in tensors.items()]
        if any(bias in weights for bias, _ in biases) and not weights.stack(f"{name}.bias", biases):
            return False
        matrices = [(f"{tensor}.weight", rows) for tensor, rows in tensors.items()]
        return weights.stack(f"{name}.weight", matrices, self.model.hidden_size)

    def _gated_queries(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Queries of all heads, (rows, heads * head_size), whose matrix also has gates of each head's result."""
        model, name = self.model, f"blk.{layer}.attn_q"
        size, width = model.head_sizes[layer], model.heads * model.head_sizes[layer]
        product = self._linear(x, name, 2 * width, model.hidden_size)
        heads = self._reshaped(product, [self.rows, model.heads, 2 * size], f"{name}_heads")
        queries, gates = (
            self._reshaped(
                self._sliced(heads, i * size, (i + 1) * size, f"{name}_{part}"),
                [self.rows, width],
                f"{name}_{part}_rows",
            )
            for i, part in enumerate(("query", "gate"))
        )
        self._output_gates[layer] = self.emit(relax.op.sigmoid(gates), f"{name}_share")
        return queries

    def _has_rotated_norms(self, layer: int) -> bool:
        """Return whether a layer normalizes queries and keys after their rotation."""
        kind, tensor = self.model.architecture.norms.heads, f"blk.{layer}.attn_q_norm.weight"
        has_unit_norms = self.model.has_unit_norms and self.model.is_rotated(layer)
        return has_unit_norms or (kind == "rotated" and tensor in self.weights)

    def _normalized_heads(self, x: relax.Expr, layer: int, part: str) -> relax.Expr:
        """Queries or keys (`part`: "q" or "k") of all heads with norms that the attention kernel does not compute."""
        model, name = self.model, f"blk.{layer}.attn_{part}"
        kind, size, width = model.architecture.norms.heads, model.head_sizes[layer], int(x.ty.shape.values[-1])
        if kind == "joint":
            return self._norm(x, f"{name}_norm")
        heads = self._reshaped(x, [self.rows, width // size, size], f"{name}_heads")
        if kind in ("rotated", "unit"):
            if model.is_rotated(layer):
                heads = self._rotated(heads, layer, name)
            result = (self._norm if kind == "rotated" else self._normal)(heads, f"{name}_norm")
        else:
            ones, zeros = (relax.const(np.full(size, value, "float32")) for value in (1.0, 0.0))
            normal = self.emit(
                relax.op.nn.layer_norm(heads, ones, zeros, axes=[-1], epsilon=model.eps), f"{name}_normal"
            )
            factors = self.weights.vector(f"{name}_norm.weight", width // size, size)
            result = self.emit(normal * factors, f"{name}_norm")
        return self._reshaped(result, [self.rows, width], f"{name}_rows")

    def _rotated(self, x: relax.Expr, layer: int, name: str) -> relax.Expr:
        """Rotate heads, (rows, heads, size)."""
        size, half = self.model.head_sizes[layer], self.model.rotary_sizes[layer] // 2
        rows, heads = self.rows, int(x.ty.shape.values[1])
        table = self.emit(relax.op.expand_dims(self._rotary_table(layer), 1), f"{name}_angles")
        cosines, sines = (self._sliced(table, i * half, (i + 1) * half, f"{name}_angles") for i in range(2))
        in_pairs, turned = self.model.architecture.rotary == "pairs", self._sliced(x, 0, 2 * half, f"{name}_turned")
        if in_pairs:
            turned = self._reshaped(turned, [rows, heads, half, 2], f"{name}_pairs")
            turned = self.emit(relax.op.permute_dims(turned, [0, 1, 3, 2]), f"{name}_unpaired")
            turned = self._reshaped(turned, [rows, heads, 2 * half], f"{name}_halves")
        first, second = (self._sliced(turned, i * half, (i + 1) * half, f"{name}_half") for i in range(2))

        def multiply(x: relax.Expr, y: relax.Expr) -> relax.Expr:
            return self.emit(x * y, f"{name}_product")

        low = multiply(first, cosines) - multiply(second, sines)
        high = multiply(second, cosines) + multiply(first, sines)
        parts = [self.emit(part, f"{name}_part") for part in (low, high)]
        if in_pairs:
            columns = [self.emit(relax.op.expand_dims(part, 3), f"{name}_column") for part in parts]
            parts = [self.emit(relax.op.concat(columns, axis=3), f"{name}_pairs")]
            parts = [self._reshaped(parts[0], [rows, heads, 2 * half], f"{name}_paired")]
        if 2 * half < size:
            parts.append(self._sliced(x, 2 * half, size, f"{name}_unrotated"))
        return parts[0] if len(parts) == 1 else self.emit(relax.op.concat(parts, axis=2), f"{name}_rotated")

    def _rotary_table(self, layer: int) -> relax.Expr:
        """Cosines and sines of the rotary angles of each row's position, (rows, rotary_size).

        Each device computes a table of its own, which costs less than a copy. Its name is that of the first layer that
        reads it.
        """
        base, scale, yarn = self.model.rotary_base_of(layer)
        size, is_divided = self.model.rotary_sizes[layer], self.model.has_scaled_positions(layer)
        key = self.rows, size, is_divided, base, scale, yarn, self.types.device_of(f"blk.{layer}.attn")
        if key not in self.rotary_tables:
            name = f"blk.{layer}.attn_rope"
            positions = self.emit(relax.op.astype(self._integers("positions", layer), "float32"), f"{name}.positions")
            column = self.emit(relax.op.expand_dims(positions, 1), f"{name}.column")
            frequencies = np.tile(self._frequencies(size, is_divided, base, scale, yarn), 2)[None]
            angles = self.emit(column * relax.const(frequencies), f"{name}.angles")
            parts = [self.emit(op(angles), f"{name}.{op.__name__}") for op in (relax.op.cos, relax.op.sin)]
            # Unlike a concatenation of halves, a selection is one kernel.
            table = self.emit(relax.op.where(relax.const(np.arange(size)[None] < size // 2), *parts), name)
            magnitude = yarn.magnitude if yarn else self.model.magnitude
            self.rotary_tables[key] = self._scaled(table, magnitude, f"{name}.scaled")
        return self.rotary_tables[key]

    def _frequencies(
        self, rotary_size: int, is_divided: bool, base: float, scale: float, yarn: Yarn | None
    ) -> np.ndarray:
        """Rotary frequencies: radians per position for each pair of elements."""
        frequencies = base ** (-np.arange(0, rotary_size, 2, dtype="float64") / rotary_size)
        frequencies = yarn.scaled(frequencies, scale) if yarn else scale * frequencies
        divisors = {name: f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")}
        numbers = {
            name: self.weights.numbers(tensor, [rotary_size // 2])
            for name, tensor in divisors.items()
            if is_divided and tensor in self.weights
        }
        is_short = self.context <= self.model.short_context
        numbers.pop("factors_long" if is_short else "factors_short", None)
        for each in numbers.values():
            frequencies = frequencies / each
        return np.asarray(frequencies, "float32")

    def _temperature(self, layer: int) -> relax.Expr:
        """Factors of the queries of each row, which grow with its position, (rows, 1)."""
        factor, length = self.model.temperature
        name = f"blk.{layer}.attn_temperature"
        positions = self.emit(relax.op.astype(self._integers("positions", layer), "float32"), f"{name}.numbers")
        # Rows after the end of a text have negative positions.
        positions = self.emit(relax.op.maximum(positions, scalar(0.0)), f"{name}.positions")
        if self.model.architecture.temperature:
            positions = self.emit(positions + scalar(1.0), f"{name}.ordinals")
        steps = self.emit(relax.op.floor(self._scaled(positions, 1.0 / length, f"{name}.scaled")), f"{name}.steps")
        logarithm = self.emit(relax.op.log(self.emit(steps + scalar(1.0), f"{name}.sum")), f"{name}.log")
        scaled = self._scaled(logarithm, factor, f"{name}.grown")
        return self.emit(relax.op.expand_dims(self.emit(scaled + scalar(1.0), f"{name}.factor"), 1), name)

    def _latent_qkv(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Queries of all heads in the space of compressed keys, then a compressed key, which is the value, too.

        The rotated elements of a head are the first.
        """
        model, latent, size, name = self.model, self.model.latent, self.model.head_sizes[layer], f"blk.{layer}"
        assert latent is not None, "only models with sizes of a latent attention have one"
        plain = latent.key_size - model.rotary_sizes[layer]
        self.weights.split_heads(f"{name}.attn_kv_b", model.heads, plain, latent.value_size, latent.rank)
        query, width, part = x, model.hidden_size, "q"
        if latent.query_rank:
            query, width, part = self._linear(x, f"{name}.attn_q_a", latent.query_rank, width), latent.query_rank, "q_b"
            query = self._norm(query, f"{name}.attn_q_a_norm")
        query = self._linear(query, f"{name}.attn_{part}", model.heads * latent.key_size, width)
        heads = self._reshaped(query, [self.rows, model.heads, latent.key_size], f"{name}.attn_q_heads")
        unrotated = self._sliced(heads, 0, plain, f"{name}.attn_q_nope")
        rotated = self._sliced(heads, plain, latent.key_size, f"{name}.attn_q_pe")
        absorbed = self._head_products(unrotated, f"{name}.attn_k_b", latent.rank, plain)
        joined = self.emit(relax.op.concat([rotated, absorbed], axis=2), f"{name}.attn_q_latent")
        queries = self._reshaped(joined, [self.rows, model.heads * size], f"{name}.attn_q_rows")
        key = self._linear(x, f"{name}.attn_kv_a_mqa", size, model.hidden_size)
        compressed = self._norm(self._sliced(key, 0, latent.rank, f"{name}.attn_kv"), f"{name}.attn_kv_a_norm")
        key = self.emit(
            relax.op.concat([self._sliced(key, latent.rank, size, f"{name}.attn_k_pe"), compressed], axis=1),
            f"{name}.attn_k_latent",
        )
        return self.emit(relax.op.concat([queries, key], axis=1), f"{name}.attn_qkv")

    def _latent_values(self, x: relax.Expr, name: str) -> relax.Expr:
        """Values of all heads, (rows, heads * value_size), from sums of compressed ones."""
        model, latent = self.model, self.model.latent
        assert latent is not None, "only models with sizes of a latent attention have one"
        products = self._head_products(x, f"{name}.attn_v_b", latent.value_size, latent.rank)
        return self._reshaped(products, [self.rows, model.heads * latent.value_size], f"{name}.attn_values")

    def _head_products(self, x: relax.Expr, name: str, out_features: int, in_features: int) -> relax.Expr:
        """The product of each head with a matrix of its own, (rows, heads, out_features).

        Heads are experts of block-quantized weights, and a batch of unquantized ones.
        """
        rows, heads, dtype = self.rows, self.model.heads, self.types.dtype_of(name)
        matrices = self.weights.unquantized_matrix(f"{name}.weight", [heads, out_features, in_features], dtype)
        if matrices is None:
            ids = relax.const(np.tile(np.arange(heads, dtype="int32"), (rows, 1)))
            x = self._reshaped(x, [rows, heads, 1, in_features], f"{name}.heads")
            result = self._expert_linear(x, ids, name, heads, out_features, in_features)
            return self._reshaped(result, [rows, heads, out_features], f"{name}.out")
        x = self._reshaped(self._cast(x, dtype), [rows, heads, in_features], f"{name}.rows")
        x = self.emit(relax.op.permute_dims(x, [1, 0, 2]), f"{name}.heads")
        transposed = self.emit(relax.op.permute_dims(matrices, [0, 2, 1]), f"{name}.transposed")
        result = self.emit(relax.op.matmul(x, transposed, out_dtype="float32"), name)
        return self.emit(relax.op.permute_dims(result, [1, 0, 2]), f"{name}.out")


class DeltaGraph(GraphOps):
    """The gated delta rule of layers."""

    def _delta_rule(self, x: relax.Expr, layer: int) -> relax.Expr:
        """The results of all heads of a layer with the gated delta rule, (rows, result_size), which adds to states."""
        model, name, states = self.model, f"blk.{layer}", self.caches[layer]
        problem = model.delta_problem(self.rows, int(states.ty.shape.values[0]), self.kind == CHUNK)
        width = model.result_size(layer)
        self._split_old_matrix(name, problem)
        vectors = [self.weights.vector(f"{name}.{part}", problem.value_heads) for part in ("ssm_a", "ssm_dt.bias")]
        taps = self.weights.vector(f"{name}.ssm_conv1d.weight", problem.channels, problem.taps)
        taps = self.emit(relax.op.permute_dims(taps, [1, 0]), f"{name}.ssm_conv1d.taps")
        mixed = self._linear(x, f"{name}.attn_qkv", problem.channels, model.hidden_size)
        beta, alpha = self._delta_shares(x, name, problem)
        mixed, states = self._delta_kernel(
            convolution_kernel(replace(problem, is_convolution=True)), [mixed, taps], states, f"{name}.attn.conv"
        )
        inputs = [mixed, beta, alpha, *vectors]
        result, self.caches[layer] = self._delta_kernel(
            delta_rule_kernel(problem), inputs, states, f"{name}.attn", is_output=True
        )
        self._end_full_rows(layer)
        result, x = self._current(result, f"{name}.attn.row"), self._current(x, f"{name}.attn_input")
        rows = self.rows
        heads = self._reshaped(result, [rows, problem.value_heads, problem.value_size], f"{name}.attn.heads")
        normal = self._reshaped(self._norm(heads, f"{name}.ssm_norm"), [rows, width], f"{name}.attn.normal")
        gate = self._linear(x, f"{name}.attn_gate", width, model.hidden_size)
        gate = self.emit(relax.op.nn.silu(gate), f"{name}.attn_gate_act")
        return self.emit(normal * gate, f"{name}.attn.gated")

    def _split_old_matrix(self, name: str, problem: DeltaRuleProblem) -> None:
        """Split the matrix of older files, with the rows of each head of keys in turn."""
        if self.weights.has_tensor(f"{name}.ssm_in.weight"):
            keys, values = problem.key_heads * problem.key_size, problem.value_heads * problem.value_size
            sizes = [problem.key_size] * 2 + [values // problem.key_heads] * 2
            groups = np.arange(2 * (keys + values)).reshape(problem.key_heads, -1)
            *mixed, gates = (part.reshape(-1) for part in np.split(groups, np.cumsum(sizes)[:-1], axis=1))
            orders = {f"{name}.attn_qkv.weight": np.concatenate(mixed), f"{name}.attn_gate.weight": gates}
            self.weights.order_rows(f"{name}.ssm_in.weight", orders, self.model.hidden_size)

    def _delta_shares(self, x: relax.Expr, name: str, problem: DeltaRuleProblem) -> list[relax.Expr]:
        """Numbers of the shares of changes and of the decays of each head of values, (rows, value_heads) each."""
        model, heads, rows = self.model, problem.value_heads, self.rows
        if f"{name}.ssm_ba.weight" not in self.weights:
            return [self._linear(x, f"{name}.ssm_{part}", heads, model.hidden_size) for part in ("beta", "alpha")]
        product = self._linear(x, f"{name}.ssm_ba", 2 * heads, model.hidden_size)
        group = heads // problem.key_heads
        groups = self._reshaped(product, [rows, problem.key_heads, 2 * group], f"{name}.ssm_ba_groups")
        parts = [self._sliced(groups, i * group, (i + 1) * group, f"{name}.ssm_ba_part") for i in range(2)]
        return [self._reshaped(part, [rows, heads], f"{name}.ssm_ba_heads") for part in parts]

    def _delta_kernel(
        self,
        kernel: tvm.tirx.PrimFunc,
        inputs: list[relax.Expr],
        states: relax.Expr,
        name: str,
        is_output: bool = False,
    ) -> list[relax.Expr]:
        """The results of a kernel that changes states in place, and the states."""
        function = self.builder.add_func(
            opaque_kernel(kernel), f"{kernel.attrs['global_symbol']}_{self.rows}_{self.kind}"
        )
        inputs = [*inputs, self.params["sequences"], self.params["positions"], states]
        results = relax.TensorType(list(kernel.params[-1].shape), "float32")
        call = relax.op.call_tir_inplace(function, inputs, [-1, len(inputs) - 1], [results, states.ty])
        both = self.emit(call, name)
        output = self.emit(relax.TupleGetItem(both, 0), f"{name}.results")
        return [output, self.emit(relax.TupleGetItem(both, 1), f"{name}.states", is_output)]
