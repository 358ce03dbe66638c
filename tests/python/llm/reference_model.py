"""Reference results of a language model in a GGUF file, in float64: whole sequences, no cache, no fusion."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

STATED = ("glm4moe", "deepseek2")  # architectures whose files state whether shares sum to their factor
# Gemma's sizes whose scores are scaled by the width of a head as if heads filled the model's width: 27 B.
SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


class ReferenceModel:
    """A model of a file.

    Parameters
    ----------
    path : Path or str
    """

    def __init__(self, path: Path | str) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self._reader.get_field("general.architecture").contents()
        self.is_gemma = self.architecture in ("gemma2", "gemma3")
        self.layers = self.key("block_count")
        self.width = self.key("embedding_length")
        self.heads = self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv")
        self.size = self.key("attention.key_length", self.width // self.heads)
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.vocabulary = int(self._tensors["token_embd.weight"].shape[1])

    def key(self, name, default=None):
        """A key of the architecture; where it is missing, `default`."""
        field = self._reader.get_field(f"{self.architecture}.{name}")
        return default if field is None else field.contents()

    def weight(self, name: str, rows=slice(None)) -> np.ndarray | None:
        """Some rows of a tensor in float64; None if the file lacks it."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        numbers = gguf.quants.dequantize(np.ascontiguousarray(tensor.data[rows]), tensor.tensor_type).astype(np.float64)
        scale = self._tensors.get(f"{name.removesuffix('.weight')}.scale")
        return numbers if scale is None else numbers * scale.data.reshape(-1, *[1] * (numbers.ndim - 1))

    def logits(self, tokens) -> np.ndarray:
        """Logits after each token.

        Parameters
        ----------
        tokens : sequence of int
            From position 0 on.

        Returns
        -------
        np.ndarray
            Of shape (tokens, vocabulary), float64.
        """
        return self.logits_of(self.hidden(tokens))

    def logits_of(self, hidden: np.ndarray) -> np.ndarray:
        """Logits of rows that `hidden` returned."""
        return softcapped(hidden @ self._table().T, self.key("final_logit_softcapping", 0.0))

    def surprises(self, tokens, rows: int = 256) -> np.ndarray:
        """-log p of each token but the first after all before it; logits of so many rows are in memory at once."""
        hidden = self.hidden(tokens)[:-1]
        table = self._table().T
        following = np.asarray(tokens)[1:]
        parts = []
        for begin in range(0, len(hidden), rows):
            logits = softcapped(hidden[begin : begin + rows] @ table, self.key("final_logit_softcapping", 0.0))
            targets = following[begin : begin + rows]
            top = logits.max(axis=1)
            total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            parts.append(total - logits[np.arange(len(targets)), targets])
        return np.concatenate(parts)

    def _table(self) -> np.ndarray:
        """The matrix of logits: (vocabulary, width)."""
        output = self.weight("output.weight")
        return self.weight("token_embd.weight") if output is None else output

    def hidden(self, tokens) -> np.ndarray:
        """Output of the last norm for each token, over the divisor of logits: shape (tokens, width)."""
        x = self.weight("token_embd.weight", np.asarray(tokens))
        x = x * (self.width**0.5 if self.is_gemma else self.key("embedding_scale", 1.0))
        for layer in range(self.layers):
            x = x + self._branch(layer, x, "attn_norm", self._attention, "post_attention_norm")
            experts = f"blk.{layer}.ffn_gate_inp.weight" in self._tensors
            work = self._experts if experts else self._mlp
            before = "post_attention_norm" if self.architecture in ("glm4moe", "gpt-oss") else "ffn_norm"
            x = x + self._branch(layer, x, before, work, "post_ffw_norm")
        return rms_norm(x, self.weight("output_norm.weight"), self.eps) / self.key("logit_scale", 1.0)

    def _branch(self, layer, x, before, work, after):
        """Output of a layer, added to its input; Gemma normalizes it once more."""
        y = work(layer, rms_norm(x, self._of(layer, before), self.eps)) * self.key("residual_scale", 1.0)
        return rms_norm(y, self._of(layer, after), self.eps) if self.is_gemma else y

    def _of(self, layer, name, kind="weight"):
        return self.weight(f"blk.{layer}.{name}.{kind}")

    def _attention(self, layer, x):
        rows = len(x)
        if self.key("attention.kv_lora_rank"):
            return self._latent_attention(layer, x)
        q, k, v = (self._projected(layer, name, x).reshape(rows, -1, self.size) for name in "qkv")
        rotation = self._rotation(layer, rows)
        q, k = (rotated(self._normed(layer, name, y), *rotation, self._in_pairs) for name, y in (("q", q), ("k", k)))
        k, v = (np.repeat(y, self.heads // self.kv_heads, axis=1) for y in (k, v))
        q, k, v = (y.swapaxes(0, 1) for y in (q, k, v))  # (heads, rows, size)
        scores = q @ k.swapaxes(1, 2) * self._scale
        scores = softcapped(scores, self.key("attn_logit_softcapping", 0.0))
        scores = np.where(visible(rows, self.window(layer)), scores, -np.inf)
        sinks = self._of(layer, "attn_sinks")
        if sinks is not None:  # a score without a key
            scores = np.concatenate([np.broadcast_to(sinks[:, None, None], (self.heads, rows, 1)), scores], axis=2)
            v = np.concatenate([np.zeros_like(v[:, :1]), v], axis=1)
        y = (softmax(scores) @ v).swapaxes(0, 1)
        return self._projected(layer, "output", y.reshape(rows, -1))

    def _latent_attention(self, layer, x):
        """Attention with keys and values of all heads, which are products of a compressed vector of each token."""
        rows, rank, plain = len(x), self.key("attention.kv_lora_rank"), -self.key("rope.dimension_count")
        q = x
        if self.key("attention.q_lora_rank"):
            q = rms_norm(self._projected(layer, "q_a", x), self._of(layer, "attn_q_a_norm"), self.eps)
        q = self._projected(layer, "q_b" if q is not x else "q", q).reshape(rows, self.heads, -1)
        compressed = self._projected(layer, "kv_a_mqa", x)
        rotation = self._rotation(layer, rows)
        q_rotated = rotated(q[..., plain:], *rotation, in_pairs=True)
        k_rotated = rotated(compressed[:, None, rank:], *rotation, in_pairs=True)
        compressed = rms_norm(compressed[:, :rank], self._of(layer, "attn_kv_a_norm"), self.eps)
        keys, values, joined = (self._of(layer, f"attn_{name}_b") for name in ("k", "v", "kv"))
        if joined is not None:
            keys, values = np.split(joined.reshape(self.heads, -1, rank), [q.shape[-1] + plain], axis=1)
            keys = keys.swapaxes(1, 2)
        k, v = np.einsum("tr,hrn->thn", compressed, keys), np.einsum("tr,hvr->thv", compressed, values)
        scores = np.einsum("qhn,khn->hqk", q[..., :plain], k) + np.einsum("qhn,kan->hqk", q_rotated, k_rotated)
        magnitude = 1.0
        if self.key("rope.scaling.type") == "yarn":
            multiplier = self.key("rope.scaling.yarn_log_multiplier")
            magnitude = multiplier * np.log(self.key("rope.scaling.factor")) + 1
        scores = scores * magnitude**2 / np.sqrt(q.shape[-1])
        y = np.einsum("hqk,khv->qhv", softmax(np.where(visible(rows, 0), scores, -np.inf)), v)
        return self._projected(layer, "output", y.reshape(rows, -1))

    def _projected(self, layer, name, x):
        bias = self._of(layer, f"attn_{name}", "bias")
        return x @ self._of(layer, f"attn_{name}").T + (0.0 if bias is None else bias)

    def _normed(self, layer, name, y):
        weight = self._of(layer, f"attn_{name}_norm")
        if weight is None:
            return y
        return rms_norm(y.reshape(len(y), -1, len(weight)), weight, self.eps).reshape(y.shape)

    @property
    def _in_pairs(self) -> bool:
        """True if rotation pairs element 2i with 2i + 1, not i with i + half."""
        return self.architecture in ("llama", "granite", "granitemoe")

    @property
    def _scale(self) -> float:
        if self.key("attention.scale"):
            return self.key("attention.scale")
        by_width = (self.architecture, self.layers) in SCALED_BY_WIDTH
        return (self.width / self.heads if by_width else self.size) ** -0.5

    def window(self, layer: int) -> int:
        """Number of positions that a token of a layer sees, its own included; 0 for all."""
        if not self.is_gemma and self.architecture != "gpt-oss":
            return 0
        window = self.key("attention.sliding_window", 4096 if self.architecture == "gemma2" else 0)
        pattern = self.key("attention.sliding_window_pattern", 6 if self.architecture == "gemma3" else 2)
        if isinstance(pattern, list):
            return window if pattern[layer] else 0
        return 0 if layer % pattern == pattern - 1 else window

    def _rotation(self, layer, rows):
        """Cosines and sines: each of shape (rows, half of the rotated dimensions)."""
        rotated_dims = self.key("rope.dimension_count", self.size)
        base, factor = self.key("rope.freq_base", 10000.0), self.key("rope.scaling.factor", 1.0)
        if self.architecture == "gemma3" and self.window(layer):
            base, factor = self.key("rope.freq_base_swa", 10000.0), 1.0
        frequencies = base ** (-np.arange(0, rotated_dims, 2) / rotated_dims)
        magnitude = 1.0
        if self.key("rope.scaling.type") == "yarn":
            turns = self.key("rope.scaling.original_context_length") * frequencies / (2 * np.pi)
            # The pairs that turn 32 times and once, by interpolation: their logarithms are a straight line.
            first, last = np.interp(np.log([1 / 32, 1]), -np.log(turns), np.arange(len(turns)), left=0)
            share = 1 - np.clip((np.arange(len(turns)) - np.floor(first)) / (np.ceil(last) - np.floor(first)), 0, 1)
            frequencies, factor = frequencies * (share + (1 - share) / factor), 1.0
            if not self.key("rope.scaling.yarn_log_multiplier"):
                magnitude = 0.1 * np.log(self.key("rope.scaling.factor")) + 1
        frequencies = frequencies / factor
        factors = self.weight("rope_freqs.weight")
        angles = np.arange(rows)[:, None] * (frequencies if factors is None else frequencies / factors)
        return magnitude * np.cos(angles), magnitude * np.sin(angles)

    def _mlp(self, layer, x, suffix=""):
        gate, up, down = (self._of(layer, f"ffn_{name}{suffix}") for name in ("gate", "up", "down"))
        return (self._activation(x @ gate.T) * (x @ up.T)) @ down.T

    def _experts(self, layer, x):
        gates, ups, downs = (self._of(layer, f"ffn_{name}_exps") for name in ("gate", "up", "down"))
        biases = [self._of(layer, f"ffn_{name}_exps", "bias") for name in ("gate", "up", "down")]
        y = np.zeros_like(x)
        for row, (experts, shares) in enumerate(self._routes(layer, x)):
            for expert, share in zip(experts, shares, strict=True):
                gate, up = gates[expert] @ x[row], ups[expert] @ x[row]
                if self.architecture == "gpt-oss":
                    gate, up = (value + bias[expert] for value, bias in zip((gate, up), biases[:2], strict=True))
                    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                    inner = gate * sigmoid(1.702 * gate) * (up + 1)
                    y[row] += share * (downs[expert] @ inner + biases[2][expert])
                    continue
                y[row] += share * (downs[expert] @ (self._activation(gate) * up))
        if self._of(layer, "ffn_gate_shexp") is None:
            return y
        gate = self._of(layer, "ffn_gate_inp_shexp")
        return y + self._mlp(layer, x, "_shexp") * (1 if gate is None else sigmoid(x @ gate)[:, None])

    def _routes(self, layer, x):
        """The experts of each row, and their shares."""
        bias = self._of(layer, "ffn_gate_inp", "bias")
        scores = x @ self._of(layer, "ffn_gate_inp").T + (0.0 if bias is None else bias)
        is_sigmoid = self.key("expert_gating_func", 1) == 2
        powers = sigmoid(scores) if is_sigmoid else softmax(scores)
        bias = self._of(layer, "exp_probs_b", "bias")
        order = powers if bias is None else powers + bias
        groups = np.split(order, self.key("expert_group_count", 1), axis=1)
        sums = np.stack([np.sort(group)[:, -2 if is_sigmoid else -1 :].sum(axis=1) for group in groups], axis=1)
        worst = np.argsort(-sums, axis=1, kind="stable")[:, self.key("expert_group_used_count", len(groups)) :]
        normalizes = self.key("expert_weights_norm", self.architecture not in ("qwen2moe", "olmoe", *STATED))
        for row, power in enumerate(powers):
            allowed = np.concatenate([np.full(len(g[row]), i not in worst[row]) for i, g in enumerate(groups)])
            best = np.argsort(-np.where(allowed, order[row], -np.inf), kind="stable")[: self.key("expert_used_count")]
            total = power[best].sum() if normalizes else 1
            yield best, power[best] / total * self.key("expert_weights_scale", 1.0)

    def _activation(self, x):
        return gelu(x) if self.is_gemma else x / (1 + np.exp(-x))


def rms_norm(x, weight, eps):
    """RMS norm: `x` divided by the root mean square of its last axis, times `weight`."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def gelu(x):
    """GELU in its form with tanh."""
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def sigmoid(x):
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


def softmax(x):
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softcapped(x, cap):
    """Soft cap of scores to (-cap, cap); unchanged if `cap` is 0 or None."""
    return cap * np.tanh(x / cap) if cap else x


def visible(rows, window):
    """Mask of keys (columns) that each query (row) sees: none after it, and `window` up to itself."""
    distance = np.arange(rows)[:, None] - np.arange(rows)
    return (distance >= 0) & (distance < (window or rows))


def rotated(x, cosines, sines, in_pairs):
    """Rotate the first dimensions of each head by the angles of its row: x (rows, heads, size)."""
    half = cosines.shape[1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if in_pairs else (slice(half), slice(half, 2 * half))
    y = x.copy()
    y[..., first] = x[..., first] * cosines[:, None] - x[..., second] * sines[:, None]
    y[..., second] = x[..., second] * cosines[:, None] + x[..., first] * sines[:, None]
    return y
