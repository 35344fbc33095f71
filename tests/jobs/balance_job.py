"""`tiny_job.py` on two nodes that seem to differ in speed, so that prompts move from the first batch on.

Writes the moves of each batch to `<output_dir>/ranks/moves-<rank>.jsonl`.
"""

import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path

from grpo.rollout.balance import NodeBalance

settings = json.loads(Path(sys.argv[1]).read_text())
moves = Path(settings["config"]["output_dir"]) / "ranks" / f"moves-{os.environ['RANK']}.jsonl"
init, share_out = NodeBalance.__init__, NodeBalance.share_out


def seemingly_unequal(self, groups, engines, **how):
    init(self, groups, engines, **how)
    self._tokens_per_s = [500.0, 100.0]


def noted_share_out(self, requests, **owed):
    shares = share_out(self, requests, **owed)
    with moves.open("a") as lines:
        lines.write(json.dumps([dataclasses.asdict(move) for move in shares.moves]) + "\n")
    return shares


NodeBalance.__init__ = seemingly_unequal
NodeBalance.share_out = noted_share_out
NodeBalance.note = lambda self, tokens_per_s: None
runpy.run_path(str(Path(__file__).with_name("tiny_job.py")), run_name="__main__")
