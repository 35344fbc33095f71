"""`GRPOConfig`: TRL's, plus where engines run, how weights reach them and how long anything may take."""

import math
import os
import warnings
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
import trl

from grpo.engine.early import drop_host, start_first_host
from grpo.job.devices import count_gpus
from grpo.job.files import is_on
from grpo.job.launch import Launch, asks_for_cpu, either, multiples_around, parent_argv, read_launch
from grpo.job.process_groups import leave_out_deepspeeds_op, make_world_group
from grpo.job.quiet import quiet
from grpo.job.topology import plan_node

# TRL's defaults of the fields that say where a server is; in local mode there is none.
_SERVER_FIELDS = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
)

# Engine arguments that follow from other settings. A second way to set them would be a way to contradict oneself.
OWN_ENGINE_KEYS = {
    "model": "model_name_or_path",
    "tokenizer": "processing_class",
    "tokenizer_revision": "model_init_kwargs",
    "skip_tokenizer_init": "nothing: structured output needs the tokenizer",
    "revision": "model_init_kwargs",
    "trust_remote_code": "trust_remote_code",
    "dtype": "bf16 / fp16 / model_init_kwargs['dtype']: the engine computes in the trainer's dtype",
    "max_model_len": "vllm_max_model_length",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "pipeline_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_reserved_gpus: several engines on a node are several processes",
    "model_impl": "vllm_model_impl",
    "enable_sleep_mode": "nothing: the engine has its GPUs to itself",
    "load_format": "nothing: the first push brings the weights",
    "weight_transfer_config": "vllm_sync_backend",
    "worker_extension_cls": "nothing: the workers are asked by one of our own how they hold the weights",
    "logprobs_mode": "nothing: importance sampling needs processed_logprobs",
    "enable_lora": "nothing: LoRA is not supported",
    "seed": "seed",
}

