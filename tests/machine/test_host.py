"""The readers on made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

from gdino_lab.machine import host


def test_limits_of_both_control_group_versions(tmp_path: Path):
    """The smallest of nested limits counts, what is cached is free, and no limit is None."""
    (tmp_path / "cgroup").write_text("4:memory:/docker/a\n3:cpu,cpuacct:/gone\n0::/user\n")
    inner, outer, user = tmp_path / "memory/docker/a", tmp_path / "memory/docker", tmp_path / "user"
    for folder in (inner, user, tmp_path / "cpu"):
        folder.mkdir(parents=True)
    memory = lambda: host.cgroup_folders("memory", tmp_path / "cgroup", tmp_path)  # noqa: E731
    cpu = lambda: host.cgroup_folders("cpu", tmp_path / "cgroup", tmp_path)  # noqa: E731
    assert list(memory()) == [inner, outer, tmp_path / "memory", user, tmp_path]
    assert list(cpu()) == [tmp_path / "cpu", user, tmp_path]
    assert host.read_memory_limit(memory()) is None
    cores = host.read_usable_cores(cpu())

    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (inner / "memory.usage_in_bytes").write_text("500\n")
    (outer / "memory.limit_in_bytes").write_text("1000\n")
    (outer / "memory.usage_in_bytes").write_text("700\n")
    (outer / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    assert host.read_memory_limit(memory()) == (1000, 400)
    (user / "memory.max").write_text("max\n")
    (user / "memory.current").write_text("5\n")
    assert host.read_memory_limit(iter([user])) is None
    (user / "memory.max").write_text("50\n")
    assert host.read_memory_limit(memory()) == (50, 45)

    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (user / "cpu.max").write_text("max 100000\n")
    assert host.read_usable_cores(cpu()) == cores
    (user / "cpu.max").write_text("25000 50000\n")
    assert host.read_usable_cores(cpu()) == 0.5


def test_oom_kills_are_counted_where_the_kernel_counts_them(tmp_path: Path):
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n")
    assert host.read_oom_kills(iter([tmp_path])) == 2
    (tmp_path / "memory.events").unlink()
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert host.read_oom_kills(iter([tmp_path])) == 5
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 9\n")
    assert host.read_oom_kills(iter([]), tmp_path / "vmstat") == 9
    assert host.read_oom_kills(iter([]), tmp_path / "nowhere") is None
