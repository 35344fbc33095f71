"""GPUs of one node: recorded outputs of nvidia-smi, and what was asked for."""

import pytest
import torch

from grpo.ops.doctor import gpus
from grpo.ops.doctor.records import Status
from tests.support.doctored import examined

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL

# `nvidia-smi --query-gpu=index,uuid,driver_version,memory.used,memory.total --format=csv,noheader,nounits`, then
# `nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory` with the same format
SMI_GPUS = """\
0, GPU-11111111-aaaa-bbbb-cccc-000000000000, 570.124.06, 4, 81559
1, GPU-22222222-aaaa-bbbb-cccc-000000000000, 570.124.06, 71236, 81559
2, GPU-33333333-aaaa-bbbb-cccc-000000000000, 570.124.06, 2048, 81559
"""


SMI_PROCESSES = """\
GPU-22222222-aaaa-bbbb-cccc-000000000000, 41234, /usr/bin/python3, 71230
GPU-22222222-aaaa-bbbb-cccc-000000000000, 41235, server, with a comma, [N/A]
"""


def test_check_gpu_memory_names_holding_processes() -> None:
    found, processes = gpus.parse_gpus(SMI_GPUS), gpus.parse_processes(SMI_PROCESSES)
    assert [gpu.used_bytes >> 20 for gpu in found] == [4, 71236, 2048]
    full, some = gpus.check_gpu_memory(found, processes)
    assert (full.status, some.status) == (FAIL, WARN)
    assert "GPU 1: 69.6 of 79.6 GiB taken by pid 41234 /usr/bin/python3 (69.6 GiB)" in full.message
    assert full.message.endswith("pid 41235 server, with a comma")
    assert "cannot be seen from here" in some.message
    assert [finding.status for finding in gpus.check_gpu_memory(found[:1], processes)] == [PASS]
    assert gpus.check_gpu_memory([], {}) == []


@pytest.mark.parametrize(
    ("value", "indices"),
    [(None, [0, 1, 2]), ("1,2", [1, 2]), ("GPU-3333", [2]), ("", []), ("MIG-abc", [0, 1, 2])],
)
def test_visible_gpus_follow_cuda_visible_devices(value: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in gpus.visible_gpus(gpus.parse_gpus(SMI_GPUS), value)] == indices


def test_check_gpu_count_compares_seen_with_requested() -> None:
    found = gpus.parse_gpus(SMI_GPUS)

    def status(seen: int, asked: int | None, gpus_there: list) -> Status:
        return gpus.check_gpu_count(seen=seen, asked=asked, gpus=gpus_there).status

    assert status(3, 3, found) is PASS
    assert status(3, None, found) is PASS
    assert status(2, 3, found) is FAIL
    assert status(3, 2, found) is WARN
    assert status(1, None, found) is WARN
    assert status(0, None, found) is FAIL
    assert status(0, None, []) is PASS


def test_gpus_check_without_usable_gpu_fails_unless_use_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    none = examined({})["gpus"]
    assert none.status == FAIL
    assert none.message.endswith("(CUDA_VISIBLE_DEVICES is unset) [GRPO-101]")
    assert "--gres=gpu:8" in none.fix
    assert "--use_cpu" in none.fix
    with monkeypatch.context() as context:
        context.setattr(gpus, "query_gpus", lambda: pytest.fail("no GPU is asked for"))
        asked_for = examined({}, "--use_cpu")["gpus"]
    assert (asked_for.status, asked_for.message) == (PASS, "none: the job asks for CPUs (use_cpu)")
    slices = examined({"CUDA_VISIBLE_DEVICES": "MIG-1"})["gpus"]
    assert (slices.status, "(MIG)" in slices.message, "nvidia-smi -mig 0" in slices.fix) == (FAIL, True, True)
