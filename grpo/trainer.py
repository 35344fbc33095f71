"""`GRPOTrainer`: TRL's, generating on the node's own engines.

The loop is TRL's and reads like the paper (DeepSeekMath, https://arxiv.org/abs/2402.03300): sample a group of
completions per prompt, score them, train on their advantages, sync the new weights. This class replaces where the
samples come from and how the weights get there.
"""

import asyncio
import contextlib
import copy
import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, TrainerControl
from trl.extras.profiling import profiling_context

from grpo.checkpoints.deepspeed_settings import import_deepspeeds_muon
from grpo.config import GRPOConfig
from grpo.config.models import attention_heads, base_of, describe_model, sampling_settings
from grpo.config.options import refuse_with_spare_groups
from grpo.config.refusals import ddp_memory_warning, refuse_unsupported
from grpo.engine.client import EngineClient
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
from grpo.preflight.inputs import check_inputs, try_first_row
from grpo.preflight.lora import around_towers, choose_lora, with_revision
from grpo.preflight.quantisation import settle_quantisation
from grpo.record.folder import make_run_folder
from grpo.record.metrics import MetricsFile, clipped_share, completion_lengths
from grpo.record.provenance import beside_options
from grpo.record.screen import what_runs_where
from grpo.record.timeline.start import open_timeline
from grpo.rollout.agents.rollout import AgentBatch
from grpo.seam.episodes import Episodes, environments_in_threads, together
from grpo.seam.episodes_ahead import refuse_main_thread_ahead
from grpo.seam.evaluating import PREFIX, Evaluation
from grpo.seam.guarding import BatchGuard
from grpo.seam.observing import ObservedTrainer
from grpo.seam.old_logprobs import OldLogprobs
from grpo.seam.scoring import BatchRewards
from grpo.seam.sparing import SpareGroups
from grpo.seam.view import TrainerView
from grpo.serving import engine_spec
from grpo.weights.adapters import Lora
from grpo.weights.gather import gather_convolutions_with_their_layers
from grpo.weights.probe import TEXT_TOKENS
from grpo.weights.trained import TrainedModel


def _clients_of(engines: EngineSupervisor) -> Callable[[], Sequence[EngineLike]]:
    """The present ones, while there are any, by whoever must not hold them."""
    alive = weakref.ref(engines)
    return lambda: [] if (found := alive()) is None else found.clients


