"""Mistakes of placement, one after the other on the same ranks: each ends the trainer's start before any engine.

`refusals_job.py SETTINGS.json`: `model`, `config` for `GRPOConfig`, and `mistakes`, more settings by name. The first
one meets the launcher as it is, the others one whose request fits. Writes `<output_dir>/refused-<rank>.json`, what each
raised, and ends with what the last one raises.
"""

import json
import os
import sys
from pathlib import Path

from grpo import GRPOConfig, GRPOTrainer  # first: it imports what others import, in less time

# isort: split
from datasets import Dataset

from grpo.place import topology

settings = json.loads(Path(sys.argv[1]).read_text())
report = Path(settings["config"]["output_dir"]) / f"refused-{os.environ['RANK']}.json"
refused: dict[str, str] = {}
for name, mistake in settings["mistakes"].items():
    if refused:
        topology.parent_argv = lambda: []
    try:
        GRPOTrainer(
            model=settings["model"],
            reward_funcs=lambda completion_ids, **kwargs: [0.0 for _ in completion_ids],
            args=GRPOConfig(**{**settings["config"], **mistake}),
            train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 8}),
        )
    except Exception as error:
        refused[name] = f"{type(error).__name__}: {error}"
        report.write_text(json.dumps(refused))
        if len(refused) == len(settings["mistakes"]):
            raise
