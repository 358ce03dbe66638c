"""Names of the packed functions of worker threads in executables."""

from __future__ import annotations

MAX_THREADS = 1023  # maximum number of threads of one caller, because tasks are counted in ten bits of a word

MAX_CPUS = 1024
"""Number of CPUs (the size of C's `cpu_set_t`) on which workers are placed on different cores; the system places
threads on CPUs of higher numbers."""

_PREFIX = "relax_hetero.workers.3"  # increment the version with the interface: a process may load old files

START = f"{_PREFIX}.start"
"""Set up once per process. Parameters: addresses of TVM's functions that take, raise and drop an error, default number
of threads of a caller, nanoseconds to spin, address and length of an int32 table of core numbers by CPU, number of
tasks of a loop for each thread. Returns 0 unless the system refuses."""

CONFIGURE = f"{_PREFIX}.configure"
"""Set the calling thread's maximum number of threads, including itself, the number that it uses, and the nanoseconds
that it spins; -1 for those of the process."""

SPIN = f"{_PREFIX}.spin"  # set the nanoseconds that callers spin; workers spin 16 times as long
FORGET = f"{_PREFIX}.forget"  # forget the calling thread's workers, which are lost in a forked child
WIDTH = f"{_PREFIX}.width"  # return the number of threads that the calling thread uses; 0 if it is not set
LAUNCH = f"{_PREFIX}.launch_address"  # return the address of the function that parallel loops call

STAGE = f"{_PREFIX}.stage_address"
"""Return the address of the function that copies between pageable and pinned memory (`vm.device.pinned_staging`)."""

HELP = f"{_PREFIX}.help_address"  # return the address of the function in which helper threads wait for such copies


def launch_setter(number: int) -> str:
    """The name of the function that sets the launch function of a module's parallel loops.

    `number`: index of the module among those with parallel loops.
    """
    return f"{_PREFIX}.use.{number}"
