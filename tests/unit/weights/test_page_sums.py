"""The checksum of a tensor's bits, with sums worked out by hand; and what it shows."""

import random

import pytest
import torch

from grpo.weights.page_sums import PAGE_BYTES, ArrivedSums, fetched, page_sum

WORDS = PAGE_BYTES // 8


def paged(*pages: int) -> torch.Tensor:
    """A page for each number, which is its first word; of zeros else."""
    words = torch.zeros(len(pages), WORDS, dtype=torch.int64)
    words[:, 0] = torch.tensor(pages)
    return words.view(-1)


def test_page_sum_weighs_each_page_by_its_number() -> None:
    assert page_sum(paged(5, 7, 11)).item() == 1 * 5 + 2 * 7 + 3 * 11
    three_words = torch.tensor([13, 0, 1])  # the beginning of a page
    assert page_sum(torch.cat([paged(5, 7), three_words])).item() == 5 + 2 * 7 + 3 * 14
    assert page_sum(paged()).item() == 0


def test_page_sum_counts_trailing_bytes_and_tiny_tensors() -> None:
    assert page_sum(torch.tensor([1, 2, 3], dtype=torch.uint8)).item() == 1 + 2 * 2**8 + 3 * 2**16
    eleven = torch.tensor([4, *[0] * 7, 1, 0, 2], dtype=torch.uint8)
    assert page_sum(eleven).item() == 4 + 1 + 2 * 2**16
    assert page_sum(torch.tensor(-2, dtype=torch.int8)).item() == 254
    assert page_sum(torch.tensor(1.0, dtype=torch.bfloat16)).item() == 0x3F80


def test_page_sum_on_overflow_wraps_around() -> None:
    assert page_sum(torch.tensor([2**63 - 1, 1])).item() == -(2**63)
    assert page_sum(paged(0, 2**62)).item() == -(2**63)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_page_sum_is_independent_of_memory_offset(dtype: torch.dtype) -> None:
    memory = torch.randint(0, 255, (5 * PAGE_BYTES + 64,), dtype=torch.uint8)
    num_bytes = 4 * PAGE_BYTES + 3 * dtype.itemsize
    for begin in range(0, 17, dtype.itemsize):
        tensor = memory[begin : begin + num_bytes].view(dtype)
        assert page_sum(tensor) == page_sum(tensor.clone()), begin


def test_page_sum_of_misaligned_tensor_in_pieces_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.weights.page_sums._PIECE_BYTES", 2 * PAGE_BYTES)
    memory = torch.randint(0, 255, (5 * PAGE_BYTES + 64,), dtype=torch.uint8)
    assert page_sum(memory[2:]) == page_sum(memory[2:].clone())


def test_page_sum_detects_dropped_repeated_and_swapped_pages() -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    for trial in range(100):
        pages = torch.randn(draw.randint(2, 9), WORDS * 4).bfloat16()
        right = page_sum(pages)
        one, two = draw.sample(range(len(pages)), 2)
        stale = pages + 2e-2 * torch.randn(pages.shape)  # as of an earlier policy
        for kind, value in (("zero", 0), ("stale", stale[one].bfloat16()), ("repeated", pages[two])):
            wrong = pages.clone()
            wrong[one] = value
            assert page_sum(wrong) != right, (trial, kind)
        wrong = pages.clone()
        wrong[[one, two]] = pages[[two, one]]
        assert page_sum(wrong) != right, trial
        memory = torch.zeros(2 * pages.numel()).bfloat16()[3:]  # pages of memory need not be pages of the tensor
        flat = memory[: pages.numel()].copy_(pages.view(-1))
        apart = [slice(5 + at * WORDS * 4, 5 + (at + 1) * WORDS * 4 - 5) for at in (0, len(pages) - 1)]
        flat[apart[0]], flat[apart[1]] = flat[apart[1]].clone(), flat[apart[0]].clone()
        assert page_sum(flat) != right, trial


def test_fetched_returns_values_of_all_sums() -> None:
    sums = {"one": page_sum(torch.tensor([1])), "two": page_sum(paged(1, 1))}
    assert fetched(sums) == {"one": 1, "two": 3}
    assert fetched({}) == {}


# -- what arrives ----------------------------------------------------------------------------------------------------


def arrived(**tensors: torch.Tensor) -> tuple[ArrivedSums, dict[str, int]]:
    """What has come, and what was sent."""
    sums = ArrivedSums()
    for name, tensor in tensors.items():
        sums.arrive(name, tensor)
    return sums, fetched({name: page_sum(tensor) for name, tensor in tensors.items()})


def test_arrived_sums_accept_whole_partial_and_computed_loads() -> None:
    bucket = torch.arange(100)
    sums, sent = arrived(head=bucket[:10], fused=bucket[10:40], tail=bucket[40:])
    for weight in (bucket[:10], bucket[10:20], bucket[20:40], bucket[40:].view(6, 10)[:, 3:], 2 * bucket[:10]):
        sums.load(weight)
    assert sums.changed(sent) == []
    assert sums._loaded.keys() == {"head", "fused", "tail"}


def test_arrived_sums_after_write_before_load_name_tensor() -> None:
    bucket = torch.arange(100)
    sums, sent = arrived(head=bucket[:10], fused=bucket[10:40], tail=bucket[40:])
    bucket[39] = 0
    for weight in (bucket[:10], bucket[10:20], bucket[40:]):
        sums.load(weight)
    assert sums.changed(sent) == ["fused: its memory was used again between its arrival and its loading"]


@pytest.mark.parametrize("place", [slice(0, 10), slice(5, 12), slice(0, 40), slice(10, 11)])
def test_arrived_sums_after_overlapping_arrival_name_tensors(place: slice) -> None:
    bucket = torch.arange(100)
    sums, sent = arrived(head=bucket[:10], fused=bucket[10:40], tail=bucket[40:])
    is_hit = {"head": place.start < 10, "fused": place.stop > 10, "tail": False}
    sums.load(bucket[40:])
    sums.arrive("late", bucket[place])
    sums.load(bucket[place])
    assert sums.changed(sent) == [
        f"{name}: its memory was used again between its arrival and its loading" for name, hit in is_hit.items() if hit
    ]


def test_arrived_sums_ignore_reuse_of_freed_memory() -> None:
    sums, sent = ArrivedSums(), {}
    for number in range(50):
        tensor = torch.full((1000,), number)
        sums.arrive(str(number), tensor)
        sent |= fetched({str(number): page_sum(tensor)})
        del tensor
        sums.load(torch.full((1000,), -1))  # the model's own, which may stand where `tensor` did
    assert sums.changed(sent) == []


def test_arrived_sums_with_missing_tensor_name_it() -> None:
    sums, sent = arrived(head=torch.arange(10))
    assert sums.changed({**sent, "tail": 0}) == ["tail: other bits arrived than were sent"]
