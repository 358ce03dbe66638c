"""An attack for the tests of the harness: the seed decides how it ends, and nothing of the library is used."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from .harness import REFUSED, RIGHT, Outcome


def attack(rng: np.random.Generator) -> Outcome:
    """Right, refused, wrong, a foreign error, a crash or a hang."""
    seed = int(rng.bit_generator.seed_seq.entropy)  # type: ignore[attr-defined]
    if seed == 0:
        return RIGHT
    if seed == 1:
        return REFUSED
    if seed == 2:
        return Outcome("wrong", "numbers")
    if seed == 3:
        raise ValueError("foreign")
    if seed == 4:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(3600)
    return RIGHT
