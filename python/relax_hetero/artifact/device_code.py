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

    def __post_init__(self) -> None:
        for name in ("params", "axes"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class DeviceCode:
    """Kernels of one target.

    Attributes
    ----------
    kind : str
        Target kind.
    key : str
        Prefix of the global functions by which host code launches the kernels, which depends on the text.
    text : str
        Source, in the language of the kind.
    kernels : tuple of KernelLaunch
        The kernels.
    """

    kind: str
    key: str
    text: str
    kernels: tuple[KernelLaunch, ...]

    def __post_init__(self) -> None:
        launches = (KernelLaunch(**entry) if isinstance(entry, dict) else entry for entry in self.kernels)
        object.__setattr__(self, "kernels", tuple(launches))

    def function_name(self, kernel: str) -> str:
        """The name of the global function that launches a kernel."""
        return f"{self.key}.{kernel}"