class GRPOTrainer(ObservedTrainer):
    """TRL's `GRPOTrainer` with the same arguments; `args` is a `grpo.GRPOConfig`, which is copied.

    In local mode every rank of the job makes one at the same time, from the main thread. FSDP is refused there, and of
    quantised models all but four bits below LoRA; of a multimodal model the text part is trained, unless the data have
    images.
    """

    start_engine: ClassVar[StartEngine] = EngineClient
    """Starts each engine."""
    _watch: FailureWatch
    _rewards: BatchRewards
    _episodes: Episodes
    _spares: SpareGroups
    _guard: BatchGuard
    _evaluation: Evaluation
    _is_evaluating = False

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        prompt_order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, GRPOConfig):
            raise TypeError(f"args is a {type(args).__module__}.GRPOConfig [GRPO-201]: import GRPOConfig from grpo")
        inherited = {
            "model": model,
            "reward_funcs": reward_funcs,
            "args": copy.copy(args),  # some fields depend on where we are, and TRL sets others
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": processing_class,
            "reward_processing_classes": reward_processing_classes,
            "callbacks": [*(callbacks or []), MetricsFile(self.beside_metrics)],
            "optimizers": optimizers,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
        }
        self._local: LocalVLLM | None = None
        self._view = TrainerView(self)
        self._old_logprobs = OldLogprobs(self._view, clips_on_engines=args.local_mode and args.old_logprobs == "engine")
        self.prompt_order = prompt_order
        self._reward_loop: asyncio.AbstractEventLoop | None = None
        if not args.local_mode:
            drop_host()  # that `grpo launch` has started for engines
            join_deepspeed(args.deepspeed)
            if read_launch(os.environ).rank == 0:
                make_run_folder(Path(args.output_dir))  # transformers would make it for everybody to read
            super().__init__(**inherited)
            # A launcher sends SIGTERM when a rank has failed, and here no watch could tell that from a request.
            signals = StopSignals(sigterm=False)
            signals.take()
            self.open_run(self.args, signals)
            return
        if read_launch(os.environ).launched:
            start_first_host()  # unless one waits already, or this node's engines have been started before
        with self.recording_failures(args.output_dir):
            refuse_unsupported(inherited)
            refuse_main_thread_ahead(inherited)
            check_inputs(inherited)
            self._init_local(inherited)

    # -- start ----------------------------------------------------------------------------------------------------

    def _init_local(self, inherited: dict[str, Any]) -> None:
        """Engines first, so that they start while TRL loads the model; then TRL's trainer; then both together."""
        args: GRPOConfig = inherited["args"]
        given = inherited["processing_class"]
        settle_quantisation(inherited)
        plain = base_of(inherited["model"])
        self.choose_processor(inherited)
        refuse_with_spare_groups(inherited, takes_images=self._takes_images)
        inherited["peft_config"] = around_towers(with_revision(inherited["peft_config"], args), plain, args)
        self.topology, self._watch = self._find_place(inherited["model"], args)
        if not self.topology.launched and len(self.topology.devices) > 1:
            # The other GPU is the engine's. TRL would refuse two, and transformers spread the model over both.
            args._n_gpu = 1
            args.model_init_kwargs = {"device_map": {"": 0}, **(args.model_init_kwargs or {})}
        with self._watch.guard(), self._watch.during("start"):
            named, adapted, bits = (inherited[name] for name in ("model", "peft_config", "quantization_config"))
            choice = choose_lora(named, adapted, bits, args, has_gpus=bool(self.topology.devices))
            name = named if isinstance(named, str) else named.config._name_or_path or type(named).__name__
            beside = {"model_name_or_path": name, **beside_options(inherited)}
            rollout_s = args.rollout_timeout
            if inherited["environment_factory"]:  # as long to reset, and nobody need hear of it before the batch ends
                rollout_s *= 2
            self.open_run(
                args,
                self._watch.signals,
                self._watch,
                topology=self.topology,
                max_wait_s=max(args.vllm_start_timeout, args.vllm_generate_timeout, args.vllm_sync_timeout, rollout_s),
                beside=beside,
            )
            self._open_logs(Path(args.output_dir))
            self._record_what_the_watch_learns()
            text = self._node_groups.by_rank_zero(lambda: self._try_first_row(inherited), list[int])
            self._say(*what_runs_where(self.topology, Path(args.output_dir), model=name))
            self.timeline = open_timeline(
                Path(args.output_dir), self.topology, self._node_groups, self._watch, attempt=self.attempt
            )
            engine_model, self._private_folder = describe_model(  # a folder that is removed with us
                plain, args, given, self.topology, takes_images=self._takes_images
            )
            if self._private_folder is not None and self._processor is not None:  # some of vLLM's classes read it
                self._processor.save(self._private_folder.path)
            slot = None if choice is None or choice.way == "merge" else choice.slot
            engines = EngineSupervisor(
                engine_spec(args, engine_model, self.topology, slot),
                self.topology,
                self._watch,
                log_folder=Path(args.output_dir) / LOGS_FOLDER,
                attempt=self.attempt,
                timeout_s=args.vllm_start_timeout,
                max_restarts=args.vllm_max_restarts,
                standby=args.vllm_standby,
                stopped_timeout_s=args.heartbeat_timeout,
                stall_timeout_s=args.vllm_stall_timeout,
                start_engine=self.start_engine,
            )
            if (func := inherited["rollout_func"]) is not None:
                me: Any = weakref.proxy(self)
                inherited["rollout_func"] = together(func, self._view, lambda: me._note_sampling())
            try:
                join_deepspeed(args.deepspeed)
                self._init_without_a_generator(inherited)
                self.observe(self.timeline, self.topology, self._local_pids, _clients_of(engines))
            except BaseException:
                engines.close()
                raise
            lora = None
            if choice is not None:
                self._say(str(choice))
                compute_in(self.model, engine_model.dtype)
                lora = Lora(self.model, merges=choice.way == "merge")
            self._make_parts(func, inherited["tools"] or ())
            self._local = self.vllm_generation = LocalVLLM(
                args,
                engines,
                TrainedModel(
                    model=self.model if lora is None else lora.base,
                    lora=lora,
                    engine_model=engine_model,
                    special_ids=tuple(self._tokenizer.all_special_ids),
                    text=tuple(text),
                    reference=None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model),
                    end_tokens=tuple(self.eos_token_ids),
                    autocast=self.accelerator.autocast,
                    pictures=self.find_pictures(text),
                ),
                self._node_groups,
                self._watch,
                self._progress,
                prompts_of_batch=self.prompts_of_batch,
                engine_ids=lambda: self._engine_ids,
                on_restart=lambda restart: self.record_restart(str(restart)),
                rollouts=self._episodes.rollouts,
                timeline=self.timeline,
            )
            ddp_memory_warning(self)

    def _make_parts(self, func: Any, tools: Sequence[Callable[..., Any]]) -> None:
        view, watch, groups = self._view, self._watch, self._node_groups
        me: Any = weakref.proxy(self)
        self._rewards = BatchRewards(view, watch, self.timeline)
        self._episodes = Episodes(
            view, self._rewards, me, watch, self.topology, func=func, tools=tools, attempt=self.attempt
        )
        self._spares = SpareGroups(view, self._rewards, watch, groups, lambda: me._sampler)

        def note_nodes(figures: Any) -> None:
            me.by_node = {**me.by_node, **figures}

        self._guard = BatchGuard(view, watch, groups, note_nodes)
        self._evaluation = Evaluation(view, lambda of_set: me.write_evaluated(of_set))

    def _open_logs(self, output_dir: Path) -> None:
        """This rank's, and on the local main that of the node's sentinel."""
        place, folder = self.topology, output_dir.absolute() / LOGS_FOLDER
        versions = ", ".join(" ".join(each) for each in read_versions().items())
        about = f"rank {place.rank} of {place.world_size}, node {place.node} of {place.num_nodes}; {versions}"
        open_log(folder / log_name("rank", node=place.node, index=place.rank, attempt=self.attempt), about)
        if place.is_local_main:
            self._watch.open_log(folder / log_name("sentinel", node=place.node, attempt=self.attempt))

    def _try_first_row(self, inherited: dict[str, Any]) -> list[int]:
        """On rank 0; ordinary text, of which a verification takes no more."""
        first = try_first_row(inherited)
        self._reward_loop = first.reward_loop
        return first.text[:TEXT_TOKENS]

    def _find_place(self, model: "str | PreTrainedModel", args: GRPOConfig) -> tuple[NodeTopology, FailureWatch]:
        num_heads, num_kv_heads = attention_heads(base_of(model), args)
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
        self._local_pids = {rank: pids[rank] for rank in topology.node_ranks}
        return topology, watch_for(
            topology,
            self._local_pids,
            timeout_s=args.heartbeat_timeout,
            start_timeout_s=args.start_timeout,
            rank_stall_timeout_s=args.rank_stall_timeout,
        )

    def _record_what_the_watch_learns(self) -> None:
        me = weakref.ref(self)  # the engines' threads hold the watch, and would keep this object alive

        def on_record(record: FailureRecord) -> None:
            if (trainer := me()) is not None:
                trainer.record_failure(str(record), record.kind, record=record)

        self._watch.on_record = on_record

    def _init_without_a_generator(self, inherited: dict[str, Any]) -> None:
        """TRL would build a generator of its own; it takes ours in the same place afterwards."""
        args: GRPOConfig = inherited["args"]
        args.use_vllm = False
        factories = environments_in_threads(inherited["environment_factory"], args)
        try:
            super().__init__(**{**inherited, "environment_factory": factories})
        finally:
            args.use_vllm = True
        if self.is_deepspeed_enabled:
            import_deepspeeds_muon()
        base = base_of(self.model)
        gather_convolutions_with_their_layers(base)
        if (line := self.settle_towers(base)) is not None:
            self._say(line)
        if self._reward_loop is not None:  # what asynchronous rewards keep belongs to the loop in which they ran first
            self.async_loop = self._reward_loop
        if self._old_logprobs.clips_on_engines:
            self.vllm_importance_sampling_correction = False
        self.use_vllm = True
        self._last_loaded_step = -1

    # -- the loop -------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a failure on any rank raises on every rank that can raise, with one record."""
        with self._guarded("train"):
            self._last_loaded_step = -1  # else TRL leaves out the first weight sync of a second `train`
            if self._local is not None:
                self._local.forget_sent()  # whatever happened to frozen weights since the last one
            try:
                return super().train(*args, **kwargs)
            finally:
                if self._local is not None:
                    self._local.drop_ahead()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample and score."""
        if self._local is None:
            return super()._generate_and_score_completions(inputs)
        with self._episodes.of_batch(), self._rewards.of_batch(inputs):
            scored = super()._generate_and_score_completions(inputs)
        self._old_logprobs.take(scored)
        self._guard.take(scored, has_own=not self._old_logprobs.clips_on_engines)
        if (refused := self._local.refused_rows) is not None:
            scored["completion_mask"][refused] = 0
            counted = scored["completion_mask"] * scored.get("tool_mask", 1)
            scored["num_items_in_batch"] = self.accelerator.gather(counted.sum()).sum()  # as TRL counts them (1.16)
        if "importance_sampling_ratio" in scored:
            self.note_metrics(clipped_share(scored, self.args, self.accelerator))
        self.note_metrics(completion_lengths(scored, self.accelerator))
        self.note_completions(self._local.facts(self._end_tokens), self._mode)
        return scored

    def _generate(self, prompts: list[Any]) -> Any:
        """Sample, with spare groups more than is trained on; reward functions begin as completions come."""
        if self._local is None:
            return super()._generate(prompts)
        generate = super()._generate

        def sample(prompts: list[Any]) -> Any:
            self._episodes.end_resets()
            generated = self._rewards.sample(prompts, generate)
            self._old_logprobs.sampled()
            return generated

        calculate = partial(self._rewards.calculate, super()._calculate_rewards)
        return self._spares.sample(prompts, sample, calculate)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Sync the weights where they have changed, then ask for completions; TRL does."""
        if self._local is None:
            return super()._generate_single_turn(*args, **kwargs)
        with profiling_context(self, "vLLM.generate"):
            self._local.rest_for_weights()  # here, so that TRL's timer of the weight sync does not count it
        completions = super()._generate_single_turn(*args, **kwargs)
        self.note_sampling(self._local)
        return completions

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any) -> Any:
        if self._local is None:
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest)
        return self._episodes.talked(completions)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """Score."""
        batch = inputs, prompts, completions, completion_ids_list
        if self._local is None:
            return super()._calculate_rewards(*batch)
        if (rewards := self._spares.take_rewards()) is None:
            rewards = self._rewards.calculate(super()._calculate_rewards, *batch)
        self._evaluation.add(rewards)
        return rewards

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train."""
        with self._old_logprobs.in_training(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._old_logprobs.leaves_out(model):
            return None, None, None
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if (batch := self._old_logprobs.first_scored()) is not None:
            own = found[0].detach()
            self._old_logprobs.note(batch, own)
            if self._local is not None:
                self._guard.note(batch, own)
        return found

    def after_step(self, control: TrainerControl) -> None:
        if self._local is not None:
            self.note_metrics(self._local.startup.first_step())
        super().after_step(control)
        self._old_logprobs.after_step()
        if self._local is not None:
            self._guard.after_step()

    # -- beside the loop ------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = PREFIX
    ) -> dict[str, float]:
        """As TRL's, of the weights that the model holds now; fails as `train` does.

        Costs two weight syncs. TRL goes by the step (1.16), but `load_best_model_at_end` and callbacks put other
        weights into the model at the same step: before an evaluation, or after it the old ones again. Of one that is
        not the loop's own nobody knows what it evaluates: nothing of training is sampled meanwhile.
        """
        evaluate = partial(super().evaluate, eval_dataset, ignore_keys, metric_key_prefix)
        if self._local is not None:
            evaluate = partial(self._evaluation.of_set, eval_dataset, metric_key_prefix, evaluate)
        if self._is_evaluating:  # one of several sets
            return evaluate()
        with self._guarded("evaluate"):
            self._last_loaded_step = -1
            if self._local is not None and not self.control.should_evaluate:
                self._local.wait_for_batches()
            self._is_evaluating = True
            try:
                return evaluate()
            finally:
                self._is_evaluating, self._last_loaded_step = False, -1

    @contextlib.contextmanager
    def _guarded(self, phase: str) -> Iterator[None]:
        if self._local is None:
            yield
            return
        with self._watch.guard(), self._watch.during(phase):
            yield

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._local is not None:
            self._evaluation.note()
        super().log(logs, start_time)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._local is not None and self._buffered_inputs:
            self._old_logprobs.take_resumed(self._buffered_inputs)

    def keep_ahead(self) -> dict[str, Any] | None:
        if self._local is None or self._must_resume:  # for want of engines
            return None
        return {"settings": self._sampling, "batches": self._local.keep_ahead(lambda: self._signals.is_hurried)}

    def resume_ahead(self, kept: dict[str, Any] | None) -> None:
        if self._local is None:
            return
        self._local.kept_batches = []
        if not kept or not self.args.generation_lookahead:
            return
        if kept["settings"] == self._sampling:
            self._local.kept_batches = kept["batches"]
        elif kept["batches"]:
            self._say("sampling settings have changed: the batches under way are sampled again")

    # -- what the loop asks ---------------------------------------------------------------------------------------

    def agent_batch(self, prompts: Sequence[Any]) -> AgentBatch:
        """Inside of a rollout function: what `grpo.agents` needs of the batch that is being made.

        Args:
            prompts: of this rank's rows, as TRL gives them to the rollout function.
        """
        if self._local is None:
            raise TypeError("grpo.agents asks the node's own engines: set vllm_mode to 'local'")
        return self._episodes.agent_batch(prompts)

    def _note_sampling(self) -> None:
        assert self._local is not None, "its engines have sampled"
        self.note_sampling(self._local)

    @property
    def _end_tokens(self) -> set[int]:
        return {*self.eos_token_ids, self._tokenizer.pad_token_id}  # as TRL counts those that were cut (1.16)

    @property
    def _sampling(self) -> str:
        settings = sampling_settings(self.args) | {"max_model_len": self.args.vllm_max_model_length}
        return json.dumps(settings, sort_keys=True, default=str)

    def _progress(self) -> tuple[int, str, int]:
        return self.state.global_step, self._mode, self._step // self._steps_per_batch

    # -- end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        if self._local is not None:
            self._watch.leave()

    def close(self) -> None:
        """End this node's engines and leave the output folder; otherwise they go with this object or the process."""
        if self._local is not None:
            self._local.close()
        super().close()
