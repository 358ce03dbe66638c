"""Settings that must hold before TVM is imported, which tests run by default, and where random numbers come from."""

from __future__ import annotations

import gc
import inspect
import os
import re
import secrets
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from zlib import crc32

# Tests run several at a time: a pool as wide as the machine in each would only make them wait for each other.
os.environ.setdefault("TVM_NUM_THREADS", "2")
os.environ.setdefault("TVM_BIND_THREADS", "0")
# Tests are of the code as it is compiled now; those of the compile cache have folders of their own.
os.environ["RELAX_HETERO_CACHE"] = "off"
# Test modules and the processes that tests start, which import the package, are compiled once, whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Intel's OpenCL for CPUs, if the extra opencl-cpu is installed; else the drivers of the machine.
if (_driver := Path(sys.prefix) / "lib" / "libintelocl.so").exists():
    os.environ.setdefault("OCL_ICD_VENDORS", str(_driver))
# The same numbers on every run; ``RELAX_HETERO_TEST_SEED=random`` draws a new seed. Workers of pytest-xdist inherit the
# environment, so that all of them draw from the same one.
if os.environ.setdefault("RELAX_HETERO_TEST_SEED", "0") == "random":
    os.environ["RELAX_HETERO_TEST_SEED"] = str(secrets.randbelow(10**9))

# TVMScript looks at the whole stack for each function and class that it parses, and `inspect` searches all modules for
# the one of each frame's file, which it never finds for frames of the import system, of runpy, of code made of text and
# of a module that is being imported: half of the time that it takes to import the tests.
_module_of_file = inspect.getmodule
_module_of_frames = cache(lambda filename: None if filename.startswith("<") else _module_of_file(None, filename))


def _module_of(thing: object, filename: str | None = None) -> ModuleType | None:
    return _module_of_frames(filename) if filename and inspect.isframe(thing) else _module_of_file(thing, filename)


inspect.getmodule = _module_of

import pytest  # noqa: E402 (the environment comes first)
from hypothesis import HealthCheck, settings  # noqa: E402

# The same examples on every run; the first example of a test pays for compiling and imports, so no deadline. A failure
# prints a line that repeats its example.
settings.register_profile(
    "relax_hetero",
    derandomize=True,
    deadline=None,
    max_examples=20,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("relax_hetero")

OPTIONAL = ("slow", "timing")

# One in so many variants of a test runs by default, unless the test has a number of its own: kernels are compiled
# for each, an interpreter runs those of GPUs here, and `-m slow` and `-m gpu` run the rest.
ONE_OF = {
    "tests/python/tir/matmul/": 20,
    "tests/python/tir/": 10,
    "tests/python/frontend/ops/": 6,
    "tests/python/transform/": 5,
    "tests/python/driver/": 4,
    "tests/python/llm/": 4,
    "tests/python/test_": 1,
    "tests/python/": 2,
    "": 1,
}


def _rare(items: list[pytest.Item]) -> Generator[pytest.Item]:
    """Variants of tests that are too many for each run, chosen by the hashes of their names.

    Each n-th in turn would always meet the same value of an inner parameter. Those that are slow by themselves do not
    count: else a test could have none that runs.
    """
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(item.get_closest_marker(name) for name in OPTIONAL):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, of_test in variants.items():
        sampled = of_test[0].get_closest_marker("sampled")
        each = sampled.args[0] if sampled is not None else next(n for at, n in ONE_OF.items() if test.startswith(at))
        yield from sorted(of_test, key=lambda item: crc32(item.nodeid.encode()))[-(-len(of_test) // each) :]


def _is_short(item: pytest.Item) -> bool:
    limit = item.get_closest_marker("timeout")
    return limit is None or limit.args[0] < float(item.config.getini("timeout"))


def pytest_report_header() -> str:
    """The seed of all fresh random numbers, at the top of the output."""
    return f"random numbers: RELAX_HETERO_TEST_SEED={os.environ['RELAX_HETERO_TEST_SEED']}"


@cache
def _takes_two_devices(module: ModuleType) -> bool:
    """Return whether tests of a module, or functions that it imports, use `device_pairs.TWO_DEVICES`."""
    return any("TWO_DEVICES" in getattr(value, "__globals__", ()) for value in vars(module).values())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests, which stay, out of the collections of garbage: each would visit all of them again.

    Compiling makes many short-lived objects, and few cycles: fewer collections take a twentieth of the time less.
    """
    gc.disable()
    gc.set_threshold(20_000)
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests and timing tests, unless `-m` selects them or a test is given by its name.

    `-m gpu` includes slow ones; timing tests run only where `-m` names them, as parallel tests falsify them. Tests that
    may take minutes begin first, while other processes have work.
    """
    items.sort(key=_is_short)
    for item in _rare(items):
        item.add_marker(pytest.mark.slow)
    for item in items:
        if isinstance(item, pytest.Function) and _takes_two_devices(item.module):
            item.add_marker(pytest.mark.two_devices)
    chosen = config.option.markexpr
    if any("::" in argument for argument in config.args):
        return
    optional = [name for name in OPTIONAL if not chosen or (name == "timing" and name not in chosen)]
    selected, left_out = [], []
    for item in items:
        (left_out if any(item.get_closest_marker(name) for name in optional) else selected).append(item)
    if left_out:
        items[:] = selected
        config.hook.pytest_deselected(items=left_out)


# Many tests name CPUs of x86 without its architecture, to have devices that differ.
NAMES_X86 = re.compile(r"mcpu '[\w.-]+' is not a CPU that LLVM knows for 'aarch64")


def _skip_on_other_architecture(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Report a test that names a CPU of x86 on a machine of another architecture as skipped."""
    if report.failed and (found := NAMES_X86.search(str(report.longrepr))):
        report.outcome = "skipped"
        report.longrepr = (str(report.nodeid), 0, f"Skipped: a CPU of x86: {found[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files that name CPUs of another architecture."""
    report = yield
    _skip_on_other_architecture(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say with every failure how to draw the same numbers again."""
    report = yield
    _skip_on_other_architecture(report)
    if report.failed:
        report.sections.append(("random numbers", f"RELAX_HETERO_TEST_SEED={os.environ['RELAX_HETERO_TEST_SEED']}"))
    return report


class _ScheduleErrors:
    """Log of `ScheduleCPU` that raises the errors of rules which it is to note."""

    def debug(self, message: str, *args: object, exc_info: bool) -> None:
        raise AssertionError(message % args)


@pytest.fixture(scope="session", autouse=True)
def _rules_for_loops_do_not_fail() -> Iterator[None]:
    """Fail tests of models in which a rule for loops has an error, which costs a model only its speed."""
    from relax_hetero.transform.dispatch import schedule_cpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_cpu, "_log", _ScheduleErrors())
        yield


@pytest.fixture
def free_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let meshes split even small products."""
    from free_exchanges import free_exchanges_in

    free_exchanges_in(monkeypatch)
