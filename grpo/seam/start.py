"""Start of a trainer: its place in the job, this node's engines beside TRL's own `__init__`, then both together."""

import copy
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from grpo.checkpoints.deepspeed_settings import import_deepspeeds_muon
from grpo.config import GRPOConfig
from grpo.config.models import attention_heads, base_of, describe_model
from grpo.config.options import refuse_with_spare_groups
from grpo.config.refusals import ddp_memory_warning, refuse_unsupported
from grpo.engine.early import drop_host, start_first_host
from grpo.engine.like import EngineLike, StartEngine
from grpo.engine.supervisor import EngineSupervisor
from grpo.faults.failure import FailureRecord
from grpo.faults.sentinel_start import watch_for
from grpo.faults.signals import StopSignals
from grpo.faults.watch import FailureWatch
from grpo.groups.agreement import agree_on_topology
from grpo.groups.process_groups import join_deepspeed
from grpo.local_vllm import LocalVLLM
from grpo.model.four_bit import compute_in
from grpo.place.launch import read_launch
from grpo.place.log import LOGS_FOLDER, log_name, open_log
from grpo.place.same_everywhere import read_versions
from grpo.place.topology import NodeTopology, read_topology
from grpo.preflight.inputs import FirstRow, check_inputs, check_model_name, try_first_row
from grpo.preflight.lora import around_towers, choose_lora, with_revision
from grpo.preflight.quantisation import settle_quantisation
from grpo.record.folder import make_run_folder
from grpo.record.provenance import beside_options
from grpo.record.screen import placement_lines
from grpo.record.timeline.start import open_timeline
from grpo.seam.episodes import environments_in_threads, together
from grpo.seam.episodes_ahead import refuse_main_thread_ahead
from grpo.seam.parts import TrainerParts
from grpo.seam.run import say
from grpo.serving import engine_spec
from grpo.weights.adapters import Lora
from grpo.weights.gather import gather_convolutions_with_their_layers
from grpo.weights.probe import TEXT_TOKENS
from grpo.weights.trained import TrainedModel

Arguments = dict[str, Any]
"""Arguments of TRL's trainer, by name."""
Init = Callable[..., None]
"""TRL's `__init__`."""


