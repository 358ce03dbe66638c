"""Random numbers of tests, which a failure can repeat.

One seed, the environment variable RELAX_HETERO_TEST_SEED, stands behind all of them. Runs repeat the same numbers
unless it is set, to another seed or to "random"; pytest prints it at the top of its output and with every failure.
A test draws the same numbers from the same seed whether it runs alone or with others, because its own name is part of
what the generator starts from.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter

import numpy as np

_drawn: Counter[str] = Counter()


def fresh_seed() -> int:
    """Another seed at each call within a test, and the same ones when the test runs again from the same base.

    Outside of a test (a module's constant, a fixture that several tests share) use a seed that is written down: such
    code runs in whichever test comes first.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if not test:
        raise RuntimeError("fresh random numbers are for tests; give a constant a seed that is written down")
    _drawn[test] += 1
    base = int(os.environ["RELAX_HETERO_TEST_SEED"])
    entropy = [base, zlib.crc32(test.encode()), _drawn[test]]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def fresh_rng() -> np.random.Generator:
    """A generator that starts from `fresh_seed`."""
    return np.random.default_rng(fresh_seed())
