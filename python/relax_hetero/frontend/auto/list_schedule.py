"""How long one call takes when independent work overlaps: a list schedule of its ops and transfers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .plan_costs import PlanCosts
from .work_graph import OUTSIDE


def call_ticks(costs: PlanCosts, plan: Sequence[int]) -> int:
    """Ticks from the start of a call until all its ops and transfers are done.

    A queue does one thing at a time: of what is ready, what comes first in the program, where a transfer stands before
    its first reader. A unit is ready when all it reads is at hand, a transfer when its value is made. Never more than
    ``costs.total(plan)``, as some queue always works.

    A value that a unit before its maker reads, which is possible where a unit's bindings lie apart, is not waited for.
    """
    units = len(costs.graph.units)
    # Steps: the units, then the transfers. Of each its place in the program, its queue and ticks, how many it waits
    # for, and who waits for it.
    order = list(range(1, 2 * units, 2))
    queue_of = [costs.queue_of[device] for device in plan]
    ticks = [unit_ticks[device] for unit_ticks, device in zip(costs.ops, plan, strict=True)]
    waits = [0] * units
    followers: list[list[int]] = [[] for _ in range(units)]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(costs.queues)]
    for value in costs.graph.values:
        maker, source = value.maker, costs.where(value.maker, plan)
        step_to: dict[int, int] = {}
        for destination, carrier, amount in costs.transfers(value, plan):
            step = step_to[destination] = len(ticks)
            at = (reader for reader in value.readers if costs.where(reader, plan) == destination and reader != OUTSIDE)
            order.append(2 * min(at, default=units))
            queue_of.append(costs.queue_of[carrier])
            ticks.append(amount)
            waits.append(0 if maker == OUTSIDE else 1)
            followers.append([])
            if maker != OUTSIDE:
                followers[maker].append(step)
        for reader in value.readers:
            if reader == OUTSIDE or reader <= maker:
                continue
            before = step_to.get(plan[reader], maker)
            if plan[reader] != source or maker != OUTSIDE:
                followers[before].append(reader)
                waits[reader] += 1
    for step, count in enumerate(waits):
        if count == 0:
            ready[queue_of[step]].append((order[step], step))
    for waiting in ready:
        heapq.heapify(waiting)
    return _run(order, queue_of, ticks, waits, followers, ready)


def _run(
    order: list[int],
    queue_of: list[int],
    ticks: list[int],
    waits: list[int],
    followers: list[list[int]],
    ready: list[list[tuple[int, int]]],
) -> int:
    """When the last step ends. `ready` holds a heap for each queue: places in the program and steps."""
    now = 0
    running: list[tuple[int, int]] = []  # until when, and which step
    free = [True] * len(ready)
    for queue, waiting in enumerate(ready):
        if waiting:
            step = heapq.heappop(waiting)[1]
            heapq.heappush(running, (ticks[step], step))
            free[queue] = False
    while running:
        now, done = heapq.heappop(running)
        free[queue_of[done]] = True
        touched = [queue_of[done]]
        for follower in followers[done]:
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready[queue_of[follower]], (order[follower], follower))
                touched.append(queue_of[follower])
        for queue in touched:
            if free[queue] and ready[queue]:
                step = heapq.heappop(ready[queue])[1]
                heapq.heappush(running, (now + ticks[step], step))
                free[queue] = False
    return now
