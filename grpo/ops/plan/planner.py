"""Makes a plan, as far as it goes: placement, batch, estimates."""

import argparse
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trl import get_peft_config

from grpo.config.models import choose_backend, compute_dtype, head_counts, loaded_dtype, model_config
from grpo.faults.mistakes import is_users
from grpo.ops.plan.batch import Batch, plan_batch, prompt_tokens_of
from grpo.ops.plan.estimates import Estimates, estimate
from grpo.ops.plan.job import Launcher, PlannedConfig, read_launcher, read_training, zero_of
from grpo.ops.plan.lora import PlannedLora, planned_lora
from grpo.ops.plan.memory_budget import ASSUMED_GPU_GIB, GIB
from grpo.ops.plan.model_shape import ModelShape, count_parameters, shape_of
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

    def refuse(self, error: Exception) -> None:
        """Add a mistake, in one line. Raises `error` if it is none."""
        if not is_users(error):
            raise error
        self.errors.append(" ".join(line.strip() for line in message_of(error).splitlines()))

    def assume(self, what: str | None) -> None:
        if what is not None:
            self.assumptions.append(what)


def make_plan(args: argparse.Namespace) -> Plan:
    """As much of the plan as the arguments of the command allow; what is wrong is in its `errors`."""
    plan = Plan()
    try:
        plan.launcher = read_launcher(args.config_file, args.num_processes, args.num_machines)
        arguments = read_training(args.config, args.train_flags, plan.launcher)
    except Exception as error:  # noqa: BLE001  `refuse` raises what is no mistake
        plan.refuse(error)
        return plan
    for check in CHECKS:
        try:
            check(arguments)
        except Exception as error:  # noqa: BLE001  what the module of a reward function raises, too
            plan.refuse(error)
    training = arguments.training
    assert isinstance(training, PlannedConfig)
    plan.launcher = launcher = replace(plan.launcher, use_cpu=plan.launcher.use_cpu or training.use_cpu)
    try:
        check_writable(Path(training.output_dir))
    except (OSError, ValueError) as error:  # of this machine, which may not be one of the cluster's
        plan.warnings.append(f"on this machine {error}")
    config = _model_config(plan, arguments)
    if not training.local_mode:
        mode = f"vllm_mode is {training.vllm_mode!r} and use_vllm {training.use_vllm}"
        plan.errors.append(f"{mode}: only local mode is planned")
    else:
        _place(plan, args, launcher, training, config)
    lora = _lora(plan, arguments, config) if training.local_mode else None
    if training.refusal is not None:
        plan.errors.append(training.refusal)
    elif plan.nodes is not None:
        plan.batch = _count_batch(plan, args, training, config, plan.nodes)
        if config is not None and (lora is not None or not arguments.model.use_peft):
            _estimate(plan, args, arguments, config, lora)
    return plan


def _lora(plan: Plan, arguments: Arguments, config: Any) -> PlannedLora | None:
    """The model with its adapters; None without any, and with an error where the trainer would refuse them."""
    training = arguments.training
    assert isinstance(training, PlannedConfig)
    assert plan.launcher is not None
    try:
        zero3 = zero_of(plan.launcher, training).get("stage") == 3
        peft_config = get_peft_config(arguments.model)
        if peft_config is None:
            return None
        check_lora(peft_config, training, zero3=zero3)
        if config is None or training.refusal is not None:
            return None
        dtype = compute_dtype(_model(arguments, config), training)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lora = planned_lora(peft_config, training, config, dtype, has_gpus=not plan.launcher.use_cpu)
    except Exception as error:  # noqa: BLE001  `refuse` raises what is no mistake
        plan.refuse(error)
        return None
    plan.lora = lora.choice
    plan.warnings += [str(warning.message) for warning in caught]
    return lora


def _name(arguments: Arguments) -> str:
    return arguments.model.model_name_or_path or "the demo's model"


def _model(arguments: Arguments, config: Any) -> "str | PreTrainedModel":
    """Whose dtype is asked for: by its name, or the demo's, which has none yet."""
    if arguments.model.model_name_or_path is not None:
        return arguments.model.model_name_or_path
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _model_config(plan: Plan, arguments: Arguments) -> Any:
    """The configuration of the model that will be trained; None, with an error, when it cannot be read."""
    if arguments.model.model_name_or_path is None:
        plan.assume("no model is named: train.py's demo, with its model of 0.6 M parameters")
        return CONFIG_MAPPING["qwen3"](**RECIPE["model"])
    return _read_config(plan, "model_name_or_path", arguments.model.model_name_or_path, arguments)


def _read_config(plan: Plan, setting: str, name: str, arguments: Arguments) -> Any:
    """The configuration of the model that `setting` names; None when it cannot be read.

    That is an error, unless it is a hub id and this machine may be the reason.
    """
    try:
        is_local = local_model(name, setting) is not None
    except ValueError:  # which `CHECKS` have told
        return None
    try:
        return model_config(name, arguments.training)
    except (OSError, ValueError, StrictDataclassError) as error:
        is_gated = isinstance(error.__cause__, GatedRepoError)  # a RepositoryNotFoundError, too
        absent = isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError))
        is_known = is_local or (absent and not is_gated)
        (plan.errors if is_known else plan.warnings).append(
            f"{setting} is {name!r}, whose configuration cannot be read ({reason_of(error)}), so memory and push are "
            f"left out: give a local folder with its config.json (hf download {name} config.json), or look at the "
            "network and HF_TOKEN"
        )
        return None


