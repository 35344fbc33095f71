"""A rank without torch, for the sentinel alone: hangs on it, does as it is reported, and ends with the job's record.

`light_rank.py RANK TIMEOUT_S`, then lines on stdin: first the sentinel's name, then what to do. Writes `ready`, and
the record that it gets, as JSON.
"""

import contextlib
import ctypes
import json
import os
import selectors
import sys
import time
from pathlib import Path

from grpo.faults.deadlines import CallLimits
from grpo.faults.liveness import NodePlace
from grpo.faults.sentinel_link import SentinelLink


def tell(what: str) -> None:
    print(what, flush=True)


rank, timeout_s = int(sys.argv[1]), float(sys.argv[2])
link = SentinelLink(
    sys.stdin.readline().strip(), rank, NodePlace(node=0, rank=rank, host="?", pid=0), timeout_s=timeout_s
)
limits, limit = CallLimits(link, lambda cause, phase: None), contextlib.ExitStack()
os.set_blocking(sys.stdin.fileno(), False)
selector = selectors.DefaultSelector()
selector.register(link, selectors.EVENT_READ)
selector.register(sys.stdin, selectors.EVENT_READ)
tell("ready")
while True:
    ready = {key.fileobj for key, _ in selector.select(link.interval_s)}
    if (record := link.receive()) is not None:
        tell(json.dumps(record.as_dict()))
        sys.exit(1)
    for line in sys.stdin.read().splitlines() if sys.stdin in ready else ():
        match line.split():
            case ["phase", phase, exchanges]:
                link.say_phase(phase, int(exchanges))
            case ["limited", seconds]:
                limit.enter_context(limits.around("reward", float(seconds), "the rewards take too long"))
            case ["unlimited"]:
                limit.close()
            case ["flood", count]:
                for exchange in range(1, int(count) + 1):
                    link.say_phase("train", exchange)
            case ["fail", cause]:
                link.say("report", record={"node": 0, "rank": rank, "host": "a", "phase": "x", "cause": cause})
            case ["covers", folder, session]:
                link.say("covers", folder=folder, session=int(session))
            case ["uncovers", folder]:
                link.say("uncovers", folder=folder)
            case ["not_come", exchange]:
                answered = link.ask()
                while not answered.is_set():
                    selector.select(1.0)
                    assert link.receive() is None
                tell(json.dumps(link.not_come(int(exchange))))
            case ["leave"]:
                link.say("left")
                sys.exit(0)
            case ["hold", seconds]:  # with the interpreter's lock
                ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
            case ["hang", seconds]:  # a minute longer than it may take, and no Python code runs meanwhile
                with limits.around("reward", float(seconds), "the rewards take too long"):
                    ctypes.PyDLL(None).usleep(int((float(seconds) + 60) * 1e6))
            case ["enter", count]:
                for _ in range(int(count)):
                    link.progress.enter()
            case ["look"]:
                link.progress.look()
            case ["step", seconds]:
                link.progress.note_step(float(seconds))
            case ["eat", mebibytes]:
                eaten = b"x" * (int(mebibytes) << 20)
            case ["deaf"]:  # to the record, too
                Path(f"/proc/{os.getpid()}/comm").write_text("deaf")
                time.sleep(600)
        tell(f"done {line}")
