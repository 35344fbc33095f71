"""A device that has run out of memory: in which phase, whose memory it is, and which settings lower it."""

import re
import traceback
from dataclasses import dataclass

from grpo.faults.device_memory import asked_bytes, device_in, idle_bytes, memory_in, read_memory
from grpo.faults.foreign import with_causes

_REST_OF_TORCHS = re.compile(r" GPU \d+ has a total capacity.*", re.DOTALL)


_ROWS = "halve per_device_train_batch_size and double gradient_accumulation_steps"
_STATES = "train on more ranks, or offload the optimizer as configs/4node_offload.yaml does"
_SAMPLING = "lower vllm_gpu_memory_utilization, or max_num_batched_tokens in vllm_engine_kwargs"
_OLD = f"{_ROWS}, or set old_logprobs to engine, which leaves this forward pass out"

PHASES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    # Name, `path:function` of a frame, what lowers it; the first of which there is a frame, inner phases first.
    ("a weight sync", re.compile(r"/grpo/weights/"), "lower vllm_sync_bucket_mb, or set vllm_sync_backend to shm"),
    ("a checkpoint", re.compile(r":(_save_checkpoint|save_model)$"), "set zero3_save_16bit_model to false"),
    ("a reward", re.compile(r"/grpo/rewards/|:_calculate_rewards$"), "score fewer rows at a time, or on a GPU apart"),
    ("the optimizer step", re.compile(r"/(deepspeed|optim)/.*:(step|initialize)$"), _STATES),
    ("the backward pass", re.compile(r":backward$"), f"{_ROWS}, or set attn_implementation to flash_attention_2"),
    ("sampling", re.compile(r"/vllm/.*:execute_model$"), _SAMPLING),
    ("an engine's start", re.compile(r"/vllm/"), "lower vllm_max_model_length, or raise vllm_tensor_parallel_size"),
    ("the old log-probabilities", re.compile(r":_generate_and_score_completions$"), _OLD),
    ("the forward pass", re.compile(r":compute_loss$"), f"{_ROWS}, or lower max_completion_length"),
    ("loading a model", re.compile(r":from_pretrained$"), f"{_STATES}; beta 0 needs no second model"),
)


def phase_of(error: BaseException) -> tuple[str, str]:
    """By the frames of an error and of what it was raised from: the phase, and what lowers it."""
    walked = (frame for each in with_causes(error) for frame, _ in traceback.walk_tb(each.__traceback__))
    frames = [f"{frame.f_code.co_filename}:{frame.f_code.co_name}" for frame in walked]
    found = ((name, lower) for name, of_frame, lower in PHASES if any(map(of_frame.search, frames)))
    return next(found, ("training", f"{_ROWS}, or {_STATES}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a device has run out of memory, for a person."""

    is_others: bool
    """Whether what was asked for would fit if other processes were gone."""
    text: str
    """The error's, without torch's figures where `lines` has them."""
    lines: list[str]
    """Figures where they are known, and advice."""


def explain(error: BaseException) -> Explanation:
    text = "\n".join(str(each) for each in with_causes(error))
    device, asked, shown, lines = device_in(text), asked_bytes(text), str(error), []
    memory = read_memory(device) or memory_in(text)
    if memory is not None:
        shown = _REST_OF_TORCHS.sub("", shown)
        figures = (
            f"device {device}, in GiB: asked for {_gib(asked)}, free {_gib(memory.free)} of {_gib(memory.total)}, "
        )
        lines.append(figures + f"held by this process {_gib(memory.own)}, by others {_gib(memory.others)}")
        if memory.is_short_of_others(asked):
            return Explanation(is_others=True, text=shown, lines=lines)
    (phase, lower), idle = phase_of(error), idle_bytes(text)
    if asked is not None and idle >= asked:
        lower = f"torch keeps {_gib(idle)} GiB in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True; or {lower}"
    lines.append(f"in {phase} [GRPO-631]: {lower}")
    lines.append("docs/out_of_memory.md has more for each phase, `grpo plan` with this job's files what each needs")
    return Explanation(is_others=False, text=shown, lines=lines)


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**30:.2f}"
