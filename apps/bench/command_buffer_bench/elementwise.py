"""The cost of submitting a kernel, and of a call: chains of small kernels with and without command buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from bars import Check
from turns import Timing, take_turns

import relax_hetero as rh
from command_buffer_bench.chains import Chain, whole_numbers

WITH, WITHOUT, HAND, BOUND, STOCK = "command buffers", "without", "by hand", "by hand, bound", "stock TVM"
NAMES = (WITH, WITHOUT, STOCK, HAND, BOUND)
KERNEL_BAR, CALL_BAR = 10.0, 5.0  # nanoseconds per kernel, microseconds per call of few kernels


class WrongResult(Exception):
    """A contestant has a wrong result, and is not timed."""


@dataclass(frozen=True)
class Contestant:
    """A program that runs a chain on one argument.

    Attributes
    ----------
    call : Callable
        Runs the chain once; this is timed.
    result : Callable
        Runs the chain once, and returns its result.
    """

    call: Callable[[], object]
    result: Callable[[], tvm.runtime.Tensor]


def contestants(chain: Chain, argument: tvm.runtime.Tensor) -> tuple[dict[str, Contestant], dict[str, int]]:
    """The contestants of a chain, and the numbers of its regions and commands."""
    module = chain.module()
    recorded = rh.vm.VirtualMachine(rh.compile(module, command_buffers=True))
    mains = {
        WITH: recorded["main"],
        WITHOUT: rh.vm.VirtualMachine(rh.compile(module, command_buffers=False))["main"],
        STOCK: tvm.relax.VirtualMachine(tvm.compile(module, rh.native("llvm")), tvm.cpu())["main"],
    }
    plain = {name: Contestant(call := functools.partial(main, argument), call) for name, main in mains.items()}
    regions = recorded.executable.metadata.regions
    facts = {"regions": len(regions), "commands": sum(len(region.commands) for region in regions)}
    return {**plain, **_by_hand(recorded, chain, argument)}, facts


def _by_hand(machine: rh.vm.VirtualMachine, chain: Chain, argument: tvm.runtime.Tensor) -> dict[str, Contestant]:
    """The same kernels recorded by hand, submitted with memory bound each time, and with a bound table."""
    buffer = chain.record(machine, argument.shape[0])
    result = tvm.runtime.empty(argument.shape, "float32")
    contestants = {}
    for name, bindings in ((HAND, [argument, result]), (BOUND, buffer.bind([argument, result]))):
        call = functools.partial(buffer.submit, bindings)
        contestants[name] = Contestant(call, lambda call=call: (call(), result)[1])
    return contestants


def check_result(name: str, chain: Chain, contestant: Contestant, array: np.ndarray) -> None:
    """Raise WrongResult unless the contestant computes the chain exactly."""
    result, expected = contestant.result().numpy(), chain.result(array)
    if not np.array_equal(result, expected):
        raise WrongResult(f"{name}, {chain.kernels} kernels: found {result}, expected {expected}")


def measure_elementwise(counts: Sequence[int], distinct: int, symbolic: bool, rounds: int, seed: int) -> dict[str, Any]:
    """Time chains; all contestants and all lengths take turns.

    Parameters
    ----------
    counts : sequence of int
        Numbers of kernels of the chains.
    distinct : int
        Number of different kernels, which are called in turn.
    symbolic : bool
        If true, their extent is symbolic.
    rounds, seed : int
        Number of turns, and seed of their order.

    Returns
    -------
    dict
        ``chains``: by count, regions, commands and each contestant's median and fastest call in microseconds;
        ``kernel_ns``: nanoseconds a kernel by contestant, from the medians of the shortest and the longest chain.
    """
    array = whole_numbers(seed)
    argument = tvm.runtime.tensor(array)
    chains: dict[int, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    for count in sorted(counts):
        chain = Chain(count, distinct, symbolic=symbolic)
        runners, chains[count] = contestants(chain, argument)
        for name, contestant in runners.items():
            check_result(name, chain, contestant, array)
            calls[_key(name, count)] = contestant.call
    times = take_turns(calls, rounds, seed)
    for count, facts in chains.items():
        facts["us"] = {name: _microseconds(times[_key(name, count)]) for name in NAMES}
    return {"distinct": distinct, "symbolic": symbolic, "chains": chains, "kernel_ns": kernel_nanoseconds(chains)}


def kernel_nanoseconds(chains: dict[int, dict[str, Any]]) -> dict[str, float]:
    """The time per kernel of each contestant, from the difference of the longest and the shortest chain."""
    short, long = min(chains), max(chains)
    if short == long:
        return {}
    shortest, longest = chains[short]["us"], chains[long]["us"]
    return {name: (longest[name]["median"] - shortest[name]["median"]) * 1e3 / (long - short) for name in longest}


def elementwise_checks(figures: dict[str, Any]) -> list[Check]:
    """The bars of the figures."""
    checks = []
    for name in (WITH, HAND):
        if name in figures["kernel_ns"]:
            checks.append(Check(f"ns a kernel, {name}", figures["kernel_ns"][name], KERNEL_BAR, at_most=True))
        count = min(figures["chains"])
        call = figures["chains"][count]["us"][name]["median"]
        checks.append(Check(f"µs a call of {count} kernel{'s' * (count > 1)}, {name}", call, CALL_BAR, at_most=True))
    return checks


def elementwise_table(figures: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and cells."""
    rows = [
        [
            f"{count:,}",
            str(facts["regions"]),
            str(facts["commands"]),
            *(f"{facts['us'][name]['median']:.2f} ({facts['us'][name]['fastest']:.2f})" for name in facts["us"]),
        ]
        for count, facts in figures["chains"].items()
    ]
    if figures["kernel_ns"]:
        rows.append(["ns a kernel", "", "", *(f"{value:.1f}" for value in figures["kernel_ns"].values())])
    extent = "any number of" if figures["symbolic"] else "16"
    title = f"{figures['distinct']} elementwise kernels on {extent} floats taking turns: µs a call, median (fastest)"
    return title, ["kernels", "regions", "commands", *NAMES], rows


def _key(name: str, count: int) -> str:
    return f"{name}, {count}"


def _microseconds(timing: Timing) -> dict[str, float]:
    return {"median": timing.median * 1e6, "fastest": timing.fastest * 1e6}
