"""A llama-shaped model in PyTorch: random f16 weights, sdpa over a cache, a greedy step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_bench.device_time import Clock, torch_on_gpu
from gpu_bench.torch_peers import captured

from llm_bench.random_gguf import Sizes
from relax_hetero.llm.calibrate import STEPS

Tensor = Any


class TorchLlama:
    """A model with merged projections of queries, keys and values, and merged gate and up projections.

    Parameters
    ----------
    shape : Sizes
    """

    def __init__(self, shape: Sizes) -> None:
        self.torch, self.shape = torch_on_gpu(), shape
        self._held: list[Any] = []

        def weight(columns: int, depth: int) -> Tensor:
            tensor = self.torch.empty((columns, depth), dtype=self.torch.float16, device="cuda")
            return tensor.normal_(0, depth**-0.5)

        self.layers = [
            (
                weight((shape.heads + 2 * shape.kv_heads) * shape.size, shape.width),
                weight(shape.width, shape.heads * shape.size),
                weight(2 * shape.feed_forward, shape.width),
                weight(shape.width, shape.feed_forward),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = weight(shape.vocabulary, shape.width)
        self.output = weight(shape.vocabulary, shape.width)
        self.scale = self.torch.ones(shape.width, dtype=self.torch.float16, device="cuda")

    def step(self, clock: Clock, batch: int, context: int) -> Callable[[], Tensor]:
        """Launches of `STEPS` steps of `batch` sequences, each with `context` tokens, the new one among them.

        A step's greedy tokens are those of the next one; the host waits for the last ones.
        """
        torch, shape = self.torch, self.shape
        kinds = {"dtype": torch.float16, "device": "cuda"}
        cache = [torch.randn(2, batch, shape.kv_heads, context, shape.size, **kinds) for _ in range(shape.layers)]
        tokens = torch.randint(0, shape.vocabulary, (batch,), device="cuda")
        position = torch.full((1,), context - 1, device="cuda")

        def work() -> list[Tensor]:
            return [tokens.copy_(self._forward(tokens, batch, 1, position, cache).argmax(-1))]

        launch, _ = captured(clock, work)
        self._held.append(work)

        def steps() -> Tensor:
            for _ in range(STEPS):
                launch()
            torch.cuda.synchronize()
            return tokens.cpu()

        return steps

    def prefill(self, clock: Clock, rows: int) -> Callable[[], Tensor]:
        """A launch of a prefill of one sequence, which returns the last row's logits."""
        torch = self.torch
        tokens, at = torch.randint(0, self.shape.vocabulary, (rows,), device="cuda"), torch.arange(rows, device="cuda")

        def work() -> list[Tensor]:
            return [self._forward(tokens, 1, rows, at, None)]

        return self._captured(clock, work)

    def bytes_read(self, batch: int, context: int) -> float:
        """Bytes of weights, keys and values that a step reads."""
        weights = sum(2 * each.numel() for layer in self.layers for each in layer) + 2 * self.output.numel()
        return weights + batch * context * 4.0 * self.shape.layers * self.shape.kv_heads * self.shape.size

    def _captured(self, clock: Clock, work: Callable[[], list[Tensor]]) -> Callable[[], Tensor]:
        """A launch of the work as a CUDA graph that copies its logits to the host; `self` keeps its tensors."""
        _, tensors = captured(clock, work)
        self._held.append(tensors)
        return lambda: tensors()[0].cpu()

    def _forward(self, tokens: Tensor, batch: int, rows: int, positions: Tensor, cache: list[Tensor] | None) -> Tensor:
        torch, shape = self.torch, self.shape
        functional = torch.nn.functional
        steps = 5e5 ** (-torch.arange(0, shape.size, 2, device="cuda") / shape.size)
        angles = positions[:, None] * steps
        rotation = (angles.cos().half(), angles.sin().half())
        x = self.embedding[tokens]
        for number, (joined, attended, gate_up, down) in enumerate(self.layers):
            both = functional.linear(self._norm(x), joined).view(batch, rows, -1, shape.size).transpose(1, 2)
            q, k, v = both.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            q, k = self._rotated(q, rotation), self._rotated(k, rotation)
            if cache is not None:
                cache[number][0].index_copy_(2, positions, k)
                cache[number][1].index_copy_(2, positions, v)
                k, v = cache[number][0], cache[number][1]
            attention = functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
            x = x + functional.linear(attention.transpose(1, 2).reshape(batch * rows, -1), attended)
            gate, up = functional.linear(self._norm(x), gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        if cache is None:
            x = x[-1:]
        return functional.linear(self._norm(x), self.output)

    def _norm(self, x: Tensor) -> Tensor:
        return self.torch.nn.functional.rms_norm(x, (self.shape.width,), self.scale, 1e-5)

    def _rotated(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        cosine, sine = rotation
        first, second = x.chunk(2, dim=-1)
        return self.torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
