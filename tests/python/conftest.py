"""Settings that must hold before TVM is imported, and one hypothesis profile for all tests."""

from __future__ import annotations

import os

# Tests run several at a time: a pool as wide as the machine in each would only make them wait for each other.
os.environ.setdefault("TVM_NUM_THREADS", "2")
os.environ.setdefault("TVM_BIND_THREADS", "0")
# Tests are of the code as it is compiled now; those of the compile cache have folders of their own.
os.environ["RELAX_HETERO_CACHE"] = "off"

from hypothesis import HealthCheck, settings  # noqa: E402 (the environment comes first)

# The same examples on every run; the first example of a test pays for compiling and imports, so no deadline.
settings.register_profile(
    "relax_hetero", derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("relax_hetero")
