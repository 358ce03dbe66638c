"""Feed-forward networks of a language model's layers: activations, experts and their choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tvm import relax

from ...op.functions import apply_function
from ...target.mesh import mesh_positions
from ...tir.routing import routing_kernel
from ...transform.ir.kernels import opaque_kernel
from ..paged_cache import CHUNK
from .expert_rules import ExpertGroup
from .graph_ops import GraphOps, scalar

_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0
"""Factor in the sigmoid of gpt-oss's gates, and limit of both factors of its product."""


class FeedForwardGraph(GraphOps):
    """Feed-forward networks of layers."""

    def _feed_forward(self, x: relax.Expr, name: str, width: int, suffix: str = "") -> relax.Expr:
        """The result of a network of `width`, whose matrices have a suffix, (rows, hidden_size)."""
        model = self.model
        parts = [f"{name}.ffn_{part}{suffix}" for part in (("gate", "up") if model.architecture.is_gated else ("up",))]
        self.weights.split_rows(f"{parts[-1]}.weight", [f"{part}.weight" for part in parts], [width, model.hidden_size])
        products = [self._linear(x, part, width, model.hidden_size) for part in parts]
        sparsity = model.sparsity[int(name.split(".")[1])] if model.sparsity else None
        if sparsity is not None:
            products[0] = self._sparse(products[0], sparsity, parts[0])
        gated = self._activated(products, f"{name}.ffn{{}}{suffix}")
        return self._linear(gated, f"{name}.ffn_down{suffix}", model.hidden_size, width)

    def _sparse(self, x: relax.Expr, deviations: float, name: str) -> relax.Expr:
        """Excess of gates over a bound, so many deviations above the mean of their row; 0 below it."""
        mean = self.emit(relax.op.mean(x, [-1], keepdims=True), f"{name}.mean")
        centered = self.emit(x - mean, f"{name}.centered")
        deviation = self.emit(relax.op.sqrt(self._mean_square(centered, f"{name}.variance")), f"{name}.deviation")
        bound = self._scaled(deviation, deviations, f"{name}.bound")
        return self.emit(relax.op.nn.relu(self.emit(centered - bound, f"{name}.over")), f"{name}.kept")

    def _dense_and_experts(self, x: relax.Expr, total: relax.Expr, layer: int) -> relax.Expr:
        """The sum of a network of all tokens and of experts, each with norms of its own.

        Experts and their choice read the residual.
        """
        model, name = self.model, f"blk.{layer}"
        dense = self._feed_forward(x, name, model.feed_forward[layer])
        scores = self._scaled(
            self._normal(total, f"{name}.ffn_gate_inp"), model.hidden_size**-0.5, f"{name}.ffn_scores_in"
        )
        factors = self.weights.vector(f"{name}.ffn_gate_inp.scale", model.hidden_size)
        scores = self.emit(scores * factors, f"{name}.ffn_scores_scaled")
        experts = self._experts(self._norm(total, f"{name}.pre_ffw_norm_2"), name, scores)
        parts = [self._norm(part, f"{name}.post_ffw_norm_{i}") for i, part in enumerate((dense, experts), 1)]
        return self.emit(relax.op.add(*parts), f"{name}.ffn_out")

    def _activated(self, products: Sequence[relax.Expr], name: str) -> relax.Expr:
        """The input of the last matrix, from one product or from those of gate and up.

        `name` takes the ends of variables' names.
        """
        function, gate = self.model.architecture.activation, products[0]
        if function == "squared_relu":
            positive = self.emit(relax.op.nn.relu(gate), name.format("_relu"))
            active = self.emit(positive * positive, name.format("_act"))
        elif function == "xielu":
            active = self._xielu(gate, name)
        elif function != "clamped_swiglu":
            active = self.emit(apply_function(function, gate), name.format("_act"))
        else:
            return self._clamped_swiglu(gate, products[1], name)
        return active if len(products) == 1 else self.emit(active * products[1], name.format("_par"))

    def _xielu(self, x: relax.Expr, name: str) -> relax.Expr:
        """``p * x * x + b * x`` of positive values, ``n * (exp(min(x, e)) - 1 - x) + b * x`` of the others."""
        negative, positive, both, bound = map(scalar, self.model.xielu[int(name.split(".")[1])])

        def emit(value: relax.Expr, part: str) -> relax.Expr:
            return self.emit(value, name.format(f"_{part}"))

        linear = emit(x * both, "linear")
        square = emit(emit(x * x, "square") * positive, "positive")
        power = emit(relax.op.exp(emit(relax.op.minimum(x, bound), "bounded")), "exp")
        rest = emit(emit(power - scalar(1.0), "expm1") - x, "rest")
        curve = emit(rest * negative, "negative")
        is_positive = emit(x > scalar(0.0), "is_positive")
        return emit(emit(relax.op.where(is_positive, square, curve), "curve") + linear, "act")

    def _clamped_swiglu(self, gate: relax.Expr, up: relax.Expr, name: str) -> relax.Expr:
        limit = scalar(_SWIGLU_LIMIT)
        gate = self.emit(relax.op.minimum(gate, limit), name.format("_gate_clamped"))
        scaled = self._scaled(gate, _SWIGLU_ALPHA, name.format("_gate_scaled"))
        sigmoid = self.emit(relax.op.sigmoid(scaled), name.format("_sigmoid"))
        active = self.emit(gate * sigmoid, name.format("_act"))
        low = self.emit(relax.op.minimum(up, limit), name.format("_up_below"))
        clamped = self.emit(relax.op.maximum(low, scalar(-_SWIGLU_LIMIT)), name.format("_up_clamped"))
        shifted = self.emit(clamped + scalar(1.0), name.format("_up_shifted"))
        return self.emit(active * shifted, name.format("_par"))

    def _shared_expert(self, x: relax.Expr, name: str) -> relax.Expr:
        """The result of the expert of all tokens, (rows, hidden_size); where it has a gate, times its sigmoid."""
        model = self.model
        shared = self._feed_forward(x, name, model.shared_feed_forward, "_shexp")
        if f"{name}.ffn_gate_inp_shexp.weight" not in self.weights:
            return shared
        vector = self.weights.vector(f"{name}.ffn_gate_inp_shexp.weight", model.hidden_size)
        products = self.emit(x * vector, f"{name}.ffn_shexp_products")
        score = self.emit(relax.op.sum(products, [-1], keepdims=True), f"{name}.ffn_shexp_score")
        share = self.emit(relax.op.sigmoid(score), f"{name}.ffn_shexp_share")
        return self.emit(shared * share, f"{name}.ffn_shexp_out")

    def _experts(self, x: relax.Expr, name: str, router_input: relax.Expr | None = None) -> relax.Expr:
        """The weighted sum of the chosen experts of each row, (rows, hidden_size).

        The router reads another input than the experts if one is given.
        """
        model, matrices = self.model, [f"{name}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        sizes = model.experts, model.expert_feed_forward, model.hidden_size
        self.weights.split_experts(f"{name}.ffn_gate_up_exps.weight", matrices, sizes)
        scores = self._router_scores(x if router_input is None else router_input, name)
        groups = self.expert_groups.get(name)
        if groups is None:
            return self._experts_of_device(x, *self._routes(scores, name), name)
        device = self.types.device_of(f"{name}.ffn_moe_out")
        is_local = {group: self.types.device_of(f"{name}.ffn_sum_exps{group.suffix}") == device for group in groups}
        # What other devices compute begins first.
        order = sorted(groups, key=is_local.__getitem__)
        if self._numbers_own_experts(name):
            routes = {group: self._routes(scores, name, group) for group in order}
        else:
            routes = dict.fromkeys(order, self._routes(scores, name))
        sums = {group: self._experts_of_device(x, *routes[group], name, group) for group in order}
        total = sums[groups[0]]
        for group in groups[1:]:
            total = self.emit(total + sums[group], f"{name}.ffn_moe_out")
        return total

    def _numbers_own_experts(self, name: str) -> bool:
        """Return whether a layer's routing numbers each device's experts: ranges, on a mesh that has the scores."""
        is_on_mesh = bool(mesh_positions(self.types.device_of(f"{name}.ffn_moe_topk")))
        return is_on_mesh and all(group.is_range for group in self.expert_groups.get(name, ()))

    def _router_scores(self, x: relax.Expr, name: str) -> list[relax.Expr]:
        """Scores of all experts, (rows, experts), and perhaps their biases, (experts,)."""
        model, router = self.model, f"{name}.ffn_gate_inp"
        # float32 on all devices: rounding would change the order of experts with nearly equal scores. The router's
        # scale, if any, is one of inputs.
        scores = self._linear(x, router, model.experts, model.hidden_size, dtype="float32", has_scale=False)
        if f"{name}.exp_probs_b.bias" not in self.weights:
            return [scores]
        return [scores, self.weights.vector(f"{name}.exp_probs_b.bias", model.experts)]

    def _routes(
        self, inputs: Sequence[relax.Expr], name: str, group: ExpertGroup | None = None
    ) -> tuple[relax.Expr, relax.Expr]:
        """Numbers and shares of the experts of each row, (rows, used) each, from the results of `_router_scores`.

        With a group, numbers are those of its experts, -1 for others.
        """
        model, rows, counters = self.model, self.rows, self.counters.get(name)
        assert model.routing is not None, "layers after the dense ones have experts"
        types = [relax.TensorType([rows, model.experts_used], dtype) for dtype in ("int32", "float32")]
        problem = replace(model.routing, rows=rows, has_bias=len(inputs) > 1, has_counts=counters is not None)
        if group is not None:
            problem = replace(problem, first=group.experts[0], own=len(group.experts))
        end = group.suffix if group is not None else ""
        kernel = self.builder.add_func(opaque_kernel(routing_kernel(problem)), f"routing_{rows}_{self.kind}")
        if counters is None:
            routing = relax.op.call_tir(kernel, list(inputs), types)
        else:
            inputs = [*inputs, self.params["sequences"], counters]
            indices = [-1, -1, len(inputs) - 1]  # -1: a new tensor
            routing = relax.op.call_tir_inplace(kernel, inputs, indices, [*types, counters.ty])
        routes = self.emit(routing, f"{name}.ffn_moe_topk{end}")
        if counters is not None:
            added = relax.TupleGetItem(routes, 2)
            self.counters[name] = self.emit(added, f"{name}.ffn_moe_counts", is_output=True)
        ids = self.emit(relax.TupleGetItem(routes, 0), f"{name}.ffn_moe_ids{end}")
        return ids, self.emit(relax.TupleGetItem(routes, 1), f"{name}.ffn_moe_weights{end}")

    def _experts_of_device(
        self, x: relax.Expr, ids: relax.Expr, shares: relax.Expr, name: str, group: ExpertGroup | None = None
    ) -> relax.Expr:
        """The weighted sum of the chosen experts that a device has (by default all), (rows, hidden_size).

        `ids` and `shares` are the numbers and the shares of each row's experts; `name`: prefix of the layer,
        ``blk.3``; `group`: experts of the device.
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
        if len(own) < model.experts and not self._numbers_own_experts(name):
            numbers = np.full(model.experts, -1, "int32")
            numbers[own] = range(len(own))
            ids = self.emit(relax.op.take(relax.const(numbers), ids, axis=0, mode="clip"), f"{name}.ffn_own_exps{end}")
        has_scaled_inputs = model.architecture.has_scaled_inputs
        if has_scaled_inputs:  # of the only expert of a row
            x = self.emit(x * shares, f"{name}.ffn_scaled_exps{end}")
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
        weighted = flat
        if not has_scaled_inputs:
            column = self._reshaped(shares, [rows, used, 1], f"{name}.ffn_shares_exps{end}")
            weighted = self.emit(flat * column, f"{name}.ffn_weighted_exps{end}")
        if len(own) < model.experts:
            is_own = self.emit(ids >= relax.const(0, "int32"), f"{name}.ffn_is_own_exps{end}")
            mask = self.emit(relax.op.expand_dims(is_own, 2), f"{name}.ffn_mask_exps{end}")
            weighted = self.emit(relax.op.where(mask, weighted, scalar(0.0)), f"{name}.ffn_masked_exps{end}")
        return self.emit(relax.op.sum(weighted, [1]), f"{name}.ffn_sum_exps{end}")
