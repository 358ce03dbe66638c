"""Copies between row-major and packed storage that transpose in registers."""
from __future__ import annotations
from ..encoding.machine import Machine
from .storage import Storage


def transpose_tiles(source: Storage, destination: Storage, machine: Machine) -> bool:
    return False