def own_args(args: GRPOConfig | None, model: "str | PreTrainedModel") -> GRPOConfig:
    """Copy the trainer's `args`: some fields depend on the rank's place, and TRL sets others.

    Raises:
        TypeError: `args` is another library's configuration.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = GRPOConfig(f"{name.split('/')[-1]}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"args is a {type(args).__module__}.GRPOConfig [GRPO-201]: import GRPOConfig from grpo")
    return copy.copy(args)


def start(parts: TrainerParts, arguments: Arguments, init: Init, start_engine: StartEngine) -> LocalVLLM | None:
    """Make TRL's trainer, and open the run. Collective.

    Args:
        arguments: the trainer's arguments; some are replaced.
        init: TRL's `__init__`.
        start_engine: starts each engine.

    Returns:
        This node's engines; None in other modes than local.

    Raises:
        ValueError: the arguments do not go together, or with the data, the model or the job.
        JobFailed: another rank has failed.
    """
    args: GRPOConfig = arguments["args"]
    launch = read_launch(os.environ)
    if args.local_mode:
        if launch.launched:
            start_first_host()  # unless one waits already, or this node has started its engines before
        with parts.run.recording_failures(args.output_dir):
            check_model_name(arguments)
            refuse_unsupported(arguments)
            refuse_main_thread_ahead(arguments)
            check_inputs(arguments)
            return _start_local(parts, arguments, init, start_engine)
    drop_host()  # `grpo launch` may have started one for engines
    join_deepspeed(args.deepspeed)
    if launch.rank == 0:
        make_run_folder(Path(args.output_dir))  # transformers would make it readable for everybody
    init(**arguments)
    # A launcher sends SIGTERM when a rank has failed; without a watch it looks the same as a request to stop.
    signals = StopSignals(sigterm=False)
    signals.take()
    parts.run.open(args, signals)
    parts.resuming.choose(args, args.resume_from_checkpoint)
    return None


def _start_local(parts: TrainerParts, arguments: Arguments, init: Init, start_engine: StartEngine) -> LocalVLLM:
    """Start the engines, then TRL's trainer while they load, then connect both. Collective."""
    args: GRPOConfig = arguments["args"]
    run, view, pictures = parts.run, parts.view, parts.pictures
    output_dir, given = Path(args.output_dir), arguments["processing_class"]
    settle_quantisation(arguments)
    plain = base_of(arguments["model"])
    pictures.choose_processor(arguments)
    refuse_with_spare_groups(arguments, takes_images=pictures.are_taken)
    arguments["peft_config"] = around_towers(with_revision(arguments["peft_config"], args), plain, args)
    topology, pids = _find_place(plain, args)
    if not topology.launched and len(topology.devices) > 1:
        # The other GPU is the engine's. TRL would refuse two, and transformers spread the model over both.
        args._n_gpu = 1
        args.model_init_kwargs = {"device_map": {"": 0}, **(args.model_init_kwargs or {})}
    watch = watch_for(
        topology,
        pids,
        timeout_s=args.heartbeat_timeout,
        start_timeout_s=args.start_timeout,
        rank_stall_timeout_s=args.rank_stall_timeout,
    )
    with watch.guard(), watch.during("start"):
        named, adapted, bits = (arguments[name] for name in ("model", "peft_config", "quantization_config"))
        choice = choose_lora(named, adapted, bits, args, has_gpus=bool(topology.devices))
        name = named if isinstance(named, str) else named.config._name_or_path or type(named).__name__
        _open_run(parts, arguments, topology, watch, name)
        firsts: list[FirstRow] = []

        def try_first() -> list[int]:  # on rank 0; ordinary text, as long as a verification needs
            firsts.append(try_first_row(arguments))
            return firsts[0].text[:TEXT_TOKENS]

        text = run.groups.by_rank_zero(try_first, list[int])
        say(*placement_lines(topology, output_dir, model=name))
        timeline = open_timeline(output_dir, topology, run.groups, watch, attempt=run.attempt)
        engine_model, parts.private_folder = describe_model(  # a folder that is removed with the trainer
            plain, args, given, topology, takes_images=pictures.are_taken
        )
        if parts.private_folder is not None and pictures.processor is not None:  # some of vLLM's classes read it
            pictures.processor.save(parts.private_folder.path)
        slot = None if choice is None or choice.way == "merge" else choice.slot
        engines = EngineSupervisor(
            engine_spec(args, engine_model, topology, slot),
            topology,
            watch,
            log_folder=output_dir / LOGS_FOLDER,
            attempt=run.attempt,
            timeout_s=args.vllm_start_timeout,
            max_restarts=args.vllm_max_restarts,
            standby=args.vllm_standby,
            stopped_timeout_s=args.heartbeat_timeout,
            stall_timeout_s=args.vllm_stall_timeout,
            start_engine=start_engine,
        )
        try:
            join_deepspeed(args.deepspeed)
            _init_without_a_generator(parts, arguments, init)
            parts.timing.start(timeline, topology, pids, _clients_of(engines))
            parts.records.start()
        except BaseException:
            engines.close()
            raise
        lora = None
        if choice is not None:
            say(str(choice))
            compute_in(view.model, engine_model.dtype)
            lora = Lora(view.model, merges=choice.way == "merge")
        trained = TrainedModel(
            model=view.model if lora is None else lora.base,
            lora=lora,
            engine_model=engine_model,
            special_ids=tuple(view.tokenizer.all_special_ids),
            text=tuple(text),
            reference=None if view.ref_model is None else view.accelerator.unwrap_model(view.ref_model),
            end_tokens=tuple(view.eos_token_ids),
            autocast=view.accelerator.autocast,
            pictures=pictures.find(text),
        )
        if firsts and firsts[0].reward_loop is not None:  # objects of asynchronous rewards belong to their first loop
            view.async_loop = firsts[0].reward_loop
        local = view.engines = LocalVLLM(
            args,
            engines,
            trained,
            run.groups,
            watch,
            lambda: (view.state.global_step, view.mode, view.batch_number),
            prompts_of_batch=parts.order.prompts_of_batch,
            engine_ids=lambda: pictures.engine_ids,
            on_restart=lambda restart: run.record_restart(str(restart)),
            rollouts=parts.episodes.rollouts,
            timeline=timeline,
        )
        view.uses_vllm, view.synced_at = True, -1
        ddp_memory_warning(view)
        return local


