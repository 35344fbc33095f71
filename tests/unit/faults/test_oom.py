"""Where the kernel counts what its OOM killer takes: control groups of both versions, containers, the whole machine."""

from pathlib import Path

import pytest

from grpo.faults.oom import OomKills

V1, V2 = "4:memory:/job/7\n1:cpu:/\n0::/\n", "0::/job/7\n"
CASES = {
    "v1": (V1, "sys/fs/cgroup/memory/job/7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    "v1, in a container": (V1, "sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    "v2": (V2, "sys/fs/cgroup/job/7/memory.events", "low 0\noom 1\noom_kill {}\noom_group_kill 0\n"),
    "v2, in a container": (V2, "sys/fs/cgroup/memory.events", "oom 1\noom_kill {}\n"),
    "v2 beside v1": ("0::/job/7\n", "sys/fs/cgroup/unified/job/7/memory.events", "oom_kill {}\n"),
    "the machine": ("", "proc/vmstat", "nr_free_pages 7\noom_kill {}\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_oom_kills_reads_counter_of_cgroup_or_vmstat(case: str, tmp_path: Path) -> None:
    groups, name, text = CASES[case]
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(groups)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 900\n")
    counter = tmp_path / name
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(text.format(3))
    kills = OomKills(7, root=tmp_path)
    kills.look()
    assert kills.lately() == 0
    counter.write_text(text.format(5))
    assert kills.lately() == 2
    kills.look()
    assert kills.lately() == 2  # a process that died meanwhile may not have been seen
    kills.look()
    assert kills.lately() == 0  # but whatever dies now is another matter


def test_oom_kills_without_counter_is_zero(tmp_path: Path) -> None:
    kills = OomKills(7, root=tmp_path)
    kills.look()
    assert kills.lately() == 0
