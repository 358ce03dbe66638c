"""Programs of hosts run step by step in this process, without Ray, and the same cut in one executable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm

import relax_hetero as rh
from relax_hetero.cluster.call_plan import CALL, Program, substitute
from relax_hetero.cluster.calls import bind
from relax_hetero.cluster.cut.cut_module import cut_module
from relax_hetero.cluster.wire import decode_copy
from relax_hetero.target.hosts import on_host
from relax_hetero.target.vdevice import vdevices_of

CPU = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}


def hosted(*hosts: str) -> list[tvm.relax.VDevice]:
    """A CPU on each host."""
    return [rh.VDevice(CPU, host=host) for host in hosts]


class StepByStep:
    """The hosts of a program, each a machine of this process; a value that crosses is copied."""

    def __init__(self, program: Program) -> None:
        program.check()
        self.program = program
        self.executables = {host: rh.compile(part) for host, part in program.parts.items()}
        self.machines = {host: rh.vm.VirtualMachine(each) for host, each in self.executables.items()}

    def __call__(self, name: str, *args: Any) -> Any:
        """Results of a call: arrays, and tuples of integers for shapes."""
        plan = self.program.functions[name]
        assert not plan.runs, f"{name} is not cut into steps"
        values = {(CALL, i): decode_copy(value) for i, value in enumerate(bind(name, plan, args, {}))}
        for number, step in enumerate(plan.steps):
            output = self.machines[step.host][step.function](*(values[s.step, s.index] for s in step.arguments))
            results = [output] if step.results == 1 else list(output)
            assert len(results) == step.results
            values |= {(number, i): as_sent(value) for i, value in enumerate(results)}
        return plain(substitute(plan.result, lambda source: values[source.step, source.index]))


def as_sent(value: Any) -> Any:
    return value.numpy().copy() if hasattr(value, "numpy") else value


def plain(result: Any) -> Any:
    """A result as arrays, tuples and numbers."""
    if isinstance(result, (tuple, list, tvm.runtime.ShapeTuple)):
        return tuple(map(plain, result))
    return result.numpy() if hasattr(result, "numpy") else result


def in_one_process(mod: tvm.IRModule) -> rh.vm.VirtualMachine:
    """The machine of a module whose vdevices, taken off their hosts, are devices of one process."""
    off = [rh.VDevice(on_host(v.target, None), i) for i, v in enumerate(vdevices_of(mod))]
    return rh.vm.VirtualMachine(rh.compile(rh.transform.UpdateVDevice(off)(mod)))


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Results of one structure, equal in every bit."""
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple) and len(actual) == len(expected), f"{actual} is not {expected}"
        for each, other in zip(actual, expected, strict=True):
            assert_same_bits(each, other)
    elif isinstance(expected, np.ndarray):
        assert isinstance(actual, np.ndarray) and (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes(), f"{np.abs(actual - expected).max()} apart"
    else:
        assert type(actual) is type(expected) and actual == expected


def cut(mod: tvm.IRModule, params: Mapping[str, Any] | None = None) -> Program:
    """The program of a module over hosts, its plans checked."""
    program = cut_module(mod, params)
    for name in program.functions:
        check_plan(program, name)
    return program


def check_same(mod: tvm.IRModule, calls: Sequence[Sequence[Any]], name: str = "main") -> Program:
    """Cut a module by hosts, and compare its steps with the same cut in one process; the program."""
    program = cut(mod)
    steps, reference = StepByStep(program), in_one_process(mod)
    for args in calls:
        assert_same_bits(steps(name, *args), plain(reference[name](*args)))
    return program


def check_plan(program: Program, name: str) -> None:
    """Each step reads only earlier ones, and is the last of its host or makes a value that another host reads."""
    plan = program.functions[name]
    plan.check(name)
    for number, step in enumerate(plan.steps):
        later = [other for other in plan.steps[number + 1 :] if other.host == step.host]
        readers = {o.host for o in plan.steps for s in o.arguments if s.step == number}
        assert not later or readers - {step.host}, f"step {number} of {plan.steps} tells nobody"
