"""Meshes: several devices that share the work of an op, named by a range: ``cuda[0:2]`` is ``cuda:0`` and ``cuda:1``.

A mesh of several axes has a shape: ``cuda[0:4](2, 2)`` has rows ``cuda:0``, ``cuda:1`` and ``cuda:2``, ``cuda:3``, as
TVM's ``relax.distributed.device_mesh((2, 2), Range(0, 4))``.

In types, a mesh stands where a vdevice does: as a vdevice with the target of its first device, whose memory scope lists
the shape and the devices' positions in the module (``mesh.2x2.0.1.2.3``). `PartitionByMesh` replaces these types by
types of single devices; no other pass expects them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tvm

from ..errors import VDeviceError
from .hosts import host_of

_PREFIX = "mesh."
MESH_NAME = re.compile(
    r"(?P<kind>(?:[^/:\s\[\]]+/)?[A-Za-z_][A-Za-z0-9_]*)\[(?P<begin>0|[1-9][0-9]*):(?P<end>[1-9][0-9]*)\]"
    r"(?:\s*\((?P<shape>\s*[1-9][0-9]*\s*(?:,\s*[1-9][0-9]*\s*)*),?\s*\))?"
)
"""Name of a mesh: ``kind[begin:end]``, ``vdevice[begin:end]``, or either after ``host/``; then ``(2, 2)``, a shape."""

PRINTED_MESH = re.compile(r"[^:\s]+:-1:(?P<scope>mesh\.[0-9]+(?:[x.][0-9]+)*)")
"""A mesh as TVMScript prints its vdevice, which is in no list: ``llvm:-1:mesh.2x2.0.1.2.3``."""


_MESH_VDEVICES: dict[tuple[str, int, str], tvm.relax.VDevice] = {}
"""One object for each mesh, because TVM compares the vdevices of an op's operands by identity."""


@dataclass(frozen=True)
class Mesh:
    """Devices in rows and columns."""

    positions: tuple[int, ...]  # positions of the devices in the module's list, row after row
    shape: tuple[int, ...]  # number of devices along each axis

    @classmethod
    def of_device(cls, position: int) -> Mesh:
        """The mesh of a single device."""
        return cls((position,), (1,))

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def coordinates(self, number: int) -> tuple[int, ...]:
        """Coordinates of a device, given its number in `positions`."""
        return tuple(int(index) for index in np.unravel_index(number, self.shape))

    def groups(self, axis: int) -> list[list[int]]:
        """Numbers of the devices that differ in their coordinate along an axis only, in its order."""
        numbers = np.moveaxis(np.arange(len(self)).reshape(self.shape), axis, -1)
        return numbers.reshape(-1, self.shape[axis]).tolist()


def mesh_vdevice(
    positions: Sequence[int],  # positions of its devices in `vdevices`
    vdevices: Sequence[tvm.relax.VDevice],  # devices of the module
    shape: Sequence[int] | None = None,  # number of devices along each axis; by default, the mesh has one axis
) -> tvm.relax.VDevice:
    """The vdevice that stands for a mesh in types.

    Raises VDeviceError if the devices are on several hosts, or have different targets, so that they would not compute
    the same numbers, or are not as many as the shape has.
    """
    shape = tuple(shape or (len(positions),))
    if math.prod(shape) != len(positions):
        raise VDeviceError(
            f"a mesh has {len(positions)} devices and the shape {shape}, which has {math.prod(shape)}; expected equal "
            "numbers, as in 'cuda[0:4](2, 2)'"
        )
    first = vdevices[positions[0]]
    if len(hosts := {host_of(vdevices[position]) for position in positions}) > 1:
        raise VDeviceError(f"a mesh has devices of hosts {sorted(map(str, hosts))}; expected devices of one host")
    for position in positions:
        if str(vdevices[position].target) != str(first.target):
            raise VDeviceError(
                f"a mesh has devices {list(positions)} of the list, of which {positions[0]} is {first.target} and "
                f"{position} is {vdevices[position].target}; expected equal targets"
            )
    extents = ["x".join(map(str, shape))] if len(shape) > 1 else []
    scope = _PREFIX + ".".join([*extents, *map(str, positions)])
    key = (str(first.target), int(first.vdevice_id), scope)
    return _MESH_VDEVICES.setdefault(key, tvm.relax.VDevice(first.target, key[1], scope))


def mesh_of(vdevice: tvm.relax.VDevice | None) -> Mesh | None:
    """The mesh that a vdevice stands for; None for a vdevice that is not a mesh, and for None."""
    return None if vdevice is None else mesh_of_scope(str(vdevice.memory_scope))


def mesh_of_scope(scope: str) -> Mesh | None:
    """The mesh of a memory scope; None for one of a single device."""
    if not scope.startswith(_PREFIX):
        return None
    parts = scope.removeprefix(_PREFIX).split(".")
    shape = tuple(map(int, parts.pop(0).split("x"))) if "x" in parts[0] else (len(parts),)
    return Mesh(tuple(map(int, parts)), shape)


def mesh_positions(vdevice: tvm.relax.VDevice | None) -> tuple[int, ...]:
    """Positions of the devices of a mesh in the module's list; () for a vdevice that is not a mesh, and for None."""
    mesh = mesh_of(vdevice)
    return mesh.positions if mesh is not None else ()
