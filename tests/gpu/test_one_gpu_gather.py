"""Shards of 28 ranks put together and cast, as after an all-gather; torch alone."""

import time
from collections.abc import Callable

import pytest
import torch

from grpo.weights.gather import put_rows

RANKS = 28
SIZES = (1, 27, 28, 29, 1000, 3584 * 7 + 3, 1_000_003)  # most of them do not divide
WHOLE_GB = 15.2  # a model of 7.6 B parameters in bf16


def shards_of(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """As DeepSpeed partitions: [ranks, ceil(N / ranks)], with something else than zeros behind the last element."""
    shard = -(-whole.numel() // ranks)
    padded = torch.full((ranks * shard,), float("nan"), dtype=whole.dtype, device=whole.device)
    padded[: whole.numel()] = whole
    return padded.view(ranks, shard)


@pytest.mark.parametrize(
    ("held", "wire"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=["float32-bf16", "bf16-bf16"],
)
def test_put_rows_of_28_ranks_restores_parameters(held: torch.dtype, wire: torch.dtype, device: torch.device) -> None:
    """A bucket of several parameters, gathered together: a parameter's rows are columns of what arrived."""
    torch.manual_seed(0)
    wholes = [torch.randn(size, device=device).to(held) for size in SIZES]
    received = torch.cat([shards_of(whole, RANKS) for whole in wholes], dim=1)
    begin = 0
    for whole in wholes:
        shard = -(-whole.numel() // RANKS)
        rows = received[:, begin : begin + shard]
        begin += shard
        at_once = torch.full((whole.numel() + 2,), -1.0, dtype=wire, device=device)
        put_rows(at_once[1:-1], rows, 0)
        in_parts = at_once.clone().fill_(-1.0)
        for first, last in ((0, 9), (9, 10), (10, RANKS)):  # as over gloo, where a rank's own shard stays where it is
            put_rows(in_parts[1:-1], rows[first:last], first)
        for place in (at_once, in_parts):
            assert torch.equal(place[1:-1], whole.to(wire)), whole.numel()
            assert (place[0].item(), place[-1].item()) == (-1.0, -1.0), "written beside its place"


@pytest.mark.gpus(1)
def test_put_rows_of_15_gb_measures_time(figure: Callable[[str, float, str], None]) -> None:
    """A model of 7.6 B parameters, bucket by bucket as in a weight sync: 512 MiB of bf16 out of what 28 ranks have
    sent."""
    bucket = 2**28 + 1  # elements; does not divide
    shard = -(-bucket // RANKS)
    place = torch.empty(bucket, dtype=torch.bfloat16, device="cuda")
    for name, dtype in (("bf16 shards", torch.bfloat16), ("float32 shards, cast", torch.float32)):
        rows = torch.ones(RANKS, shard, dtype=dtype, device="cuda")
        put_rows(place, rows, 0)  # what is done once
        torch.cuda.synchronize()
        repetitions = round(WHOLE_GB * 1e9 / place.nbytes)
        begun = time.perf_counter()
        for _ in range(repetitions):
            put_rows(place, rows, 0)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        assert bool((place == 1).all())
        figure(f"{name}: 15.2 GB", seconds, "s")
        figure(name, repetitions * place.nbytes / seconds / 1e9, "GB/s")
        del rows
