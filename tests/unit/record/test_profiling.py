"""Shares of a profile, by hand and of real operators; the traces of the steps that were asked for."""

import json
from gzip import open as open_gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from transformers import TrainerControl, TrainerState

from grpo.record.profiling import ProfileSteps, shares
from grpo.record.screen import show_log


def event(name: str, begin: float, end: float, device: Any = DeviceType.CPU) -> SimpleNamespace:
    times = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, time_range=times, device_type=device, is_user_annotation=False)


def test_shares_with_gpu_count_kernels() -> None:
    found = shares(
        [
            event("aten::mm", 0, 100),  # queues, and waits
            event("gemm", 0, 40, DeviceType.CUDA),
            event("ncclDevKernel_AllGather_RING", 30, 60, DeviceType.CUDA),
            event("Memcpy DtoD", 90, 100, DeviceType.CUDA),
        ]
    )
    assert found == pytest.approx(
        {"profile/computation_share": 0.5, "profile/communication_share": 0.2, "profile/nothing_share": 0.3}
    )


def test_shares_on_cpu_count_collectives_as_communication() -> None:
    found = shares([event("wrapper", 0, 80), event("gloo:all_reduce", 20, 40), event("aten::mm", 90, 100)])
    assert found == pytest.approx(
        {"profile/computation_share": 0.7, "profile/communication_share": 0.2, "profile/nothing_share": 0.1}
    )
    assert shares([]) == {}


def test_profile_steps_traces_chosen_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    reported: dict[str, list[float]] = {}
    callback = ProfileSteps(range(2, 4), 3, reported)
    args: Any = SimpleNamespace(output_dir=str(tmp_path))
    state, control = TrainerState(), TrainerControl()
    for step in range(5):
        state.global_step = step
        callback.on_step_begin(args, state, control)
        torch.ones(100 + step, 64) @ torch.ones(64, 64)
        state.global_step += 1
        callback.on_step_end(args, state, control)
        assert bool(reported) == (step >= 2)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "rank3-steps2-3.json.gz"
    with open_gzip(trace) as file:
        names = [each.get("name") for each in json.load(file)["traceEvents"]]
    assert names.count("aten::matmul") == 2
    assert sum(share for (share,) in reported.values()) == pytest.approx(1.0)
    assert reported["profile/computation_share"][0] > 0
    assert "profile of rank 3, steps 2 to 3: computation" in capsys.readouterr().out


def test_profile_steps_at_early_train_end_writes_trace(tmp_path: Path) -> None:
    callback = ProfileSteps(range(1, 100), 0, {})
    args: Any = SimpleNamespace(output_dir=str(tmp_path))
    callback.on_step_begin(args, TrainerState(), TrainerControl())
    torch.ones(4, 4) @ torch.ones(4, 4)
    callback.on_train_end(args, TrainerState(), TrainerControl())
    assert [*(tmp_path / "profile").iterdir()]
