"""apps/bench/threads.py: what its checks count; the command itself is tested with the commands of documents."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "apps" / "bench"


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import threads

    return threads


def process(cores=1.0, speed=1.95, mask=True):
    return {"threads": 2, "microseconds": 300.0, "speed": speed, "cores": cores, "late": 0.0, "mask": mask}


def test_a_process_counts_if_its_threads_are_apart_and_fast(threads):
    processes = [process(), process(cores=0.98), process(speed=1.79), process(cores=0.99, speed=1.8)]
    placed, good = threads.checks({"one process": processes, "beside 1 busy": [process(mask=False)]})
    assert (placed.found, placed.passed) == (0.8, False)
    assert (good.found, good.passed) == (0.5, False)
    assert all(check.passed for check in threads.checks({"one process": [process()] * 48 + [process(cores=0)] * 2}))
    assert len(threads.checks({"beside 1 busy": [process()]})) == 1


def test_the_table_has_a_row_for_each_situation(threads, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    threads.show(
        {"one process": [process(), process(speed=2.0), process(speed=1.5)], "time of 1 CPUs": [process()]}, []
    )
    shown = capsys.readouterr().out
    assert "1.95, 1.50" in shown and "1.95, 1.95" in shown


@pytest.mark.parametrize(
    ("second", "file", "text"), [(True, "cpu.max", "150000 100000"), (False, "cpu.cfs_quota_us", "150000")]
)
def test_groups_have_the_time_that_was_asked_for(threads, monkeypatch, tmp_path, second, file, text):
    monkeypatch.setattr(threads, "GROUPS", tmp_path)
    (tmp_path / "cpu").mkdir()
    if second:
        (tmp_path / "cgroup.controllers").touch()
    written = []
    monkeypatch.setattr(Path, "rmdir", lambda folder: written.append((folder / file).read_text()))
    with threads.control_group(1.5) as join:
        assert join.name == "cgroup.procs" and join.parent.parent == (tmp_path if second else tmp_path / "cpu")
    assert written == [text]


def test_without_permission_there_is_no_group(threads, monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "GROUPS", tmp_path / "absent")
    with threads.control_group(1) as join:
        assert join is None
