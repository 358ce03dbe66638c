"""Layers with the gated delta rule in place of attention (`tir.delta_rule`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from ...tir.delta_rule import DeltaRuleProblem, convolution_kernel, delta_rule_kernel
from ...transform.ir.kernels import opaque_kernel
from ..paged_cache import CHUNK
from .graph_ops import GraphOps


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
