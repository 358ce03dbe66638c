"""The CPUs that a container's quota leaves, and cores that differ in speed."""

import pytest
import tvm

from relax_hetero.target import cpu_cores
from relax_hetero.target.cpu_target import cpu_target_of

VERSION_1 = {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ([("", "/")], {"cpu.max": "max 100000"}, None),
        ([("", "/")], {"cpu.max": "150000 100000"}, 2),
        ([("", "/a/b")], {"cpu.max": "400000 100000", "a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ([("", "/seen/only/outside")], {"cpu.max": "300000 100000"}, 3),
        ([("cpu,cpuacct", "/a")], VERSION_1, 3),
        ([("cpu", "/")], {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ([("", "/")], {"cpu.max": "nonsense"}, None),
        ([("", "/")], {}, None),
        ([], {"cpu.max": "100000 100000"}, None),
    ],
)
def test_quotas_of_all_groups_around_the_process_count(monkeypatch, tmp_path, groups, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cpu_cores, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cpu_cores, "_control_groups", lambda: groups)
    assert cpu_cores._cgroup_cpus() == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7"}, 4),  # Intel's hybrid CPUs
        ({"cpu_core/cpus": "0-7"}, 1),
        ({f"system/cpu/cpu{cpu}/cpu_capacity": str(1024 if cpu < 2 else 430) for cpu in range(8)}, 4),
        ({f"system/cpu/cpu{cpu}/cpu_capacity": "1024" for cpu in range(8)}, 1),
        ({"cpu_core/cpus": "0-1", "cpu_atom/cpus": "nonsense"}, 4),
        ({}, 1),
    ],
)
def test_cores_of_unlike_speed_get_several_tasks(monkeypatch, tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cpu_cores, "_DEVICES", tmp_path)
    monkeypatch.setattr(cpu_cores, "cpus_of_cores", lambda: [[0, 1], [2, 3], [4], [5]])
    assert cpu_cores.tasks_per_thread() == expected
    monkeypatch.setattr(cpu_cores, "cpus_of_cores", lambda: [[0, 1]])  # the affinity leaves one
    assert cpu_cores.tasks_per_thread() == 1


@pytest.mark.parametrize(("cores", "tasks"), [(1, 1), (6, 24)])
def test_loops_for_unlike_cores_have_tasks_to_share(cores, tasks):
    keys = ["cpu", cpu_cores.UNLIKE_CORES]
    cpu = cpu_target_of(tvm.target.Target({"kind": "llvm", "mcpu": "alderlake", "num-cores": cores, "keys": keys}))
    assert (cpu.cores, cpu.threads) == (tasks, cores)
