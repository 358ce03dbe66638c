"""Explicit transfers: ``relax.to_vdevice``."""

from __future__ import annotations

import tvm
from tvm import relax

from ..target.vdevice import VDeviceSpec
from .each_tensor import Operand, each_tensor
from .under_construction import resolve, vdevices_under_construction


def to_vdevice(x: Operand, vdevice: VDeviceSpec) -> relax.Expr:
    """Copy to a vdevice. Pure, allowed in dataflow blocks, never fused.

    Parameters
    ----------
    x : relax.Expr, or tuple of them
        A tensor, or a tuple (a Python one, a Relax one, or a tuple-typed variable) of which every tensor is copied.
    vdevice : str, tvm.runtime.Device or VDevice
        The destination, looked up at once in the module under construction (see `relax_hetero.target.vdevice.lookup`).
        A VDevice is taken as it is where no module is under construction.

    Returns
    -------
    result : relax.Expr
        A stock ``relax.to_vdevice`` call, or a tuple of them.

    Raises
    ------
    VDeviceError
        If the module has no such vdevice, or there is no module to look a name up in.
    PlacementError
        If `x` is neither a tensor nor a tuple.
    """
    if isinstance(vdevice, tvm.relax.VDevice) and vdevices_under_construction() is None:
        destination = vdevice
    else:
        destination = resolve(vdevice)
    return each_tensor(x, "to_vdevice", lambda tensor: relax.op.to_vdevice(tensor, destination))
