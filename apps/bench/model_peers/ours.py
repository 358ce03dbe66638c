"""This library: compiled and exported by one process, loaded and run by another."""

from __future__ import annotations

import tvm

import relax_hetero as rh

from . import Inputs, Session


def native_target(threads: int) -> tvm.target.Target:
    """This CPU, for so many threads."""
    return tvm.target.Target({**dict(rh.native("llvm").export()), "num-cores": threads})


def import_model(model: str, inputs: Inputs, threads: int) -> tvm.IRModule:
    """The model for this CPU."""
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    return rh.from_onnx(model, [native_target(threads)], shapes=shapes)


def compile_model(model: str, file: str, inputs: Inputs, threads: int) -> None:
    """Import, compile and export."""
    rh.compile(import_model(model, inputs, threads)).export_library(file)


def machine_of(file: str) -> rh.vm.VirtualMachine:
    """The machine of an exported file."""
    return rh.vm.VirtualMachine(rh.load(file))


def tensors_of(inputs: Inputs) -> list[tvm.runtime.Tensor]:
    """Arguments, copied to where they are aligned."""
    return [tvm.runtime.tensor(array) for array in inputs.values()]


def load(model: str, file: str, inputs: Inputs, threads: int) -> Session:
    """``vm["main"]`` on tensors; the machine allocates its results, as some of the peers do."""
    main, operands = machine_of(file)["main"], tensors_of(inputs)
    outputs: list[object] = []

    def call() -> None:
        outputs[:] = [main(*operands)]

    def results() -> list[object]:
        (found,) = outputs
        fields = [found] if isinstance(found, tvm.runtime.Tensor) else list(found)
        return [field.numpy() for field in fields]

    return Session(call, results)
