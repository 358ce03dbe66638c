"""The tensors of a GGUF file as constants of a module: blocks in their bits, other numbers as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from ...errors import FrontendError
from .file import FileTensor, GgufFile


class Weights:
    """Makes each tensor a constant once, so that functions share it.

    Parameters
    ----------
    file : GgufFile
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._constants: dict[str, relax.Expr] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def tensor(self, name: str, shape: Sequence[int]) -> FileTensor:
        """A tensor of the file that has a shape; FrontendError where it is missing or has another."""
        found = self._file.tensors.get(name)
        if found is None:
            raise FrontendError(f"{self._file.path}: has no tensor {name!r}, which its architecture needs")
        if found.shape != tuple(shape):
            raise FrontendError(f"{self._file.path}: {name!r} has shape {found.shape}, expected {tuple(shape)}")
        return found

    def numbers(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """A tensor's numbers, of float32."""
        return _numbers(self.tensor(name, shape), self._file)

    def vector(self, name: str, size: int) -> relax.Expr:
        """A vector of float32."""
        return self._constant(name, lambda: self.numbers(name, [size]))

    def matrix(self, name: str, rows: int, depth: int) -> relax.Expr:
        """A matrix (rows, depth) of a product: as numbers of float32, or what the blocks of the file mean."""
        return self._constant(name, lambda: self.numbers(name, [rows, depth]))

    def experts(self, name: str, count: int, rows: int, depth: int) -> relax.Expr:
        """Matrices (count, rows, depth), one for each expert."""
        return self._constant(name, lambda: self.numbers(name, [count, rows, depth]))

    def _constant(self, name: str, make: Callable[[], np.ndarray]) -> relax.Expr:
        if name not in self._constants:
            self._constants[name] = relax.const(tvm.runtime.tensor(make()))
        return self._constants[name]


def _numbers(tensor: FileTensor, file: GgufFile) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if tensor.type in ("F32", "F16"):
        return np.ascontiguousarray(tensor.data, "float32").reshape(tensor.shape)
    try:
        return dequantize(tensor.data, GGMLQuantizationType[tensor.type]).reshape(tensor.shape)
    except NotImplementedError as error:
        raise FrontendError(f"{file.path}: {tensor.name!r} is of type {tensor.type}, which is not known") from error
