"""Element types of the operands of a language model's products and attention: 16-bit on GPUs, float32 on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import tvm

from ...encoding.resolver import resolver_or_default
from ...errors import FrontendError
from ...target.mesh import mesh_positions
from ...target.vdevice import default_vdevice, lookup
from ..onnx.placement_rules import Patterns, PlacementRules, rule_pairs
from .file import GgufFile
from .hyperparameters import Hyperparameters
from .weights import is_plain

ACTIVATIONS = ("float32", "float16", "bfloat16")


def check_activations(activations: str | None) -> None:
    """Raise FrontendError unless the argument is None or an element type of activations."""
    if activations is not None and activations not in ACTIVATIONS:
        raise FrontendError(f"activations is {activations!r}, expected one of {', '.join(ACTIVATIONS)}")


def trained_type(file: GgufFile, model: Hyperparameters) -> str:
    """16-bit float type that a model was trained in: the type of its unquantized matrices, else its architecture's."""
    plain = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1 and is_plain(tensor.type)}
    return {"F16": "float16", "BF16": "bfloat16"}[plain.pop()] if len(plain) == 1 else model.architecture.trained_type


class ActivationTypes:
    """Element types of the operands of ops, by the names of the ops' variables.

    `activations`: the type on all devices, by default `trained` on devices whose kernels multiply 16-bit floats by
    block-quantized weights, and float32 on the others; `trained`: 16-bit float that the model was trained in; `rules`,
    `vdevices`: placement rules and devices, as for `rh.place`.
    """

    def __init__(
        self, activations: str | None, trained: str, rules: PlacementRules, vdevices: Sequence[tvm.relax.VDevice]
    ) -> None:
        pairs = rule_pairs(rules)
        self._texts = [pattern for pattern, _ in pairs]
        self._patterns = Patterns(self._texts)
        self._types: dict[tvm.relax.VDevice | None, str] = {None: activations or "float32"}
        self._types |= {vdevice: activations or _default_type(vdevice, trained) for vdevice in vdevices}
        self._devices = [lookup(device, vdevices) for _, device in pairs]
        for device in self._devices:  # a mesh has devices of one kind
            for position in mesh_positions(device)[:1]:
                self._types[device] = self._types[vdevices[position]]
        self._default = default_vdevice(vdevices) if vdevices else None

    def dtype_of(self, name: str) -> str:
        """The element type of the operands of a variable's op."""
        return self._types[self.device_of(name)]

    def device_of(self, name: str) -> tvm.relax.VDevice | None:
        """The device or mesh of a variable's op; None if there are no devices."""
        matching = self._matching(name)
        return self._devices[min(matching)] if matching else self._default

    def pattern_of(self, name: str) -> str | None:
        """The placement pattern that decides for a variable's op; None for the default device."""
        return self._texts[min(matching)] if (matching := self._matching(name)) else None

    def have_same_rules(self, names: Sequence[str]) -> bool:
        """Return whether every placement rule matches either all of the variables or none."""
        return len({frozenset(self._matching(name)) for name in names}) == 1

    def _matching(self, name: str) -> set[int]:
        """The rules that match a variable's name, its modules' names or its op, as in `rh.place`."""
        return self._patterns.matching(names_of(name))


def names_of(name: str) -> list[str]:
    """Names of a product's variable that placement rules match: its own, those of its modules, and of its op."""
    path = name.split(".")
    return [*(".".join(path[:count]) for count in range(len(path), 0, -1)), "matmul", "relax.matmul"]


def _default_type(vdevice: tvm.relax.VDevice, trained: str) -> str:
    layout = resolver_or_default(vdevice.target).block_layout(vdevice.target)
    return trained if layout is not None and trained in layout.lhs_types else "float32"