def _find_place(plain: "str | PreTrainedModel", args: GRPOConfig) -> tuple[NodeTopology, dict[int, int]]:
    """Find this rank's place in the job, and the process ids of this node's ranks. Collective."""
    num_heads, num_kv_heads = attention_heads(plain, args)
    topology, pids = agree_on_topology(
        lambda: read_topology(
            use_cpu=args.use_cpu,
            reserved_gpus=args.vllm_reserved_gpus,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            engines_per_node=args.vllm_engines_per_node,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
        ),
        args.process_index,
        args.world_size,
        timeout_s=args.start_timeout,
    )
    return topology, {rank: pids[rank] for rank in topology.node_ranks}


def _open_run(parts: TrainerParts, arguments: Arguments, place: NodeTopology, watch: FailureWatch, model: str) -> None:
    """Open the run's folder, and the logs of this rank and, on the local main, of the node's sentinel. Collective."""
    args: GRPOConfig = arguments["args"]
    run, rollout_s = parts.run, args.rollout_timeout
    if arguments["environment_factory"]:  # resets have the same limit again, before the ranks meet
        rollout_s *= 2
    run.open(
        args,
        watch.signals,
        watch,
        topology=place,
        max_wait_s=max(args.vllm_start_timeout, args.vllm_generate_timeout, args.vllm_sync_timeout, rollout_s),
        beside={"model_name_or_path": model, **beside_options(arguments)},
    )
    parts.resuming.choose(args, args.resume_from_checkpoint)
    folder = Path(args.output_dir).absolute() / LOGS_FOLDER
    versions = ", ".join(" ".join(each) for each in read_versions().items())
    about = f"rank {place.rank} of {place.world_size}, node {place.node} of {place.num_nodes}; {versions}"
    open_log(folder / log_name("rank", node=place.node, index=place.rank, attempt=run.attempt), about)
    if place.is_local_main:
        watch.open_log(folder / log_name("sentinel", node=place.node, attempt=run.attempt))
    known = weakref.ref(run)  # the engines' threads hold the watch, and would keep the run's folder open

    def on_record(record: FailureRecord) -> None:
        if (run := known()) is not None:
            run.record_failure(str(record), record.kind, record=record)

    watch.on_record = on_record


def _clients_of(engines: EngineSupervisor) -> Callable[[], Sequence[EngineLike]]:
    """Return a function that lists the present clients and holds no reference to the supervisor."""
    alive = weakref.ref(engines)
    return lambda: [] if (found := alive()) is None else found.clients


def _init_without_a_generator(parts: TrainerParts, arguments: Arguments, init: Init) -> None:
    """Run TRL's `__init__` without its own generator; the node's engines take its place afterwards."""
    args: GRPOConfig = arguments["args"]
    func, corrects = arguments["rollout_func"], args.vllm_importance_sampling_correction
    args.use_vllm = False
    if parts.old_logprobs.clips_on_engines:
        args.vllm_importance_sampling_correction = False
    try:
        init(
            **arguments
            | {
                "environment_factory": environments_in_threads(arguments["environment_factory"], args),
                "rollout_func": func and together(func, parts.view, parts.records.note_sampling),
            }
        )
    finally:
        args.use_vllm, args.vllm_importance_sampling_correction = True, corrects
    if parts.view.is_deepspeed_enabled:
        import_deepspeeds_muon()
    base = base_of(parts.view.model)
    gather_convolutions_with_their_layers(base)
    if (line := parts.pictures.settle_towers(base)) is not None:
        say(line)
