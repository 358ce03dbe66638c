"""Costs of a mesh with almost free exchanges, so that even small products are split (fixture `free_exchanges`)."""

from __future__ import annotations

from typing import Any

import pytest

from relax_hetero import providers


class FreeExchanges:
    """Costs of devices and links, instead of those of the provider "device_costs"."""

    def __init__(self, _vdevices: Any) -> None:
        pass

    def product_seconds(self, _flops: float, _nbytes: float, _dtype: str, _device: int) -> float:
        """A second, which any split shortens."""
        return 1.0

    def transfer_seconds(self, _size: float, _source: int, _destination: int) -> float:
        """A millisecond, so that fewer exchanges are better."""
        return 1e-3


def free_exchanges_in(patch: pytest.MonkeyPatch) -> None:
    """Let meshes split even small products, until a patch is undone; all sums of GPUs take the same time."""
    patch.setitem(providers._providers, "device_costs", (__name__, "FreeExchanges"))
    patch.setattr("relax_hetero.transform.shard.sharding_costs.all_reduce_seconds", lambda *_: 2.5e-6)
