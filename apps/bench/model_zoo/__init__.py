"""Models for benchmarks, made on first use; weights are random, so nothing is downloaded.

``python apps/bench/models.py`` takes the names of `MAKERS`, each also in 8 bits as ``NAME.int8``, and those of
`SYMBOLIC` also with named dimensions as ``NAME.symbolic``. Files are kept in ``.cache/models`` of the checkout, or in
``$RELAX_HETERO_CACHE/models``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx

from .convolutional import NETWORKS
from .forests import FORESTS
from .light import LIGHT, light_model
from .newer import NEWER
from .quantized import write_quantized
from .transformers import SYMBOLIC, TRANSFORMERS

MAKERS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{name: (lambda graph=graph: light_model(graph)) for name, graph in LIGHT.items()},
    **NETWORKS,
    **TRANSFORMERS,
}

BY_NAME = {**MAKERS, **NEWER, **FORESTS}
"""All models, including those that run only by name."""


def cache() -> Path:
    """The folder of the models."""
    chosen = os.environ.get("RELAX_HETERO_CACHE")
    return (Path(chosen) if chosen and chosen != "off" else Path(__file__).resolve().parents[3] / ".cache") / "models"


def model_path(name: str) -> Path:
    """The file of a model: `name` itself if it is a path, else the model of that name, made on first use.

    Raises
    ------
    ValueError
        If neither a file nor a maker has the name.
    """
    if name.endswith(".onnx"):
        if not Path(name).is_file():
            raise ValueError(f"no file {name}")
        return Path(name)
    path = cache() / f"{name}.onnx"
    if not path.exists():
        plain, _, form = name.partition(".")
        if plain not in BY_NAME or form not in ("", "int8", *(["symbolic"] if plain in SYMBOLIC else [])):
            raise ValueError(f"{name!r} is no file *.onnx and none of {', '.join(BY_NAME)}, with .int8 or .symbolic")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name and renamed, so that an interrupted run does not leave an incomplete file.
        unfinished = path.with_name(f"{name}.{os.getpid()}.tmp")
        if form == "int8":
            write_quantized(plain, model_path(plain), unfinished, lambda model, seed: random_inputs(model, {}, seed))
        else:
            onnx.save((SYMBOLIC if form else BY_NAME)[plain](), unfinished)
        os.replace(unfinished, path)
    return path


def random_inputs(model: Path, dims: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Arrays for the inputs of a model.

    Floats are normal; integers are below 1,000, or below 2 if the input is named ``*type*``; a ``*mask*`` has ones,
    and zeros in its last eighth.

    Parameters
    ----------
    model : Path
    dims : mapping of str to int
        Sizes of named dimensions; others are 1.
    seed : int
    """
    return random_arrays(onnx.load(str(model), load_external_data=False).graph, dims, seed)


def random_arrays(graph: onnx.GraphProto, dims: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Arrays for the inputs of a graph, as in `random_inputs`."""
    weights = {initializer.name for initializer in graph.initializer}
    generator = np.random.default_rng(seed)
    arrays = {}
    for value in graph.input:
        if value.name in weights:
            continue
        tensor = value.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else dims.get(d.dim_param, 1) for d in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        arrays[value.name] = _random(value.name.lower(), shape, dtype, generator)
    return arrays


def _random(name: str, shape: list[int], dtype: np.dtype, generator: np.random.Generator) -> np.ndarray:
    if "mask" in name:
        ones = np.ones(shape, dtype)
        ones[..., shape[-1] - shape[-1] // 8 :] = 0
        return ones
    if dtype.kind == "f":
        return generator.standard_normal(shape, "float32").astype(dtype)
    return generator.integers(0, 2 if dtype.kind == "b" or "type" in name else 1000, shape).astype(dtype)
