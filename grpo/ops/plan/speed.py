"""Seconds of a step, estimated from the model's size and the lengths only, for advice on the number of inference GPUs.

The ratio of the two is the purpose, not the seconds: prefill and pauses are left out. `grpo report` measures a run.

- A batch takes as long as its longest completion, of the full length; the mean one has `MEAN_LENGTH` of it, and ranks
  train on the mean. With N >= 2 batches in flight, N steps pass until a batch is needed: later batches fill the slots
  of ended completions. A step then takes an Nth of the longest completion, or the time of the caches' slots for the
  tokens of a batch.

- To sample a token, the GPU reads the weights and the keys and values of all running sequences once, or computes 2
  operations per parameter and sequence, whichever takes longer (Pope et al., https://arxiv.org/abs/2211.05102, section
  2).
- A forward over a token of a sequence of s takes 2 operations per parameter and 2 s d in the attention of each layer,
  with d = heads x head size; half of the square is masked. A backward takes two passes, checkpointing one more
  (Narayanan et al., https://arxiv.org/abs/2104.04473, appendix). Old log-probabilities (without `old_logprobs: engine`)
  and those of the reference take one each. Frozen weights take one pass in a backward; the compute of adapters is not
  counted.
- A token computes the experts on its route. A step of sampling reads the experts of all its sequences' routes, as if
  all experts were equally likely.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo.ops import MOST_AHEAD
from grpo.ops.plan.engine_memory import EngineMemory
from grpo.ops.plan.placed_job import PlacedJob

WORTH_IT = 0.05  # of a step: below this, the difference is within the noise of an estimate
MEAN_LENGTH = 0.25  # of the longest completion; assumed, not measured
# achieved share of the peak rates; assumed, not measured
TRAINING_SHARE, READING_SHARE, SAMPLING_SHARE = 0.35, 0.6, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthAdvice:
    """Advice on generation batches in flight, with the number of inference GPUs for them, by estimate."""

    lookahead: int
    reserve: int
    step_s: float
    """Seconds of one generation batch: sampling or training, whichever takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAdvice:
    """Advice on the number of inference GPUs of each node, by estimate."""

    gpus_per_node: int
    reserved: int
    generate_s: float
    """Seconds to sample one generation batch, with `reserved` GPUs."""
    train_s: float
    """Seconds to train on it, with the others."""
    reserve: int
    """Better number of inference GPUs, or `reserved` again."""
    reserve_generate_s: float
    reserve_train_s: float
    overlapped: bool
    """True if engines sample while ranks train (`generation_lookahead`): then the longer of both counts."""
    deeper: DepthAdvice | None
    """Better depth with asynchronous generation; None if it would gain nothing."""

    @property
    def step_s(self) -> float:
        """Seconds of one generation batch, with `reserved` GPUs."""
        return self._together(self.generate_s, self.train_s)

    @property
    def reserve_step_s(self) -> float:
        """Seconds of one generation batch, with `reserve` GPUs."""
        return self._together(self.reserve_generate_s, self.reserve_train_s)

    def _together(self, generate: float, train: float) -> float:
        return max(generate, train) if self.overlapped else generate + train

    def line(self) -> str:
        """Summarize the advice in one line."""
        now = f"{length(self.generate_s)} of sampling {self._joint} {length(self.train_s)} of training a batch"
        also, deeper = "", self.deeper
        if deeper is not None:
            step = length(deeper.step_s)
            also = f"; with generation_lookahead {deeper.lookahead} reserve {deeper.reserve}: {step} a batch"
        if self.reserve == self.reserved:
            return f"reserve {self.reserved} of {self.gpus_per_node} GPUs, as it is: {now}{also}"
        then = f"{length(self.reserve_generate_s)} {self._joint} {length(self.reserve_train_s)}{also}"
        return (
            f"reserve {self.reserve} of {self.gpus_per_node} GPUs instead of {self.reserved}: {now} would become {then}"
        )

    @property
    def _joint(self) -> str:
        return "beside" if self.overlapped else "and then"


