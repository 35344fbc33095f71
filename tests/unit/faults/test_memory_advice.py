"""What is said of a device that is full: the phase by the traceback, whose memory it is, and what lowers it."""

import pytest
import torch

from grpo.faults import device_memory
from grpo.faults.device_memory import PHASES, explain, phase_of
from grpo.faults.failure import FailureKind
from grpo.faults.kinds import kind_of, text_of
from tests.support.launching import ROOT

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has {} GiB memory in use. Of the allocated memory 70.00 GiB is "
    "allocated by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "read_memory", lambda device: None)


def raised_in(*frames: str, text: str = FULL.format("79.00", "0.50")) -> torch.OutOfMemoryError:
    """Through functions of these files, `path:function`, the outermost first."""
    names: dict[str, object] = {"error": torch.OutOfMemoryError(text)}
    call = "raise error"
    for frame in reversed(frames):
        path, _, function = frame.rpartition(":")
        exec(compile(f"def {function}():\n    {call}", path, "exec"), names)
        call = f"{function}()"
    with pytest.raises(torch.OutOfMemoryError) as found:
        exec(compile(call, "script.py", "exec"), names)
    return found.value


TRL, DEEPSPEED, VLLM = "/lib/trl/grpo_trainer.py", "/lib/deepspeed/engine.py", "/lib/vllm/v1/worker.py"


@pytest.mark.parametrize(
    ("frames", "name", "setting"),
    [
        ([f"{TRL}:_generate_and_score_completions"], "the old log-probabilities", "old_logprobs to engine"),
        ([f"{TRL}:training_step", f"{TRL}:compute_loss"], "the forward pass", "max_completion_length"),
        (["/lib/accelerate/deepspeed.py:backward"], "the backward pass", "flash_attention_2"),
        (["/lib/accelerate/deepspeed.py:backward", f"{DEEPSPEED}:step"], "the optimizer step", "4node_offload.yaml"),
        (["/lib/torch/optim/adamw.py:step"], "the optimizer step", "4node_offload.yaml"),
        (["/lib/torch/lr_scheduler.py:step"], "training", "per_device_train_batch_size"),
        (
            [f"{TRL}:_generate_and_score_completions", "/x/grpo/weights/sync.py:run"],
            "a weight sync",
            "vllm_sync_bucket_mb",
        ),
        ([f"{TRL}:_save_checkpoint"], "a checkpoint", "zero3_save_16bit_model"),
        ([f"{VLLM}:determine_available_memory"], "an engine's start", "vllm_max_model_length"),
        ([f"{VLLM}:execute_model"], "sampling", "vllm_gpu_memory_utilization"),
        (["/lib/transformers/modeling_utils.py:from_pretrained"], "loading a model", "beta 0"),
        ([], "training", "per_device_train_batch_size"),
    ],
)
def test_oom_text_names_phase_and_setting(frames: list[str], name: str, setting: str) -> None:
    error = raised_in(*frames)
    assert phase_of(error)[0] == name
    reported = text_of(error).splitlines()
    assert reported[0] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert reported[1].endswith("asked for 2.00, free 1.00 of 80.00, held by this process 79.00, by others 0.00")
    assert reported[2].startswith(f"in {name} [GRPO-631]: ")
    assert setting in reported[2]
    assert "grpo plan" in reported[3]
    assert kind_of(error) is FailureKind.MEMORY


def test_explain_oom_with_memory_of_others_gives_no_advice() -> None:
    found = explain(torch.OutOfMemoryError(FULL.format("39.00", "0.50")))
    assert found.is_others
    assert found.lines == [
        "device 0, in GiB: asked for 2.00, free 1.00 of 80.00, held by this process 39.00, by others 40.00"
    ]


def test_oom_text_without_process_memory_keeps_torch_message() -> None:
    """In a container: torch writes the largest number that there is."""
    error = torch.OutOfMemoryError(FULL.format("17179869184.00", "3.00"))
    assert text_of(error).startswith(
        f"OutOfMemoryError: {error}\nin training [GRPO-631]: torch keeps 3.00 GiB in pieces"
    )


def test_out_of_memory_page_lists_every_phase() -> None:
    page = (ROOT / "docs" / "out_of_memory.md").read_text()
    assert all(f"\n| {name} | " in page for name, _, _ in PHASES)
