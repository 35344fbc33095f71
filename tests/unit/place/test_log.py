"""The log: one file for each process, no line twice on the screen, and nothing that a folder which hangs can hold."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.place.log import LogFile, _levels, check_log_variable

DEADLINE_S = 30.0
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) (\S+) (\S+) (grpo\.\S+): (.*)")


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger of the test's own, with nothing above it."""
    logger = logging.getLogger("grpo.of_a_test")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers.clear()


def attached(log: logging.Logger, **arguments: int) -> LogFile:
    file = LogFile(**arguments)
    log.addHandler(file)
    return file


def read(path: Path) -> list[tuple[str, ...]]:
    """Level, process, thread, logger and text of each line."""
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert all(found), path.read_text()
    return [match.groups() for match in found if match]


def test_log_file_keeps_early_lines_and_names_process_and_thread(log: logging.Logger, tmp_path: Path) -> None:
    file, path = attached(log), tmp_path / "logs" / "rank-node1-3.attempt-2.log"
    log.info("before %s", "it")
    assert not list(tmp_path.iterdir())
    file.open(path)
    thread = threading.Thread(target=lambda: log.debug("after"), name="a thread")
    thread.start()
    thread.join()
    assert file.flush_within(DEADLINE_S)
    assert read(path) == [
        ("INFO", "rank-node1-3", "MainThread", "grpo.of_a_test", "before it"),
        ("DEBUG", "rank-node1-3", "a-thread", "grpo.of_a_test", "after"),
    ]


def test_log_file_with_exception_keeps_its_lines_together(log: logging.Logger, tmp_path: Path) -> None:
    file, path = attached(log), tmp_path / "rank-node0-0.attempt-0.log"
    file.open(path)
    try:
        raise ValueError("no\nthing")
    except ValueError:
        log.exception("it failed")
    file.handle(logging.makeLogRecord({"name": log.name, "msg": "%d", "args": ("no number",)}))
    assert file.flush_within(DEADLINE_S)
    first, *others = path.read_text().splitlines()
    assert first.endswith("it failed")
    assert "    ValueError: no" in others
    assert "    thing" in others
    assert "'%d' cannot be formatted: TypeError" in others[-1]


def test_log_file_opened_again_writes_to_new_path(log: logging.Logger, tmp_path: Path) -> None:
    file, paths = attached(log), [tmp_path / f"rank-node0-0.attempt-{attempt}.log" for attempt in (0, 1)]
    for number, path in enumerate(paths):
        file.open(path)
        log.info("run %d", number)
    assert file.flush_within(DEADLINE_S)
    assert [read(path)[0][-1] for path in paths] == ["run 0", "run 1"]