def advise(job: PlacedJob, engine: EngineMemory, fits: Callable[[int], bool]) -> SizeAdvice | None:
    """Advise on the number of inference GPUs; None without GPUs, with unlike nodes, or without memory for a sequence.

    Args:
        fits: returns True if the given number of ranks on each node holds the model.
    """
    node, tensor_parallel = job.nodes[0], job.args.vllm_tensor_parallel_size
    gpus, reserved = len(node.devices), len(node.reserved_devices)
    differ = len({(len(each.devices), each.local_world_size) for each in job.nodes}) > 1
    if not reserved or differ or not engine.sequences_at_once:
        return None
    ahead = job.args.generation_lookahead
    choices = [
        count for count in range(tensor_parallel, gpus, tensor_parallel) if count == reserved or fits(gpus - count)
    ]

    def parts(count: int, lookahead: int = ahead) -> tuple[float, float]:
        engines = count // tensor_parallel
        ranks = node.local_world_size if count == reserved else gpus - count  # some of them may stay idle
        return generate_s(job, engine, engines=engines, lookahead=lookahead), train_s(job, ranks=ranks)

    def step_s(count: int, lookahead: int = ahead) -> float:
        return max(parts(count, lookahead)) if lookahead else sum(parts(count))

    best = best_reserved(step_s, reserved=reserved, choices=choices)
    (now, now_train), (then, then_train) = parts(reserved), parts(best)
    return SizeAdvice(
        gpus_per_node=gpus,
        reserved=reserved,
        generate_s=now,
        train_s=now_train,
        reserve=best,
        reserve_generate_s=then,
        reserve_train_s=then_train,
        overlapped=bool(ahead),
        deeper=best_depth(step_s, now_s=step_s(best), choices=choices),
    )


def best_reserved(step_s: Callable[[int], float], *, reserved: int, choices: Sequence[int]) -> int:
    """Return the choice with the shortest step; `reserved` if it is as good within `WORTH_IT`.

    Args:
        step_s: returns the seconds of a step for a number of inference GPUs.
    """
    best = min(choices, key=step_s, default=reserved)
    return best if step_s(best) < step_s(reserved) * (1 - WORTH_IT) else reserved


def best_depth(step_s: Callable[[int, int], float], *, now_s: float, choices: Sequence[int]) -> DepthAdvice | None:
    """Return inference GPUs and batches in flight together: the fewest batches with about the shortest step; None if no
    step is shorter than `now_s` by `WORTH_IT`.

    Args:
        step_s: returns the seconds of a step for a number of inference GPUs and of batches in flight.
    """
    best_s = {ahead: min((step_s(count, ahead), count) for count in choices) for ahead in range(2, MOST_AHEAD + 1)}
    shortest_s, _ = min(best_s.values())
    if shortest_s >= now_s * (1 - WORTH_IT):
        return None
    lookahead = next(ahead for ahead, (seconds, _) in best_s.items() if seconds <= shortest_s * (1 + WORTH_IT))
    return DepthAdvice(lookahead=lookahead, reserve=best_s[lookahead][1], step_s=best_s[lookahead][0])


def generate_s(job: PlacedJob, engine: EngineMemory, *, engines: int, lookahead: int = 0) -> float:
    """Estimate the seconds to sample one generation batch of a node: shared over its engines, in waves of their KV
    caches."""
    under_way = lookahead * MEAN_LENGTH if lookahead > 1 else 1.0  # share of the batches' completions that still run
    completions = math.ceil(under_way * job.batch.node_samples[0] / engines)
    waves = math.ceil(completions / min(engine.sequences_at_once, engine.max_num_seqs))
    at_once = completions / waves
    sampled = min(job.args.max_completion_length, job.batch.sequence_tokens)
    mean_length = job.batch.sequence_tokens - sampled / 2
    weights = engine.weights_bytes * job.shape.parameters_read(at_once) / job.shape.engine_parameters
    read = weights + at_once * engine.kv_bytes_per_token * mean_length
    operations = 2 * job.shape.parameters_read(1) * at_once / job.args.vllm_tensor_parallel_size
    read_s = read / (job.hardware.tbps * 1e12 * READING_SHARE)
    compute_s = operations / (job.hardware.tflops * 1e12 * SAMPLING_SHARE)
    return waves * sampled * max(read_s, compute_s) / max(1, lookahead)


def train_s(job: PlacedJob, *, ranks: int) -> float:
    """Estimate the seconds to train on a node's completions of one generation batch: forward, backward,
    log-probabilities."""
    args, shape, longest = job.args, job.shape, job.batch.sequence_tokens
    tokens = longest - (1 - MEAN_LENGTH) * min(args.max_completion_length, longest)
    attention = 2 * shape.num_layers * shape.attention_heads * shape.head_dim * tokens
    passes = (3 + args.gradient_checkpointing) * args.num_iterations + (args.beta != 0)
    passes += args.old_logprobs == "trainer"
    of_weights = passes if job.lora is None else passes - args.num_iterations
    operations = job.batch.node_completions[0] * tokens
    operations *= of_weights * 2 * shape.parameters_read(1) + passes * attention
    return operations / (ranks * job.hardware.tflops * 1e12 * TRAINING_SHARE)


def length(seconds: float) -> str:
    """Format seconds: '172 s', '35 min', '0.3 s'."""
    if seconds < 0.1:
        return "less than 0.1 s"
    return f"{seconds:.{seconds < 9.5:d}f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
