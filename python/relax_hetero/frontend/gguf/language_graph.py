"""Relax functions of a language model: ``decode_B``, ``verify_R`` and ``prefill_C``.

``decode_B`` takes one token of each of B sequences and returns the logits and the greedy tokens; ``prefill_C`` takes C
consecutive tokens of one sequence and returns the logits of one of them, for which it computes one row after the
attention of the last layer that writes keys. ``verify_R`` is a decode function whose rows may be consecutive tokens of
a sequence. All write keys and values into the cache: for each layer, they take its pages as a parameter, and return
them as a result. Variables have the names of the file's tensors (``blk.3.attn_q``), which placement rules match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from ...encoding.pages import EXPERT_COUNTS
from ...encoding.token_masks import MASKED_TOKENS
from ...errors import FrontendError
from ..greedy_tokens import greedy_tokens, masked_tokens
from ..paged_cache import CHUNK, PagedCache
from .activation_types import ActivationTypes
from .attention_graph import AttentionGraph, DeltaGraph
from .expert_rules import ExpertGroup
from .graph_ops import scalar
from .hyperparameters import Hyperparameters
from .residual_graph import ResidualGraph
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
    if model.attention_chunk and cache.context > model.attention_chunk:
        raise FrontendError(
            f"context is {cache.context:,}, expected at most {model.attention_chunk:,}: layers attend within chunks of "
            "so many positions"
        )
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
        functions[tvm.ir.GlobalVar(MASKED_TOKENS)] = masked_tokens(builder, model.vocabulary, types.device_of("output"))
    return tvm.IRModule({**functions, **builder.get().functions})


class LanguageFunction(AttentionGraph, DeltaGraph, ResidualGraph):
    """Builder of one function with a cache."""

    def add_counters(self) -> None:
        """Add counters of the experts of each layer to the parameters and results."""
        for layer in range(self.model.dense_layers, self.model.layers):
            name = f"{EXPERT_COUNTS}{layer}"
            self.params[name] = relax.Var(name, relax.TensorType([self.model.experts], "int32"))
            self.counters[f"blk.{layer}"] = self.params[name]

    def build(self, name: str) -> relax.Function:
        """Build the function, with `name` as its global symbol."""
        is_chunk, x = self.kind == CHUNK, self._embedding()
        self._read_layer_inputs(x)
        if self.model.streams:
            x = self._merged(self._stream_layers(self._streams(x)))
        else:
            for layer in range(self.model.layers):
                x = self._layer(x, layer)
                if self.layer_inputs is not None:
                    x = self.emit(x + self._layer_input(x, layer), f"blk.{layer}.inp_sum")
                if f"blk.{layer}.layer_output_scale.weight" in self.weights:
                    factor = self.weights.vector(f"blk.{layer}.layer_output_scale.weight", 1)
                    x = self.emit(x * factor, f"blk.{layer}.out_scaled")
        # The result is a tuple expression: a tuple variable would have one device, and move all pages there.
        logits = self._logits(x)
        # An output of the dataflow block, in place of the local variable that `_logits` bound last.
        self.bindings[-1] = relax.VarBinding(relax.Var(logits.name, logits.ty), self.bindings[-1].value)
        outputs = {"logits": self.bindings[-1].var}
        if not is_chunk:
            tokens = greedy_tokens(
                self.builder,
                outputs["logits"],
                lambda value, name: self.emit(value, f"output.{name}"),
                self.types.device_of("output"),
            )
            outputs["greedy_tokens"] = self.emit(tokens, "output.greedy_tokens", is_output=True)
        outputs |= {f"pages_{index}": pages for index, pages in self.caches.items()}
        outputs |= {name.replace("blk.", EXPERT_COUNTS): counters for name, counters in self.counters.items()}
        return self.function(name, outputs)

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
            x = self.emit(x + kind, "token_embd.typed")
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
        return self.emit(x + positions, "token_embd.sum")

    def _stream_layers(self, x: relax.Expr) -> relax.Expr:
        """All layers of a model with several residual streams, (rows, streams, hidden_size)."""
        for layer in range(self.model.layers):
            x = self._predicted(x, layer)
            result = self._layer(self._active(x, f"blk.{layer}.altup"), layer)
            x = self._corrected(self._current(x, f"blk.{layer}.altup_row"), result, layer)
        return x

    def _layer(self, x: relax.Expr, layer: int) -> relax.Expr:
        """The output of a layer."""
        name, model, norms = f"blk.{layer}", self.model, self.model.architecture.norms
        before, between = self._input_norms(layer)
        inputs = self._optional_norm(x, before)
        has_delta_rule = model.has_delta_rule(layer)
        attention = self._delta_rule(inputs, layer) if has_delta_rule else self._attention(inputs, layer)
        matrix = f"{name}.{'ssm_out' if has_delta_rule else 'attn_output'}"
        x = self._current(x, f"{name}.attn_residual")
        projection = self._linear(attention, matrix, model.hidden_size, model.result_size(layer))
        if norms.attention_out:
            projection = self._norm(projection, f"{name}.{norms.attention_out}")
        projection = self._scaled(projection, model.residual_scale, f"{name}.attn_scaled")
        total = self.emit(x + projection, f"{name}.attn_sum")
        if norms.attention_sum:
            total = self._norm(total, f"{name}.{norms.attention_sum}")
        if f"{name}.laurel_l.weight" in self.weights:
            total = self._with_laurel(total, self._current(inputs, f"{name}.attn_input"), name)
        if before != between or not before:
            inputs = self._optional_norm(x if model.is_parallel else total, between)
        else:
            inputs = self._current(inputs, f"{name}.attn_input")
        if model.routing and model.architecture.has_dense_beside_experts:
            feed_forward = self._dense_and_experts(inputs, total, layer)
        elif layer < model.dense_layers:
            feed_forward = self._feed_forward(inputs, name, model.feed_forward[layer])
        else:
            feed_forward = self._experts(inputs, name)
            if model.shared_feed_forward:
                shared = self._shared_expert(inputs, name)
                feed_forward = self.emit(feed_forward + shared, f"{name}.ffn_out")
        if norms.feed_forward_out:
            feed_forward = self._norm(feed_forward, f"{name}.{norms.feed_forward_out}")
        feed_forward = self._scaled(feed_forward, model.residual_scale, f"{name}.ffn_scaled")
        result = self.emit(total + feed_forward, f"{name}.ffn_sum")
        return self._norm(result, f"{name}.{norms.feed_forward_sum}") if norms.feed_forward_sum else result

    def _input_norms(self, layer: int) -> tuple[str, str]:
        """Names of the norms of the inputs of attention and feed-forward; "": none."""
        norms = self.model.architecture.norms
        attention = "" if norms.skips_first and layer == 0 else norms.attention
        names = [f"blk.{layer}.{norm}" if norm else "" for norm in (attention, norms.feed_forward)]
        before, between = (other if self.weights.lacks(f"{own}.weight") else own for own, other in (names, names[::-1]))
        return before, between

    def _logits(self, x: relax.Expr) -> relax.Expr:
        model = self.model
        if "last" in self.params:
            self._take_last()
            x = self._current(x, "output.row")
        name = "output" if "output.weight" in self.weights else "token_embd"
        logits = self._linear(self._norm(x, "output_norm"), name, model.vocabulary, model.hidden_size, "output")
        logits = self._scaled(logits, model.logit_scale, "output.factored")
        if not model.logit_softcap:
            return logits
        scaled = self.emit(logits * scalar(1.0 / model.logit_softcap), "output.scaled")
        bounded = self.emit(relax.op.tanh(scaled), "output.tanh")
        return self.emit(bounded * scalar(model.logit_softcap), "output.capped")