def _place(plan: Plan, args: argparse.Namespace, launcher: Launcher, training: PlannedConfig, config: Any) -> None:
    """GPUs to ranks and engines, by the code that the ranks will run."""
    split = config is not None and training.vllm_tensor_parallel_size != 1
    heads, key_value_heads = head_counts(config) if split else (None, None)
    try:
        plan.gpus_per_node, assumed = gpus_of_nodes(args.gpus_per_node, launcher, training.vllm_reserved_gpus)
        plan.assume(assumed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan.nodes = place(
                launcher,
                plan.gpus_per_node,
                reserved_gpus=training.vllm_reserved_gpus,
                tensor_parallel_size=training.vllm_tensor_parallel_size,
                engines_per_node=training.vllm_engines_per_node,
                num_attention_heads=heads,
                num_key_value_heads=key_value_heads,
            )
        plan.warnings += dict.fromkeys(str(warning.message) for warning in caught)
        _warn_of_slow_nodes(plan, plan.nodes)
        choose_backend(training.vllm_sync_backend, has_gpus=not launcher.use_cpu)
    except ValueError as error:
        plan.errors.append(str(error))


def _warn_of_slow_nodes(plan: Plan, nodes: tuple[NodeTopology, ...]) -> None:
    fewest = min(node.num_engines for node in nodes)
    slow = [str(node.node) for node in nodes if node.num_engines == fewest]
    if len(slow) < len(nodes):
        plan.warnings.append(
            f"every node generates for the same number of completions, and node {', '.join(slow)} has the fewest "
            f"engines ({fewest}): the others wait for it"
        )


def _count_batch(
    plan: Plan, args: argparse.Namespace, training: PlannedConfig, config: Any, nodes: tuple[NodeTopology, ...]
) -> Batch:
    prompt_tokens, assumed = prompt_tokens_of(training, args.prompt_tokens)
    plan.assume(assumed)
    own_limit = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    return plan_batch(
        training,
        ranks_per_node=nodes[0].local_world_size,
        engines=[node.num_engines for node in nodes],
        prompt_tokens=prompt_tokens,
        engine_limit=training.vllm_max_model_length or own_limit,
    )


def _estimate(
    plan: Plan, args: argparse.Namespace, arguments: Arguments, config: Any, lora: PlannedLora | None
) -> None:
    """Memory and push, from the shape of the model."""
    optim = arguments.training.optim
    try:
        job = _placed_job(plan, args, arguments, config, lora)
        plan.model, plan.estimates = job.shape, estimate(job)
    except ValueError as error:  # of a model without attention, or a DeepSpeed configuration that cannot be read
        plan.errors += [str(error)] if str(error) not in plan.errors else []
        return
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


def _placed_job(
    plan: Plan, args: argparse.Namespace, arguments: Arguments, config: Any, lora: PlannedLora | None
) -> PlacedJob:
    training = arguments.training
    assert isinstance(training, PlannedConfig)
    assert plan.launcher is not None
    assert plan.nodes is not None
    assert plan.batch is not None
    name, reward_name = _name(arguments), arguments.script.reward_model_name_or_path
    reward = _read_config(plan, "reward_model_name_or_path", reward_name, arguments) if reward_name else None
    remote_code = training.trust_remote_code
    model = _model(arguments, config)
    dtype = compute_dtype(model, training)
    engine_kwargs = training.engine_kwargs
    return PlacedJob(
        args=training,
        launcher=plan.launcher,
        nodes=plan.nodes,
        batch=plan.batch,
        hardware=_hardware(plan, args, has_gpus=not plan.launcher.use_cpu),
        shape=shape_of(config, name, wrapped=None if lora is None else lora.wrapped, trust_remote_code=remote_code),
        push=push_shape(
            config,
            dtype=dtype,
            bucket_bytes=training.vllm_sync_bucket_mb * 2**20,
            whole_experts=not any(engine_kwargs.get(key) for key in ("enable_expert_parallel", "quantization")),
            lora=lora,
            trust_remote_code=remote_code,
        ),
        dtype=dtype,
        loaded_dtype=loaded_dtype(model, training),
        lora=None if lora is None else lora.choice,
        adapter_elements=0 if lora is None else lora.engine_elements,
        flash_attention="flash" in (arguments.model.attn_implementation or ""),
        reward_parameters=count_parameters(reward, trust_remote_code=remote_code) if reward is not None else 0,
    )


def _hardware(plan: Plan, args: argparse.Namespace, *, has_gpus: bool) -> Hardware:
    if has_gpus and args.gpu_memory is None:
        plan.assume(f"GPUs of {ASSUMED_GPU_GIB}GiB (--gpu-memory)")
    return Hardware(
        gpu_bytes=args.gpu_memory or ASSUMED_GPU_GIB * GIB if has_gpus else None,
        tflops=args.gpu_tflops,
        tbps=args.gpu_tbps,
    )
