"""What a kernel, and what a call, costs to submit: chains of small kernels in command buffers, and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from command_buffer_chains import Chain, whole_numbers
from report import Check
from turns import Timing, take_turns

import relax_hetero as rh

WITH, WITHOUT, STOCK = "command buffers", "without", "stock TVM"
KERNEL_BAR, CALL_BAR = 10.0, 5.0  # nanoseconds a kernel, microseconds a call of few

Main = Callable[[tvm.runtime.Tensor], tvm.runtime.Tensor]


class WrongResult(Exception):
    """A contestant that computes something else, and so gets no time."""


def contestants(module: tvm.IRModule) -> tuple[dict[str, Main], dict[str, int]]:
    """``main`` of a module in each contestant, and how many regions and commands it has in command buffers."""
    recorded = rh.compile(module, command_buffers=True)
    stock = tvm.compile(module, rh.native("llvm"))
    regions = recorded.metadata.regions
    mains = {
        WITH: rh.vm.VirtualMachine(recorded)["main"],
        WITHOUT: rh.vm.VirtualMachine(rh.compile(module, command_buffers=False))["main"],
        STOCK: tvm.relax.VirtualMachine(stock, tvm.cpu())["main"],
    }
    return mains, {"regions": len(regions), "commands": sum(len(region.commands) for region in regions)}


def check_result(name: str, chain: Chain, main: Main, array: np.ndarray) -> None:
    """WrongResult unless `main` computes the chain, exactly."""
    found, wanted = main(tvm.runtime.tensor(array)).numpy(), chain.result(array)
    if not np.array_equal(found, wanted):
        raise WrongResult(f"{name}, {chain.kernels} kernels: found {found}, expected {wanted}")


def measure_elementwise(counts: Sequence[int], distinct: int, symbolic: bool, rounds: int, seed: int) -> dict[str, Any]:
    """Times of chains, all contestants and all lengths in turns.

    Parameters
    ----------
    counts : sequence of int
        How many kernels the chains have.
    distinct : int
        How many different kernels take turns in them.
    symbolic : bool
        Whether their extent is symbolic.
    rounds, seed : int
        Of the turns.

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
        mains, chains[count] = contestants(chain.module())
        for name, main in mains.items():
            check_result(name, chain, main, array)
            calls[_key(name, count)] = functools.partial(main, argument)
    times = take_turns(calls, rounds, seed)
    for count, facts in chains.items():
        facts["us"] = {name: _microseconds(times[_key(name, count)]) for name in (WITH, WITHOUT, STOCK)}
    return {"distinct": distinct, "symbolic": symbolic, "chains": chains, "kernel_ns": kernel_nanoseconds(chains)}


def kernel_nanoseconds(chains: dict[int, dict[str, Any]]) -> dict[str, float]:
    """By contestant: the longest chain's time above the shortest one's, for each kernel that it has more."""
    short, long = min(chains), max(chains)
    if short == long:
        return {}
    least, most = chains[short]["us"], chains[long]["us"]
    return {name: (most[name]["median"] - least[name]["median"]) * 1e3 / (long - short) for name in most}


def elementwise_checks(found: dict[str, Any]) -> list[Check]:
    """What the figures have to reach."""
    count = min(found["chains"])
    call = found["chains"][count]["us"][WITH]["median"]
    checks = [Check(f"µs a call of {count} kernel{'s' * (count > 1)} in command buffers", call, CALL_BAR, at_most=True)]
    if WITH in found["kernel_ns"]:
        kernel = found["kernel_ns"][WITH]
        checks.insert(0, Check("ns a kernel in command buffers", kernel, KERNEL_BAR, at_most=True))
    return checks


def elementwise_table(found: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and cells."""
    rows = [
        [
            f"{count:,}",
            str(facts["regions"]),
            str(facts["commands"]),
            *(f"{facts['us'][name]['median']:.2f} ({facts['us'][name]['fastest']:.2f})" for name in facts["us"]),
        ]
        for count, facts in found["chains"].items()
    ]
    if found["kernel_ns"]:
        rows.append(["ns a kernel", "", "", *(f"{value:.1f}" for value in found["kernel_ns"].values())])
    extent = "any number of" if found["symbolic"] else "16"
    title = f"{found['distinct']} elementwise kernels on {extent} floats taking turns: µs a call, median (fastest)"
    return title, ["kernels", "regions", "commands", WITH, WITHOUT, STOCK], rows


def _key(name: str, count: int) -> str:
    return f"{name}, {count}"


def _microseconds(timing: Timing) -> dict[str, float]:
    return {"median": timing.median * 1e6, "fastest": timing.fastest * 1e6}
