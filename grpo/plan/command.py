"""`grpo plan`: what goes where, what it adds up to, and whether it fits, before anybody waits for a cluster.

Needs no GPU: it plans for the cluster's, on any machine.
"""

import argparse
import re
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo.plan.push_cost import NETWORK_GBPS, NVLINK_GBPS
from grpo.plan.record import Plan

if TYPE_CHECKING:
    from grpo.job.topology import NodeTopology
    from grpo.plan.job import PlannedConfig
    from grpo.plan.placed_job import PlacedJob
    from grpo.recipes.script import Arguments

ASSUMED_GPU_MEMORY = "80GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", metavar="FILE", help="accelerate's file, as in `accelerate launch`")
    parser.add_argument("--num_processes", type=_positive, metavar="N", help="goes before the file's; of all nodes")
    parser.add_argument("--num_machines", type=_positive, metavar="N", help="goes before the file's")
    parser.add_argument("--config", metavar="FILE", help="the training file of train.py; without it, its demo")
    parser.add_argument(
        "--gpus-per-node", type=_gpu_counts, metavar="8 | 8,8,7,8", help="of all nodes alike, or of each (default: 8)"
    )
    parser.add_argument(
        "--gpu-memory", type=_memory, metavar="SIZE", help=f"of one GPU, e.g. 80GiB (default: {ASSUMED_GPU_MEMORY})"
    )
    parser.add_argument(
        "--host-memory", type=_memory, metavar="SIZE", help="of one node, e.g. 1TiB (not checked without)"
    )
    parser.add_argument("--prompt-tokens", type=_positive, metavar="N", help="the longest prompt")
    parser.add_argument(
        "--network-gbps",
        type=_speed,
        default=NETWORK_GBPS,
        metavar="GBIT/S",
        help="into one node, gigabits per second over all its adapters (default: 400, one NDR adapter)",
    )
    parser.add_argument(
        "--nvlink-gbps",
        type=_speed,
        default=NVLINK_GBPS,
        metavar="GBIT/S",
        help="into one GPU from its node, gigabits per second (default: 2400, an A100's NVLink; an H100's is 3600)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="flags of train.py, after `--`")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 1 when something in it cannot work."""
    from grpo.plan.view import print_json, print_plan

    plan = make_plan(args)
    (print_json if args.json else print_plan)(plan)
    return 1 if plan.errors else 0


def make_plan(args: argparse.Namespace) -> Plan:
    """As much of the plan as the arguments allow; what is wrong is in its `errors`."""
    from grpo.plan.job import PlannedConfig, read_launcher, read_training

    plan = Plan(errors=[], warnings=[], assumptions=[])
    try:
        plan.launcher = read_launcher(args.config_file, args.num_processes, args.num_machines)
        arguments = read_training(args.config, args.train_flags, plan.launcher)
    except ValueError as error:
        plan.errors.append(str(error))
        return plan
    training = arguments.training
    assert isinstance(training, PlannedConfig)
    if training.use_cpu:  # in either file
        plan.launcher = replace(plan.launcher, use_cpu=True)
    config = _model_config(plan, arguments)
    _place(plan, args, training, config)
    if training.refusal is not None:
        plan.errors.append(training.refusal)
    elif plan.nodes is not None:
        _count_batch(plan, args, training, config)
        if config is not None:
            _estimate(plan, args, arguments, config)
    return plan


def _model_config(plan: Plan, arguments: "Arguments") -> Any:
    """The configuration of the model that will be trained; None, with an error, when it cannot be read."""
    from transformers import CONFIG_MAPPING

    from grpo.recipes.demo import RECIPE

    if arguments.is_demo:
        plan.assumptions.append("no model is named: train.py's demo, with its model of 0.6 M parameters")
        return CONFIG_MAPPING["qwen3"](**RECIPE["model"])
    return _read_config(plan, "model_name_or_path", arguments.model.model_name_or_path, arguments)


def _read_config(plan: Plan, field: str, name: str, arguments: "Arguments") -> Any:
    """The configuration of the model that `field` names; None, with an error, when it cannot be read."""
    from huggingface_hub.errors import StrictDataclassError

    from grpo.engine_settings import model_config

    try:
        return model_config(name, arguments.training)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        plan.errors.append(
            f"{field} is {name!r}, whose configuration cannot be read ({reason}), so memory and push are left out: "
            f"give a local folder that holds its config.json (hf download {name} config.json), or look at the network "
            "and HF_TOKEN"
        )
        return None


def _place(plan: Plan, args: argparse.Namespace, training: "PlannedConfig", config: Any) -> None:
    """GPUs to ranks and engines, by the code that the ranks will run."""
    from grpo.engine_settings import choose_backend, head_counts
    from grpo.plan.placement import EngineSettings, best_layout, gpus_of_nodes, place

    assert plan.launcher is not None
    if not training.local_mode:
        plan.errors.append(
            f"vllm_mode is {training.vllm_mode!r} and use_vllm {training.use_vllm}: only local mode is planned"
        )
        return
    split = config is not None and training.vllm_tensor_parallel_size != 1
    heads, key_value_heads = head_counts(config) if split else (None, None)
    settings = EngineSettings(
        reserved_gpus=training.vllm_reserved_gpus,
        tensor_parallel_size=training.vllm_tensor_parallel_size,
        engines_per_node=training.vllm_engines_per_node,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
    )
    try:
        plan.gpus_per_node, assumed = gpus_of_nodes(args.gpus_per_node, plan.launcher, settings.reserved_gpus)
        plan.assumptions += [assumed] if assumed else []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan.nodes = place(plan.launcher, plan.gpus_per_node, settings)
        plan.warnings += dict.fromkeys(str(warning.message) for warning in caught)
        choose_backend(training.vllm_sync_backend, has_gpus=not plan.launcher.use_cpu)
    except ValueError as error:
        plan.errors.append(str(error))
    counts = plan.gpus_per_node or (0,)
    if max(counts) > 0 and (plan.nodes is None or len(set(counts)) > 1):
        plan.best_layout = best_layout(counts, settings)
    if plan.nodes is not None:
        _warn_of_slow_nodes(plan, plan.nodes)


def _warn_of_slow_nodes(plan: Plan, nodes: "tuple[NodeTopology, ...]") -> None:
    fewest = min(node.num_engines for node in nodes)
    slow = [str(node.node) for node in nodes if node.num_engines == fewest]
    if len(slow) < len(nodes):
        plan.warnings.append(
            f"every node generates for the same number of completions, and node {', '.join(slow)} has the fewest "
            f"engines ({fewest}): the others wait for it"
        )


def _count_batch(plan: Plan, args: argparse.Namespace, training: "PlannedConfig", config: Any) -> None:
    from grpo.plan.batch import plan_batch, prompt_tokens_of

    assert plan.launcher is not None
    assert plan.nodes is not None
    prompt_tokens, assumed = prompt_tokens_of(training, args.prompt_tokens)
    plan.assumptions += [assumed] if assumed else []
    own_limit = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    plan.batch = plan_batch(
        training,
        ranks_per_node=plan.launcher.ranks_per_node,
        engines=[node.num_engines for node in plan.nodes],
        prompt_tokens=prompt_tokens,
        engine_limit=training.vllm_max_model_length or own_limit,
    )


def _estimate(plan: Plan, args: argparse.Namespace, arguments: "Arguments", config: Any) -> None:
    """Memory and push, from the shape of the model."""
    from grpo.plan.estimates import estimate
    from grpo.plan.shortfalls import errors_of, warnings_of

    training = arguments.training
    try:
        job = _placed_job(plan, args, arguments, config)
        plan.model = job.shape
        plan.estimates = estimate(job)
    except ValueError as error:  # of a model without attention, or a DeepSpeed configuration that cannot be read
        plan.errors.append(str(error))
        return
    plan.errors += errors_of(job, plan.estimates)
    plan.warnings += warnings_of(job, plan.estimates)
    if plan.model.layers_without_kv:
        plan.assumptions.append(f"the states of {plan.model.layers_without_kv} linear-attention layers are not counted")
    if not training.optim.startswith("adamw_torch"):
        plan.assumptions.append(f"the states of Adam with float32 moments; optim is {training.optim.value}")


def _placed_job(plan: Plan, args: argparse.Namespace, arguments: "Arguments", config: Any) -> "PlacedJob":
    from grpo.engine_settings import compute_dtype
    from grpo.plan.job import PlannedConfig
    from grpo.plan.model_shape import count_parameters, shape_of
    from grpo.plan.placed_job import Hardware, PlacedJob
    from grpo.plan.push_cost import Links
    from grpo.plan.push_memory import push_shape

    training = arguments.training
    assert isinstance(training, PlannedConfig)
    assert plan.launcher is not None
    assert plan.nodes is not None
    assert plan.batch is not None
    name = arguments.model.model_name_or_path or "the demo's model"
    remote_code = training.trust_remote_code
    reward_name, reward = arguments.script.reward_model_name_or_path, None
    if reward_name is not None:
        reward = _read_config(plan, "reward_model_name_or_path", reward_name, arguments)
    has_gpus = not plan.launcher.use_cpu
    if has_gpus and args.gpu_memory is None:
        plan.assumptions.append(f"GPUs of {ASSUMED_GPU_MEMORY} (--gpu-memory)")
    dtype = compute_dtype(name, training)
    engine_kwargs = training.vllm_engine_kwargs or {}
    assert not isinstance(engine_kwargs, str), "TrainingArguments parses its dict fields"
    return PlacedJob(
        args=training,
        launcher=plan.launcher,
        nodes=plan.nodes,
        batch=plan.batch,
        hardware=Hardware(
            gpu_bytes=args.gpu_memory or _memory(ASSUMED_GPU_MEMORY) if has_gpus else None,
            host_bytes=args.host_memory,
            links=Links(network_gbps=args.network_gbps, nvlink_gbps=args.nvlink_gbps if has_gpus else None),
        ),
        shape=shape_of(config, name, trust_remote_code=remote_code),
        push=push_shape(
            config,
            dtype=dtype,
            bucket_bytes=training.vllm_sync_bucket_mb * 2**20,
            whole_experts=not any(engine_kwargs.get(key) for key in ("enable_expert_parallel", "quantization")),
            trust_remote_code=remote_code,
        ),
        dtype=dtype,
        flash_attention="flash" in (arguments.model.attn_implementation or ""),
        reward_parameters=count_parameters(reward, trust_remote_code=remote_code) if reward is not None else 0,
    )


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no speed in gigabits per second, such as 400")
    return value


def _gpu_counts(text: str) -> tuple[int, ...]:
    """'8' or '8,8,7,8'."""
    return tuple(_positive(part.strip()) for part in text.split(","))


def _memory(text: str) -> int:
    """Bytes of '80GiB' or '1.5 TB': powers of 1024 with an i, of 1000 without."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT])(i?)B", text.strip())
    if match is None or match[1].count(".") > 1 or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it with its unit, such as 80GiB, 80GB or 1TiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1))
