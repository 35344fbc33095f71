"""`GRPOConfig`: TRL's options, plus those for engines, weight syncs and timeouts."""

import logging
import math
import os
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
import trl

from grpo.config.checks import accumulation_of, check_counts, check_local, check_placement, check_trackers
from grpo.config.documented import documented
from grpo.config.options import (
    EvaluationConfig,
    GroupConfig,
    MultiTurnConfig,
    RecordingConfig,
    check_evaluating,
    check_groups,
    check_multi_turn,
    check_recording,
    own_log_level,
)
from grpo.groups.process_groups import make_world_group
from grpo.place.devices import count_gpus
from grpo.place.files import is_on
from grpo.place.launch import asks_for_cpu, check_is_for_cpus, either, multiples_around, parent_argv, read_launch
from grpo.place.log import check_log_variable
from grpo.place.patches.deepspeed import leave_out_shared_memory_op
from grpo.record.screen import show_log

LOCAL_GPU_MEMORY_UTILIZATION = 0.9
_log = logging.getLogger(__name__)


@documented
@dataclass
class GRPOConfig(MultiTurnConfig, EvaluationConfig, GroupConfig, RecordingConfig, trl.GRPOConfig):
    """TRL's `GRPOConfig` with `use_vllm` on and `vllm_mode="local"`: every node hosts its own engines.

    `vllm_mode` `"server"` and `"colocate"`, and `use_vllm=False`, are passed to TRL unchanged.
    """

    use_vllm: bool = True
    """Whether to generate with vLLM. On by default here, off in TRL."""
    vllm_mode: str = "local"
    """'local': every node's local main process hosts vLLM engines on the node's inference GPUs. 'server' and 'colocate'
    are TRL's own modes."""
    vllm_gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that an engine takes. None: 0.9 in local mode, where the engine has its GPUs to itself,
    and TRL's 0.3 in colocate mode. Without GPUs the KV cache is sized by kv_cache_memory_bytes in vllm_engine_kwargs
    instead."""
    vllm_reserved_gpus: int | None = None
    """How many GPUs of each node, the last ones, are reserved for engines. None: all on which no rank trains; may then
    differ from node to node."""
    vllm_engines_per_node: int | None = None
    """Engines of a node without GPUs, where nothing is reserved; None means one."""
    vllm_balance_nodes: bool | None = None
    """Whether prompts move from slow nodes to fast ones, in proportion to the tokens/s of their engines and less what
    they still owe of earlier batches, so that a step does not wait for the slowest. None: with generation_lookahead of
    2 or more; and where nodes have not the same number of ranks to an engine, in proportion to their engines alone. No
    effect on one node."""
    vllm_sync_backend: str = "auto"
    """How weights reach the engines: 'nccl', 'shm' (shared memory), or 'auto': nccl with GPUs."""
    vllm_sync_bucket_mb: int = 512
    """Upper size in MB of what is gathered at a time; a larger single parameter still goes."""
    vllm_lora: str = "auto"
    """How LoRA adapters reach the engines: 'adapter' (the base once, then adapters alone), 'merge' (inside of the
    weights that are synced), or 'auto': by themselves where vLLM can hold them."""
    generation_lookahead: int = 0
    """Generation batches that the engines sample while the ranks still train on earlier ones: 0 is on-policy; with 1
    engines and ranks work at the same time, and completions are one weight sync older when they are trained on, which
    importance sampling corrects. With N of 2 or more, N batches are under way and weights reach engines that go on
    sampling: a step waits less for the longest completions, which are up to N weight syncs old."""
    old_logprobs: str = "trainer"
    """Whose log-probabilities the loss takes for those of the policy that has sampled. 'trainer': what the trainer
    computes of each generation batch before it is trained on; importance sampling corrects for how far the engines are
    from that. 'engine': those that came with the samples; PPO's clip bounds how far the policy goes from the one that
    has sampled, old batches included, the forward pass before training is left out, and vllm_importance_sampling_* have
    no effect."""
    freeze_towers: bool = False
    """Whether vision towers and their projectors stay as they are where prompts come with images. With text alone they
    always do, and with LoRA, which leaves them out."""
    trim_padding: bool = True
    """Compute each micro-batch only as wide as its rows, and deal the rows of an optimizer step out to its
    micro-batches by length, longest first. False: as TRL does, all as wide as the longest row of the generation batch,
    in random order. Rows keep that order where the loss depends on it: loss_type 'bnpo', entropy_coef,
    top_entropy_quantile below 1, router_aux_loss_coef, a subclass's own _compute_loss."""
    completions_per_step: int | None = None
    """Completions per optimizer step, over all ranks and whatever their number: gradient_accumulation_steps follows
    from it. None: per_device_train_batch_size x gradient_accumulation_steps x ranks."""
    vllm_importance_sampling_mode: str | None = None
    """As in TRL: 'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'. None: TRL's 'sequence_mask',
    and 'token_truncate' for loss_type 'vespo', which needs it, and with generation_lookahead, where the ratio of a
    whole long sequence leaves its bounds almost always; 'sequence_*' are refused with 2 or more."""
    vllm_engine_kwargs: dict[str, Any] | str | None = None
    """Passed to vLLM's engine as they are (a JSON object on the command line). A key that another setting decides, or
    that would make the engine another policy, is refused by name."""
    vllm_max_logprob_gap: float | None = None
    """Limit of the gap between engine and trainer log-probabilities, in nats, when a weight sync is verified, and of
    its mean over a batch's tokens on each node; beyond it the job ends. None: by the engine's dtype, and for batches
    none. The first gap sets a tighter limit for later weight syncs: beyond that one the whole model is sent once more,
    and if it does not help, a warning follows."""
    check_rewards: bool = True
    """Whether every reward function is called once before anything is loaded, on rank 0, with made-up completions of
    the data set's first row, so that a mistake in it shows at once; and whether those that run beside the main thread
    are called on one group of the first batch in both, which have to answer alike. Set it to False for functions whose
    calls have effects, or need what is there only in training."""
    vllm_max_restarts: int = 3
    """How often in an hour an engine that dies, or is stuck, is started again; it gets the weights, and its requests
    are sampled again. Deaths in the search for a prompt of which engines die do not count. At the next death, and with
    0 at the first, the last finished step is saved and the job ends."""
    vllm_standby: bool = False
    """Whether each node keeps a process ready that has imported vLLM, for an engine that has to be started again:
    seconds for about 1 GB of memory."""
    vllm_max_refused: int = 128
    """How many completions may be left out of training because no engine takes their prompts, which are longer than
    vllm_max_model_length, say, or because engines die of them; with more the job ends."""
    vllm_start_timeout: float = 1800.0
    """Seconds that an engine may take from its start until it is ready: a guard against one that hangs. Of one that is
    late what it has compiled is kept, so that the next start is shorter."""
    vllm_stall_timeout: float | None = None
    """Seconds without the end of a step after which an engine that has completions to sample is ended as stuck, and
    started again; always ten times its slowest step so far where that is longer. None: 120, and 600 on CPUs and in the
    first generation batch of an engine, which compiles."""
    vllm_generate_timeout: float = 3600.0
    """Seconds that one generation batch may take."""
    vllm_sync_timeout: float = 600.0
    """Seconds that one step of a weight sync may take."""

    reward_timeout: float = 600.0
    """Seconds that a reward function may take for one batch of a rank; then the job ends, and its failure shows where
    the function is."""
    overlap_rewards: bool = True
    """Run reward functions in a thread while the trainer computes log-probabilities; False for functions that speak to
    other ranks or use the trained model. One that only the main thread may call is found out and called there without
    this."""
    start_timeout: float = 1800.0
    """Seconds that processes of the job may come one after the other before the first step: into the trainer, to the
    node's watch, into process groups. After 60 s a line a minute says who is waited for."""
    rank_stall_timeout: float = 600.0
    """Seconds that a training process may be stuck in training while the others wait for it, until the job ends with a
    failure that names it; after 60 s, or five steps' time, a warning has its stacks. Before the first step
    start_timeout, where that is longer. Generation, rewards and weight syncs have deadlines of their own, and saves and
    evaluations take as long as they take. A folder of the run that takes no write ends the job, too, 20 s before."""
    heartbeat_timeout: float = 20.0
    """Seconds that a node may be silent, or that a training process or a launcher may be stopped (SIGSTOP), until the
    job ends with a failure that names it; 5 or more."""

    _VALID_DICT_FIELDS = [*trl.GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs", "eval_sets"]  # noqa: RUF012  as in TRL

    @property
    def local_mode(self) -> bool:
        """True if this project's engines generate."""
        return self.use_vllm and self.vllm_mode == "local"

    @property
    def balances_nodes(self) -> bool:
        """`vllm_balance_nodes`, resolved: with fewer than two batches ahead, balancing would follow random
        variation."""
        return self.generation_lookahead >= 2 if self.vllm_balance_nodes is None else self.vllm_balance_nodes

    @property
    def num_ranks(self) -> int:
        """Ranks of the job, known before transformers makes the process group."""
        return read_launch(os.environ).world_size

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """`vllm_engine_kwargs`, parsed; {} if unset."""
        assert not isinstance(self.vllm_engine_kwargs, str), "TrainingArguments parses its dict fields"
        return self.vllm_engine_kwargs or {}

    def __post_init__(self) -> None:
        show_log()
        check_log_variable(os.environ)
        self._take_launchers_word()
        if self.vllm_mode not in ("local", "server", "colocate"):
            raise ValueError(f"vllm_mode is {self.vllm_mode!r}; it is one of 'local', 'server' and 'colocate'")
        check_trackers(self.report_to)
        if self.vllm_gpu_memory_utilization is None:
            default = trl.GRPOConfig.vllm_gpu_memory_utilization
            self.vllm_gpu_memory_utilization = LOCAL_GPU_MEMORY_UTILIZATION if self.local_mode else default
        if self.vllm_importance_sampling_mode is None:
            by_token = self.local_mode and (self.generation_lookahead or self.loss_type == "vespo")  # which needs it
            self.vllm_importance_sampling_mode = (
                "token_truncate" if by_token else trl.GRPOConfig.vllm_importance_sampling_mode
            )
        if self.local_mode:
            check_counts(self)
            if self.completions_per_step is not None:
                self.gradient_accumulation_steps = accumulation_of(self, self.num_ranks)
            if not vars(self)["use_cpu"]:
                on_cpus = is_on(os.environ.get("ACCELERATE_USE_CPU")) or asks_for_cpu(parent_argv())
                num_gpus = count_gpus(os.environ, use_cpu=on_cpus)
                if not num_gpus and not on_cpus:
                    check_is_for_cpus(parent_argv())
                check_placement(self, os.environ, num_gpus)
            if not torch.accelerator.is_available():
                # Accelerate's DeepSpeed launcher does not pass its file's `use_cpu` to the ranks (1.15), and
                # transformers then takes each rank for the only one.
                self.use_cpu = True
        try:
            super().__post_init__()
        except ValueError as error:
            advice = batch_advice(self, self.world_size) if "divisible" in str(error) else ""
            raise ValueError(f"{str(error).rstrip('.')}: {advice}" if advice else str(error)) from None
        show_log(own_log_level(self))
        if self.local_mode:
            check_local(self)
            check_recording(self)
            check_multi_turn(self)
            check_evaluating(self)
            check_groups(self)
            return
        own = own_fields(self, trl.GRPOConfig)
        changed = [name for name in own if getattr(self, name) != getattr(type(self), name)]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} work in local mode only, but use_vllm is {self.use_vllm} and vllm_mode "
                f"{self.vllm_mode!r}: remove them, or set use_vllm to True and vllm_mode to 'local'"
            )

    def _take_launchers_word(self) -> None:
        """Apply `grpo launch --output-dir DIR --resume auto`, which override the script without changing its
        arguments."""
        for name, variable in (("output_dir", "GRPO_OUTPUT_DIR"), ("resume_from_checkpoint", "GRPO_RESUME")):
            value = os.environ.get(variable)
            own = getattr(self, name)
            if not value or own == value:
                continue
            setattr(self, name, value)
            if own is not None:
                _log.info("%s is %s (%s), not %s", name, value, variable, own)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Device property in which transformers makes the process group; with `--deepspeed FILE` it ignores the
        backend."""
        if self.use_cpu and (self.deepspeed or is_on(os.environ.get("ACCELERATE_USE_DEEPSPEED"))):
            leave_out_shared_memory_op()
        if self.deepspeed and self.ddp_backend and not self.use_cpu and read_launch(os.environ).launched:
            make_world_group(self.ddp_backend, timeout_s=self.ddp_timeout)
        return super()._setup_devices


def own_fields(ours: Any, theirs: Any) -> list[str]:
    """Fields a dataclass adds to its base class."""
    return [each.name for each in fields(ours) if each.name not in theirs.__dataclass_fields__]


def batch_advice(args: trl.GRPOConfig, world_size: int) -> str:
    """Suggest settings if batches do not divide evenly; '' if they do."""
    group, micro_batch = args.num_generations, args.per_device_train_batch_size * world_size
    size, steps = args.generation_batch_size, args.steps_per_generation
    if size is not None and steps is None and size % micro_batch:
        return f"set generation_batch_size to {either(multiples_around(size, micro_batch))}"
    if size is not None and group > 1 and size % group:
        fitting = [count for count in range(2, min(size, 2 * group) + 1) if size % count == 0]
        near = sorted(sorted(fitting, key=lambda count: abs(count - group))[:2])
        step = group // math.gcd(group, size // args.per_device_train_batch_size)
        text = f"set per_device_train_batch_size to {either(multiples_around(args.per_device_train_batch_size, step))}"
        return text + (f", or num_generations to {either(near)}" if near else "")
    group = args.num_generations_eval or group
    if args.eval_strategy != "no" and args.per_device_eval_batch_size * world_size % group:
        step = group // math.gcd(group, world_size)
        return f"set per_device_eval_batch_size to {either(multiples_around(args.per_device_eval_batch_size, step))}"
    return ""
