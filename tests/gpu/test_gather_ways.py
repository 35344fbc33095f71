"""What the whole-model receive of every rank costs: an all-gather against shards that go to the sending rank alone."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.requirements import rehearsed


@pytest.mark.gpus(3)
@pytest.mark.job
@pytest.mark.takes(120)
def test_gather_by_exchange_receives_shards_on_sender_only(
    tmp_path: Path, figure: Callable[[str, float, str], None]
) -> None:
    """Two ranks and an engine: every rank receives the other's half in an all-gather, one of them otherwise."""
    from bench.weight_sync import figures_of, run_ranks

    device = "cpu" if rehearsed() else "cuda"
    settings = {"repetitions": 2 if rehearsed() else 5, "bucket_mb": 512, "shards": "bfloat16"}
    args = argparse.Namespace(device=device, short=rehearsed(), **settings)
    ranks = run_ranks(args, tmp_path)
    half = pytest.approx(ranks[0]["wire_mb"] / 2 * 2**20, rel=0.25 if rehearsed() else 0.01)
    assert [rank["received_bytes"] for rank in ranks] == [
        {"exchange": half, "all-gather": half},
        {"exchange": 0, "all-gather": half},
    ]
    figures = figures_of(ranks)
    names = ("exchange", "all-gather", *(() if rehearsed() else ("own weight sync by exchange",)), "own weight sync")
    medians = {name: sorted(figures[name].values)[len(figures[name].values) // 2] for name in names}
    for name, seconds in medians.items():
        figure(name, seconds, "s")
    if not rehearsed():
        # The sending rank receives as much in both: about 1 where what the other one receives costs no time.
        figure(
            "own weight sync / own weight sync by exchange",
            medians["own weight sync"] / medians["own weight sync by exchange"],
            "",
        )
