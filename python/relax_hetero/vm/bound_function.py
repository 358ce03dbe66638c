"""A function of a machine as a Python callable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..artifact.signature import FunctionSignature
from .queue.fence import Fence

if TYPE_CHECKING:
    from .machine import VirtualMachine


class BoundFunction:
    """A function of a machine, as ``vm["main"]`` gives it.

    Attributes
    ----------
    machine : VirtualMachine
    name : str
    """

    __slots__ = ("machine", "name")

    def __init__(self, machine: VirtualMachine, name: str) -> None:
        self.machine = machine
        self.name = name

    @property
    def signature(self) -> FunctionSignature:
        """What the function takes and returns."""
        return self.machine.executable.signature(self.name)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function; see `VirtualMachine.__getitem__`."""
        return self.machine.call(self.name, args, kwargs, out)

    def submit(self, *args: Any, out: Any = None, **kwargs: Any) -> Fence:
        """Have the function run, without waiting for it; see `VirtualMachine.submit`.

        Buffers given as `out` are not to be used until the fence is done.
        """
        return self.machine.submit_into(out, self.name, args, kwargs)

    def __repr__(self) -> str:
        return f"<{self.signature} on {', '.join(map(str, self.machine.devices))}>"
