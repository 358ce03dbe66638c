"""Kernels of devices that TVM's runtime has no support for, as text that a back end builds when a machine is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel, and the arguments that host code passes: its parameters, then the extents of the launch."""

    name: str  # name in the text
    params: tuple[str, ...]  # element type of each scalar parameter; empty for addresses
    axes: tuple[str, ...]  # thread axis of each extent: "blockIdx.x", "threadIdx.x"


@dataclass(frozen=True)
class LaunchSequence:
    """Launches of a command buffer or of a single kernel, whose arguments host code passes in one call."""

    name: str  # name of the host function
    constants: tuple[float, ...]  # arguments that are known when compiling
    # For each launch the index of its kernel in `DeviceCode.kernels`, and the positions of its arguments among those
    # that are passed, followed by `constants`.
    launches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DeviceCode:
    """Kernels of one target."""

    kind: str  # target kind
    key: str  # prefix of the global functions that launch the kernels; it depends on the text
    text: str  # source, in the language of the kind
    kernels: tuple[KernelLaunch, ...]
    sequences: tuple[LaunchSequence, ...] = ()  # launches that host code submits as a whole

    def function_name(self, name: str) -> str:
        """The name of the global function that launches a kernel, or a sequence."""
        return f"{self.key}.{name}"
