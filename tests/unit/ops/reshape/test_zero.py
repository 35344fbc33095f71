"""DeepSpeed's files for other ranks, from files made by hand; real ones: `multiprocess/test_export.py`."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.checkpoints.pickles import load_mapped
from grpo.ops.reshape.zero import reshape_zero

SHAPES = {"a": torch.Size([5]), "b": torch.Size([2, 2]), "c": torch.Size([3])}
VALUES = {"a": torch.arange(1.0, 6), "b": torch.arange(10.0, 14), "c": torch.arange(20.0, 23)}
FROZEN = torch.arange(30.0, 37)
# Weight decay for a and b, which are two sub-groups of four elements a rank and more; none for c.
ZERO3_GROUPS = [["a", "b"], ["c"]]


def part(series: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """ZeRO-3's: equal parts, the last one filled up with zeros."""
    size = -(-len(series) // ranks)
    return torch.cat([series, torch.zeros(size * ranks - len(series))])[rank * size : (rank + 1) * size]


def write_zero3(folder: Path) -> None:
    """Of two ranks, with sub-groups [a, b] (3 + 2 of a rank) and [c]."""
    folder.mkdir(parents=True)
    for rank in (0, 1):
        masters = [torch.cat([part(VALUES[name], rank, 2) for name in group]) for group in ZERO3_GROUPS]
        state = {n: {"step": torch.tensor(4.0), "exp_avg": flat + 100} for n, flat in enumerate(masters)}
        groups = [{"lr": 0.1, "weight_decay": 0.1, "params": [0]}, {"lr": 0.1, "weight_decay": 0.0, "params": [1]}]
        zero = {
            "zero_stage": 3,
            "partition_count": 2,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": masters,
        }
        settings = {"zero_optimization": {"stage": 3, "sub_group_size": 4}}
        write(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", zero, ds_config=settings)
        model = {
            "module": {name: torch.empty(0) for name in SHAPES},
            "param_shapes": [OrderedDict((name, SHAPES[name]) for name in group) for group in ZERO3_GROUPS],
            "frozen_param_shapes": {"f": torch.Size([7])},
            "frozen_param_fragments": {"f": part(FROZEN, rank, 2)},
            "dp_world_size": 2,
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def write(path: Path, zero: dict[str, Any], *, ds_config: dict) -> None:
    torch.save({"optimizer_state_dict": zero, "ds_config": ds_config, "ds_version": "0.19.8"}, path)


def write_zero2(folder: Path) -> None:
    """Of two ranks: a and b in a flat group of 9 elements and 3 of padding, c in one of 3 and 1."""
    folder.mkdir(parents=True)
    flats = [torch.cat([VALUES["a"], VALUES["b"], torch.zeros(3)]), torch.cat([VALUES["c"], torch.zeros(1)])]
    for rank in (0, 1):
        mine = [flat.chunk(2)[rank] for flat in flats]
        paddings = [3 * rank, 1 * rank]
        zero = {
            "zero_stage": 2,
            "partition_count": [2, 2],
            "group_paddings": paddings,
            "base_optimizer_state": {
                "state": {n: {"step": torch.tensor(4.0), "exp_avg": flat.clone()} for n, flat in enumerate(mine)},
                "param_groups": [{"params": [0]}, {"params": [1]}],
            },
            "single_partition_of_fp32_groups": [
                flat[: len(flat) - padding].clone() for flat, padding in zip(mine, paddings, strict=True)
            ],
            "param_slice_mappings": [],
        }
        settings = {"zero_optimization": {"stage": 2}}
        write(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", zero, ds_config=settings)
    shapes = [OrderedDict(a=SHAPES["a"], b=SHAPES["b"]), OrderedDict(c=SHAPES["c"])]
    torch.save({"module": VALUES, "param_shapes": shapes, "dp_world_size": 2}, folder / "mp_rank_00_model_states.pt")


def test_reshape_zero_of_zero3_matches_partitions_by_hand(tmp_path: Path) -> None:
    write_zero3(tmp_path / "before")
    reshape_zero(tmp_path / "before", tmp_path / "after", before=2, ranks=3)
    assert len(list((tmp_path / "after").iterdir())) == 6
    file = load_mapped(tmp_path / "after" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    zero = file["optimizer_state_dict"]
    # of a: elements 2 and 3; of b: the third and nothing more in a part of two; of c: the second
    assert [flat.tolist() for flat in zero["fp32_flat_groups"]] == [[3, 4, 12, 13], [21]]
    inner = zero["optimizer_state_dict"]
    assert inner["state"][0]["exp_avg"].tolist() == [103, 104, 112, 113]
    assert inner["state"][1]["exp_avg"].tolist() == [121]
    assert inner["state"][0]["step"] == 4
    assert [(group["params"], group["weight_decay"]) for group in inner["param_groups"]] == [([0], 0.1), ([1], 0.0)]
    assert (zero["partition_count"], file["ds_version"]) == (3, "0.19.8")
    last = load_mapped(tmp_path / "after" / "zero_pp_rank_2_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert [flat.tolist() for flat in last["fp32_flat_groups"]] == [[5, 0, 0, 0], [22]]
    model = load_mapped(tmp_path / "after" / "zero_pp_rank_2_mp_rank_00_model_states.pt")
    assert model["dp_world_size"] == 3
    assert model["frozen_param_fragments"]["f"].tolist() == [36, 0, 0]
    reshape_zero(tmp_path / "before", tmp_path / "alone", before=2, ranks=1)
    alone = load_mapped(tmp_path / "alone" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    # five elements fill a sub-group of four
    assert [flat.tolist() for flat in alone["fp32_flat_groups"]] == [VALUES[name].tolist() for name in "abc"]
    assert [group["params"] for group in alone["optimizer_state_dict"]["param_groups"]] == [[0, 1], [2]]
    steps = [state["step"] for state in alone["optimizer_state_dict"]["state"].values()]
    for step in steps:
        step += 1  # as the optimizer does, one sub-group after the other
    assert steps == [5, 5, 5]


def test_reshape_zero_of_zero2_matches_partitions_by_hand(tmp_path: Path) -> None:
    write_zero2(tmp_path / "before")
    reshape_zero(tmp_path / "before", tmp_path / "after", before=2, ranks=3)
    names = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)}
    assert {path.name for path in (tmp_path / "after").iterdir()} == {*names, "mp_rank_00_model_states.pt"}
    files = [load_mapped(tmp_path / "after" / name)["optimizer_state_dict"] for name in sorted(names)]
    # 9 and 3 elements in parts of 4 and 2
    masters = [[flat.tolist() for flat in zero["single_partition_of_fp32_groups"]] for zero in files]
    assert masters == [[[1, 2, 3, 4], [20, 21]], [[5, 10, 11, 12], [22]], [[13], []]]
    assert [zero["group_paddings"] for zero in files] == [[0, 0], [0, 1], [3, 2]]
    assert files[2]["base_optimizer_state"]["state"][0]["exp_avg"].tolist() == [13, 0, 0, 0]
    assert files[0]["partition_count"] == [3, 3]
    address = files[1]["param_slice_mappings"][0]
    assert {name: (each.numel, each.start) for name, each in address.items()} == {"a": (1, 0), "b": (3, 1)}
    assert load_mapped(tmp_path / "after" / "mp_rank_00_model_states.pt")["dp_world_size"] == 3


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = torch.load(folder / name, weights_only=False)
        change(file)
        torch.save(file, folder / name)

    return edit


OPTIM_3 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIM_2 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
REFUSED: dict[str, tuple[Callable, Callable[[Path], object], str]] = {
    "a rank is missing": (
        write_zero3,
        lambda folder: (folder / OPTIM_3).unlink(),
        r"has not one optimizer file of each of 2 ranks, but: zero_pp_rank_1_mp_rank_00_optim_states\.pt$",
    ),
    "tensor parallel": (
        write_zero3,
        lambda folder: (folder / OPTIM_3).rename(folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        r"has not one optimizer file of each of 2 ranks",
    ),
    "nvme": (write_zero3, lambda folder: (folder / "offloaded_tensors").mkdir(), "offloaded to NVMe"),
    "other parts": (
        write_zero3,
        edited(OPTIM_3, lambda file: file["optimizer_state_dict"].update(fp32_flat_groups=[torch.ones(4)] * 2)),
        r"sub-group 0 has not the 5 elements",
    ),
    "other sub-groups": (
        write_zero3,
        edited(OPTIM_3, lambda file: file["ds_config"]["zero_optimization"].update(sub_group_size=3)),
        r"sub-groups are not formed as DeepSpeed 0\.19 does with sub_group_size 3",
    ),
    "whole beside its parts": (
        write_zero3,
        edited(MODEL_3, lambda file: file["module"].update(b=torch.ones(4))),
        r"b is whole beside its parts",
    ),
    "another optimizer": (
        write_zero3,
        edited(
            OPTIM_3,
            lambda file: file["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].update(rows=torch.ones(3)),
        ),
        r"optimizer's state 'rows' has 3 elements for 5 of weights",
    ),
    "elastic": (
        write_zero2,
        edited(OPTIM_2, lambda file: file["optimizer_state_dict"].update(base_optimizer_state=[])),
        "elastic_checkpoint",
    ),
    "round robin": (
        write_zero2,
        edited(OPTIM_2, lambda file: file["ds_config"]["zero_optimization"].update(round_robin_gradients=True)),
        "round_robin_gradients: its order belongs to 2 ranks",
    ),
    "other padding": (
        write_zero2,
        edited(OPTIM_2, lambda file: file["optimizer_state_dict"].update(group_paddings=[1, 0])),
        r"rank 0 holds \[6, 2\] elements of its groups, and \[1, 0\] of padding, not \[6, 2\] and \[0, 0\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_reshape_zero_of_unsupported_files_raises(case: str, tmp_path: Path) -> None:
    make, spoil, words = REFUSED[case]
    make(tmp_path / "before")
    spoil(tmp_path / "before")
    with pytest.raises(ValueError, match=words):
        reshape_zero(tmp_path / "before", tmp_path / "after", before=2, ranks=3)
