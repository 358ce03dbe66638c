"""This library: compiled and exported by one process, loaded and run by another."""

from __future__ import annotations

import re
from collections import Counter

import tvm

import relax_hetero as rh

from . import FLOAT32, Inputs, Session, Setting


def native_target(setting: Setting) -> tvm.target.Target:
    """This CPU with the threads and the instructions of a setting."""
    return tvm.target.Target(
        {**dict(rh.native("llvm", isa=setting.isa or None).export()), "num-cores": setting.threads}
    )


def import_model(model: str, inputs: Inputs, setting: Setting) -> tvm.IRModule:
    """The model for this CPU, with the sizes of the inputs."""
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    return in_precision(rh.from_onnx(model, [native_target(setting)], shapes=shapes), setting.precision)


def in_precision(mod: tvm.IRModule, precision: str) -> tvm.IRModule:
    """The module with its float products in a precision."""
    return mod if precision == FLOAT32 else rh.transform.ToMixedPrecision(precision)(mod)


def compile_model(model: str, file: str, inputs: Inputs, setting: Setting) -> None:
    """Import, compile and export."""
    rh.compile(import_model(model, inputs, setting), cache=False).export_library(file)


def products_of(executable: rh.vm.Executable) -> dict[str, int]:
    """The number of products and convolutions by types of operands; *stock* are those without a kernel."""
    encodings = executable.metadata.encodings
    types = [re.search(r"<(\w+ \* \w+) ", entry["operands"][0]["encoding"]) for entry in encodings["ops"]]
    counts = Counter(match[1] for match in types if match)
    counts.update(stock=len(encodings["cancelled"]))
    return {name: count for name, count in counts.items() if count}


def tensors_of(inputs: Inputs) -> list[tvm.runtime.Tensor]:
    """Arguments, copied to aligned memory."""
    return [tvm.runtime.tensor(array) for array in inputs.values()]


def load(model: str, file: str, inputs: Inputs, setting: Setting) -> Session:
    """``vm["main"]`` on tensors; the machine allocates its results, like some of the peers."""
    executable = rh.load(file)
    main, operands = rh.vm.VirtualMachine(executable)["main"], tensors_of(inputs)
    outputs: list[object] = []

    def call() -> None:
        outputs[:] = [main(*operands)]

    def results() -> list[object]:
        (output,) = outputs
        fields = [output] if isinstance(output, tvm.runtime.Tensor) else list(output)
        return [field.numpy() for field in fields]

    return Session(call, results, products=products_of(executable))
