"""The matrix is whole, its page says what is known; and some of its cells, on real jobs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import page, stamps
from tests.faults.judge import judge, silent_ranks
from tests.faults.matrix import FAULTS, IN_LONG_TESTS, IN_TESTS, LAYOUTS, PHASES, Cell, Expected, cells, find
from tests.faults.run import Ground, run_cell
from tests.faults.stamps import code_of
from tests.support.launching import Job


def test_matrix_gives_reason_for_each_empty_cell() -> None:
    everything = list(cells())
    assert len(everything) == len(FAULTS) * len(PHASES) * len(LAYOUTS) == len({cell.name for cell in everything})
    for cell in everything:
        assert (cell.expected is None) == bool(cell.why_not), cell.name
    for fault in FAULTS:
        assert any(cell.expected for cell in everything if cell.fault is fault), f"{fault.name} is never put"
    chosen = {*IN_TESTS, *IN_LONG_TESTS}
    assert {cell.name for cell in find(list(chosen))} == chosen


def test_faults_page_matches_results() -> None:
    assert page.PAGE.read_text() == page.page(page.read_results()), "python -m tests.faults.page writes it"


CELL = find(["host-killed/train/one"])[0]
GOOD = {"wrong": [], "seconds": 7.2, "record": "", "left": [], "commit": "abc", "date": "2026-01-02"}


def test_state_of_result_from_other_code_is_stale() -> None:
    for result, state in (
        ({}, page.NOT_RUN),
        ({**GOOD, "code": code_of(CELL)}, page.HOLDS),
        ({**GOOD, "code": "of other code"}, page.STALE),
        (GOOD, page.STALE),  # from before results said so
        ({**GOOD, "code": code_of(CELL), "wrong": ["took 61 s"]}, page.WRONG),
    ):
        results = {CELL.name: result} if result else {}
        assert page.state_of(CELL, results) == state
        (row,) = [
            line
            for line in page.page(results).partition("## Two")[0].splitlines()
            if line.startswith("| engine host k")
        ]
        assert ("\\*" in row) == (state == page.STALE)
        assert ("1 of commit abc (2026-01-02)" in page.page(results)) == bool(result)


def test_code_of_cell_ignores_comments_and_unrelated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(source: str, cell: Cell = CELL) -> str:
        stamps._files.cache_clear()
        (tmp_path / "grpo" / "faults").mkdir(parents=True, exist_ok=True)
        (tmp_path / "grpo" / "faults" / "watch.py").write_text(source)
        return code_of(cell)

    monkeypatch.setattr(stamps, "ROOT", tmp_path)
    plain = code("def f():\n    return 1\n")
    assert code('"""What."""\n\n\ndef f():\n    """Why."""\n    return 1  # because\n') == plain
    assert code("def f():\n    return 2\n") != plain
    assert code("def f():\n    return 1\n", replace(CELL, expected=Expected(goes_on=True, within_s=5.0))) != plain
    (tmp_path / "grpo" / "ops").mkdir()
    (tmp_path / "grpo" / "ops" / "report.py").write_text("x = 1\n")
    assert code("def f():\n    return 1\n") == plain
    stamps._files.cache_clear()


DIED = "the process of rank 1 (pid 7) died without a word: killed? [GRPO-601]"


@pytest.mark.parametrize(
    ("output", "logs", "struck", "silent"),
    [
        ("[rank0]: x.JobFailed: the job failed on A\n[grpo] rank 1 ends: the job failed on A", {}, [], []),
        ("[rank0]: x.JobFailed: the job failed on A", {}, [], [1]),
        ("[rank0]: x.JobFailed: the job failed on A", {1: "ERROR rank-node0-1 the job failed on A"}, [], []),
        ("[rank0]: x.JobFailed: the job failed on A", {1: "INFO rank-node0-1 all is well"}, [], [1]),
        ("[rank0]: x.JobFailed: the job failed on A", {}, [1], []),
        (f"[rank0]: x.JobFailed: the job failed on node 0, rank 1: {DIED}", {}, [], []),
        ("[grpo] the sentinel of node 0 kills rank 1 (pid 7), which does not end: the job failed on A", {}, [0], []),
        ("the job failed on A", {}, [], [0, 1]),  # a launcher says so
    ],
)
def test_silent_ranks_returns_ranks_without_report(
    output: str, logs: dict[int, str], struck: list[int], silent: list[int], tmp_path: Path
) -> None:
    job = Job(launchers=[], log=tmp_path / "job.log", output_dir=tmp_path, temporary=tmp_path, orphans_before=set())
    job.log.write_text(output)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    for rank, text in logs.items():
        (tmp_path / "run" / "logs" / f"rank-node0-{rank}.attempt-0.log").write_text(text)
    assert silent_ranks(job, struck) == silent


def test_judge_ignores_phase_in_output_folder_name(tmp_path: Path) -> None:
    """Its folder's name stands in what a record quotes of logs."""
    record = "node 0 (h), rank 0, phase 'train': EngineDied; the last lines of runs/host-killed-start-one/engine.log:"
    job = Job(launchers=[], log=tmp_path / "job.log", output_dir=tmp_path, temporary=tmp_path, orphans_before=set())
    job.log.write_text(
        f"[rank0]: x.JobFailed: the job failed on {record}\n[grpo] rank 1 ends: the job failed on {record}"
    )
    expected = Expected(says=("node 0", "engine start|start"))
    found = judge(expected, job, 3.0, {}, [], struck=[], spares=False)
    assert found.wrong == ["the record has no engine start|start"]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground.make(tmp_path_factory.mktemp("ground"))


@pytest.mark.parametrize("name", [*IN_TESTS, *(pytest.param(each, marks=pytest.mark.long) for each in IN_LONG_TESTS)])
def test_run_cell_ends_as_expected(name: str, ground: Ground, tmp_path: Path) -> None:
    (cell,) = find([name])
    result = run_cell(cell, ground, tmp_path / "out")
    assert result.wrong == [], result
