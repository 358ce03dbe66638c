"""Clusters: blocks that wait for each other and reach each other's shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .faults import KernelFault
from .memory import RANK_BITS, shared_place
from .ptx import Instruction, instruction, pointer, register_writer
from .waiting import Rendezvous, Wait, complete_warps, waits


@instruction(r"mapa(\.shared::cluster)?\.u(32|64)")
def _mapa(expressions: Any, one: Instruction) -> Any:
    write = register_writer(expressions, one.operands[0])
    address, rank = pointer(expressions, one.operands[1]), expressions.compiled(one.operands[2])

    def evaluate(lanes: Any, mask: Any) -> None:
        addresses = np.broadcast_to(np.asarray(address(lanes, mask)), (lanes.count,))
        _, offset = shared_place(lanes, addresses)
        ranks = np.broadcast_to(np.asarray(rank(lanes, mask), np.int64), (lanes.count,))
        active = lanes.active(mask)
        if (ranks[active] >= lanes.blocks.cluster).any():
            raise KernelFault(f"block {int(ranks[active].max())} of a cluster of {lanes.blocks.cluster}")
        high = addresses.astype(np.uint64) & ~np.uint64(0xFFFFFFFF)
        mapped = high | ((ranks + 1) << RANK_BITS | offset).astype(np.uint64)
        write(lanes, mask, mapped.astype(np.uint32) if "u32" in one.parts else mapped)

    return evaluate


def _arrive(lanes: Any, mask: Any) -> None:
    complete_warps(lanes, mask, "the cluster's barrier")
    blocks = lanes.blocks
    for cluster, members in lanes.members(mask):
        barrier = blocks.barriers.setdefault(("cluster", cluster), Rendezvous("the cluster's barrier"))
        tickets = lanes.state.setdefault("cluster", {})
        for member in members.tolist():
            if member in tickets:
                raise KernelFault("a thread arrives at the cluster's barrier twice and does not wait in between")
        ticket = barrier.arrive(blocks.clocks, cluster, members, blocks.cluster * blocks.threads)
        tickets.update(dict.fromkeys(members.tolist(), ticket))


def _wait(lanes: Any, mask: Any) -> Iterator[Wait]:
    blocks = lanes.blocks
    for cluster, members in lanes.members(mask):
        barrier: Rendezvous = blocks.barriers.get(("cluster", cluster), Rendezvous(""))
        tickets = lanes.state.setdefault("cluster", {})
        missing = [member for member in members.tolist() if member not in tickets]
        if missing:
            raise KernelFault("a thread waits at the cluster's barrier, where it has not arrived")
        ticket = max(tickets.pop(member) for member in members.tolist())

        def ready(barrier: Rendezvous = barrier, ticket: int = ticket) -> bool:
            return barrier.opened > ticket

        def text(barrier: Rendezvous = barrier) -> str:
            reached = sum(len(part) for part in barrier.arrived)
            return f"{barrier.name} is reached by {reached} of {blocks.cluster * blocks.threads} threads"

        while not ready():
            yield Wait(ready, text)
        assert barrier.given is not None
        blocks.clocks.acquire(cluster, members, barrier.given)


@instruction(r"barrier\.cluster\.arrive(\..*)?")
def _cluster_arrive(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    return _arrive


@instruction(r"barrier\.cluster\.wait(\..*)?", waits=True)
def _cluster_wait(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    return _wait


@waits("tirx.cuda.cluster_sync")
def _cluster_sync(expressions: Any, call: Any) -> Any:
    expressions.names.roles = True

    def run(lanes: Any, mask: Any) -> Iterator[Wait]:
        _arrive(lanes, mask)
        yield from _wait(lanes, mask)

    return run
