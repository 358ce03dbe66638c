"""Counts of the tokens that chose each expert of a mixture, which its functions add up on the devices of the layers."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tvm import runtime

from ..artifact.regular_files import read_regular
from ..artifact.signature import TensorSpec, ValueSpec
from ..display.text import plural
from ..encoding.pages import EXPERT_COUNTS
from ..errors import HeteroError
from ..vm.device.tensors import copy_into, empty

WRITE_SECONDS = 60.0  # time between two writes of a file
_MAX_COUNTS_BYTES = 1 << 26

_log = logging.getLogger("relax_hetero")


class ExpertCounts:
    """Counters of each layer with experts, arguments of every call of the functions, which add to them in place."""

    def __init__(
        self,
        # Inputs of a function; their `device` is an index in `devices`, or -1 for the host.
        inputs: Sequence[ValueSpec],
        devices: Sequence[runtime.Device],  # physical device of each vdevice
    ) -> None:
        specs = [spec for spec in inputs if isinstance(spec, TensorSpec) and spec.name.startswith(EXPERT_COUNTS)]
        # File that `write` replaces, and `write_if_due` once in `WRITE_SECONDS`; None before `continue_file`.
        self.path: str | os.PathLike[str] | None = None
        self._layers = [int(spec.name.removeprefix(EXPERT_COUNTS)) for spec in specs]
        # Counters of int32, (experts,), in the order of the layers; empty for functions that do not count.
        self.tensors = []
        for spec in specs:
            device = runtime.device("cpu", 0) if spec.device < 0 else devices[spec.device]
            self.tensors.append(runtime.tensor(np.zeros([int(extent) for extent in spec.shape or ()], "int32"), device))
        self._last = [np.zeros(tensor.shape, "uint32") for tensor in self.tensors]
        self._totals = [np.zeros(tensor.shape, "int64") for tensor in self.tensors]
        self._next_write = time.monotonic() + WRITE_SECONDS

    def read(self) -> dict[int, list[int]]:
        """Tokens so far that chose each expert, by layer, with those of the file before."""
        for tensor, last, total in zip(self.tensors, self._last, self._totals, strict=True):
            host = empty(tuple(map(int, tensor.shape)), "int32", runtime.device("cpu", 0))
            copy_into(tensor, host)
            counts = np.from_dlpack(host).view("uint32").copy()
            total += counts - last  # also if a counter has started again from 0
            last[:] = counts
        return {layer: total.tolist() for layer, total in zip(self._layers, self._totals, strict=True)}

    def continue_file(self, path: str | os.PathLike[str]) -> None:
        """Let `write` replace a file, and add to the counts that it has; a file that does not exist is written now.

        Raises HeteroError if the file cannot be written, or does not have counts of the same layers and experts.
        """
        if os.path.exists(path):
            for total, counts in zip(self._totals, self._read_file(path), strict=True):
                total += counts
        self.path = path
        self.write()

    def _read_file(self, path: str | os.PathLike[str]) -> list[np.ndarray]:
        """The counts of a file, in the order of the layers."""
        where, hint = os.fspath(path), "name another file, or remove this one"
        try:
            fields = json.loads(read_regular(path, _MAX_COUNTS_BYTES))["expert_counts"]
            counts = {int(layer): np.array(numbers) for layer, numbers in fields.items()}
        except OSError as error:
            raise HeteroError(f"{where} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeteroError(f"{where}: is not a file of expert counts: {error!r}; {hint}") from None
        shapes = {layer: numbers.shape for layer, numbers in counts.items()}
        expected = {layer: total.shape for layer, total in zip(self._layers, self._totals, strict=True)}
        if shapes != expected or any(numbers.dtype.kind != "i" for numbers in counts.values()):
            raise HeteroError(
                f"{where}: found counts of {_shapes_text(shapes)}, expected whole numbers for "
                f"{_shapes_text(expected)}; {hint}"
            )
        return [counts[layer] for layer in self._layers]

    def write(self) -> None:
        """Write the counts to `path`, whose old contents are replaced at once; without a path, do nothing.

        Raises HeteroError if the file cannot be written.
        """
        if self.path is None:
            return
        self._next_write = time.monotonic() + WRITE_SECONDS
        path = Path(self.path)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        fields: dict[str, Any] = {"expert_counts": {str(layer): counts for layer, counts in self.read().items()}}
        try:
            temporary.write_text(json.dumps(fields))
            os.replace(temporary, os.path.realpath(path))
        except OSError as error:
            raise HeteroError(f"{path} cannot be written: {error.strerror or error}") from None
        finally:
            temporary.unlink(missing_ok=True)

    def write_if_due(self) -> None:
        """Write the counts if the last time was `WRITE_SECONDS` ago; a file that cannot be written is tried again."""
        if self.path is not None and time.monotonic() >= self._next_write:
            try:
                self.write()
            except HeteroError as error:
                _log.warning("%s; counts of experts are kept, and written in %.0f seconds", error, WRITE_SECONDS)


def _shapes_text(shapes: Mapping[int, tuple[int, ...]]) -> str:
    """Text of the shapes of counts by layer: ``2 layers (1 to 2) of 8 experts``."""
    if not shapes:
        return "no layers"
    sizes = ", ".join(sorted({"x".join(map(str, shape)) for shape in shapes.values()}))
    first, last = min(shapes), max(shapes)
    return f"{plural(len(shapes), 'layer')} ({first} to {last}) of {sizes} experts"
