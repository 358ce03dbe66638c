"""Ops whose sizes only a call knows, called with sizes and shapes drawn at random, against ONNX Runtime."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from .harness import RIGHT, Outcome
from .run_size_attacks import check
from .size_attacks import attacks
from .sizes.attack import Attack, Call, extremes

MOST_BYTES = 1 << 28
_SIZES = (0, 1, 2, 3, 4, 5, 8, 17)


@functools.cache
def _attacks() -> tuple[Attack, ...]:
    return tuple(attacks())


def attack(rng: np.random.Generator) -> Outcome:
    """Three calls of the model of an attack."""
    base = _attacks()[rng.integers(len(_attacks()))]
    calls = [_changed(base.calls[rng.integers(len(base.calls))], rng) for _ in range(3)]
    findings = list(check(dataclasses.replace(base, calls=calls)))
    return Outcome("wrong", str(findings[0])) if findings else RIGHT


def _changed(call: Call, rng: np.random.Generator) -> Call:
    """A call with a number of one of its small integer arrays replaced, or a dimension of one of its arrays."""
    changed = dict(call)
    name = str(rng.choice(list(changed)))
    value = np.array(changed[name])
    if value.dtype.kind == "i" and 0 < value.size < 9 and rng.random() < 0.8:
        limits = np.iinfo(value.dtype)
        options = [number for number in (*extremes(), *_SIZES) if limits.min <= number <= limits.max]
        value.reshape(-1)[rng.integers(value.size)] = options[rng.integers(len(options))]
    elif value.ndim:
        shape = list(value.shape)
        shape[rng.integers(value.ndim)] = int(rng.choice(_SIZES))
        if value.itemsize * math.prod(shape) > MOST_BYTES:
            return changed
        value = np.resize(value, shape) if value.size else np.zeros(shape, value.dtype)
    changed[name] = value
    return changed
