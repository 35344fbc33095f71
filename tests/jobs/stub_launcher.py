"""Stands where `grpo` stands: `grpo launch` without nodes that meet, launcher and ranks, for the scripts in launch/.

`python -m tests.jobs.stub_launcher launch ARGUMENTS...`, once on each of two nodes. Reads its arguments as
`grpo launch` does, writes `<output_dir>/launched.<attempt>.<node>.json` with what it was given, behaves as the word for
this attempt in `<output_dir>/behaviour.json` says, leaves in `run_state.json` what the trainer leaves there, and ends
as `grpo launch` does after such an end.

    finish     says that training has finished
    wait       until it is asked to stop; says what the request asked for
    slow       hears that it is asked to stop, but does not come to the end of its step
    heal       fails in a way that another attempt may mend
    hopeless   fails in a way that no attempt can mend
    vanish     dies without a word
    progress   completes a newer checkpoint, then dies without a word
    lopsided   node 1 dies, node 0 waits until it is ended
    silent     node 1 says and hears nothing more, and node 0 says so
    broken K   the engine of node K does not start
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from grpo.faults.failure import FailureKind, FailureRecord
from grpo.ops.launch import attempt, command, next_attempt
from grpo.ops.launch.agent import Ending
from grpo.record.files import Entry, note_run
from grpo.record.folder import RunFolder

SHOWN = ("GRPO_JOB", "GRPO_ATTEMPT", "GRPO_STOP_LEAD_S", "CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NODES = 2
PATIENCE_S = 60.0

attempt.VISIBLE_S = 1.0  # both nodes are on this machine


class Interrupted(Exception):
    """A second SIGINT, or one that no trainer hears."""


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > deadline:
            sys.exit(f"stub: {what} did not happen within {PATIENCE_S:.0f} s")
        time.sleep(0.02)


class Stub:
    """One node's, from its arguments to its end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.output_dir: Path = args.output_dir
        self.node = int(os.environ.get("SLURM_NODEID") or args.node_rank)
        before = len(list(self.output_dir.glob(f"launched.*.{self.node}.json")))  # of another job, too
        self.number = max(before, int(os.environ.get("GRPO_ATTEMPT") or 0))
        self.launcher: attempt.Attempt | None = None
        self.asked = self.terminated = False

    def record(self, node: int) -> Path:
        return self.output_dir / f"launched.{self.number}.{node}.json"

    def meet(self, arguments: list[str], dispositions: dict[str, str]) -> float:
        """Write down what this node was given, and wait for the others; when the head began."""
        started = time.time()
        if self.node:
            wait_until(self.record(0).exists, "the head")
            started = json.loads(self.record(0).read_text())["started"]
        given = {"arguments": arguments, "environment": {key: os.environ.get(key) for key in SHOWN}, "pid": os.getpid()}
        path = self.record(self.node)
        path.with_suffix(".new").write_text(json.dumps({**given, "signals": dispositions, "started": started}))
        path.with_suffix(".new").replace(path)
        wait_until(lambda: all(self.record(node).exists() for node in range(NODES)), "the other node")
        return started

    def on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGTERM:
            self.terminated = True
        elif not self.asked and self.launcher is not None and self.launcher.ask_to_stop():
            self.asked = True
            print("[grpo] asked to stop", file=sys.stderr, flush=True)
        elif number == signal.SIGINT:
            raise Interrupted

    def behave(self, word: str, run: RunFolder | None, is_own: Callable[[Entry], bool]) -> bool:
        """What the ranks of this node do; whether they end well.

        Args:
            run: rank 0's output folder; None on other nodes, whose ranks hear from rank 0 how all end.
        """
        if word == "progress" and run is not None:
            checkpoint = self.output_dir / f"checkpoint-{10 * (self.number + 1)}"
            checkpoint.mkdir()
            (checkpoint / "complete.json").write_text("{}")
        if word in ("vanish", "progress") or (word == "lopsided" and run is None):
            return False
        if word == "silent" and run is None:
            wait_until(lambda: False, "an end by SIGKILL")
        if run is None:
            wait_until(lambda: next_attempt.read_state(self.output_dir, is_own) is not None, "rank 0's end")
            return word in ("finish", "wait")
        match word:
            case "finish":
                run.update(state="finished", why="all steps are done", step=3)
            case "wait" | "lopsided":
                wait_until(lambda: self.terminated or run.stop_request() is not None, "a request to stop")
                request = run.stop_request()
                time.sleep(0.2)  # the last step and the checkpoint
                run.update(state="stopped", why="asked to", step=3, requeue=request is None or request.requeue)
                run.answer_requests()
            case "slow":
                wait_until(lambda: False, "an interrupt")
            case "heal":
                run.update(state="failed", why="a node has lost its network", step=3)
            case "silent":
                run.update(state="failed", why="words that nobody reads", kind=FailureKind.NODE_LOST, nodes=(1,))
            case "hopeless":
                run.update(state="failed", why="28 training processes were asked for, 24 fit", kind=FailureKind.USER)
            case "broken 0" | "broken 1":
                node = int(word[-1])
                host = json.loads(self.record(node).read_text())["environment"]["SLURMD_NODENAME"]
                died = FailureRecord(
                    node=node, rank=node, host=host, phase="engine start", cause="it died", kind=FailureKind.ENGINE
                )
                run.begin_attempt()
                run.update(state="failed", why=str(died), kind=died.kind, failure=died)
            case _:
                raise ValueError(word)
        return word in ("finish", "wait")

    def run(self, arguments: list[str]) -> int:
        """`grpo launch`'s exit code."""
        if not Path(self.args.script).is_file():
            print(f"grpo launch: there is no script {self.args.script}", file=sys.stderr)
            return 2
        dispositions = {each.name: str(signal.getsignal(each)) for each in SIGNALS}
        for each in SIGNALS:
            signal.signal(each, self.on_signal)
        started = self.meet(arguments, dispositions)
        has_succeeded = is_interrupted = False
        with tempfile.TemporaryDirectory() as notes:
            self.launcher = attempt.Attempt(
                output_dir=self.output_dir,
                notes=Path(notes),
                launched=started,
                started=started,
                is_head=self.node == 0,
                env=os.environ,
            )
            env = {**os.environ, **self.launcher.variables()}
            note_run(self.output_dir, env)
            run = None
            if self.node == 0:
                run = RunFolder(self.output_dir, env)
                run.drop_old_requests()
                run.update(state="running")
            word = json.loads((self.output_dir / "behaviour.json").read_text())[self.number]
            print(f"stub on node {self.node}, attempt {self.number}: {word}", flush=True)
            try:
                has_succeeded = self.behave(word, run, lambda state: state.get("started") == started)
            except Interrupted:
                print("[grpo] ended by SIGINT", file=sys.stderr)
                is_interrupted = True
            if run is not None:
                run.release()
            ending = Ending(has_succeeded=has_succeeded, is_interrupted=is_interrupted)
            code, why = self.launcher.conclude(ending, max_crashes=self.args.max_crashes)
        print(f"[grpo] {why}", file=sys.stderr if code else sys.stdout, flush=True)
        return code


def main(name: str, *arguments: str) -> int:
    if name != "launch":
        sys.exit(f"grpo {name} is not expected here")
    parser = argparse.ArgumentParser(prog="grpo launch")
    command.add_arguments(parser)
    return Stub(parser.parse_args(arguments)).run(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
