"""`tiny_job.py` where a layer of node 1's engine stays behind from a step on, until everything has to be sent.

The settings' `stale`: part of the names of what stays behind, and that step. The first weight syncs are verified alone.
"""

import json
import runpy
import sys
from pathlib import Path

from grpo.weights import delivery
from grpo.weights.delivery import WeightDelivery
from grpo.weights.source import GatheredSource

part, first_step = json.loads(Path(sys.argv[1]).read_text())["stale"]
node = [0]
step = [0]
kept = {}
was_required = []
deliver, fill, require = WeightDelivery.deliver, GatheredSource.fill, WeightDelivery.require_full_sync


def noted_deliver(self, now):
    node[0], step[0] = self.groups.topology.node, now
    return deliver(self, now)


def stale_fill(self, bucket, places):
    fill(self, bucket, places)
    if places is None or node[0] != 1 or was_required:
        return
    for meta, place in zip(bucket.metas, places, strict=True):
        if part in meta.name:
            if step[0] <= first_step:
                kept[meta.name] = place.clone()
            place.copy_(kept[meta.name])


def noted_require(self):
    was_required.append(step[0])
    require(self)


WeightDelivery.deliver, WeightDelivery.require_full_sync = noted_deliver, noted_require
GatheredSource.fill = stale_fill
delivery.is_due = lambda number: number <= 10
runpy.run_path(str(Path(__file__).with_name("tiny_job.py")), run_name="__main__")
