"""One rank of `bench.weight_sync`, started by torchrun: `python -m bench.weight_sync_job SETTINGS.json`; writes
`<rank>.json`."""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed

from bench.weight_sync_lora import LoraRanks
from bench.weight_sync_ranks import ExpertRanks, Ranks
from grpo.place.patches.deepspeed import leave_out_shared_memory_op


def measured(ranks: Ranks | ExpertRanks) -> dict[str, Any]:
    try:
        return ranks.measure()
    finally:
        ranks.syncer.close()
        if ranks.client is not None:
            ranks.client.close()


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    leave_out_shared_memory_op()
    deepspeed.init_distributed(dist_backend="nccl" if settings["device"] == "cuda" else "gloo")
    ranks = Ranks(settings)
    found = measured(ranks)
    found["experts"] = measured(ExpertRanks(settings))
    found["lora"] = measured(LoraRanks(settings))
    (Path(settings["folder"]) / f"{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
