"""Runs cells of the matrix on real jobs: `python -m tests.faults.run [PATTERN …]`, all without one (`make faults`).

A cell is FAULT/PHASE/LAYOUT, as in `matrix.py`; patterns are a shell's: `'host-*/sync/*'`. What was found goes into
`results.json`, cell by cell, and `docs/faults.md` is written from it at the end. `--list` shows the cells alone, and
what is known of each; `--stale` takes those alone that have no good result of the code as it is, so that a run that
was broken off goes on.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

from grpo.faults.liveness import MAX_INTERVAL_S
from tests.faults import page
from tests.faults.judge import PATIENCE_S, Result, judge, judge_going_on, ranks_of, until_gone
from tests.faults.matrix import NODES, Cell, find
from tests.faults.stamps import code_of
from tests.faults.strike import (
    SIGNALS,
    engine_pid,
    fill,
    lose_memory,
    own_files,
    rank_pid,
    seen_by,
    send,
    struck_rank,
    targets,
)
from tests.faults.surroundings import Surroundings, surroundings
from tests.support.contract import STARTUP_S, inner_process
from tests.support.launching import BIN, ROOT, Job, free_port, start, torchrun_command
from tests.support.left_over import left_over, processes_in
from tests.support.tiny_models import save_tiny_model
from tools.code_digest import commit

JOB = ROOT / "tests" / "jobs" / "fault_job.py"
TWO_BEATS_S = 2 * MAX_INTERVAL_S  # until the others know what a node does
_OF_BOTH = ("train", "save", "resume")  # phases in which every rank waits, not the local mains alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What jobs share."""

    folder: Path
    model: Path

    @classmethod
    def make(cls, folder: Path) -> "Ground":
        return cls(folder=folder, model=save_tiny_model("qwen3-tied", folder / "model"))

    def checkpoint(self) -> Path:
        """Of two steps of 2 ranks, by a job without engines; made once."""
        run = self.folder / "saved" / "run"
        if not (run / "checkpoint-2" / "complete.json").exists():
            config = {"use_vllm": False, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
            job = start_job(self, self.folder / "saved", layout="one", config=config)
            try:
                assert job.wait(STARTUP_S) == [0], job.fail("no checkpoint to resume from")
            finally:
                job.end()
        return run / "checkpoint-2"


def start_job(
    ground: Ground,
    out: Path,
    *,
    layout: str,
    config: dict,
    settings: dict | None = None,
    around: Surroundings | None = None,
) -> Job:
    """The job, with its marks in `out/marks` and its output in `out/run`, where its `around` has it."""
    around = around or Surroundings()
    marks = out / "marks"
    marks.mkdir(parents=True)
    (out / "run").mkdir(mode=0o700, exist_ok=True)
    zero3 = {} if NODES[layout] > 1 else {"deepspeed": str(ROOT / "configs" / "zero3.json")}
    values = {
        **{"model": str(ground.model), "marks": str(marks), "hold": "", "reward": "", "prompt_words": 0},
        **{"stuck": None, "eats": None, "from_step": 1},
        "config": {"output_dir": str(out / "run"), **zero3, **config},
        **(settings or {}),
    }
    (out / "settings.json").write_text(json.dumps(values))
    script, port = [str(JOB), str(out / "settings.json")], free_port()

    def command(node: int) -> list[str]:
        words = torchrun_command(script)
        if NODES[layout] > 1:
            words = [str(BIN / "grpo"), "launch", "--port", str(port), "--nodes", ",".join(around.addresses)]
            words += ["--node-rank", str(node), "--ranks-per-node", "1", *script]
        return around.command(node, words)

    return start(command, out, nodes=NODES[layout], env={"CUDA_VISIBLE_DEVICES": "", **around.env})


def run_cell(cell: Cell, ground: Ground, out: Path) -> Result:
    """Start the job, put the fault where the cell says, and see how it ends."""
    assert cell.expected is not None, f"{cell.name} is not run: {cell.why_not}"
    (out / "run").mkdir(parents=True, mode=0o700)
    if cell.phase == "resume":
        subprocess.run(["cp", "-r", str(ground.checkpoint()), str(out / "run")], check=True)
    with surroundings(cell, out) as around:
        return _run_in(around, cell, ground, out)


def _run_in(around: Surroundings, cell: Cell, ground: Ground, out: Path) -> Result:
    assert cell.expected is not None
    run, marks, fault = out / "run", out / "marks", cell.fault
    settings: dict[str, object] = {"hold": "" if fault.act == "asked" else cell.phase, **fault.settings}
    if fault.act in ("stick", "eat") and not fault.is_engines:
        settings["stuck" if fault.act == "stick" else "eats"] = struck_rank(cell)
    if fault.act == "stick":
        settings["from_step"] = 3  # the first one, which waits for engines, is no measure
    job = start_job(ground, out, layout=cell.layout, config=cell.config(), settings=settings, around=around)
    spared: set[int] = set()
    try:
        struck, lost = _put(cell, job, marks, around)
        began = time.monotonic()
        if fault.act == "eat":
            around.lift()
        holds = fault.act == "freeze"
        if cell.expected.spared:
            spared = struck
        if cell.expected.goes_on:
            return judge_going_on(cell, job, run, began)
        deadline = began + cell.expected.within_s + PATIENCE_S
        seconds = until_gone(job, deadline, spared, spares_held=holds)
        ended = None if seconds is None else seconds - began
        running = processes_in(job.temporary)
        around.lift()
        send(struck, signal.SIGKILL)
        lose_memory(lost)
        if holds:
            until_gone(job, time.monotonic() + PATIENCE_S, set())
        left = sorted(left_over(job.temporary, job.orphans_before | lost)) if ended is not None else []
        ranks = ranks_of(cell.layout)
        gone = [rank for rank in ranks if (marks / f"rank-{rank}.json").exists() and rank_pid(marks, rank) in struck]
        if fault.target == "disk":  # who raises the cause itself says it so, and there is no space for it in its log
            gone += [rank for rank in ranks if f"[rank{rank}]: OSError: [Errno 28]" in job.output()]
        return judge(
            cell.expected, job, ended, running, left, struck=gone, spares=bool(cell.expected.spared), ranks=ranks
        )
    finally:
        around.lift()
        send(processes_in(job.temporary), signal.SIGKILL)
        job.end(may_leave=True)


def _put(cell: Cell, job: Job, marks: Path, around: Surroundings) -> tuple[set[int], set[str]]:
    """Wait until the job is where the fault belongs, and put it there.

    Returns:
        The pids that it took; and the files that nobody is left to remove.
    """
    fault, ranks = cell.fault, [*ranks_of(cell.layout)]
    if fault.act == "asked":
        if fault.settings.get("reward"):
            _await(job, marks / "at-reward-1")
        elif fault.settings.get("prompt_words"):
            _await(job, marks / "at-long-prompts-0")
        elif cell.phase == "start":
            _await(job, marks / "engine-0-1.json")
        return set(), set()
    if cell.layout == "one" and cell.phase not in _OF_BOTH:
        ranks = [0]
    for rank in ranks:
        _await(job, marks / f"at-{cell.phase}-{rank}")
    if fault.act == "fill":
        where = marks.parent / "run" if fault.target == "disk" else Path("/dev/shm")
        fill(seen_by(job.launchers[0].pid, where))
        (marks / "go-on").touch()
        return set(), set()
    if fault.act not in SIGNALS:
        if fault.act in ("cut", "reset"):
            time.sleep(TWO_BEATS_S)  # each side knows the other's phase by its last beat
        around.put()
        if not fault.holds_ranks:
            (marks / "go-on").touch()
        return {rank_pid(marks, struck_rank(cell))} if fault.act == "eat" and not fault.is_engines else set(), set()
    return _strike(cell, job, marks, ranks)


def _strike(cell: Cell, job: Job, marks: Path, ranks: list[int]) -> tuple[set[int], set[str]]:
    """Send signals; see `_put`."""
    fault = cell.fault
    taken = targets(job, marks, cell)
    if fault.target.startswith("node"):
        time.sleep(TWO_BEATS_S)  # the others know a node's phase by its last beat
    held = [inner_process(engine_pid(marks, rank)).pid for rank in ranks] if cell.phase == "generate" else []
    send(held, signal.SIGSTOP)  # so that nothing is answered before the fault comes
    if cell.phase == "generate":
        (marks / "go-on").touch()
        for rank in ranks:
            _await(job, marks / f"submitted-{rank}")
    lost = own_files(taken, job.temporary) if fault.target.startswith("node") else set()
    send(taken, signal.SIGSTOP)  # all at once, as a machine goes: or some would hear of the others' end
    send(taken, SIGNALS[fault.act])
    if SIGNALS[fault.act] == signal.SIGKILL:
        lose_memory(lost)
    if not (fault.holds_ranks and fault.act == "kill"):
        send(set(held) - set(taken), signal.SIGCONT)
    if not fault.holds_ranks:
        (marks / "go-on").touch()
    return set(taken), lost


def _await(job: Job, path: Path) -> None:
    job.wait_for(str(path.relative_to(job.output_dir)), STARTUP_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="FAULT/PHASE/LAYOUT, as a shell's pattern")
    parser.add_argument("--list", action="store_true", help="show the cells, and run none")
    parser.add_argument("--stale", action="store_true", help="those alone without a good result of this code")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once; most of a cell is a start, on two cores")
    args = parser.parse_args()
    results, chosen = page.read_results(), find(args.patterns)
    known = {cell.name: page.state_of(cell, results) for cell in chosen}
    if args.stale:
        chosen = [cell for cell in chosen if known[cell.name] != page.HOLDS]
    if not chosen:
        if args.stale and known:
            print("every result holds")
            return 0
        print(f"no cell is called {' or '.join(args.patterns)}: --list shows them all", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{known[cell.name]:8} {cell.name}" for cell in chosen))
        return 0
    failed, stamp = 0, commit()
    with tempfile.TemporaryDirectory(prefix="grpo-faults-") as folder, contextlib.ExitStack() as at_end:
        pool = ThreadPoolExecutor(args.jobs)
        at_end.callback(pool.shutdown, cancel_futures=True)  # Ctrl-C waits for those that run, and begins no more
        ground = Ground.make(Path(folder))
        if any(cell.phase == "resume" for cell in chosen):
            ground.checkpoint()
        under_way = {pool.submit(_try, cell, ground): cell for cell in chosen}
        for number, future in enumerate(as_completed(under_way)):
            cell, (result, took) = under_way[future], future.result()
            failed += bool(result.wrong)
            results[cell.name] = asdict(replace(result, commit=stamp, date=f"{date.today()}", code=code_of(cell)))
            page.write_results(results)
            how = "ok" if not result.wrong else f"WRONG: {'; '.join(result.wrong)} (logs: {_folder(cell)})"
            print(f"{number + 1}/{len(chosen)} {cell.name}: {result.seconds} s, {how} ({took:.0f} s)", flush=True)
    page.write_page(results)
    return int(failed > 0)


def _folder(cell: Cell) -> Path:
    return ROOT / "runs" / "faults" / cell.name.replace("/", "-")


def _try(cell: Cell, ground: Ground) -> tuple[Result, float]:
    """What came of it, and the seconds that all of it took."""
    out, begun = _folder(cell), time.monotonic()
    subprocess.run(["rm", "-rf", str(out)], check=True)
    try:
        result = run_cell(cell, ground, out)
    except Exception as error:  # noqa: BLE001  the job did not come to the phase, as a rule; the others are to be run
        (out / "why.txt").write_text("".join(traceback.format_exception(error)))
        result = Result(wrong=[(str(error) or repr(error)).splitlines()[0]], seconds=None, record="", left=[])
    return result, time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
