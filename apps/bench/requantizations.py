"""Differences of a model's quantized tensors from ONNX Runtime's, each computed from the same quantized tensors.

python apps/bench/requantizations.py minilm.int8 resnet50.int8

A model is cut at every quantized tensor: the ops after it get ONNX Runtime's numbers, so that a difference comes from
one requantization, not from all before it.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
import numpy as np
import onnx
from model_zoo import model_path, random_inputs
from onnx import helper
from rich.console import Console
from rich.table import Table
from smoke import small_quantized_model, smoke

import relax_hetero as rh

_CUT = "_cut"


@dataclass(frozen=True)
class Differences:
    """Numbers of elements of all quantized tensors that differ; ``largest`` is the largest difference in units."""

    tensors: int
    elements: int
    off_by_one: int
    largest: int


def quantized_values(model: onnx.ModelProto) -> list[str]:
    """Results of quantizing nodes: ``QuantizeLinear`` of activations, ``QLinear…``."""
    constants = {weight.name for weight in model.graph.initializer}
    quantizing = ("QuantizeLinear", "QLinear", "QGemm")
    return [
        node.output[0]
        for node in model.graph.node
        if node.op_type.startswith(quantizing) and node.input[0] not in constants
    ]


def cut_model(model: onnx.ModelProto, types: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model cut at quantized values: they are outputs, and their readers read inputs (``NAME_cut``).

    Parameters
    ----------
    model : onnx.ModelProto
    types : mapping of str to numpy.ndarray
        Arrays with the shape and element type of each quantized value.
    """
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    graph = cut.graph
    for node in graph.node:
        node.input[:] = [name + _CUT if name in types else name for name in node.input]
    outputs = {value.name for value in graph.output}
    for name, array in types.items():
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.input.append(helper.make_tensor_value_info(name + _CUT, element, array.shape))
        if name not in outputs:
            graph.output.append(helper.make_tensor_value_info(name, element, array.shape))
    return cut


def reference(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """ONNX Runtime's quantized values, without its graph optimizations."""
    import onnxruntime as ort

    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    names = quantized_values(model)
    present = {value.name for value in shown.graph.output}
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def differences(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], target: object = "llvm") -> Differences:
    """Compare every quantized value with ONNX Runtime's.

    Parameters
    ----------
    model : onnx.ModelProto
    inputs : mapping of str to numpy.ndarray
    target : object
        Target, as in `vdevices` of `relax_hetero.from_onnx`.
    """
    expected = reference(model, inputs)
    cut = cut_model(model, expected)
    shapes = {name: list(array.shape) for name, array in inputs.items()}
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(cut, [target], shapes=shapes)))
    operands = {**inputs, **{name + _CUT: array for name, array in expected.items()}}
    results = machine["main"](**operands)
    fields = dict(zip((value.name for value in cut.graph.output), _fields(results), strict=True))
    units = [np.abs(fields[name].astype("int32") - array.astype("int32")) for name, array in expected.items()]
    return Differences(
        tensors=len(units),
        elements=sum(unit.size for unit in units),
        off_by_one=sum(int((unit == 1).sum()) for unit in units),
        largest=max(int(unit.max()) for unit in units),
    )


def _fields(results: object) -> Sequence[np.ndarray]:
    return [tensor.numpy() for tensor in (results if isinstance(results, (tuple, list)) else [results])]


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--seed", default=0, show_default=True, help="Seed of inputs.")
@smoke(models=lambda _: (small_quantized_model(pathlib.Path(tempfile.mkdtemp())),))
def main(models: tuple[str, ...], seed: int) -> None:
    """Compare the quantized tensors of MODELS, ONNX files or names of models.py, with ONNX Runtime's."""
    table = Table()
    for column in ("model", "quantized tensors", "elements", "off by one", "largest difference"):
        table.add_column(column, justify="left" if column == "model" else "right")
    wrong = False
    for name in models:
        path = model_path(name)
        result = differences(onnx.load(str(path)), random_inputs(path, {}, seed))
        share = f"{result.off_by_one} ({result.off_by_one / result.elements:.2e})"
        table.add_row(name, str(result.tensors), str(result.elements), share, str(result.largest))
        wrong |= result.largest > 1
    Console(highlight=False).print(table)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
