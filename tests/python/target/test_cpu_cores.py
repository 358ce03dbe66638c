"""The CPUs that a container's quota leaves."""

import pytest

from relax_hetero.target import cpu_cores

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
