"""A compiled model: code, what it says about itself, and its constants."""

from __future__ import annotations

from typing import Any

from tvm import runtime

from .metadata import DeviceSpec, Metadata
from .names import unknown_name
from .signature import FunctionSignature


class Executable:
    """A compiled model, made by ``rh.compile`` or ``rh.load``.

    Parameters
    ----------
    module : tvm.runtime.Module
        A module of kind ``relax.VMExecutable`` with its kernel modules imported.
    metadata : Metadata
        Manifest, signatures, constants, placement, dispatches.
    constants : list of tvm.runtime.Tensor
        One tensor per entry of ``metadata.constants``.

    Attributes
    ----------
    module, metadata, constants
        As given.
    """

    def __init__(self, module: Any, metadata: Metadata, constants: list[Any]) -> None:
        self.module: runtime.Module = getattr(module, "mod", module)
        self.metadata = metadata
        self.constants: list[runtime.Tensor] = list(constants)

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """The manifest in order."""
        return self.metadata.devices

    @property
    def function_names(self) -> list[str]:
        """The functions that can be called."""
        return list(self.metadata.signatures)

    def signature(self, name: str = "main") -> FunctionSignature:
        """What function `name` takes and returns; BindingError where there is none."""
        signature = self.metadata.signatures.get(name)
        if signature is None:
            raise unknown_name("function", name, self.function_names, "executable")
        return signature
