"""Collectives of an executable: exchanges between the devices of a mesh that are not copies."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BuildError

AUTO, CUSTOM, NCCL = STRATEGIES = ("auto", "custom", "nccl")
"""Values of `allreduce_strategy`; "custom" is vLLM's and TensorRT-LLM's word for kernels with peer access."""

ASKED_FOR = "allreduce_strategy="  # beginning of `CollectiveSpec.why` if the caller has chosen the algorithm

ALL_REDUCE_OP, EXCHANGE_OP = "all-reduce", "exchange"


def check_strategy(strategy: str, caller: str) -> None:
    """Require one of `STRATEGIES`; BuildError otherwise."""
    if strategy not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise BuildError(f"{caller}: allreduce_strategy is {strategy!r}, expected one of {known}")


@dataclass(frozen=True)
class CollectiveSpec:
    """A collective over the GPUs of a mesh."""

    op: str  # ``"all-reduce"``, or ``"exchange"``: tensors that cross between GPUs at once
    function: str  # function that has it
    variable: str  # variable of its result on the first GPU
    devices: tuple[int, ...]  # manifest indices of the GPUs
    bytes: int  # bytes of the operand of each GPU, or of all tensors that cross
    joined: tuple[str, ...]  # work that its kernels do as well: ``"norm"``, ``"residual"``
    algorithm: str  # ``"one-shot"``, ``"two-shot"`` or ``"NCCL"``
    why: str  # reason for the algorithm
