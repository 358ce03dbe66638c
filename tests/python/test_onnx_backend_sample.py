"""A fixed sample of ONNX's backend suite, in this process; all of it: `make conformance`."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "apps" / "onnx_backend"))

# One case in FEW runs by default, one in MORE with `make test-slow`.
FEW, MORE = 139, 37


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


@pytest.mark.parametrize("every", [3 * FEW, pytest.param(MORE, marks=pytest.mark.slow)])
def test_right_or_refused_as_a_gpu_would_run_it(every):
    """Every kernel is run on the CPU by `gpu_interpreter`, which finds races and stray indices."""
    from conformance.cases import case_names, load_case, mismatch

    import relax_hetero as rh
    from gpu_interpreter.models import InterpretedModel

    wrong, passed, sample = [], 0, case_names()[::every]
    for name in sample:
        case = load_case(name)
        try:
            model = InterpretedModel(rh.from_onnx(case.model, vdevices=[{"kind": "cuda", "arch": "sm_90a"}]))
        except rh.HeteroError:
            continue
        for inputs, expected in case.data_sets:
            result = model(*inputs)
            outputs = result if isinstance(result, tuple) else (result,)
            problem = mismatch(expected, outputs, case.rtol, case.atol)
            wrong += [(name, problem)] if problem is not None else []
        passed += 1
    assert wrong == []
    assert passed > 0.6 * len(sample)
