"""Stands where accelerate or torchrun stands: says what the trainer says to the scripts in launch/, and trains nothing.

`stub_launcher.py NAME ARGUMENTS...`, once on each of two nodes. Writes `<output_dir>/launched.<attempt>.<node>.json`
with what it was given, then behaves as the word for this attempt in `<output_dir>/behaviour.json` says:

    finish     says that training has finished
    wait       until it is asked to stop, by a file or by SIGTERM; node 0 says what the request asked for
    heal       fails in a way that another attempt may mend
    hopeless   fails in a way that no attempt can mend
    vanish     dies without a word
    progress   completes a newer checkpoint, then dies without a word
    lopsided   node 1 dies, the others wait until they are ended
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

SHOWN = ("GRPO_JOB", "GRPO_ATTEMPT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_NODELIST")

name, *arguments = sys.argv[1:]


def argument(option: str) -> str:
    return arguments[len(arguments) - 1 - arguments[::-1].index(option) + 1]


output_dir = Path(argument("--output_dir"))
node = int(argument("--machine_rank" if name == "accelerate" else "--node_rank"))
job, attempt = os.environ["GRPO_JOB"], int(os.environ["GRPO_ATTEMPT"])
terminated = False


def on_sigterm(*_: object) -> None:
    global terminated
    terminated = True


def write(path: Path, value: dict) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


def say(state: str, *, why: str, requeue: bool = False, can_heal: bool = True) -> None:
    if node == 0:
        place = {"job": job, "attempt": attempt, "step": 3, "checkpoint": None}
        state_file = {"state": state, "why": why, "requeue": requeue, "can_heal": can_heal, **place}
        write(output_dir / "run_state.json", state_file)


def wait_until(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.02)


def everybody_is_here() -> bool:
    return len(list(output_dir.glob(f"launched.{attempt}.*.json"))) == 2


def node_0_has_failed() -> bool:
    return '"failed"' in (output_dir / "run_state.json").read_text()


def wait_for_a_request() -> None:
    own, person = output_dir / f"stop.{job}.{attempt}", output_dir / "stop"
    wait_until(lambda: terminated or own.exists() or person.exists())
    time.sleep(0.2)  # the last step and the checkpoint
    say("stopped", why="asked to", requeue=not person.exists())


signal.signal(signal.SIGTERM, on_sigterm)
usr1 = "ignored" if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN else "deadly"
given = {"name": name, "arguments": arguments, "node": node, "usr1": usr1, "pid": os.getpid()}
write(
    output_dir / f"launched.{attempt}.{node}.json",
    {**given, "environment": {key: os.environ.get(key) for key in SHOWN}},
)
print(f"{name} on node {node}, attempt {attempt}", flush=True)
say("running", why="")
behaviour = json.loads((output_dir / "behaviour.json").read_text())[attempt]
if behaviour not in ("finish", "wait"):
    wait_until(everybody_is_here)
match behaviour:
    case "finish":
        say("finished", why="all steps are done")
    case "wait":
        wait_for_a_request()
    case "heal":
        say("failed", why="a node has lost its network")
        wait_until(node_0_has_failed)
        sys.exit(1)
    case "hopeless":
        say("failed", why="28 training processes were asked for, 24 fit", can_heal=False)
        wait_until(node_0_has_failed)
        sys.exit(1)
    case "vanish":
        sys.exit(1)
    case "progress":
        checkpoint = output_dir / f"checkpoint-{10 * (attempt + 1)}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "complete.json").write_text("{}")
        sys.exit(1)
    case "lopsided":
        if node == 1:
            sys.exit(1)
        wait_for_a_request()
    case _:
        raise ValueError(behaviour)
