"""Where control groups for programs are made, what they are given, and that they go."""

import logging
import subprocess
import tempfile
from pathlib import Path

import pytest

from grpo.ops.train import sandbox, sandbox_group
from grpo.ops.train.sandbox_group import PREFIX, GroupPlace, entrance, find_place, own_place, program_group, set_limits
from tests.support.sandboxed import outcome

V1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 / /cg/cpu rw - cgroup cgroup rw,cpu\n"
V1 += "35 31 0:32 {} /cg/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2 = "30 23 0:26 {} /cg rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
OF_V1, OF_V2 = "9:name=systemd:/\n4:cpu,cpuacct:/\n3:memory:/pod/job\n0::/\n", "0::/pod/job\n"


@pytest.mark.parametrize(
    ("cgroups", "mountinfo", "asked"),
    [
        pytest.param(OF_V1, V1.format("/"), ["1 /cg/memory/pod/job"], id="v1"),
        pytest.param(OF_V1, V1.format("/pod/job"), ["1 /cg/memory"], id="v1, its own group mounted"),
        pytest.param(OF_V1, V2.format("/") + V1.format("/"), ["1 /cg/memory/pod/job"], id="memory is v1's beside v2"),
        pytest.param(OF_V1, V2.format("/"), [], id="v1 is not mounted"),
        pytest.param(OF_V2, V2.format("/"), ["2 /cg/pod/job", "2 /cg/pod"], id="v2: not above its parent"),
        pytest.param(OF_V2, V2.format("/pod/job"), ["2 /cg"], id="v2: not above what is mounted"),
        pytest.param("0::/\n", V2.format("/"), ["2 /cg"], id="v2: the root"),
        pytest.param("0::/../job\n", V2.format("/"), [], id="outside of its namespace"),
        pytest.param(OF_V2, V2.format("/other"), [], id="another one is mounted"),
        pytest.param("", V2.format("/"), [], id="no group"),
        pytest.param(OF_V2, "", [], id="no mounts"),
    ],
)
def test_find_place_tries_control_groups_in_order(cgroups: str, mountinfo: str, asked: list[str]) -> None:
    """In this order, and the first that can limit is taken."""
    seen: list[str] = []

    def refuse(place: GroupPlace) -> bool:
        seen.append(f"{place.version} {place.folder}")
        return False

    assert find_place(cgroups, mountinfo, can_limit=refuse) is None
    assert seen == asked
    for wanted in asked:
        taken = find_place(cgroups, mountinfo, can_limit=lambda place: f"{place.version} {place.folder}" == wanted)  # noqa: B023
        assert taken is not None
        assert f"{taken.version} {taken.folder}" == wanted


@pytest.mark.parametrize(
    ("version", "names", "expected"),
    [
        (2, ["memory.max"], {"memory.max": "5000"}),
        (
            2,
            ["memory.max", "memory.swap.max", "memory.oom.group"],
            {"memory.max": "5000", "memory.swap.max": "0", "memory.oom.group": "1"},
        ),
        (1, ["memory.limit_in_bytes"], {"memory.limit_in_bytes": "5000"}),
        (
            1,
            ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"],
            {"memory.limit_in_bytes": "5000", "memory.memsw.limit_in_bytes": "5000"},
        ),
    ],
)
def test_set_limits_writes_files_of_both_versions(
    version: int, names: list[str], expected: dict[str, str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_text("max\n")
    set_limits(tmp_path, version, 5000)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == expected


@pytest.mark.parametrize("version", [1, 2])
def test_program_group_without_memory_controller_raises(version: int, tmp_path: Path) -> None:
    """As where `memory` is not in `cgroup.subtree_control`: a group is made there, and takes no limit."""
    there = GroupPlace(folder=tmp_path, version=version)
    with pytest.raises(FileNotFoundError, match="memory"), program_group(there, 5000):
        pass
    assert not sandbox_group._can_limit(there)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_is_left")
def test_run_program_without_its_control_group_reports_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is in force is not given up for one program."""
    monkeypatch.setattr(sandbox, "own_place", lambda: GroupPlace(folder=tmp_path / "gone", version=1))
    ended = outcome("print(42)", True)
    assert (ended.code, ended.output) == (None, b"")
    assert ended.why.startswith("control group: [Errno 2] No such file")


@pytest.mark.usefixtures("nothing_is_left")
def test_program_group_holds_process_under_its_limit(place: GroupPlace) -> None:
    with program_group(place, 2**27) as group:
        assert (group / sandbox_group._LIMIT[place.version]).read_text() == f"{2**27}\n"
        read = ["/bin/sh", "-c", 'echo 0 > "$0" && cat /proc/self/cgroup', entrance(group)]
        assert f"/{group.name}\n" in subprocess.run(read, capture_output=True, text=True, check=True).stdout
    assert not group.exists()


@pytest.mark.usefixtures("nothing_is_left")
def test_own_place_removes_groups_of_dead_processes_alone(place: GroupPlace, caplog: pytest.LogCaptureFixture) -> None:
    stale = Path(tempfile.mkdtemp(prefix=f"{PREFIX}1-", dir=place.folder))
    with program_group(place, 2**27) as group, caplog.at_level(logging.INFO):
        own_place.cache_clear()
        assert own_place() == place
        assert (stale.exists(), group.exists()) == (False, True)
    assert f"memory is limited by control groups below {place.folder}" in caplog.text


def test_program_group_still_in_use_is_logged_and_removed_later(
    place: GroupPlace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_group, "_REMOVAL_S", 0.1)
    with program_group(place, 2**27) as group:
        command = ["/bin/sh", "-c", 'echo 0 > "$0" && echo in && exec sleep 600', entrance(group)]
        sleeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "in\n"
    with sleeper:
        assert f"{group} stays behind: [Errno 16]" in caplog.text
        sleeper.kill()
    own_place.cache_clear()
    assert own_place() == place
    assert not group.exists()


def test_own_place_without_control_groups_logs_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_group, "find_place", lambda *_, **__: None)
    own_place.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert own_place() is None
    finally:
        own_place.cache_clear()
    assert "memory is limited for each process; no control group can be made for all" in caplog.text
