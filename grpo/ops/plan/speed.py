"""Seconds of a step, estimated from the model's size and the lengths alone, for advice on how many GPUs to reserve.

It is meant for the relation of the two, not for the seconds: every completion counts at its full length, prompts' own
computation and the pauses between are left out. `grpo report` says better, of a run.

- Sampling a token reads the weights and the keys and values of all running sequences once, or computes 2 operations per
  parameter and sequence, whichever takes longer (Pope et al., https://arxiv.org/abs/2211.05102, section 2).
- A pass over a token of a sequence of s takes 2 operations per parameter and 2 s d in the attention of each layer, with
  d = heads x head size and half of the square is masked; a backward takes two passes, checkpointing one more (Narayanan
  et al., https://arxiv.org/abs/2104.04473, appendix), old log-probabilities (without `old_logprobs: engine`) and
  those of the reference one each. Frozen weights are passed once in a backward; what adapters compute is not counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo.ops.plan.engine_memory import EngineMemory
from grpo.ops.plan.placed_job import PlacedJob

WORTH_IT = 0.05  # of a step: less is within the noise of an estimate
TRAINING_SHARE, READING_SHARE, SAMPLING_SHARE = 0.35, 0.6, 0.5  # what of these is reached; assumed, not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAdvice:
    """How many GPUs of each node to reserve, by estimate."""

    gpus_per_node: int
    reserved: int
    generate_s: float
    """Of one generation batch, with `reserved` GPUs."""
    train_s: float
    """On it, with the others."""
    reserve: int
    """What would be better, or `reserved` again."""
    reserve_generate_s: float
    reserve_train_s: float
    overlapped: bool
    """Whether engines sample while ranks train (`generation_lookahead`): then the longer of both counts."""

    def line(self) -> str:
        """In one line for people."""
        now = f"{_length(self.generate_s)} of sampling {self._joint} {_length(self.train_s)} of training a batch"
        if self.reserve == self.reserved:
            return f"reserve {self.reserved} of {self.gpus_per_node} GPUs, as it is: {now}"
        then = f"{_length(self.reserve_generate_s)} {self._joint} {_length(self.reserve_train_s)}"
        return (
            f"reserve {self.reserve} of {self.gpus_per_node} GPUs instead of {self.reserved}: {now} would become {then}"
        )

    @property
    def _joint(self) -> str:
        return "beside" if self.overlapped else "and then"


def advise(job: PlacedJob, engine: EngineMemory) -> SizeAdvice | None:
    """None where there is nothing to weigh: no GPUs, nodes that differ, no room for a sequence."""
    node, tensor_parallel = job.nodes[0], job.args.vllm_tensor_parallel_size
    gpus, reserved = len(node.devices), len(node.reserved_devices)
    if not reserved or len({len(each.devices) for each in job.nodes}) > 1 or not engine.sequences_at_once:
        return None
    overlapped = bool(job.args.generation_lookahead)

    def parts(count: int) -> tuple[float, float]:
        return generate_s(job, engine, engines=count // tensor_parallel), train_s(job, ranks=gpus - count)

    def step_s(count: int) -> float:
        return max(parts(count)) if overlapped else sum(parts(count))

    best = best_reserved(step_s, reserved=reserved, choices=range(tensor_parallel, gpus, tensor_parallel))
    (now, now_train), (then, then_train) = parts(reserved), parts(best)
    return SizeAdvice(
        gpus_per_node=gpus,
        reserved=reserved,
        generate_s=now,
        train_s=now_train,
        reserve=best,
        reserve_generate_s=then,
        reserve_train_s=then_train,
        overlapped=overlapped,
    )


def best_reserved(step_s: Callable[[int], float], *, reserved: int, choices: Sequence[int]) -> int:
    """The choice with the shortest step; `reserved`, what is so now, where that is as good by `WORTH_IT`.

    Args:
        step_s: seconds of a step with so many GPUs reserved.
    """
    best = min(choices, key=step_s, default=reserved)
    return best if step_s(best) < step_s(reserved) * (1 - WORTH_IT) else reserved


def generate_s(job: PlacedJob, engine: EngineMemory, *, engines: int) -> float:
    """One generation batch of a node, shared out over its engines, in waves of what their caches hold."""
    completions = math.ceil(job.batch.node_completions / engines)
    waves = math.ceil(completions / min(engine.sequences_at_once, engine.max_num_seqs))
    at_once = completions / waves
    sampled = min(job.args.max_completion_length, job.batch.sequence_tokens)
    mean_length = job.batch.sequence_tokens - sampled / 2
    read = engine.weights_bytes + at_once * engine.kv_bytes_per_token * mean_length
    operations = 2 * job.shape.num_parameters * at_once / job.args.vllm_tensor_parallel_size
    read_s = read / (job.hardware.tbps * 1e12 * READING_SHARE)
    compute_s = operations / (job.hardware.tflops * 1e12 * SAMPLING_SHARE)
    return waves * sampled * max(read_s, compute_s)


def train_s(job: PlacedJob, *, ranks: int) -> float:
    """All of a node's completions of one generation batch, forward, backward and what else is computed for them."""
    args, shape, tokens = job.args, job.shape, job.batch.sequence_tokens
    attention = 2 * shape.num_layers * shape.attention_heads * shape.head_dim * tokens
    passes = (3 + args.gradient_checkpointing) * args.num_iterations + (args.beta != 0)
    passes += args.old_logprobs == "trainer"
    of_weights = passes if job.lora is None else passes - args.num_iterations
    operations = job.batch.node_completions * tokens
    operations *= of_weights * 2 * shape.num_parameters + passes * attention
    return operations / (ranks * job.hardware.tflops * 1e12 * TRAINING_SHARE)


def _length(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
