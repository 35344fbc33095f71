"""What the whole-model receive of every rank costs: an all-gather against shards that go to the sending rank alone."""

import argparse
from pathlib import Path

import pytest
import torch

from bench.push import figures_of, run_ranks

pytestmark = pytest.mark.gpu


def test_all_gather_against_shards_to_the_sender(tmp_path: Path) -> None:
    """Two ranks and an engine: every rank receives the other's half in an all-gather, one of them otherwise."""
    found = torch.cuda.device_count()
    if found < 3:
        pytest.skip(f"needs 3 CUDA devices, this machine has {found}")
    args = argparse.Namespace(device="cuda", short=False, repetitions=5, bucket_mb=512)
    ranks = run_ranks(args, tmp_path)
    half = pytest.approx(ranks[0]["wire_mb"] / 2 * 2**20, rel=0.01)
    assert [rank["received_bytes"] for rank in ranks] == [
        {"exchange": half, "all-gather": half},
        {"exchange": 0, "all-gather": half},
    ]
    figures = figures_of(ranks)
    names = ("exchange", "all-gather", "own push by exchange", "own push")
    medians = {name: sorted(figures[name].values)[len(figures[name].values) // 2] for name in names}
    print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items()))
    # The sending rank receives as much in both: what the other one receives costs no time.
    assert medians["own push"] < 1.1 * medians["own push by exchange"]
