"""A fixed sample of ONNX's backend suite, in this process; all of it: `make conformance`."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "apps" / "onnx_backend"))

# Of every run is one case of so many; one of the smaller number of them is of `make test-slow`.
FEW, MORE = 97, 37


@pytest.mark.parametrize("every", [FEW, pytest.param(MORE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("configuration", ["b", "c"])
def test_right_or_refused(configuration, every):
    from conformance.cases import case_names  # here: ONNX computes the data of all its cases
    from conformance.outcome import PASSED, REFUSED, run_case

    sample = case_names()[::every]
    outcomes = [run_case(name, configuration) for name in sample]
    assert [(o.name, o.status, o.detail) for o in outcomes if o.status not in (PASSED, REFUSED)] == []
    # Seven in ten cases of the whole suite pass; the others have types or ops that are refused by name.
    assert sum(outcome.status == PASSED for outcome in outcomes) > 0.6 * len(sample)
