"""Models of ONNX ops whose sizes only a call knows, and calls: sizes that agree, contradict, or are extreme.

`attacks` yields them; `run_size_attacks.py` compares each call with ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fuzz.sizes.attack import Attack
from fuzz.sizes.chains import chains
from fuzz.sizes.cuts import cuts
from fuzz.sizes.layers import attention, norms
from fuzz.sizes.places import images, places
from fuzz.sizes.products import products
from fuzz.sizes.shapes import ranges, shapes

FAMILIES = (shapes, ranges, cuts, products, norms, attention, places, images, chains)
"""Generators of attacks, each for a kind of op."""


def attacks(seed: int = 0) -> Iterator[Attack]:
    """All attacks; the random ones follow from `seed`."""
    for family in FAMILIES:
        yield from family(np.random.default_rng(seed))
