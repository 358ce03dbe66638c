"""Kernels of devices that TVM's runtime has no support for, as text that a back end builds when a machine is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel, and the arguments that host code passes: its parameters, then the extents of the launch.

    Attributes
    ----------
    name : str
        Name in the text.
    params : tuple of str
        Element type of each scalar parameter; empty for addresses.
    axes : tuple of str
        Thread axis of each extent: "blockIdx.x", "threadIdx.x".
    """

    name: str
    params: tuple[str, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class LaunchSequence:
    """Launches of a command buffer or of a single kernel, whose arguments host code passes in one call.

    Attributes
    ----------
    name : str
        Name of the host function.
    constants : tuple of int or float
        Arguments that are known when compiling.
    launches : tuple of tuple of int
        For each launch the index of its kernel in `DeviceCode.kernels`, and the positions of its arguments among those
        that are passed, followed by `constants`.
    """

    name: str
    constants: tuple[float, ...]
    launches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DeviceCode:
    """Kernels of one target.

    Attributes
    ----------
    kind : str
        Target kind.
    key : str
        Prefix of the global functions that launch the kernels; it depends on the text.
    text : str
        Source, in the language of the kind.
    kernels : tuple of KernelLaunch
        The kernels.
    sequences : tuple of LaunchSequence
        Launches that host code submits as a whole.
    """

    kind: str
    key: str
    text: str
    kernels: tuple[KernelLaunch, ...]
    sequences: tuple[LaunchSequence, ...] = ()

    def function_name(self, name: str) -> str:
        """The name of the global function that launches a kernel, or a sequence."""
        return f"{self.key}.{name}"
