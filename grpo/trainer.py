"""`GRPOTrainer`: TRL's, generating on the node's own engines.

The loop is TRL's and reads like the paper (DeepSeekMath, https://arxiv.org/abs/2402.03300): sample a group of
completions per prompt, score them, train on their advantages, push the new weights. This class replaces where the
samples come from and how the weights get there.
"""

import contextlib
import weakref
from typing import Any

from transformers import PreTrainedModel, TrainerControl
from trl.extras.profiling import profiling_context

from grpo.config import GRPOConfig
from grpo.engine_settings import attention_heads, describe_model
from grpo.job.agreement import agree_on_topology
from grpo.job.failure import FailureRecord
from grpo.job.node_groups import NodeGroups
from grpo.job.process_groups import join_deepspeed
from grpo.job.topology import read_topology
from grpo.job.watch import watch_for
from grpo.local_vllm import LocalVLLM, SyncReport
from grpo.refusals import ddp_memory_warning, refuse_unsupported
from grpo.run.metrics import MetricsFile, count_clipped
from grpo.run.prompt_order import prompts_of_batch
from grpo.run.resumable import ResumableTrainer

ARRIVAL_TIMEOUT_S = 300.0  # between the first and the last rank's arrival in the trainer


class GRPOTrainer(ResumableTrainer):
    """TRL's `GRPOTrainer` with the same arguments; `args` is a `grpo.GRPOConfig`.

    In local mode every rank of the job makes one at the same time, from the main thread. Images, tools, environments,
    rollout functions, LoRA, quantised models and FSDP are refused there.
    """

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
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, GRPOConfig):
            raise TypeError(f"args is a {type(args).__module__}.GRPOConfig: import GRPOConfig from grpo")
        inherited = {
            "model": model,
            "reward_funcs": reward_funcs,
            "args": args,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": processing_class,
            "reward_processing_classes": reward_processing_classes,
            "callbacks": [*(callbacks or []), MetricsFile()],
            "optimizers": optimizers,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
        }
        self._local: LocalVLLM | None = None
        self._logged_sync: dict[str, SyncReport] = {}
        if not args.local_mode:
            if args.deepspeed:
                join_deepspeed()
            super().__init__(**inherited)
            return
        with self.recording_failures(setting_up=True):
            refuse_unsupported(inherited)
            self._init_local(inherited)

    def _init_local(self, inherited: dict[str, Any]) -> None:
        args: GRPOConfig = inherited["args"]
        num_heads, num_kv_heads = attention_heads(inherited["model"], args)
        self.topology, pids = agree_on_topology(
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
            timeout_s=ARRIVAL_TIMEOUT_S,
        )
        if not self.topology.launched and len(self.topology.devices) > 1:
            # The other GPU is the engine's. TRL would refuse two, and transformers spread the model over both.
            args._n_gpu = 1
            args.model_init_kwargs = {"device_map": {"": 0}, **(args.model_init_kwargs or {})}
        first = self.topology.node * self.topology.local_world_size
        self._watch = watch_for(
            self.topology,
            {rank: pids[rank] for rank in range(first, first + self.topology.local_world_size)},
        )
        with self._watch.guard(), self._watch.during("start"):
            self.open_run(args, self._watch.signals, self._watch)
            me = weakref.ref(self)  # the engines' threads hold the watch, and would keep this object alive

            def on_record(record: FailureRecord) -> None:
                if (trainer := me()) is not None:
                    trainer.record_failure(str(record), can_heal=record.can_heal)

            self._watch.on_record = on_record
            longest_s = max(args.vllm_start_timeout, args.vllm_generate_timeout, args.vllm_sync_timeout)
            groups = NodeGroups(self.topology, max_wait_s=longest_s, watch=self._watch)
            engine_model, private_folder = describe_model(
                inherited["model"], args, inherited["processing_class"], self.topology
            )
            self._private_folder = private_folder  # removed with this object
            self._local = LocalVLLM(
                args, engine_model, self.topology, groups, self._watch, self._progress, attempt=self.attempt
            )
            if args.deepspeed:
                join_deepspeed()
            # TRL would build its own generator here; it takes ours in the same place afterwards.
            args.use_vllm = False
            try:
                super().__init__(**inherited)
                if self._is_vlm:
                    raise ValueError(
                        f"{self.model.config.model_type} takes images: local mode trains text models; pass the text "
                        "model, or set vllm_mode to 'server' or 'colocate'"
                    )
            except BaseException:
                self._local.close()
                raise
            finally:
                args.use_vllm = True
            self.use_vllm = True
            self.vllm_generation = self._local
            self._last_loaded_step = -1
            self._local.attach(self.model, self.accelerator.autocast, self._following_prompts)
            ddp_memory_warning(self)

    def _progress(self) -> tuple[int, str]:
        return self.state.global_step, "train" if self.model.training else "eval"

    def _following_prompts(self) -> list[list[int]] | None:
        """This rank's prompts of the generation batch after the present one; None when training ends before it."""
        args = self.args
        micro_batches_left = (self.state.max_steps - self.state.global_step) * args.gradient_accumulation_steps
        micro_batches_left -= self._step - self._step_began_at
        if not args.generation_lookahead or micro_batches_left <= self._steps_per_batch:
            return None
        return prompts_of_batch(
            self._step // self._steps_per_batch + 1,
            self._sampler,
            self.train_dataset,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            tokenize=lambda prompts: self._tokenize_prompts(prompts)[0],
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a failure on any rank raises on every rank that can raise, with one record."""
        with self._guarded("train"):
            self._last_loaded_step = -1  # TRL would leave out a second `train`'s first push where both begin at a step
            try:
                return super().train(*args, **kwargs)
            finally:
                if self._local is not None:
                    self._local.drop_ahead()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; fails as `train` does."""
        with self._guarded("evaluate"):
            return super().evaluate(*args, **kwargs)

    @contextlib.contextmanager
    def _guarded(self, phase: str) -> Any:
        if self._local is None:
            yield
            return
        with self._watch.guard(), self._watch.during(phase):
            yield

    def after_step(self, control: TrainerControl) -> None:
        if self._local is not None and (startup := self._local.startup.first_step()):
            for name, seconds in startup.metrics().items():
                self._metrics["train"][name].append(seconds)
            self._say(str(startup))
        super().after_step(control)

    def leave(self) -> None:
        if self._local is not None:
            self._watch.leave()

    def close(self) -> None:
        """End this node's engines and leave the output folder; otherwise they go with this object or the process."""
        if self._local is not None:
            self._local.close()
        super().close()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self._local is not None:
            with profiling_context(self, "vLLM.generate"):
                self._local.collect_ahead()  # here, so that TRL's timer of the push does not count it
        result = super()._generate_single_turn(*args, **kwargs)
        if self._local is not None:
            self._log_generation(self._local)
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        ratio = output.get("importance_sampling_ratio")
        if self._local is not None and ratio is not None:
            counts = count_clipped(
                ratio,
                output["completion_mask"],
                mode=self.args.vllm_importance_sampling_mode,
                clip_min=self.args.vllm_importance_sampling_clip_min,
                clip_max=self.args.vllm_importance_sampling_clip_max,
            )
            counts = self.accelerator.gather(counts.unsqueeze(0)).sum(0)
            mode = "train" if self.model.training else "eval"
            name = "sampling/importance_sampling_ratio/clipped_share"
            self._metrics[mode][name].append((counts[0] / counts[1].clamp(min=1)).item())
        return output

    def _log_generation(self, local: LocalVLLM) -> None:
        """Metrics of one generation batch, over nodes, and of the last push if they have not been logged yet."""
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        reports = local.last_generation
        of_nodes = {
            "rollout/generate_s": [report.generate_s for report in reports],
            "rollout/tokens_per_s": [report.tokens_per_s for report in reports],
            "rollout/wait_s": [report.wait_s for report in reports],
            "engine/idle_s": [report.idle_s for report in reports],
        }
        periods_s = [report.period_s for report in reports if report.period_s is not None]
        if periods_s:
            of_nodes["rollout/wait_share"] = [r.wait_s / p for r, p in zip(reports, periods_s, strict=True)]
            of_nodes["engine/idle_share"] = [r.idle_s / p for r, p in zip(reports, periods_s, strict=True)]
        for name, values in of_nodes.items():
            metrics[name].append(sum(values) / len(values))
            metrics[f"{name}_min"].append(min(values))
            metrics[f"{name}_max"].append(max(values))
        metrics["rollout/policy_lag"].append(local.policy_lag.pushes)
        metrics["rollout/policy_lag_steps"].append(local.policy_lag.steps)
        metrics["engine/policy_version"] = [self.state.global_step - local.policy_lag.steps]
        sync = local.last_sync
        if sync is None or self._logged_sync.get(mode) is sync:
            return
        self._logged_sync[mode] = sync
        metrics["push/total_s"].append(sync.total_s)
        metrics["push/gather_s"].append(sync.gather_s)
        metrics["push/send_s"].append(sync.send_s)
        metrics["push/bytes"].append(sync.num_bytes)
        if sync.gap is not None:
            if sync.gap is local.first_gap:
                self._say(
                    f"the first push is proved: log-probabilities differ by {sync.gap.mean:.2g} nats in the mean and "
                    f"{sync.gap.max:.2g} at most; from now on up to {local.gap_limit:.2g} in the mean"
                )
            metrics["push/logprob_gap_limit"].append(local.gap_limit)
            metrics["push/logprob_gap_mean"].append(sync.gap.mean)
            metrics["push/logprob_gap_max"].append(sync.gap.max)
