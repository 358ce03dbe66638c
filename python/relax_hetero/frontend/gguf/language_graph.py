"""Relax functions of a language model: ``decode_B``, ``verify_R`` and ``prefill_C``.

``decode_B`` takes one token of each of B sequences and returns the logits and the greedy tokens; ``prefill_C`` takes C
consecutive tokens of one sequence and returns the logits of one of them. ``verify_R`` is a decode function whose rows
may be consecutive tokens of a sequence. All write keys and values into the cache: for
each layer, they take its pages as a parameter, and return them as a result. Variables have the names of the file's
tensors (``blk.3.attn_q``), which placement rules match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from ...encoding.pages import TABLES
from ...encoding.token_masks import MASKED_TOKENS
from ...errors import FrontendError
from ...op.cached_attention import cached_attention
from ...op.functions import apply_function
from ...op.quantized_matmul import dequantize_blocks
from ...op.streamed import stream
from ...tir.delta_rule import DeltaRuleProblem, convolution_kernel, delta_rule_kernel
from ...tir.routing import EXPERT_COUNTS, routing_kernel
from ...transform.ir.kernels import opaque_kernel
from ..greedy_tokens import greedy_tokens, masked_tokens
from ..paged_cache import CHUNK, DECODE, PagedCache
from .activation_types import ActivationTypes
from .expert_rules import ExpertGroup
from .hyperparameters import Hyperparameters, Yarn
from .stream_experts import ExpertStreams
from .weights import Weights


def language_module(
    model: Hyperparameters,
    weights: Weights,
    cache: PagedCache,
    activation_bits: int,
    types: ActivationTypes,
    expert_groups: Mapping[str, Sequence[ExpertGroup]],
    streams: ExpertStreams,
    count_experts: bool,
) -> tvm.IRModule:
    """Build all functions of a model, without placement.

    Residual sums, norms and results of products are float32. Only operands of products and attention have the types in
    `types`, so that activations of models trained in bfloat16 do not overflow float16 between layers. Products with
    block-quantized weights may round them to integers of `activation_bits` (see `dequantize_blocks`). `expert_groups`
    has the layers whose experts are on several devices, by their prefix (``blk.3``). With `count_experts`, functions
    take and return counters of the rows that chose each expert, which they add to in place.
    """
    builder = relax.BlockBuilder()
    functions = {}
    for name, rows, kind in cache.functions:
        params = cache.parameters(rows, kind, model.caches)
        context = cache.context
        function = LanguageFunction(
            model, weights, params, context, rows, kind, activation_bits, types, expert_groups, streams, builder
        )
        if count_experts:
            function.add_counters()
        functions[tvm.ir.GlobalVar(name)] = function.build(name)
    if cache.masks_tokens:
        functions[tvm.ir.GlobalVar(MASKED_TOKENS)] = masked_tokens(builder, model.vocabulary)
    return tvm.IRModule({**functions, **builder.get().functions})


class LanguageFunction:
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
        self.builder = builder
        self.counters: dict[str, relax.Expr] = {}  # by the prefix of the layer
        self.bindings: list[relax.Binding] = []
        self.rotary_tables: dict[tuple[int, float, float, Yarn | None, relax.VDevice | None], relax.Expr] = {}
        self._output_gates: dict[int, relax.Expr] = {}  # by layer
        self.params, self.context = params, context

    def add_counters(self) -> None:
        """Add counters of the experts of each layer to the parameters and results."""
        for layer in range(self.model.dense_layers, self.model.layers):
            name = f"{EXPERT_COUNTS}{layer}"
            self.params[name] = relax.Var(name, relax.TensorType([self.model.experts], "int32"))
            self.counters[f"blk.{layer}"] = self.params[name]

    def build(self, name: str) -> relax.Function:
        """Build the function, with `name` as its global symbol."""
        x = self._embedding()
        pages = []
        for layer in range(self.model.layers):
            x, layer_pages = self._layer(x, layer)
            pages.append(layer_pages)
        # The result is a tuple expression: a tuple variable would have one device, and move all pages there.
        logits = self._logits(x)
        # An output of the dataflow block, in place of the local variable that `_logits` bound last.
        self.bindings[-1] = relax.VarBinding(relax.Var(logits.name, logits.ty), self.bindings[-1].value)
        outputs = {"logits": self.bindings[-1].var}
        if self.kind != CHUNK:
            tokens = greedy_tokens(
                self.builder, outputs["logits"], lambda value, name: self.emit(value, f"output.{name}")
            )
            outputs["greedy_tokens"] = self.emit(tokens, "output.greedy_tokens", is_output=True)
        outputs |= {f"pages_{layer}": layer_pages for layer, layer_pages in enumerate(pages)}
        outputs |= {name.replace("blk.", EXPERT_COUNTS): counters for name, counters in self.counters.items()}
        return self.function(name, outputs)

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

    def _embedding(self) -> relax.Expr:
        """The embeddings of the tokens, (rows, hidden_size)."""
        model = self.model
        table = self._matrix("token_embd", [model.vocabulary, model.hidden_size])
        x = self.emit(relax.op.take(table, self.params["tokens"], axis=0), "token_embd")
        x = self._scaled(x, model.embedding_scale, "token_embd.scaled")
        if not model.architecture.rotary:
            x = self._with_positions(x)
        if "token_types.weight" in self.weights:
            kind = relax.const(self.weights.first_row("token_types.weight", model.hidden_size))
            x = self.emit(relax.op.add(x, kind), "token_embd.typed")
        return self._norm(x, "token_embd_norm") if "token_embd_norm.weight" in self.weights else x

    def _with_positions(self, x: relax.Expr) -> relax.Expr:
        """The embeddings plus those of their positions, (rows, hidden_size)."""
        model = self.model
        if self.context > model.context:
            raise FrontendError(
                f"context is {self.context:,}, expected at most {model.context:,}: positions have learned embeddings"
            )
        table = self._matrix("position_embd", [model.context, model.hidden_size], "token_embd.table")
        positions = self.emit(
            relax.op.take(table, self.params["positions"], axis=0, mode="clip"), "token_embd.positions"
        )
        return self.emit(relax.op.add(x, positions), "token_embd.sum")

    def _scaled(self, x: relax.Expr, factor: float, name: str) -> relax.Expr:
        """Multiply by a factor, unless it is 1."""
        return x if factor == 1.0 else self.emit(relax.op.multiply(x, _scalar(factor)), name)

    def _layer(self, x: relax.Expr, layer: int) -> tuple[relax.Expr, relax.Expr]:
        """The output of a layer, and its pages."""
        name, model, norms = f"blk.{layer}", self.model, self.model.architecture.norms
        before, between = self._input_norms(layer)
        inputs = self._optional_norm(x, before)
        has_delta_rule = model.has_delta_rule(layer)
        attention, pages = self._delta_rule(inputs, layer) if has_delta_rule else self._attention(inputs, layer)
        matrix = f"{name}.{'ssm_out' if has_delta_rule else 'attn_output'}"
        projection = self._linear(attention, matrix, model.hidden_size, model.result_size(layer))
        if norms.attention_out:
            projection = self._norm(projection, f"{name}.{norms.attention_out}")
        projection = self._scaled(projection, model.residual_scale, f"{name}.attn_scaled")
        total = self.emit(relax.op.add(x, projection), f"{name}.attn_sum")
        if norms.attention_sum:
            total = self._norm(total, f"{name}.{norms.attention_sum}")
        if before != between or not before:
            inputs = self._optional_norm(x if model.is_parallel else total, between)
        if layer < model.dense_layers:
            feed_forward = self._feed_forward(inputs, name, model.feed_forward[layer])
        else:
            feed_forward = self._experts(inputs, name)
            if model.shared_feed_forward:
                shared = self._shared_expert(inputs, name)
                feed_forward = self.emit(relax.op.add(feed_forward, shared), f"{name}.ffn_out")
        if norms.feed_forward_out:
            feed_forward = self._norm(feed_forward, f"{name}.{norms.feed_forward_out}")
        feed_forward = self._scaled(feed_forward, model.residual_scale, f"{name}.ffn_scaled")
        result = self.emit(relax.op.add(total, feed_forward), f"{name}.ffn_sum")
        return self._norm(result, f"{name}.{norms.feed_forward_sum}") if norms.feed_forward_sum else result, pages

    def _input_norms(self, layer: int) -> tuple[str, str]:
        """Names of the norms of the inputs of attention and feed-forward; "": none."""
        norms = self.model.architecture.norms
        attention = "" if norms.skips_first and layer == 0 else norms.attention
        names = [f"blk.{layer}.{norm}" if norm else "" for norm in (attention, norms.feed_forward)]
        before, between = (other if self.weights.lacks(f"{own}.weight") else own for own, other in (names, names[::-1]))
        return before, between

    def _optional_norm(self, x: relax.Expr, name: str) -> relax.Expr:
        """The norm of a name; without a name, the value."""
        return self._norm(x, name) if name else x

    def _attention(self, x: relax.Expr, layer: int) -> tuple[relax.Expr, relax.Expr]:
        name, model = f"blk.{layer}", self.model
        qkv = self._latent_qkv(x, layer) if model.latent else self._qkv(x, layer)
        qkv = self._cast(qkv, self.types.dtype_of(f"{name}.attn"))
        window = model.window_of(layer)
        page_table = TABLES[window > 0]
        norms, rotary = "", model.architecture.rotary if model.is_rotated(layer) else ""
        if model.architecture.norms.heads == "each":
            norms = "".join(part for part in "qk" if f"{name}.attn_{part}_norm.weight" in self.weights)
        elif self._has_rotated_norms(name):  # `_normalized_heads` rotates
            rotary = ""
        has_sinks = f"{name}.attn_sinks.weight" in self.weights
        operands = [self._rotary_table(layer)] if rotary else []
        size = model.head_sizes[layer]
        operands += [self.weights.vector(f"{name}.attn_{part}_norm.weight", size) for part in norms]
        if has_sinks:
            operands.append(self.weights.vector(f"{name}.attn_sinks.weight", model.heads))
        call = cached_attention(
            qkv,
            *(self.params[key] for key in (f"pages_{layer}", page_table, "sequences", "positions")),
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
        if model.latent:
            output = self._latent_values(output, name)
        if layer in self._output_gates:
            output = self.emit(relax.op.multiply(output, self._output_gates[layer]), f"{name}.attn.gated")
        return output, self.emit(relax.TupleGetItem(result, 1), f"{name}.attn.pages", is_output=True)

    def _qkv(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Queries, keys and values of all heads, (rows, (heads + 2 * kv_heads) * head_size)."""
        model, name = self.model, f"blk.{layer}"
        kv_size = model.kv_heads[layer] * model.head_sizes[layer]
        sizes = {"q": model.heads * model.head_sizes[layer], "k": kv_size, "v": kv_size}
        joined, names = f"{name}.attn_qkv", {f"{name}.attn_{part}": size for part, size in sizes.items()}
        has_norms = model.architecture.norms.heads != "each" and f"{name}.attn_q_norm.weight" in self.weights
        has_gate = model.architecture.has_output_gate
        is_changed = has_norms or model.temperature[0] > 0 or has_gate
        if f"{joined}.weight" in self.weights or (not is_changed and self._try_merge(joined, names)):
            product = self._linear(x, joined, sum(sizes.values()), model.hidden_size)
            if not is_changed:
                return product
            parts, end = [], 0
            for part, size in names.items():
                begin, end = end, end + size
                parts.append(self._sliced(product, begin, end, part))
        else:
            first = [self._gated_queries(x, layer)] if has_gate else []
            parts = first + [self._linear(x, part, size, model.hidden_size) for part, size in [*names.items()][len(first) :]]
        if has_norms:
            parts[:2] = [self._normalized_heads(part, layer, key) for part, key in zip(parts, "qk", strict=False)]
        if model.temperature[0]:
            parts[0] = self.emit(relax.op.multiply(parts[0], self._temperature(layer)), f"{name}.attn_q_tempered")
        return self.emit(relax.op.concat(parts, axis=1), joined)

    def _gated_queries(self, x: relax.Expr, layer: int) -> relax.Expr:
        """Queries of all heads, (rows, heads * head_size), whose matrix also has rows of gates of each head's result."""
        model, name = self.model, f"blk.{layer}.attn_q"
        size, width = model.head_sizes[layer], model.heads * model.head_sizes[layer]
        product = self._linear(x, name, 2 * width, model.hidden_size)
        heads = self._reshaped(product, [self.rows, model.heads, 2 * size], f"{name}_heads")
        queries, gates = (
            self._reshaped(self._sliced(heads, i * size, (i + 1) * size, f"{name}_{part}"), [self.rows, width], f"{name}_{part}_rows")
            for i, part in enumerate(("query", "gate"))
        )
        self._output_gates[layer] = self.emit(relax.op.sigmoid(gates), f"{name}_share")
        return queries

    def _delta_rule(self, x: relax.Expr, layer: int) -> tuple[relax.Expr, relax.Expr]:
        """The results of all heads of a layer with the gated delta rule, (rows, result_size), and its states."""
        model, name, rows, params = self.model, f"blk.{layer}", self.rows, self.params
        states = params[f"pages_{layer}"]
        problem = model.delta_problem(rows, int(states.ty.shape.values[0]), self.kind == CHUNK)
        width = model.result_size(layer)
        vectors = [self.weights.vector(f"{name}.{part}", problem.value_heads) for part in ("ssm_a", "ssm_dt.bias")]
        taps = self.weights.vector(f"{name}.ssm_conv1d.weight", problem.channels, problem.taps)
        taps = self.emit(relax.op.permute_dims(taps, [1, 0]), f"{name}.ssm_conv1d.taps")
        mixed = self._linear(x, f"{name}.attn_qkv", problem.channels, model.hidden_size)
        beta, alpha = self._delta_shares(x, name, problem)
        mixed, states = self._delta_kernel(
            convolution_kernel(replace(problem, is_convolution=True)), [mixed, taps], states, f"{name}.attn.conv"
        )
        inputs = [mixed, beta, alpha, *vectors]
        result, states = self._delta_kernel(delta_rule_kernel(problem), inputs, states, f"{name}.attn", is_output=True)
        heads = self._reshaped(result, [rows, problem.value_heads, problem.value_size], f"{name}.attn.heads")
        normal = self._reshaped(self._norm(heads, f"{name}.ssm_norm"), [rows, width], f"{name}.attn.normal")
        gate = self._linear(x, f"{name}.attn_gate", width, model.hidden_size)
        gate = self.emit(relax.op.nn.silu(gate), f"{name}.attn_gate_act")
        return self.emit(relax.op.multiply(normal, gate), f"{name}.attn.gated"), states

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
        self, kernel: tvm.tirx.PrimFunc, inputs: list[relax.Expr], states: relax.Expr, name: str, is_output: bool = False
    ) -> list[relax.Expr]:
        """The results of a kernel that changes states in place, and the states."""
        function = self.builder.add_func(opaque_kernel(kernel), f"{kernel.attrs['global_symbol']}_{self.rows}_{self.kind}")
        inputs = [*inputs, self.params["sequences"], self.params["positions"], states]
        results = relax.TensorType(list(kernel.params[-1].shape), "float32")
        call = relax.op.call_tir_inplace(function, inputs, [-1, len(inputs) - 1], [results, states.ty])
        both = self.emit(call, name)
        output = self.emit(relax.TupleGetItem(both, 0), f"{name}.results")
        return [output, self.emit(relax.TupleGetItem(both, 1), f"{name}.states", is_output)]

    def _has_rotated_norms(self, name: str) -> bool:
        """Return whether a layer normalizes queries and keys after their rotation."""
        return self.model.architecture.norms.heads == "rotated" and f"{name}.attn_q_norm.weight" in self.weights

    def _normalized_heads(self, x: relax.Expr, layer: int, part: str) -> relax.Expr:
        """Queries or keys (`part`: "q" or "k") of all heads with norms that the attention kernel does not compute."""
        model, name = self.model, f"blk.{layer}.attn_{part}"
        kind, size, width = model.architecture.norms.heads, model.head_sizes[layer], int(x.ty.shape.values[-1])
        if kind == "joint":
            return self._norm(x, f"{name}_norm")
        heads = self._reshaped(x, [self.rows, width // size, size], f"{name}_heads")
        if kind == "rotated":
            if model.is_rotated(layer):
                heads = self._rotated(heads, layer, name)
            result = self._norm(heads, f"{name}_norm")
        else:
            ones, zeros = (relax.const(np.full(size, value, "float32")) for value in (1.0, 0.0))
            normal = self.emit(
                relax.op.nn.layer_norm(heads, ones, zeros, axes=[-1], epsilon=model.eps), f"{name}_normal"
            )
            factors = self.weights.vector(f"{name}_norm.weight", width // size, size)
            result = self.emit(relax.op.multiply(normal, factors), f"{name}_norm")
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
            return self.emit(relax.op.multiply(x, y), f"{name}_product")

        low = relax.op.subtract(multiply(first, cosines), multiply(second, sines))
        high = relax.op.add(multiply(second, cosines), multiply(first, sines))
        parts = [self.emit(part, f"{name}_part") for part in (low, high)]
        if in_pairs:
            columns = [self.emit(relax.op.expand_dims(part, 3), f"{name}_column") for part in parts]
            parts = [self.emit(relax.op.concat(columns, axis=3), f"{name}_pairs")]
            parts = [self._reshaped(parts[0], [rows, heads, 2 * half], f"{name}_paired")]
        if 2 * half < size:
            parts.append(self._sliced(x, 2 * half, size, f"{name}_unrotated"))
        return parts[0] if len(parts) == 1 else self.emit(relax.op.concat(parts, axis=2), f"{name}_rotated")

    def _temperature(self, layer: int) -> relax.Expr:
        """Factors of the queries of each row, which grow with its position, (rows, 1)."""
        factor, length = self.model.temperature
        name = f"blk.{layer}.attn_temperature"
        positions = self.emit(relax.op.astype(self.params["positions"], "float32"), f"{name}.numbers")
        # Rows after the end of a text have negative positions.
        positions = self.emit(relax.op.maximum(positions, _scalar(0.0)), f"{name}.positions")
        steps = self.emit(relax.op.floor(self._scaled(positions, 1.0 / length, f"{name}.scaled")), f"{name}.steps")
        logarithm = self.emit(relax.op.log(self.emit(relax.op.add(steps, _scalar(1.0)), f"{name}.sum")), f"{name}.log")
        scaled = self._scaled(logarithm, factor, f"{name}.grown")
        return self.emit(relax.op.expand_dims(self.emit(relax.op.add(scaled, _scalar(1.0)), f"{name}.factor"), 1), name)

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

    def _reshaped(self, x: relax.Expr, shape: list[int], name: str) -> relax.Expr:
        """Reshape a value, unless it has the shape."""
        return (
            x if [int(extent) for extent in x.ty.shape.values] == shape else self.emit(relax.op.reshape(x, shape), name)
        )

    def _sliced(self, x: relax.Expr, begin: int, end: int, name: str) -> relax.Expr:
        """Elements from `begin` to `end` of the last axis."""
        return self.emit(relax.op.strided_slice(x, [len(x.ty.shape.values) - 1], [begin], [end]), name)

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

    def _rotary_table(self, layer: int) -> relax.Expr:
        """Cosines and sines of the rotary angles of each row's position, (rows, rotary_size).

        Each device computes a table of its own, which costs less than a copy. Its name is that of the first layer that
        reads it.
        """
        base, scale, yarn = self.model.rotary_base_of(layer)
        size = self.model.rotary_sizes[layer]
        key = size, base, scale, yarn, self.types.device_of(f"blk.{layer}.attn")
        if key not in self.rotary_tables:
            name = f"blk.{layer}.attn_rope"
            positions = self.emit(relax.op.astype(self.params["positions"], "float32"), f"{name}.positions")
            column = self.emit(relax.op.expand_dims(positions, 1), f"{name}.column")
            frequencies = relax.const(self._frequencies(size, base, scale, yarn)[None])
            angles = self.emit(relax.op.multiply(column, frequencies), f"{name}.angles")
            parts = [self.emit(op(angles), f"{name}.{op.__name__}") for op in (relax.op.cos, relax.op.sin)]
            table = self.emit(relax.op.concat(parts, axis=1), name)
            magnitude = yarn.magnitude if yarn else self.model.magnitude
            self.rotary_tables[key] = self._scaled(table, magnitude, f"{name}.scaled")
        return self.rotary_tables[key]

    def _frequencies(self, rotary_size: int, base: float, scale: float, yarn: Yarn | None) -> np.ndarray:
        """Rotary frequencies: radians per position for each pair of elements."""
        frequencies = base ** (-np.arange(0, rotary_size, 2, dtype="float64") / rotary_size)
        frequencies = yarn.scaled(frequencies, scale) if yarn else scale * frequencies
        divisors = {name: f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")}
        numbers = {
            name: self.weights.numbers(tensor, [rotary_size // 2])
            for name, tensor in divisors.items()
            if tensor in self.weights
        }
        is_short = self.context <= self.model.short_context
        numbers.pop("factors_long" if is_short else "factors_short", None)
        for each in numbers.values():
            frequencies = frequencies / each
        return np.asarray(frequencies, "float32")

    def _feed_forward(self, x: relax.Expr, name: str, width: int, suffix: str = "") -> relax.Expr:
        """The result of a network of `width`, whose matrices have a suffix, (rows, hidden_size)."""
        model = self.model
        parts = [f"{name}.ffn_{part}{suffix}" for part in (("gate", "up") if model.architecture.is_gated else ("up",))]
        self.weights.split_rows(f"{parts[-1]}.weight", [f"{part}.weight" for part in parts], [width, model.hidden_size])
        products = [self._linear(x, part, width, model.hidden_size) for part in parts]
        gated = self._activated(products, f"{name}.ffn{{}}{suffix}")
        return self._linear(gated, f"{name}.ffn_down{suffix}", model.hidden_size, width)

    def _activated(self, products: Sequence[relax.Expr], name: str) -> relax.Expr:
        """The input of the last matrix, from one product or from those of gate and up.

        `name` takes the ends of variables' names.
        """
        function, gate = self.model.architecture.activation, products[0]
        if function == "squared_relu":
            positive = self.emit(relax.op.nn.relu(gate), name.format("_relu"))
            active = self.emit(relax.op.multiply(positive, positive), name.format("_act"))
        elif function == "xielu":
            active = self._xielu(gate, name)
        elif function != "clamped_swiglu":
            active = self.emit(apply_function(function, gate), name.format("_act"))
        else:
            return self._clamped_swiglu(gate, products[1], name)
        return active if len(products) == 1 else self.emit(relax.op.multiply(active, products[1]), name.format("_par"))

    def _xielu(self, x: relax.Expr, name: str) -> relax.Expr:
        """``p * x * x + b * x`` of positive values, ``n * (exp(min(x, e)) - 1 - x) + b * x`` of the others."""
        negative, positive, both, bound = map(_scalar, self.model.xielu[int(name.split(".")[1])])

        def emit(value: relax.Expr, part: str) -> relax.Expr:
            return self.emit(value, name.format(f"_{part}"))

        linear = emit(relax.op.multiply(x, both), "linear")
        square = emit(relax.op.multiply(emit(relax.op.multiply(x, x), "square"), positive), "positive")
        power = emit(relax.op.exp(emit(relax.op.minimum(x, bound), "bounded")), "exp")
        rest = emit(relax.op.subtract(emit(relax.op.subtract(power, _scalar(1.0)), "expm1"), x), "rest")
        curve = emit(relax.op.multiply(rest, negative), "negative")
        is_positive = emit(relax.op.greater(x, _scalar(0.0)), "is_positive")
        return emit(relax.op.add(emit(relax.op.where(is_positive, square, curve), "curve"), linear), "act")

    def _clamped_swiglu(self, gate: relax.Expr, up: relax.Expr, name: str) -> relax.Expr:
        limit = _scalar(_SWIGLU_LIMIT)
        gate = self.emit(relax.op.minimum(gate, limit), name.format("_gate_clamped"))
        scaled = self._scaled(gate, _SWIGLU_ALPHA, name.format("_gate_scaled"))
        sigmoid = self.emit(relax.op.sigmoid(scaled), name.format("_sigmoid"))
        active = self.emit(relax.op.multiply(gate, sigmoid), name.format("_act"))
        low = self.emit(relax.op.minimum(up, limit), name.format("_up_below"))
        clamped = self.emit(relax.op.maximum(low, _scalar(-_SWIGLU_LIMIT)), name.format("_up_clamped"))
        shifted = self.emit(relax.op.add(clamped, _scalar(1.0)), name.format("_up_shifted"))
        return self.emit(relax.op.multiply(active, shifted), name.format("_par"))

    def _shared_expert(self, x: relax.Expr, name: str) -> relax.Expr:
        """The result of the expert of all tokens, (rows, hidden_size); where it has a gate, times its sigmoid."""
        model = self.model
        shared = self._feed_forward(x, name, model.shared_feed_forward, "_shexp")
        if f"{name}.ffn_gate_inp_shexp.weight" not in self.weights:
            return shared
        vector = self.weights.vector(f"{name}.ffn_gate_inp_shexp.weight", model.hidden_size)
        products = self.emit(relax.op.multiply(x, vector), f"{name}.ffn_shexp_products")
        score = self.emit(relax.op.sum(products, [-1], keepdims=True), f"{name}.ffn_shexp_score")
        share = self.emit(relax.op.sigmoid(score), f"{name}.ffn_shexp_share")
        return self.emit(relax.op.multiply(shared, share), f"{name}.ffn_shexp_out")

    def _experts(self, x: relax.Expr, name: str) -> relax.Expr:
        """The weighted sum of the chosen experts of each row, (rows, hidden_size)."""
        ids, weights = self._routes(x, name)
        groups = self.expert_groups.get(name)
        if groups is None:
            return self._experts_of_device(x, ids, weights, name)
        device = self.types.device_of(f"{name}.ffn_moe_out")
        is_local = {group: self.types.device_of(f"{name}.ffn_sum_exps{group.suffix}") == device for group in groups}
        # What other devices compute begins first.
        order = sorted(groups, key=is_local.__getitem__)
        sums = {group: self._experts_of_device(x, ids, weights, name, group) for group in order}
        total = sums[groups[0]]
        for group in groups[1:]:
            total = self.emit(relax.op.add(total, sums[group]), f"{name}.ffn_moe_out")
        return total

    def _routes(self, x: relax.Expr, name: str) -> tuple[relax.Expr, relax.Expr]:
        """Numbers and shares of the experts of each row, (rows, used) each."""
        model, rows = self.model, self.rows
        assert model.routing is not None, "layers after the dense ones have experts"
        # float32 on all devices: rounding would change the order of experts with nearly equal scores.
        inputs = [self._linear(x, f"{name}.ffn_gate_inp", model.experts, model.hidden_size, dtype="float32")]
        has_bias, counters = f"{name}.exp_probs_b.bias" in self.weights, self.counters.get(name)
        if has_bias:
            inputs.append(self.weights.vector(f"{name}.exp_probs_b.bias", model.experts))
        types = [relax.TensorType([rows, model.experts_used], dtype) for dtype in ("int32", "float32")]
        problem = replace(model.routing, rows=rows, has_bias=has_bias, has_counts=counters is not None)
        kernel = self.builder.add_func(opaque_kernel(routing_kernel(problem)), f"routing_{rows}_{self.kind}")
        if counters is None:
            routing = relax.op.call_tir(kernel, inputs, types)
        else:
            inputs += [self.params["sequences"], counters]
            indices = [-1, -1, len(inputs) - 1]  # -1: a new tensor
            routing = relax.op.call_tir_inplace(kernel, inputs, indices, [*types, counters.ty])
        routes = self.emit(routing, f"{name}.ffn_moe_topk")
        if counters is not None:
            added = relax.TupleGetItem(routes, 2)
            self.counters[name] = self.emit(added, f"{name}.ffn_moe_counts", is_output=True)
        ids = self.emit(relax.TupleGetItem(routes, 0), f"{name}.ffn_moe_ids")
        return ids, self.emit(relax.TupleGetItem(routes, 1), f"{name}.ffn_moe_weights")

    def _experts_of_device(
        self, x: relax.Expr, ids: relax.Expr, shares: relax.Expr, name: str, group: ExpertGroup | None = None
    ) -> relax.Expr:
        """The weighted sum of the chosen experts that a device has (by default all), (rows, hidden_size).

        Parameters
        ----------
        x, ids, shares : relax.Expr
            Rows, numbers of their experts, and the experts' shares.
        name : str
            Prefix of the layer, ``blk.3``.
        group : ExpertGroup, optional
            Experts of the device.
        """
        model, rows, end = self.model, self.rows, group.suffix if group else ""
        used, width, hidden = model.experts_used, model.expert_feed_forward, model.hidden_size
        kept = end  # the end of the names of weights
        end += self.streams.suffix_of(f"{name}{end}", rows) if self.kind == CHUNK else ""
        own = list(group.experts) if group else list(range(model.experts))
        if group:
            for part, sizes in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                tensor = f"{name}.ffn_{part}_exps"
                self.weights.select_experts(tensor, f"{tensor}{kept}", own, [model.experts, *sizes])
        if len(own) < model.experts:
            numbers = np.full(model.experts, -1, "int32")
            numbers[own] = range(len(own))
            ids = self.emit(relax.op.take(relax.const(numbers), ids, axis=0, mode="clip"), f"{name}.ffn_own_exps{end}")
        narrow = self._cast(x, self.types.dtype_of(f"{name}.ffn_gate_exps{end}"))
        expert_input = self.emit(relax.op.reshape(narrow, [rows, 1, 1, hidden]), f"{name}.ffn_in_exps{end}")

        def linear(x: relax.Expr, part: str, out_features: int, in_features: int) -> relax.Expr:
            tensor = f"{name}.ffn_{part}_exps"
            sizes = len(own), out_features, in_features
            return self._expert_linear(x, ids, f"{tensor}{end}", *sizes, tensor=f"{tensor}{kept}")

        gate, up = linear(expert_input, "gate", width, hidden), linear(expert_input, "up", width, hidden)
        gated = self._activated([gate, up], f"{name}.ffn{{}}_exps{end}")
        down = linear(gated, "down", hidden, width)
        flat = self._reshaped(down, [rows, used, hidden], f"{name}.ffn_rows_exps{end}")
        column = self._reshaped(shares, [rows, used, 1], f"{name}.ffn_shares_exps{end}")
        weighted = self.emit(relax.op.multiply(flat, column), f"{name}.ffn_weighted_exps{end}")
        if len(own) < model.experts:
            is_own = self.emit(relax.op.greater_equal(ids, relax.const(0, "int32")), f"{name}.ffn_is_own_exps{end}")
            mask = self.emit(relax.op.expand_dims(is_own, 2), f"{name}.ffn_mask_exps{end}")
            weighted = self.emit(relax.op.where(mask, weighted, _scalar(0.0)), f"{name}.ffn_masked_exps{end}")
        return self.emit(relax.op.sum(weighted, [1]), f"{name}.ffn_sum_exps{end}")

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

    def _logits(self, x: relax.Expr) -> relax.Expr:
        model = self.model
        if "last" in self.params:
            x = self.emit(relax.op.take(x, self.params["last"], axis=0, mode="clip"), "last_row")
            self.row_kind = DECODE  # one row per chunk
        name = "output" if "output.weight" in self.weights else "token_embd"
        logits = self._linear(self._norm(x, "output_norm"), name, model.vocabulary, model.hidden_size, "output")
        logits = self._scaled(logits, model.logit_scale, "output.factored")
        if not model.logit_softcap:
            return logits
        scaled = self.emit(relax.op.multiply(logits, _scalar(1.0 / model.logit_softcap)), "output.scaled")
        bounded = self.emit(relax.op.tanh(scaled), "output.tanh")
        return self.emit(relax.op.multiply(bounded, _scalar(model.logit_softcap)), "output.capped")

    def _norm(self, x: relax.Expr, name: str) -> relax.Expr:
        """RMS norm ``x / sqrt(mean(x * x) + eps) * weight`` or layer norm, row by row."""
        size = int(x.ty.shape.values[-1])
        weight = self.weights.vector(f"{name}.weight", size)
        if self.model.architecture.norms.kind == "layer":
            has_bias = f"{name}.bias" in self.weights
            bias = self.weights.vector(f"{name}.bias", size) if has_bias else relax.const(np.zeros(size, "float32"))
            return self.emit(relax.op.nn.layer_norm(x, weight, bias, axes=[-1], epsilon=self.model.eps), name)
        squares = self.emit(relax.op.multiply(x, x), f"{name}.squares")
        mean = self.emit(relax.op.mean(squares, [-1], keepdims=True), f"{name}.mean")
        stable = self.emit(relax.op.add(mean, _scalar(self.model.eps)), f"{name}.stable")
        inverse = self.emit(relax.op.rsqrt(stable), f"{name}.inverse")
        normal = self.emit(relax.op.multiply(x, inverse), f"{name}.normal")
        return self.emit(relax.op.multiply(normal, weight), name)

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

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """Cast a value to an element type, once for all readers."""
        if str(x.ty.dtype) == dtype:
            return x
        if (x, dtype) not in self._casts:
            self._casts[x, dtype] = self.emit(relax.op.astype(x, dtype), f"{x.name}.{dtype}")
        return self._casts[x, dtype]

    def _linear(
        self, x: relax.Expr, tensor: str, out_features: int, in_features: int, name: str = "", dtype: str = ""
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
        if f"{tensor}.scale" in self.weights:
            scale = self.weights.vector(f"{tensor}.scale", 1)
            result = self.emit(relax.op.multiply(result, scale), f"{name}.scaled")
        if f"{tensor}.bias" in self.weights:
            bias = self.weights.vector(f"{tensor}.bias", out_features)
            result = self.emit(relax.op.add(result, bias), f"{name}.biased")
        return result


_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0
"""Factor in the sigmoid of gpt-oss's gates, and limit of both factors of its product."""


def _scalar(value: float) -> relax.Expr:
    return relax.const(value, "float32")
