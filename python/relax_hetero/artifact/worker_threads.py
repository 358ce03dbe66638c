"""The names by which code brings worker threads along, and says where to point its parallel loops at them."""

from __future__ import annotations

MAX_THREADS = 1023
"""Maximum number of threads of one caller: their tasks are counted in ten bits of a word."""

MAX_CPUS = 1024
"""CPUs that threads are kept apart on, as many as C's set of CPUs has room for; threads on CPUs of higher numbers are
left to the system."""

_PREFIX = "relax_hetero.workers.2"  # the number changes with the functions' meaning: a process may load old files

START = f"{_PREFIX}.start"
"""Set up, once in a process: addresses of TVM's functions that take, raise and drop an error, threads of a caller that
said nothing, nanoseconds to spin, the address of numbers (int32) that are the same for CPUs of one core, how many of
them there are. Returns 0 unless the system refuses."""

CONFIGURE = f"{_PREFIX}.configure"
"""Give the calling thread room for so many threads, itself included, and have it use so many of them."""

SPIN = f"{_PREFIX}.spin"
"""Have callers spin for so many nanoseconds, and workers 16 times as long."""

FORGET = f"{_PREFIX}.forget"
"""In a process that was forked: the calling thread's workers are gone, it makes new ones."""

WIDTH = f"{_PREFIX}.width"
"""How many threads the calling thread uses, 0 where nobody said."""

LAUNCH = f"{_PREFIX}.launch_address"
"""Returns the address of the function that parallel loops call."""

STAGE = f"{_PREFIX}.stage_address"
"""Returns the address of the function that copies between plain and pinned memory (`vm.device.pinned_staging`)."""

HELP = f"{_PREFIX}.help_address"
"""Returns the address of the function in which threads wait to help with such copies; it never returns."""


def launch_setter(number: int) -> str:
    """The name of the function that has the parallel loops of a part of the code call the address that it is given.

    Parameters
    ----------
    number : int
        Position of the part, from 0 on without gaps.
    """
    return f"{_PREFIX}.use.{number}"
