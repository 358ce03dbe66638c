"""Meshes: several devices that share the work of an op, named by a range: ``cuda[0:2]`` is ``cuda:0`` and ``cuda:1``.

In types, a mesh stands where a vdevice does: as a vdevice with the target of its first device, whose memory scope lists
the devices' positions in the module (``mesh.0.1``). `PartitionByMesh` replaces these types by types of single devices;
no other pass expects them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tvm

from ..errors import VDeviceError

_PREFIX = "mesh."
MESH_NAME = re.compile(
    r"(?P<kind>(?:[^/:\s\[\]]+/)?[A-Za-z_][A-Za-z0-9_]*)\[(?P<begin>0|[1-9][0-9]*):(?P<end>[1-9][0-9]*)\]"
)
"""Name of a mesh: ``kind[begin:end]``, ``vdevice[begin:end]``, or either after ``host/``."""


def mesh_vdevice(positions: Sequence[int], vdevices: Sequence[tvm.relax.VDevice]) -> tvm.relax.VDevice:
    """The vdevice that stands for a mesh in types.

    Parameters
    ----------
    positions : sequence of int
        Positions of its devices in `vdevices`.
    vdevices : sequence of VDevice
        Devices of the module.

    Raises
    ------
    VDeviceError
        If the devices have different targets, so that they would not compute the same numbers.
    """
    first = vdevices[positions[0]]
    for position in positions:
        if str(vdevices[position].target) != str(first.target):
            raise VDeviceError(
                f"a mesh has devices {list(positions)} of the list, of which {positions[0]} is {first.target} and "
                f"{position} is {vdevices[position].target}; expected equal targets"
            )
    return tvm.relax.VDevice(first.target, int(first.vdevice_id), _PREFIX + ".".join(map(str, positions)))


def mesh_positions(vdevice: tvm.relax.VDevice | None) -> tuple[int, ...]:
    """Positions of the devices of a mesh in the module's list; () for a vdevice that is not a mesh, and for None."""
    scope = "" if vdevice is None else str(vdevice.memory_scope)
    return tuple(map(int, scope.removeprefix(_PREFIX).split("."))) if scope.startswith(_PREFIX) else ()
