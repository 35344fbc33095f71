"""Makes a plan, as far as it goes: placement, batch, estimates."""

import argparse
import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, StrictDataclassError
from transformers import CONFIG_MAPPING
from trl import get_peft_config

from grpo.config.models import choose_backend, compute_dtype, head_counts, loaded_dtype, model_config
from grpo.config.refusals import check_init_kwargs
from grpo.faults.mistakes import is_users
from grpo.ops.plan.batch import Batch, plan_batch, prompt_tokens_of
from grpo.ops.plan.estimates import Estimates, estimate
from grpo.ops.plan.job import Launcher, PlannedConfig, read_launcher, read_training, zero_of
from grpo.ops.plan.lora import PlannedLora, planned_lora
from grpo.ops.plan.memory_budget import ASSUMED_GPU_GIB, GIB
from grpo.ops.plan.model_shape import ModelShape, count_parameters, meta_model, shape_of
from grpo.ops.plan.placed_job import Hardware, PlacedJob
from grpo.ops.plan.placement import gpus_of_nodes, place
from grpo.ops.plan.push_memory import push_shape
from grpo.ops.plan.shortfalls import errors_of, warnings_of
from grpo.ops.plan.speed import SizeAdvice, advise
from grpo.ops.telling import message_of
from grpo.ops.train.arguments import Arguments
from grpo.ops.train.checks import CHECKS
from grpo.ops.train.demo import RECIPE
from grpo.place.topology import NodeTopology
from grpo.preflight.lora import LoraChoice, check_lora
from grpo.preflight.model import local_model, reason_of
from grpo.record.folder import check_writable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ONE_BY_ONE = ("enable_expert_parallel", "quantization")  # engine settings with which experts are not loaded at once


@dataclass(slots=True, kw_only=True)
class Plan:
    """What was found out, filled in as it is; what could not be is None, and `errors` or `assumptions` say why."""

    errors: list[str] = field(default_factory=list)
    """What cannot work: exit code 1."""
    warnings: list[str] = field(default_factory=list)
    """What works, but probably not as meant, and what does not fit by an estimate."""
    assumptions: list[str] = field(default_factory=list)
    launcher: Launcher | None = None
    gpus_per_node: tuple[int, ...] | None = None
    nodes: tuple[NodeTopology, ...] | None = None
    """The placement as the local main of each node will see it."""
    batch: Batch | None = None
    lora: LoraChoice | None = None
    """How adapters reach the engines; None without any."""
    model: ModelShape | None = None
    estimates: Estimates | None = None
    advice: SizeAdvice | None = None
    """How many GPUs to reserve, by estimate; None where that cannot be said."""

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """A mistake that is raised inside becomes an error, in one line, and ends what is inside."""
        try:
            yield
        except Exception as error:
            if not is_users(error):
                raise
            message = " ".join(line.strip() for line in message_of(error).splitlines())
            self.errors += [message] if message not in self.errors else []

    @contextlib.contextmanager
    def noting_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        self.warnings += dict.fromkeys(str(warning.message) for warning in caught)

    def assume(self, what: str | None) -> None:
        if what is not None:
            self.assumptions.append(what)


def make_plan(args: argparse.Namespace) -> Plan:
    """As much of the plan as the arguments of the command allow; what is wrong is in its `errors`."""
    plan = Plan()
    with plan.refusing():
        plan.launcher = read_launcher(args.config_file, args.num_processes, args.num_machines)
        with plan.noting_warnings():
            arguments = read_training(args.config, args.train_flags, plan.launcher)
        _Planner(plan, args, plan.launcher, arguments).fill_in()
    return plan


