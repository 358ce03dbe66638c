"""Error records: what a kernel of a GPU reports is raised once, in the words of the check."""

import ctypes
import threading

import numpy as np
import pytest
import tvm

from relax_hetero.artifact.checks import CLAIMED, END, FIRST, FOUND, KEY, READY, WORDS, CheckSpec
from relax_hetero.artifact.metadata import ConstantSpec
from relax_hetero.errors import HeteroError
from relax_hetero.vm.device import error_records
from relax_hetero.vm.device.constants import PlacedConstants
from relax_hetero.vm.device.error_records import ErrorRecord, raise_reported, register_checks
from relax_hetero.vm.device.tensors import from_numpy

CHECK = CheckSpec("index", "op relax.take of variable 'y' in function 'main'")
GPU = 7


@pytest.fixture
def record(monkeypatch):
    memory = (ctypes.c_int32 * WORDS)(*range(1, WORDS + 1))
    instance = ErrorRecord(ctypes.addressof(memory), memory)
    monkeypatch.setattr(error_records, "_records", {GPU: instance})
    return instance


def report(record, *numbers, is_ready=True):
    """Write what the first thread of a kernel writes that finds a value out of range."""
    record.words[CLAIMED] = 1
    for word, number in zip((KEY, FOUND, FIRST, END), numbers, strict=True):
        record.words[word], record.words[word + 1] = (ctypes.c_int32(number >> shift).value for shift in (0, 32))
    record.words[READY] = is_ready


def test_a_new_record_says_nothing(record):
    assert list(record.words) == [0] * WORDS
    raise_reported(GPU)
    raise_reported(GPU + 1)


@pytest.mark.parametrize("index", [10, -11, 2**31, -(2**31) - 1, 2**32 - 1, 2**63 - 1, -(2**63), -1])
def test_reported_errors_are_raised_once(record, index):
    register_checks([CHECK])
    report(record, CHECK.key, index, -10, 10)
    with pytest.raises(HeteroError) as raised:
        raise_reported(GPU)
    assert str(raised.value) == f"{CHECK.message(index, -10, 10)} (found on cuda:{GPU})"
    raise_reported(GPU)
    assert record.words[CLAIMED] == record.words[READY] == 0


def test_half_of_a_report_is_left_alone(record):
    report(record, CHECK.key, 10, -10, 10, is_ready=False)
    raise_reported(GPU)
    assert record.words[CLAIMED] == 1


def test_one_thread_gets_the_error(record):
    register_checks([CHECK])
    report(record, CHECK.key, 10, -10, 10)
    errors = []

    def look():
        try:
            raise_reported(GPU)
        except HeteroError as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1


def test_a_check_that_nobody_knows(record):
    report(record, 12345, 10, -10, 10)
    with pytest.raises(HeteroError, match="a check on cuda:7 refused the value 10, expected -10 to 9"):
        raise_reported(GPU)


def test_keys_are_those_of_texts():
    other = CheckSpec("divisor", CHECK.where)
    assert CHECK.key == CheckSpec(CHECK.subject, CHECK.where).key != other.key
    assert 0 <= CHECK.key < 2**62


def test_a_machine_has_the_record_in_place_of_the_constant(record):
    constant = from_numpy(np.zeros(WORDS, "int32"), tvm.cpu())
    spec = ConstantSpec("constant_0", (WORDS,), "int32", 0, is_record=True)
    (placed,) = PlacedConstants([constant], [spec], [tvm.cuda(GPU)], lambda name: 0).values
    assert placed.data_ptr() == ctypes.addressof(record.words) and placed.device == tvm.cuda(GPU)
    assert tuple(placed.shape) == (WORDS,) and str(placed.dtype) == "int32"