def test_log_file_on_hung_path_drops_and_counts_records(log: logging.Logger, tmp_path: Path) -> None:
    """A pipe that nobody reads hangs in `open`, as a file on a server that does not answer does."""
    file, path = attached(log, max_waiting=10), tmp_path / "rank-node0-0.attempt-0.log"
    os.mkfifo(path)
    file.open(path)
    log.info("taken by the thread")
    assert file._thread is not None
    assert file._thread.ident is not None
    deadline = time.monotonic() + DEADLINE_S
    while "left" not in sys._current_frames()[file._thread.ident].f_locals:  # what it is about to write
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begun = time.monotonic()
    for number in range(100_000):
        log.debug("record %d", number)
    assert time.monotonic() - begun < DEADLINE_S
    assert file.num_dropped == 100_000 - 10
    assert not file.flush_within(0.1)
    # The server answers again. Open for writing, too: a pipe without a writer has an end, and each batch is one.
    with open(os.open(path, os.O_RDWR)) as reader:
        lines = [reader.readline() for _ in range(12)]
    assert lines[0].endswith("taken by the thread\n")
    assert f" WARNING rank-node0-0 grpo-log grpo.place.log: {100_000 - 10} records are missing here" in lines[1]
    assert [line.rpartition(" ")[2] for line in lines[2:]] == [f"{number}\n" for number in range(10)]
    deadline = time.monotonic() + DEADLINE_S
    while file.num_dropped:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_log_file_in_unwritable_folder_counts_lost_and_recovers(log: logging.Logger, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    file, path = attached(log), tmp_path / "logs" / "rank-node0-0.attempt-0.log"
    file.open(path)
    log.info("lost")
    assert not file.flush_within(DEADLINE_S)
    (tmp_path / "logs").unlink()
    log.info("kept")
    file.flush_within(DEADLINE_S)
    (missing, kept) = read(path)
    assert missing[-1].startswith("1 records are missing here")
    assert kept[-1] == "kept"
    assert file.flush_within(DEADLINE_S)


def test_log_file_after_fork_marks_lines_with_child_pid(log: logging.Logger, tmp_path: Path) -> None:
    file, path = attached(log), tmp_path / "engine-node0-0.attempt-0.log"
    file.open(path)
    log.info("of the parent")
    assert file.flush_within(DEADLINE_S)
    child = os.fork()
    if child == 0:
        log.info("of the child")
        os._exit(0 if file.flush_within(DEADLINE_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    log.info("of the parent again")
    assert file.flush_within(DEADLINE_S)
    assert [(who, text) for _, who, _, _, text in read(path)] == [
        ("engine-node0-0", "of the parent"),
        (f"engine-node0-0/{child}", "of the child"),
        ("engine-node0-0", "of the parent again"),
    ]


def test_log_file_in_signal_handler_keeps_all_records(log: logging.Logger, tmp_path: Path) -> None:
    file, path = attached(log), tmp_path / "rank-node0-0.attempt-0.log"
    file.open(path)
    before = signal.signal(signal.SIGALRM, lambda *_: log.info("signal"))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for number in range(3000):
            log.debug("record %d", number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert file.flush_within(DEADLINE_S)
    texts = [line[-1] for line in read(path)]
    assert [text for text in texts if text != "signal"] == [f"record {number}" for number in range(3000)]
    assert "signal" in texts


@pytest.mark.parametrize(
    ("value", "levels"),
    [
        ("", {}),
        ("debug", {"grpo": logging.DEBUG}),
        ("weights,engine", {"grpo.weights": logging.DEBUG, "grpo.engine": logging.DEBUG}),
        ("warning, grpo.rollout.pool=debug", {"grpo": logging.WARNING, "grpo.rollout.pool": logging.DEBUG}),
        ("trainer=INFO", {"grpo.trainer": logging.INFO}),
    ],
)
def test_grpo_log_variable_sets_package_levels(value: str, levels: dict[str, int]) -> None:
    check_log_variable({"GRPO_LOG": value})
    assert _levels({"GRPO_LOG": value}) == (levels, "")


@pytest.mark.parametrize("value", ["wieghts", "weights=loud", "debug,../../etc"])
def test_grpo_log_variable_with_unknown_word_raises(value: str) -> None:
    with pytest.raises(ValueError, match=r"is neither a level .* nor one of the packages .*weights.*GRPO_LOG=debug"):
        check_log_variable({"GRPO_LOG": value})


SCRIPT = """
import logging, os, sys
from pathlib import Path
{own}
from grpo.place.log import open_log
from grpo.record.screen import show_log
show_log()
log = logging.getLogger("grpo.weights.sync")
log.info("a line for the user")
log.debug("a detail")
log.info("for the file", extra={{"on_screen": False}})
logging.getLogger("mine").warning("the script's own")
open_log(Path(sys.argv[1]) / f"rank-node0-{{os.environ.get('RANK', 0)}}.attempt-0.log")
log.warning("a warning")
log.warning("of any rank", extra={{"on_screen": True}})
"""
BASIC_CONFIG = "logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)"


def run_script(folder: Path, *, own: str = "", **env: str) -> tuple[list[str], list[str]]:
    """What a script's rank shows, and the texts in its log."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(own=own), str(folder)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (path,) = folder.glob("*.log")
    return (done.stdout + done.stderr).splitlines(), [line[-1] for line in read(path)]


@pytest.mark.parametrize("own", ["", BASIC_CONFIG], ids=["plain", "basicConfig"])
def test_show_log_prints_each_line_once(own: str, tmp_path: Path) -> None:
    shown, written = run_script(tmp_path, own=own)
    ours = [line for line in shown if "the script's own" not in line]
    assert ours == ["[grpo] a line for the user", "[grpo] a warning", "[grpo] of any rank"]
    assert sum("the script's own" in line for line in shown) == 1
    header = written.pop(2)
    assert header.startswith("this is pid ")
    assert written == ["a line for the user", "for the file", "a warning", "of any rank"]


def test_show_log_on_other_ranks_prints_marked_lines_alone(tmp_path: Path) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    shown, written = run_script(tmp_path, GRPO_LOG="weights", **rank)
    assert [line for line in shown if line.startswith("[grpo]")] == ["[grpo] of any rank"]
    assert "a detail" in written


HANGS = """
import logging, os, sys, time
from pathlib import Path
from grpo.place.log import open_log
path = Path(sys.argv[1]) / "rank-node0-0.attempt-0.log"
os.mkfifo(path)
open_log(path)
logging.getLogger("grpo.faults.watch").info("phase 1")
"""


def test_flush_log_before_exit_waits_bounded_time(tmp_path: Path) -> None:
    ends = HANGS + "from grpo.place.log import flush_log\nflush_log()\nos._exit(3)\n"
    for name, script in (("hangs", ends), ("goes", ends.replace("os.mkfifo(path)", ""))):
        (folder := tmp_path / name).mkdir()
        begun = time.monotonic()
        done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (3, b"")
        assert time.monotonic() - begun < DEADLINE_S
    assert read(tmp_path / "goes" / "rank-node0-0.attempt-0.log")[-1][-1] == "phase 1"


def test_exit_with_hung_log_reports_missing_records(tmp_path: Path) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - begun < DEADLINE_S
    assert re.fullmatch(r"\[grpo\] \d records are missing in \S+rank-node0-0\.attempt-0\.log: .*\n", done.stderr)