class _Planner:
    """Fills `plan` in with what the job's arguments lead to."""

    def __init__(self, plan: Plan, args: argparse.Namespace, launcher: Launcher, arguments: Arguments) -> None:
        training = arguments.training
        assert isinstance(training, PlannedConfig)
        self.plan, self.args, self.training = plan, args, training
        self.model, self.script = arguments.model, arguments.script
        self.arguments = arguments
        self.launcher = plan.launcher = replace(launcher, use_cpu=launcher.use_cpu or training.use_cpu)
        self.config: Any = None
        """Of the model that will be trained; None when it cannot be read."""
        self.lora: PlannedLora | None = None

    def fill_in(self) -> None:
        plan, training = self.plan, self.training
        for check in CHECKS:
            with plan.refusing():
                check(self.arguments)
        try:
            check_writable(Path(training.output_dir))
        except (OSError, ValueError) as error:  # of this machine, which may not be one of the cluster's
            plan.warnings.append(f"on this machine {error}")
        self.config = self._model_config()
        if training.local_mode:
            with plan.refusing():
                check_init_kwargs(training, self.model.model_name_or_path)
            with plan.refusing():
                self._place()
            with plan.refusing():
                self._wrap()
        else:
            mode = f"vllm_mode is {training.vllm_mode!r} and use_vllm {training.use_vllm}"
            plan.errors.append(f"{mode}: only local mode is planned")
        if training.refusal is not None:
            plan.errors.append(training.refusal)
        elif plan.nodes is not None:
            batch = plan.batch = self._count_batch(plan.nodes)
            if self.config is not None and (self.lora is not None or not self.model.use_peft):
                self._estimate(plan.nodes, batch)

    def _model_config(self) -> Any:
        """None, with an error, when it cannot be read."""
        if self.model.model_name_or_path is None:
            self.plan.assume("no model is named: train.py's demo, with its model of 0.6 M parameters")
            return CONFIG_MAPPING["qwen3"](**RECIPE["model"])
        return self._read_config("model_name_or_path", self.model.model_name_or_path)

    def _read_config(self, setting: str, name: str) -> Any:
        """The configuration of the model that `setting` names; None when it cannot be read.

        That is an error, unless it is a hub id and this machine may be the reason.
        """
        try:
            is_local = local_model(name, setting) is not None
        except ValueError:  # reported by `CHECKS` already
            return None
        try:
            return model_config(name, self.training)
        except (OSError, ValueError, StrictDataclassError) as error:
            is_gated = isinstance(error.__cause__, GatedRepoError)  # a RepositoryNotFoundError, too
            absent = isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError))
            is_known = is_local or (absent and not is_gated)
            (self.plan.errors if is_known else self.plan.warnings).append(
                f"{setting} is {name!r}, whose configuration cannot be read ({reason_of(error)}), so memory and push "
                f"are left out: give a local folder with its config.json (hf download {name} config.json), or look at "
                "the network and HF_TOKEN"
            )
            return None

    def _place(self) -> None:
        """GPUs to ranks and engines, by the code that the ranks will run."""
        plan, training = self.plan, self.training
        split = self.config is not None and training.vllm_tensor_parallel_size != 1
        heads, key_value_heads = head_counts(self.config) if split else (None, None)
        reserved = training.vllm_reserved_gpus
        plan.gpus_per_node, assumed = gpus_of_nodes(self.args.gpus_per_node, self.launcher, reserved)
        plan.assume(assumed)
        with plan.noting_warnings():
            plan.nodes = place(
                self.launcher,
                plan.gpus_per_node,
                reserved_gpus=reserved,
                tensor_parallel_size=training.vllm_tensor_parallel_size,
                engines_per_node=training.vllm_engines_per_node,
                num_attention_heads=heads,
                num_key_value_heads=key_value_heads,
            )
        fewest = min(node.num_engines for node in plan.nodes)
        slow = [str(node.node) for node in plan.nodes if node.num_engines == fewest]
        if len(slow) < len(plan.nodes):
            plan.warnings.append(
                f"every node generates for the same number of completions, and node {', '.join(slow)} has the fewest "
                f"engines ({fewest}): the others wait for it"
            )
        choose_backend(training.vllm_sync_backend, has_gpus=not self.launcher.use_cpu)

    def _wrap(self) -> None:
        """The model with its adapters, where there are any."""
        zero3 = zero_of(self.launcher, self.training).get("stage") == 3
        peft_config = get_peft_config(self.model)
        if peft_config is None:
            return
        check_lora(peft_config, self.training, zero3=zero3)
        if self.config is None or self.training.refusal is not None:
            return
        dtype = compute_dtype(self._named_model(), self.training)
        has_gpus = not self.launcher.use_cpu
        with self.plan.noting_warnings():
            self.lora = planned_lora(peft_config, self.training, self.config, dtype, has_gpus=has_gpus)
        self.plan.lora = self.lora.choice

    def _named_model(self) -> "str | PreTrainedModel":
        """Whose dtype is asked for: by its name, or the demo's, which has none yet."""
        return self.model.model_name_or_path or meta_model(self.config)

    def _count_batch(self, nodes: tuple[NodeTopology, ...]) -> Batch:
        training = self.training
        prompt_tokens, assumed = prompt_tokens_of(training, self.args.prompt_tokens)
        self.plan.assume(assumed)
        text = None if self.config is None else self.config.get_text_config()
        return plan_batch(
            training,
            ranks_per_node=nodes[0].local_world_size,
            engines=[node.num_engines for node in nodes],
            prompt_tokens=prompt_tokens,
            engine_limit=training.vllm_max_model_length or getattr(text, "max_position_embeddings", None),
        )

    def _estimate(self, nodes: tuple[NodeTopology, ...], batch: Batch) -> None:
        """Memory and push, from the shape of the model."""
        plan, config, optim = self.plan, self.config, self.training.optim
        try:
            job = self._placed_job(nodes, batch)
            plan.model, plan.estimates = job.shape, estimate(job)
        except (AttributeError, TypeError) as error:  # what a configuration calls otherwise
            plan.warnings.append(
                f"the memory of a {config.model_type} is left out: its configuration is not understood "
                f"({type(error).__name__}: {error})"
            )
            return
        if not getattr(config.get_text_config(), "num_experts_per_tok", None):  # of experts only some compute
            plan.advice = advise(job, plan.estimates.engine)
        plan.errors += errors_of(job, plan.estimates)
        plan.warnings += warnings_of(job, plan.estimates)
        if job.shape.layers_without_kv:
            plan.assume(f"the states of {job.shape.layers_without_kv} linear-attention layers are not counted")
        if not optim.startswith("adamw_torch"):
            plan.assume(f"the states of Adam with float32 moments; optim is {optim.value}")

    def _placed_job(self, nodes: tuple[NodeTopology, ...], batch: Batch) -> PlacedJob:
        training, config, lora = self.training, self.config, self.lora
        remote_code, reward_name = training.trust_remote_code, self.script.reward_model_name_or_path
        reward = self._read_config("reward_model_name_or_path", reward_name) if reward_name else None
        model = self._named_model()
        dtype = compute_dtype(model, training)
        return PlacedJob(
            args=training,
            launcher=self.launcher,
            nodes=nodes,
            batch=batch,
            hardware=self._hardware(),
            shape=shape_of(
                config,
                self.model.model_name_or_path or "the demo's model",
                wrapped=None if lora is None else lora.wrapped,
                trust_remote_code=remote_code,
            ),
            push=push_shape(
                config,
                dtype=dtype,
                bucket_bytes=training.vllm_sync_bucket_mb * 2**20,
                whole_experts=not any(training.engine_kwargs.get(key) for key in ONE_BY_ONE),
                lora=lora,
                trust_remote_code=remote_code,
            ),
            dtype=dtype,
            loaded_dtype=loaded_dtype(model, training),
            lora=None if lora is None else lora.choice,
            adapter_elements=0 if lora is None else lora.engine_elements,
            flash_attention="flash" in (self.model.attn_implementation or ""),
            reward_parameters=count_parameters(reward, trust_remote_code=remote_code) if reward is not None else 0,
        )

    def _hardware(self) -> Hardware:
        args, gpu_bytes = self.args, None
        if not self.launcher.use_cpu:
            gpu_bytes = args.gpu_memory or ASSUMED_GPU_GIB * GIB
            self.plan.assume(None if args.gpu_memory else f"GPUs of {ASSUMED_GPU_GIB}GiB (--gpu-memory)")
        return Hardware(gpu_bytes=gpu_bytes, tflops=args.gpu_tflops, tbps=args.gpu_tbps)
