"""Peaks of devices, and the share of a peak that kernels reach."""

import pytest

import relax_hetero as rh
from relax_hetero.artifact.metadata import DeviceSpec
from relax_hetero.driver.compile import device_spec
from relax_hetero.frontend.auto import measure_devices
from relax_hetero.frontend.auto.measure_devices import DeviceFigures, Figures
from relax_hetero.report.device_peaks import peaks_of, share_of_peak

PEAK = {"operations_per_second": {"f32": 1e11, "bf16": 2e11}, "bytes_per_second": 1e10}


@pytest.fixture
def figures(monkeypatch):
    """Figures as if they were measured."""
    one = DeviceFigures({"float32": 1e11, "bfloat16": 2e11}, 1e10, 1e-6, 1e-5)
    monkeypatch.setattr("relax_hetero.report.device_peaks.figures_of", lambda vdevices: Figures({0: one}, {}))


def test_this_cpu_has_the_measured_figures(figures):
    here = device_spec(rh.VDevice(rh.native("llvm")), default=True)
    assert peaks_of([here]) == {"llvm:0": PEAK}


def test_another_machines_devices_have_no_figure(figures):
    elsewhere = DeviceSpec('{"kind": "llvm", "mcpu": "power9", "mtriple": "powerpc64le-linux-gnu"}')
    assert peaks_of([elsewhere]) == {}


def test_a_measurement_that_fails_gives_no_figure(monkeypatch):
    monkeypatch.setattr("relax_hetero.report.device_peaks.figures_of", lambda vdevices: None)
    assert measure_devices.are_present([rh.VDevice(rh.native("llvm"))])
    assert peaks_of([device_spec(rh.VDevice(rh.native("llvm")), default=True)]) == {}


@pytest.mark.parametrize(
    ("precision", "operations", "nbytes", "expected"),
    [
        ("f32", 10**9, 10**6, (0.5, "arithmetic")),
        ("f32", 10**6, 10**8, (0.5, "memory")),
        ("bf16", 4 * 10**9, 0, (1.0, "arithmetic")),
        ("bf16*bf16->bf16+f32", 4 * 10**9, 0, (1.0, "arithmetic")),
        # The peak of int8 products was not measured; the memory bandwidth was.
        ("u8*s8->s32", 10**12, 10**8, (0.5, "memory")),
        ("f32", 0, 0, (None, None)),
        ("f32", None, None, (None, None)),
    ],
)
def test_the_share_is_of_the_bounding_peak(precision, operations, nbytes, expected):
    share, bound = share_of_peak(PEAK, precision, operations, nbytes, 0.02)
    assert (share, bound) == (pytest.approx(expected[0]) if expected[0] else None, expected[1])


def test_without_a_peak_there_is_no_share():
    assert share_of_peak(None, "f32", 10**9, 10**9, 0.1) == (None, None)
