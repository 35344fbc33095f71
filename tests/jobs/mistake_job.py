"""A script without a trainer: writes what it was asked to FOLDER/<rank>.json, then does as it is reported.

mistake_job.py FOLDER [wait | fail]
"""

import json
import os
import signal
import sys
from pathlib import Path

import mistake_job_neighbour  # type: ignore[import-not-found]  # beside this script: its folder is where modules are found

folder, *behaviour = sys.argv[1:]
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
reported = {name: os.environ.get(name) for name in (*names, "GRPO_OUTPUT_DIR", "GRPO_RESUME", "GRPO_STARTED")}
reported |= {name: value for name, value in os.environ.items() if name.startswith(("PET_", "ACCELERATE_USE"))}
draft = Path(folder) / f".{reported['RANK']}"
draft.write_text(
    json.dumps({"argv": sys.argv, "name": __name__, "reported": reported, "neighbour": mistake_job_neighbour.HERE})
)
draft.rename(Path(folder) / f"{reported['RANK']}.json")
if behaviour == ["wait"]:
    signal.pause()
if behaviour == ["fail"]:
    raise KeyError("answer")
