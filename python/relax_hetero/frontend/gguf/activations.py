"""Element types that a language model's products and attention read: 16-bit floats on GPUs, float32 on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import tvm

from ...encoding.resolver import resolver_or_default
from ...errors import FrontendError
from ...target.vdevice import default_vdevice, lookup
from ..onnx.node_names import NodeInfo
from ..onnx.placement_rules import PlacementRules, matching_patterns, rule_pairs
from .file import GgufFile
from .hyperparameters import Hyperparameters
from .weights import is_plain

ACTIVATIONS = ("float32", "float16", "bfloat16")


def check_activations(activations: str | None) -> None:
    """Refuse what is not an element type of activations, by a FrontendError."""
    if activations is not None and activations not in ACTIVATIONS:
        raise FrontendError(f"activations is {activations!r}, expected one of {', '.join(ACTIVATIONS)}")


def trained_type(file: GgufFile, model: Hyperparameters) -> str:
    """The 16-bit float that a model was trained in: that of the file's plain matrices, else of its architecture."""
    plain = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1 and is_plain(tensor.type)}
    return {"F16": "float16", "BF16": "bfloat16"}[plain.pop()] if len(plain) == 1 else model.architecture.trained_type


class ActivationTypes:
    """Element types of what variables' ops read, by the variables' names.

    Parameters
    ----------
    activations : str, optional
        The type on all devices; by default `trained` on devices whose kernels multiply 16-bit floats by weights in
        blocks, and float32 on the others.
    trained : str
        16-bit float that the model was trained in.
    rules, vdevices
        Which variables go to which device, as for `rh.place`.
    """

    def __init__(
        self, activations: str | None, trained: str, rules: PlacementRules, vdevices: Sequence[tvm.relax.VDevice]
    ) -> None:
        self._rules = rule_pairs(rules)
        self._types: dict[tvm.relax.VDevice | None, str] = {None: activations or "float32"}
        self._types |= {vdevice: activations or _type_on(vdevice, trained) for vdevice in vdevices}
        # Key: the pattern that decides; None for variables that no pattern matches.
        self._devices: dict[str | None, tvm.relax.VDevice | None] = {
            None: default_vdevice(vdevices) if vdevices else None
        }
        self._devices |= {pattern: lookup(device, vdevices) for pattern, device in reversed(self._rules)}

    def of(self, name: str) -> str:
        """The element type of what the op of a variable reads."""
        return self._types[self.device_of(name)]

    def device_of(self, name: str) -> tvm.relax.VDevice | None:
        """The device of a variable's op; None where there are no devices."""
        return self._devices[self._pattern(name, self._rules)]

    def are_alike(self, names: Sequence[str]) -> bool:
        """Return whether no rule of the placement tells the variables apart."""
        return all(len({self._pattern(name, [rule]) for name in names}) == 1 for rule in self._rules)

    def _pattern(self, name: str, rules: PlacementRules) -> str | None:
        """The pattern that decides where a variable goes, by the names that `rh.place` knows it by."""
        homes = name.split(".")
        modules = (".".join(homes[:count]) for count in range(1, len(homes)))
        node = NodeInfo(name, (*modules, "matmul", "relax.matmul"), "matmul", "", "")
        return matching_patterns([node], rules).get(name)


def _type_on(vdevice: tvm.relax.VDevice, trained: str) -> str:
    layout = resolver_or_default(vdevice.target).block_layout(vdevice.target)
    return trained if layout is not None and trained in layout.lhs_types else "float32"
