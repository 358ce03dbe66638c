"""The tensors of a GGUF file as constants of a module: blocks in their bits, other numbers as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from ...encoding.block_formats import FILE_FORMATS
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

    def matrix(self, name: str, shape: Sequence[int]) -> tuple[relax.Expr, str]:
        """Rows of weights, ``shape[-1]`` in each: a constant, and the format of its bytes ("": numbers of float32).

        Matrices that are stacked are rows below each other.

        Raises
        ------
        FrontendError
            If the tensor is missing, has another shape, or its type is not known.
        """
        tensor = self.tensor(name, shape)
        if tensor.type == "F32":
            return self._constant(name, lambda: self.numbers(name, shape).reshape(-1, shape[-1])), ""
        form = tensor.type.lower()
        if form not in FILE_FORMATS:
            known = ", ".join(known.upper() for known in ("f32", *FILE_FORMATS))
            raise FrontendError(f"{self._file.path}: {name!r} is of type {tensor.type}, expected one of {known}")
        rows = int(np.prod(shape[:-1]))
        return self._constant(name, lambda: np.ascontiguousarray(tensor.data).view("uint8").reshape(rows, -1)), form

    def _constant(self, name: str, make: Callable[[], np.ndarray]) -> relax.Expr:
        if name not in self._constants:
            self._constants[name] = relax.const(tvm.runtime.tensor(make()))
        return self._constants[name]


def _numbers(tensor: FileTensor, file: GgufFile) -> np.ndarray:
    """Of a tensor that is no matrix of products: F32, or F16."""
    if tensor.type not in ("F32", "F16"):
        raise FrontendError(f"{file.path}: {tensor.name!r} is of type {tensor.type}, expected F32 or F16")
    return np.ascontiguousarray(tensor.data, "float32").reshape(tensor.shape)
