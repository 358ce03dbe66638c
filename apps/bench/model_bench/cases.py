"""Cases of the model benchmark: a model, the precision of its float products, sizes of its dimensions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from model_peers import FLOAT32, PRECISIONS
from model_zoo import model_path

from .model_worker import FLOAT32_ALLOWED

LOW_ALLOWED = (0.0, 2e-2)
"""Allowed error of float16 and bfloat16, compared with float32: relative, and of the largest number."""
QUANTIZED_ALLOWED = (0.0, 0.3)
"""Allowed error of quantized models: numbers between two integers may be rounded to either, and layers amplify this.
ONNX Runtime with and without its graph optimizations differs by 0.2 for ``minilm.int8``."""
_QUANTIZED = re.compile("QuantizeLinear|DynamicQuantize|QLinear|QGemm|Integer|NBits")


@dataclass(frozen=True)
class Case:
    """A row of the report.

    Attributes
    ----------
    model : str
        Name of the model.
    path : Path
    precision : str
        A key of `model_peers.PRECISIONS`.
    dims : mapping of str to int
        Sizes of named dimensions.
    """

    model: str
    path: Path
    precision: str
    dims: Mapping[str, int]

    @property
    def family(self) -> str:
        """The name without sizes."""
        return self.model if self.precision == FLOAT32 else f"{self.model}:{PRECISIONS[self.precision]}"

    @property
    def label(self) -> str:
        """The name in tables."""
        return " ".join([self.family, *(f"{name}={size}" for name, size in self.dims.items())])

    def allowed(self) -> tuple[float, ...]:
        """Allowed error compared with ONNX Runtime on the same file: relative, and of the largest number."""
        nodes = onnx.load(str(self.path), load_external_data=False).graph.node
        if any(_QUANTIZED.search(node.op_type) for node in nodes):
            return QUANTIZED_ALLOWED
        return FLOAT32_ALLOWED if self.precision == FLOAT32 else LOW_ALLOWED


def cases_of(names: Sequence[str], precision: str, dims: Mapping[str, Sequence[int]]) -> list[Case]:
    """Every model with all combinations of sizes.

    Parameters
    ----------
    names : sequence of str
        ``NAME`` or ``NAME:bf16``, where NAME is a model of the zoo or a file.
    precision : str
        Precision of models whose name does not contain one.
    dims : mapping of str to sequence of int

    Raises
    ------
    ValueError
        If there is no such model.
    """
    cases = []
    precisions = {short: long for long, short in PRECISIONS.items()}
    for name in names:
        model, _, short = name.rpartition(":")
        model, chosen = (model, precisions[short]) if model and short in precisions else (name, precision)
        path = model_path(model)
        for sizes in itertools.product(*dims.values()):
            cases.append(Case(path.name.removesuffix(".onnx"), path, chosen, dict(zip(dims, sizes, strict=True))))
    return cases
