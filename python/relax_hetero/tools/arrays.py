"""Inputs of a model: arrays from files, or random ones."""

from __future__ import annotations

import os
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BindingError, HeteroError
from ..target.element_types import numpy_dtype

if TYPE_CHECKING:
    from ..vm import FunctionSignature, TensorSpec


def read_arrays(files: Sequence[str], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read arrays from ``x.npy``, ``NAME=x.npy`` and ``inputs.npz``.

    `files`: arguments of the command line; `names`: inputs of the model, of which the first without an array gets an
    ``.npy`` file without a name. Raises BindingError if a file cannot be read, or an input is unknown or given twice.
    """
    arrays: dict[str, np.ndarray] = {}
    for text in files:
        name, _, path = text.rpartition("=")
        if name and Path(text).exists():
            name, path = "", text
        content = _load(Path(path))
        if isinstance(content, np.ndarray):
            free = [each for each in names if each not in arrays]
            if not name and not free:
                raise BindingError(f"{path}: every input already has an array; the model takes {_join_names(names)}")
            content = {name or free[0]: content}
        for key, array in content.items():
            if key not in names:
                raise BindingError(f"{path}: the model has no input {key!r}; it takes {_join_names(names)}")
            if key in arrays:
                raise BindingError(f"{path}: input {key!r} is given twice")
            arrays[key] = array
    return arrays


def random_arrays(
    signature: FunctionSignature, shapes: Mapping[str, Sequence[int]], seed: int, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Complete `arrays` by random ones; parameters are left out.

    `shapes` holds shapes of inputs and, as one extent, sizes of symbolic dimensions. Floats are standard normal.
    Integers are zeros and ones, which are valid masks and indices. Raises BindingError if an input is not a tensor, or
    the size of a symbolic dimension is missing.
    """
    generator = np.random.default_rng(seed)
    inputs: dict[str, np.ndarray] = {}
    for index, spec in enumerate(signature.inputs):
        if spec.name in arrays:
            inputs[spec.name] = arrays[spec.name]
        elif index < signature.num_input:
            inputs[spec.name] = _random(tensor_spec(spec), shapes, generator)
    return inputs


def tensor_spec(spec: object) -> TensorSpec:
    """Return the spec of a tensor; BindingError for other types, which files cannot hold."""
    from ..vm import TensorSpec

    if not isinstance(spec, TensorSpec):
        name = getattr(spec, "name", "?")
        raise BindingError(f"input {name!r} is a {type(spec).__name__.removesuffix('Spec').lower()}, not a tensor")
    return spec


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an ``.npz`` file; unlike ``numpy.savez``, with any names (such as ``file``).

    Raises HeteroError if the file cannot be written.
    """
    # Replace the file instead of overwriting it: another process may have mapped it.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    target = path if path.exists() and not path.is_file() else temporary
    try:
        with zipfile.ZipFile(target, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
        if target is temporary:
            os.replace(temporary, os.path.realpath(path))
    except OSError as error:  # whose own message names the temporary file
        raise HeteroError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _random(spec: TensorSpec, shapes: Mapping[str, Sequence[int]], generator: np.random.Generator) -> np.ndarray:
    shape = shapes.get(spec.name)
    if shape is None:
        if spec.shape is None:
            raise BindingError(f"input {spec.name!r} is of unknown rank: give its --shape or --input")
        # Sizes of dimensions are stored as one extent.
        sizes = {name: extents[0] for name, extents in shapes.items() if len(extents) == 1}
        extents = [extent if isinstance(extent, int) else sizes.get(extent) for extent in spec.shape]
        shape = [extent for extent in extents if extent is not None]
        if len(shape) < len(extents):
            names = [str(each) for each, size in zip(spec.shape, extents, strict=True) if size is None]
            if all(map(str.isidentifier, names)):
                option = " ".join(f"--shape {name}=1" for name in dict.fromkeys(names))
            else:  # expressions, such as 2 * n
                option = f"--shape '{spec.name}=…'"
            text = "x".join(map(str, spec.shape))
            raise BindingError(f"input {spec.name!r} is {text}: give its sizes ({option}) or --input")
    dtype = numpy_dtype(spec.dtype or "float32")
    if dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def _load(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content:
            return {key: content[key] for key in content.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = (
            error if isinstance(error, OSError) else "expected what numpy.save or numpy.savez wrote, without pickles"
        )
        raise BindingError(f"{path}: not a readable .npy or .npz file: {reason}") from error


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "no inputs"
