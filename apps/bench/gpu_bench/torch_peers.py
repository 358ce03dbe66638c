"""PyTorch's side of the benchmarks of GPUs: the same work, captured as one CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .device_time import Clock, Launch, torch_on_gpu
from .workloads import Array, Attentions, Products, Rows

Tensor = Any
Peer = tuple[Launch, Callable[[], list[Tensor]]]
"""A launch, and a function that returns its results."""


def tensor_of(array: Array) -> Tensor:
    """An array on the GPU; types that PyTorch cannot read from numpy are passed as bytes."""
    torch = torch_on_gpu()
    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn"):
        plain = np.ascontiguousarray(array).view("uint8")
        return torch.from_numpy(plain).cuda().view(getattr(torch, name)).reshape(array.shape)
    return torch.from_numpy(array).cuda()


def captured(clock: Clock, work: Callable[[], Sequence[Tensor]]) -> Peer:
    """A launch of the work as a CUDA graph, and its results."""
    torch = torch_on_gpu()
    with torch.inference_mode(), torch.cuda.stream(clock.stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=clock.stream):
        results = work()

    def tensors(held: object = work) -> list[Tensor]:
        # The graph reads operands by address, so it keeps alive what refers to them.
        graph.replay()
        torch.cuda.synchronize()
        return list(results)

    return graph.replay, tensors


def products(clock: Clock, work: Products, autotune: bool = False) -> dict[str, Peer]:
    """cuBLAS on right operands by rows and by columns; with an epilogue, torch.compile of the same."""
    torch = torch_on_gpu()
    torch.backends.cuda.matmul.allow_tf32 = work.kind == "tf32"
    arrays, count = [tensor_of(array) for array in work.inputs()], work.count
    lhs = arrays[:count]
    right = arrays[count:] if work.shape.batch else [tensor_of(array) for array in work.weights()]
    turned = [w.transpose(-1, -2).contiguous().transpose(-1, -2) for w in right]
    if work.gelu:
        biases = [tensor_of(array) for array in work.biases()]

        def piece(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return torch.nn.functional.gelu(x @ w + b)

        mode = "max-autotune-no-cudagraphs" if autotune else None
        fused = torch.compile(piece, dynamic=False, mode=mode)
        return {
            name: captured(clock, lambda w=weights: [fused(*each) for each in zip(lhs, w, biases, strict=True)])
            for name, weights in (("torch.compile", right), ("torch.compile, transposed", turned))
        }
    multiply = {"e4m3": _scaled, "s8": torch._int_mm}.get(work.kind, torch.bmm if work.shape.batch else torch.mm)
    peers, failures = {}, []
    for name, weights in (("cuBLAS", right), ("cuBLAS, transposed", turned)):
        try:
            peers[name] = captured(clock, lambda w=weights: [multiply(*each) for each in zip(lhs, w, strict=True)])
        except RuntimeError as error:  # some accept one order of the right operand only, such as _scaled_mm
            failures.append(f"{name}: {error}")
    if not peers:
        raise RuntimeError("; ".join(failures))
    return peers


def _scaled(x: Tensor, w: Tensor) -> Tensor:
    return torch_on_gpu()._scaled_mm(x, w, scale_a=_one(), scale_b=_one(), out_dtype=torch_on_gpu().bfloat16)


@functools.cache
def _one() -> Tensor:
    return torch_on_gpu().ones((), device="cuda")


def rows(clock: Clock, work: Rows) -> dict[str, Peer]:
    """The same work by torch.compile."""
    torch = torch_on_gpu()
    arrays = [tensor_of(array) for array in work.inputs()]
    second_operands = arrays[-work.count :]
    functional = torch.nn.functional
    gamma, beta = (torch.full((work.width,), value, device="cuda", dtype=arrays[0].dtype) for value in (1.5, 0.25))

    def chain(x: Tensor, other: Tensor) -> Tensor:
        y = x * 1.5 + other
        return torch.where(x > 0, y * torch.sigmoid(y), torch.tanh(other))

    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "chain": chain,
        "softmax": lambda x, _: torch.softmax(x, -1),
        "layer norm": lambda x, _: functional.layer_norm(x, (work.width,), gamma, beta),
        "transpose": lambda x, _: x.t().contiguous(),
        "reduction": lambda x, _: x.sum(-1),
    }
    fused = torch.compile(functions[work.name], dynamic=False)
    pairs = list(zip(arrays[: work.count], second_operands, strict=True))
    return {"torch.compile": captured(clock, lambda: [fused(x, other) for x, other in pairs])}


def copy_bandwidth(clock: Clock, megabytes: int = 1024) -> tuple[Launch, int]:
    """A launch that copies some megabytes on the device, and the bytes that it reads and writes."""
    torch = torch_on_gpu()
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return (lambda: target.copy_(source)), 2 * (megabytes << 20)


def attentions(clock: Clock, work: Attentions) -> dict[str, Peer]:
    """The same work by each suitable kernel of PyTorch's ``scaled_dot_product_attention``."""
    torch = torch_on_gpu()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    arrays = [tensor_of(array) for array in work.inputs()]
    pieces = [arrays[i : i + 3] for i in range(0, len(arrays), 3)]
    attend = torch.nn.functional.scaled_dot_product_attention
    peers, failures = {}, []
    backends = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention 2": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
    for name, backend in backends.items():
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                peers[name] = captured(clock, lambda: [attend(*piece, is_causal=work.causal) for piece in pieces])
        except RuntimeError as error:
            failures.append(f"{name}: {error}")
    if not peers:
        raise RuntimeError("; ".join(failures))
    return peers
