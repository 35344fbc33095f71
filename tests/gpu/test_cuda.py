"""What only CUDA devices can show. Run on a GPU machine: `python -m pytest tests/gpu`.

Without enough devices each test says what it needs and passes nothing off as tested: it is reported as skipped, with
the reason in pytest's summary.
"""

from pathlib import Path

import pytest
import torch

from tests.launching import BIN, ROOT, free_port, start, tiny_job_script
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.gpu


def needs(count: int) -> None:
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} CUDA devices, this machine has {found}")


def run(model: Path, out: Path, *, ranks: int, config: dict) -> list[dict]:
    script = tiny_job_script(model, out, config={"use_cpu": False, "bf16": True, **config})
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(ROOT / "configs" / "1node.yaml")]
    command += ["--num_processes", str(ranks), "--main_process_port", str(free_port()), *script]
    job = start(lambda _: command, out)
    try:
        codes = job.wait(600)
        assert codes == [0], job.fail(f"launchers exited {codes}")
        return job.metrics()
    finally:
        job.end()


@pytest.mark.parametrize("backend", ["nccl", "shm"])
def test_one_gpu_trains_and_one_generates(backend: str, tmp_path: Path) -> None:
    needs(2)
    model = save_tiny_model("qwen3-tied", tmp_path / "model")
    config = {"vllm_reserved_gpus": 1, "vllm_sync_backend": backend, "vllm_gpu_memory_utilization": 0.2}
    config["vllm_sync_bucket_mb"] = 1  # several buckets, so that packed buffers are used again
    steps = run(model, tmp_path / "out", ranks=1, config=config)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["push/logprob_gap_mean"] for line in steps) < 0.15


def test_two_engines_and_two_ranks_over_nccl(tmp_path: Path) -> None:
    needs(4)
    model = save_tiny_model("llama-untied", tmp_path / "model")
    config = {"vllm_reserved_gpus": 2, "vllm_gpu_memory_utilization": 0.2}
    assert len(run(model, tmp_path / "out", ranks=2, config=config)) == 3


def test_tensor_parallel_2_over_nccl(tmp_path: Path) -> None:
    needs(4)
    model = save_tiny_model("phi3-fused", tmp_path / "model")
    config = {"vllm_reserved_gpus": 2, "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.2}
    assert len(run(model, tmp_path / "out", ranks=2, config=config)) == 3