# What these may be. TRL looks at its own ones where it uses them, after the first generation (1.16).
_WORDS = {
    "vllm_sync_backend": ("auto", "nccl", "shm"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

LOCAL_GPU_MEMORY_UTILIZATION = 0.9


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's `GRPOConfig` with `use_vllm` on and `vllm_mode="local"`: every node hosts its own engines.

    `vllm_mode` `"server"` and `"colocate"`, and `use_vllm=False`, go to TRL untouched.
    """

    use_vllm: bool = field(
        default=True,
        metadata={"help": "Whether to generate with vLLM. On by default here, off in TRL."},
    )
    vllm_mode: str = field(
        default="local",
        metadata={
            "help": "'local': every node's local main process hosts vLLM engines on the node's reserved GPUs. 'server' "
            "and 'colocate' are TRL's own modes."
        },
    )
    vllm_gpu_memory_utilization: float | None = field(
        default=None,
        metadata={
            "help": "Share of a GPU's memory that an engine takes. None: 0.9 in local mode, where the engine has its "
            "GPUs to itself, and TRL's 0.3 in colocate mode. Without GPUs the KV cache is sized by "
            "kv_cache_memory_bytes in vllm_engine_kwargs instead."
        },
    )
    vllm_reserved_gpus: int | None = field(
        default=None,
        metadata={
            "help": "How many GPUs of each node, the last ones, are reserved for engines. None: all on which no rank "
            "trains; may then differ from node to node."
        },
    )
    vllm_engines_per_node: int | None = field(
        default=None,
        metadata={"help": "Engines of a node without GPUs, where nothing is reserved; None means one."},
    )
    vllm_balance_nodes: bool = field(
        default=False,
        metadata={
            "help": "Whether prompts move from slow nodes to fast ones, in proportion to the tokens/s of their "
            "engines, so that a step does not wait for the slowest. No effect on one node."
        },
    )
    vllm_sync_backend: str = field(
        default="auto",
        metadata={"help": "How weights reach the engines: 'nccl', 'shm' (shared memory), or 'auto': nccl with GPUs."},
    )
    vllm_sync_bucket_mb: int = field(
        default=512,
        metadata={"help": "Upper size in MB of what is gathered at a time; a larger single parameter still goes."},
    )
    generation_lookahead: int = field(
        default=0,
        metadata={
            "help": "Generation batches that the engines sample ahead while the ranks train: 0 is on-policy; with 1 "
            "engines and ranks work at the same time, and completions are one push older when they are trained on, "
            "which importance sampling corrects."
        },
    )
    vllm_importance_sampling_mode: str | None = field(
        default=None,
        metadata={
            "help": "As in TRL: 'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'. None: TRL's "
            "'sequence_mask', and 'token_truncate' with generation_lookahead, where the ratio of a whole long sequence "
            "leaves its bounds almost always."
        },
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Passed to vLLM's engine as they are (a JSON object on the command line). A key that another "
            "setting decides is refused by name."
        },
    )
    vllm_max_logprob_gap: float | None = field(
        default=None,
        metadata={
            "help": "Limit of the mean gap between engine and trainer log-probabilities, in nats, when a push is "
            "proved. None: by the engine's dtype, and tighter once the first push has shown what rounding costs."
        },
    )
    check_rewards: bool = field(
        default=True,
        metadata={
            "help": "Whether every reward function is called once before anything is loaded, on rank 0, with made-up "
            "completions of the data set's first row, so that a mistake in it shows at once. Set it to False for "
            "functions whose calls have effects, or need what is there only in training."
        },
    )
    vllm_start_timeout: float = field(
        default=600.0, metadata={"help": "Seconds that an engine may take from its start until it is ready."}
    )
    vllm_generate_timeout: float = field(
        default=3600.0, metadata={"help": "Seconds that one generation batch may take."}
    )
    vllm_sync_timeout: float = field(default=600.0, metadata={"help": "Seconds that one step of a push may take."})

    _VALID_DICT_FIELDS = [*trl.GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]  # noqa: RUF012  as in TRL

    @property
    def local_mode(self) -> bool:
        """Whether this project's engines generate."""
        return self.use_vllm and self.vllm_mode == "local"

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """`vllm_engine_kwargs`, parsed; {} where there are none."""
        assert not isinstance(self.vllm_engine_kwargs, str), "TrainingArguments parses its dict fields"
        return self.vllm_engine_kwargs or {}

    def __post_init__(self) -> None:
        quiet()
        self._take_launchers_word()
        if self.vllm_mode not in ("local", "server", "colocate"):
            raise ValueError(f"vllm_mode is {self.vllm_mode!r}; it is one of 'local', 'server' and 'colocate'")
        if self.vllm_gpu_memory_utilization is None:
            default = _trl_default("vllm_gpu_memory_utilization")
            self.vllm_gpu_memory_utilization = LOCAL_GPU_MEMORY_UTILIZATION if self.local_mode else default
        if self.vllm_importance_sampling_mode is None:
            ahead = self.local_mode and self.generation_lookahead
            self.vllm_importance_sampling_mode = (
                "token_truncate" if ahead else _trl_default("vllm_importance_sampling_mode")
            )
        if self.local_mode:
            self._check_counts()
        if self.local_mode and not vars(self)["use_cpu"]:
            # Before anything slow: GPUs that were meant and are not there, or that engines cannot be given.
            num_gpus = count_gpus(os.environ, use_cpu=asks_for_cpu(parent_argv()))
            launch = read_launch(os.environ)
            if num_gpus and launch.launched:
                self._check_placement(launch, num_gpus)
        if self.local_mode and not torch.accelerator.is_available():
            # Accelerate's DeepSpeed launcher does not pass `use_cpu` of its file on to the ranks (1.15), and
            # transformers then takes each rank for the only one.
            self.use_cpu = True
        try:
            super().__post_init__()
        except ValueError as error:
            advice = batch_advice(self, self.world_size) if "divisible" in str(error) else ""
            raise ValueError(f"{str(error).rstrip('.')}: {advice}" if advice else str(error)) from None
        own_fields = [f.name for f in fields(self) if f.name not in trl.GRPOConfig.__dataclass_fields__]
        if self.local_mode:
            self._check_local()
            if read_launch(os.environ).launched:
                start_first_host()  # unless one waits already
            return
        drop_host()
        defaults = {f.name: f.default for f in fields(self)}
        changed = [name for name in own_fields if getattr(self, name) != defaults[name]]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} work in local mode only, but use_vllm is {self.use_vllm} and vllm_mode "
                f"{self.vllm_mode!r}: remove them, or set use_vllm to True and vllm_mode to 'local'"
            )

    def _take_launchers_word(self) -> None:
        """`grpo launch --output-dir DIR --resume auto` counts more than the script, whose arguments it leaves alone."""
        for name, variable in (("output_dir", "GRPO_OUTPUT_DIR"), ("resume_from_checkpoint", "GRPO_RESUME")):
            value = os.environ.get(variable)
            own = getattr(self, name)
            if not value or own == value:
                continue
            setattr(self, name, value)
            if own is not None and read_launch(os.environ).rank == 0:
                print(f"[grpo] {name} is {value} ({variable}), not {own}", flush=True)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Where transformers makes the process group; beside `--deepspeed FILE` it forgets the backend."""
        if self.use_cpu and (self.deepspeed or is_on(os.environ.get("ACCELERATE_USE_DEEPSPEED"))):
            leave_out_deepspeeds_op()
        if self.deepspeed and self.ddp_backend and not self.use_cpu and read_launch(os.environ).launched:
            make_world_group(self.ddp_backend, timeout_s=self.ddp_timeout)
        return super()._setup_devices

    def _check_placement(self, launch: Launch, num_gpus: int) -> None:
        """What this rank can tell alone, before transformers makes the process group.

        DeepSpeed opens NCCL's communicator of all ranks there (0.19): a rank without a GPU fails, and the others wait.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # given once, by the trainer, which looks at all nodes
            plan_node(
                launch,
                [str(index) for index in range(num_gpus)],
                reserved_gpus=self.vllm_reserved_gpus,
                tensor_parallel_size=self.vllm_tensor_parallel_size,
                engines_per_node=self.vllm_engines_per_node,
            )

    def _check_counts(self) -> None:
        """What others divide by, or count up to."""
        least = {"num_generations": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
        least |= {"steps_per_generation": 1, "generation_batch_size": 2, "num_iterations": 1}
        least |= {"max_completion_length": 1, "vllm_max_model_length": 2}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} is {value}; it must be {smallest} or more")

    def _check_local(self) -> None:
        changed = [name for name in _SERVER_FIELDS if getattr(self, name) != _trl_default(name)]
        if changed:
            raise ValueError(
                f"{', '.join(changed)}: local mode has no server, every node hosts its own engines; remove them, or "
                "set vllm_mode to 'server'"
            )
        if self.vllm_enable_sleep_mode:
            raise ValueError(
                "vllm_enable_sleep_mode: an engine in local mode has its GPUs to itself and never sleeps; remove it"
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "use_transformers_continuous_batching and use_vllm are both on, but only one can generate: set "
                "one of them to False"
            )
        if self.fsdp:
            raise ValueError(
                f"fsdp is {self.fsdp!r}: local mode trains with DeepSpeed (configs/1node.yaml), DDP or one process; "
                "FSDP is not supported"
            )
        if not self.ds3_gather_for_generation:
            raise ValueError("ds3_gather_for_generation is False, which has no meaning when vLLM generates: remove it")
        self._check_lookahead()
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                known = ", ".join(map(repr, words))
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {known}")
        for name in ("vllm_sync_bucket_mb", "vllm_start_timeout", "vllm_generate_timeout", "vllm_sync_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.vllm_sync_timeout >= self.ddp_timeout:
            raise ValueError(
                f"vllm_sync_timeout is {self.vllm_sync_timeout:g} s, but ranks that wait for a push in a collective "
                f"are ended after ddp_timeout, {self.ddp_timeout} s, without the engine's word: set ddp_timeout higher"
            )
        if self.vllm_max_logprob_gap is not None and self.vllm_max_logprob_gap <= 0:
            raise ValueError(f"vllm_max_logprob_gap is {self.vllm_max_logprob_gap}; it must be above 0, or None")
        if not 0 < self.vllm_gpu_memory_utilization <= 1:  # type: ignore[operator]
            raise ValueError(
                f"vllm_gpu_memory_utilization is {self.vllm_gpu_memory_utilization}; it is a share, above 0, at most 1"
            )
        for key in self.engine_kwargs:
            if key in OWN_ENGINE_KEYS:
                raise ValueError(f"vllm_engine_kwargs holds {key!r}, which follows from {OWN_ENGINE_KEYS[key]}")
        for key in ("n", "logprobs", "prompt_logprobs", "output_kind", "flat_logprobs"):
            if key in (self.generation_kwargs or {}):
                raise ValueError(f"generation_kwargs holds {key!r}, which the trainer sets itself: remove it")
        if (
            self.loss_type == "vespo"
            and self.vllm_importance_sampling_correction
            and self.vllm_importance_sampling_mode not in ("token_truncate", "token_mask")
        ):
            raise ValueError(
                "loss_type 'vespo' needs vllm_importance_sampling_mode 'token_truncate' or 'token_mask', not "
                f"{self.vllm_importance_sampling_mode!r}"
            )

    def _check_lookahead(self) -> None:
        if self.generation_lookahead not in (0, 1):
            raise ValueError(
                f"generation_lookahead is {self.generation_lookahead}; it is 0 or 1: with one batch ahead engines and "
                "ranks are both busy already, and every further one only makes completions older"
            )
        if not self.generation_lookahead:
            return
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction is False, but with generation_lookahead 1 completions come from "
                "an older policy than the one that is trained: remove it, or set generation_lookahead to 0"
            )
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.accelerator_config, name):
                raise ValueError(
                    f"accelerator_config has {name}, which deals rows out in another order than generation_lookahead "
                    "reads them: remove it, or set generation_lookahead to 0"
                )


def _trl_default(name: str) -> Any:
    return trl.GRPOConfig.__dataclass_fields__[name].default


def batch_advice(args: trl.GRPOConfig, world_size: int) -> str:
    """The settings to change where batches do not divide; '' where they do."""
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
