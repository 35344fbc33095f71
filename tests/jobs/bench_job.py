"""Several benchmarks in their short form, one after the other in one process: what they import takes longer than they.

`python bench_job.py FOLDER NAME...`: writes `FOLDER/<name>.json` for each that works; a failed one fails the job, after
the others. Of `startup` one variant is started, the one whose script is the benchmark's own, and counts for both.
"""

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from bench import startup

folder, *names = sys.argv[1:]
launch = startup.launch
launched: list[startup.Launch] = []


def launch_once(command: list[str], where: Path) -> Any:
    if not launched:
        train, serial = str(startup.ROOT / "train.py"), str(startup.ROOT / "bench" / "serial_start.py")
        launched.append(launch([serial if word == train else word for word in command], where))
    return launched[0]


startup.launch = launch_once
failed = []
for name in names:
    arguments = ["--device", "cpu", "--short", "--output", f"{folder}/{name}.json"]
    sys.argv, sys.orig_argv = [f"bench.{name}", *arguments], [sys.executable, "-m", f"bench.{name}", *arguments]
    print(f"--- bench.{name}", flush=True)
    try:
        importlib.import_module(f"bench.{name}").main()
    except BaseException:  # noqa: BLE001  SystemExit too; the exit code says so
        traceback.print_exc()
        failed.append(name)
sys.exit(f"failed: {' '.join(failed)}" if failed else 0)
