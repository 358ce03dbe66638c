"""Arguments of a model: read from files, or random."""

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
    """Arrays from ``x.npy``, ``NAME=x.npy`` and ``inputs.npz``.

    Parameters
    ----------
    files : sequence of str
        As given on the command line.
    names : sequence of str
        The model's inputs; an ``.npy`` file without a name is for the first one that has no array yet.

    Raises
    ------
    BindingError
        If a file cannot be read, or names an input that the model does not have, or one twice.
    """
    found: dict[str, np.ndarray] = {}
    for text in files:
        name, _, path = text.rpartition("=")
        if name and Path(text).exists():
            name, path = "", text
        loaded = _load(Path(path))
        if isinstance(loaded, np.ndarray):
            free = [known for known in names if known not in found]
            if not name and not free:
                raise BindingError(f"{path}: every input already has an array; the model takes {_listed(names)}")
            loaded = {name or free[0]: loaded}
        for key, array in loaded.items():
            if key not in names:
                raise BindingError(f"{path}: the model has no input {key!r}; it takes {_listed(names)}")
            if key in found:
                raise BindingError(f"{path}: input {key!r} is given twice")
            found[key] = array
    return found


def random_arrays(
    signature: FunctionSignature, shapes: Mapping[str, Sequence[int]], seed: int, given: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """One array per input: those in `given`, else random ones from `seed`; none for parameters that are not given.

    `shapes` holds shapes of inputs and, as one extent, sizes of symbolic dimensions. Floats are standard normal.
    Integers are zeros and ones, so that they are valid as masks and as indices.

    Raises
    ------
    BindingError
        If an input is no tensor, or a symbolic dimension has no value in `shapes`.
    """
    generator = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for number, spec in enumerate(signature.inputs):
        if spec.name in given:
            made[spec.name] = given[spec.name]
        elif number < signature.num_input:
            made[spec.name] = _random(tensor_spec(spec), shapes, generator)
    return made


def tensor_spec(spec: object) -> TensorSpec:
    """The spec itself if it is a tensor's; BindingError otherwise (tuples and shapes cannot stand in a file)."""
    from ..vm import TensorSpec

    if not isinstance(spec, TensorSpec):
        name = getattr(spec, "name", "?")
        raise BindingError(f"input {name!r} is a {type(spec).__name__.removesuffix('Spec').lower()}, not a tensor")
    return spec


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an ``.npz`` file whose members may have any name (``numpy.savez`` takes none called ``file``).

    Raises
    ------
    HeteroError
        If the file cannot be written.
    """
    # A file may be mapped by whoever loaded it: it is replaced, never written into.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    target = path if path.exists() and not path.is_file() else temporary
    try:
        with zipfile.ZipFile(target, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
        if target is temporary:
            os.replace(temporary, os.path.realpath(path))
    except OSError as error:  # it names the temporary file, which nobody asked for
        raise HeteroError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _random(spec: TensorSpec, shapes: Mapping[str, Sequence[int]], generator: np.random.Generator) -> np.ndarray:
    shape = shapes.get(spec.name)
    if shape is None:
        if spec.shape is None:
            raise BindingError(f"input {spec.name!r} is of unknown rank: give its --shape or --input")
        # A dimension by its name is one extent.
        sizes = {name: extents[0] for name, extents in shapes.items() if len(extents) == 1}
        found = [extent if isinstance(extent, int) else sizes.get(extent) for extent in spec.shape]
        shape = [extent for extent in found if extent is not None]
        if len(shape) < len(found):
            known = "x".join(map(str, spec.shape))
            names = [str(each) for each, size in zip(spec.shape, found, strict=True) if size is None]
            if all(map(str.isidentifier, names)):
                form = " ".join(f"--shape {name}=1" for name in dict.fromkeys(names))
            else:  # extents that are computed, such as 2 * n
                form = f"--shape '{spec.name}=…'"
            raise BindingError(f"input {spec.name!r} is {known}: give its sizes ({form}) or --input")
    dtype = numpy_dtype(spec.dtype or "float32")
    if dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def _load(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {key: loaded[key] for key in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BindingError(f"{path}: not a readable .npy or .npz file: {error}") from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "no inputs"
