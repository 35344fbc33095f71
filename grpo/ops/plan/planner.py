"""Make a plan, as far as possible: placement, batch, estimates."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, StrictDataclassError
from transformers import AutoConfig
from trl import get_peft_config

from grpo.config.models import choose_backend, compute_dtype, head_counts, loaded_dtype, model_config
from grpo.config.refusals import check_class, check_init_kwargs
from grpo.model.text_part import describe_trained_parts, is_multimodal
from grpo.ops.plan.batch import PlannedBatch, plan_batch, prompt_tokens_of
from grpo.ops.plan.estimates import estimate
from grpo.ops.plan.gpus import ASSUMED_GPU, GPUS
from grpo.ops.plan.hub import within_reach
from grpo.ops.plan.images import Images, caches_in_host_memory, images_of
from grpo.ops.plan.job import Launcher, PlannedConfig, read_launcher, read_training, zero_of
from grpo.ops.plan.lora import PlannedLora, planned_lora
from grpo.ops.plan.memory_budget import GIB
from grpo.ops.plan.model_shape import count_parameters, meta_model, shape_of
from grpo.ops.plan.placed_job import Hardware, PlacedJob
from grpo.ops.plan.placement import assumed_launcher, gpus_of_nodes, place
from grpo.ops.plan.plan import Plan
from grpo.ops.plan.shortfalls import fits_with, shortfalls_of
from grpo.ops.plan.speed import advise
from grpo.ops.plan.sync_memory import sync_shape
from grpo.ops.train.arguments import Arguments, quantisation_of
from grpo.ops.train.checks import CHECKS, check_rewards, check_task
from grpo.ops.train.demo import MODEL
from grpo.place.topology import NodeTopology
from grpo.preflight.lora import check_lora
from grpo.preflight.model import local_model, reason_of
from grpo.preflight.quantisation import check_own_quantisation, four_bits_of, given_once
from grpo.record.folder import check_writable

ONE_BY_ONE = ("enable_expert_parallel", "quantization")  # with these engine settings experts are not loaded at once


def make_plan(args: argparse.Namespace) -> Plan:
    """Make as much of the plan as the arguments allow; problems are in its `errors`."""
    plan = Plan()
    flags = [*(["--model_name_or_path", args.model] if args.model else []), *args.train_flags]
    with plan.refusing():
        ranks = args.ranks_per_node
        if args.config_file or args.num_processes or ranks or not (args.model or args.config):
            plan.launcher = read_launcher(args.config_file, args.num_processes, args.num_machines, ranks)
        else:
            words = [*(["--config", args.config] if args.config else []), *flags]
            nodes = args.num_machines or len(args.gpus_per_node or [0])
            plan.launcher = assumed_launcher(nodes, args.gpus_per_node, words)
            counts = plan.launcher.counts
            shown = ",".join(map(str, counts if len({*counts}) > 1 else counts[:1]))
            plan.assume(f"ZeRO-3 in bfloat16 with {shown} ranks on each node (--config_file, --num_machines)")
        with plan.noting_warnings():
            arguments = read_training(args.config, flags, plan.launcher)
        _Planner(plan, args, plan.launcher, arguments).fill_in()
    return plan


class _Planner:
    """Fills in `plan` from the job's arguments."""

    def __init__(self, plan: Plan, args: argparse.Namespace, launcher: Launcher, arguments: Arguments) -> None:
        training = arguments.training
        assert isinstance(training, PlannedConfig)
        self.plan, self.args, self.training = plan, args, training
        self.model, self.script = arguments.model, arguments.script
        self.arguments = arguments
        self.launcher = plan.launcher = replace(launcher, use_cpu=launcher.use_cpu or training.use_cpu)
        self.config: Any = None
        """Configuration of the model to train; None if it cannot be read."""
        self.lora: PlannedLora | None = None

    def fill_in(self) -> None:
        plan, training = self.plan, self.training
        for check in self._checks():
            with plan.refusing():
                check(self.arguments)
        try:
            check_writable(Path(training.output_dir))
        except (OSError, ValueError) as error:  # of this machine, which may not belong to the cluster
            plan.warnings.append(f"on this machine {error}")
        self.config = self._model_config()
        if training.local_mode:
            with plan.refusing():
                check_class(self.config)
            with plan.refusing():
                check_own_quantisation(self.config)
            with plan.refusing():
                check_init_kwargs(training, self.model.model_name_or_path)
            with plan.refusing():
                self._place()
            with plan.refusing():
                self._wrap()
            with plan.refusing():
                self._check_images()
        else:
            mode = f"vllm_mode is {training.vllm_mode!r} and use_vllm {training.use_vllm}"
            plan.errors.append(f"{mode}: only local mode is planned")
        if training.refusal is not None:
            plan.errors.append(training.refusal)
        elif plan.nodes is not None:
            batch = plan.batch = self._count_batch(plan.nodes)
            if self.config is not None and (self.lora is not None or not self.model.use_peft):
                self._estimate(plan.nodes, batch)

    def _checks(self) -> list[Callable[[Arguments], None]]:
        """The trainer's checks; if only a model is sized, data set and rewards may be missing."""
        script, left_out = self.script, {}
        if self.model.model_name_or_path is not None and (self.args.model or self.args.config is None):
            if not (script.dataset_name or self.arguments.mixture.datasets):
                left_out[check_task] = "data set"
            if not (script.reward_funcs or script.reward_model_name_or_path):
                left_out[check_rewards] = "reward"
        if left_out:
            self.plan.assume(f"no {', no '.join(left_out.values())}: the model is sized alone")
        return [check for check in CHECKS if check not in left_out]

    def _model_config(self) -> Any:
        """Read the model's configuration; None, with an error, if it cannot be read."""
        if self.model.model_name_or_path is None:
            self.plan.assume("no model is named: the demo, with its model of 0.6 M parameters")
            return AutoConfig.from_pretrained(MODEL)
        return self._read_config("model_name_or_path", self.model.model_name_or_path)

    def _read_config(self, setting: str, name: str) -> Any:
        """Read the configuration of the model in `setting`; None if it cannot be read.

        This is an error, or `unknown` for a Hub id if this machine may be the reason.
        """
        try:
            is_local = local_model(name, setting) is not None
        except ValueError:  # reported by `CHECKS` already
            return None
        training, init_kwargs = self.training, self.training.model_init_kwargs or {}
        try:
            found = name if is_local else within_reach(name, init_kwargs.get("revision"))
            config = model_config(name if training.trust_remote_code else found, training)
        except (OSError, ValueError, StrictDataclassError) as error:
            causes = (error, error.__cause__)
            is_gated = any(isinstance(cause, GatedRepoError) for cause in causes)  # also a RepositoryNotFoundError
            absent = any(isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError) for cause in causes)
            is_known = is_local or (absent and not is_gated)
            (self.plan.errors if is_known else self.plan.unknown).append(
                f"{setting} is {name!r}, whose configuration cannot be read ({reason_of(error)}), so memory and "
                "weight sync are left out: give a local folder with its config.json "
                f"(hf download {name} config.json), or look at the network and HF_TOKEN"
            )
            return None
        return config

    def _place(self) -> None:
        """Assign GPUs to ranks and engines, by the code of the ranks themselves."""
        plan, training = self.plan, self.training
        split = self.config is not None and training.vllm_tensor_parallel_size != 1
        heads, key_value_heads = head_counts(self.config) if split else (None, None)
        reserved = training.vllm_reserved_gpus
        plan.gpus_per_node, assumed = gpus_of_nodes(self.args.gpus_per_node, self.launcher)
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
        if plan.nodes[0].engines_differ and training.vllm_balance_nodes is False:
            plan.warnings.append(
                "nodes have not the same number of ranks to an engine, and vllm_balance_nodes is False: the others "
                "wait for the one with the most; leave it unset"
            )
        choose_backend(training.vllm_sync_backend, has_gpus=not self.launcher.use_cpu)

    def _wrap(self) -> None:
        """Wrap the model with its adapters, if any."""
        zero3 = zero_of(self.launcher, self.training).get("stage") == 3
        peft_config = get_peft_config(self.model)
        is_reported = self.model.load_in_8bit or peft_config is None  # reported by `CHECKS`
        asked = given_once(None if is_reported else quantisation_of(self.model), self.training.model_init_kwargs)
        if peft_config is None and asked is None:
            return
        if peft_config is not None:
            check_lora(peft_config, self.training, zero3=zero3)
        if self.config is None or self.training.refusal is not None:
            return
        dtype = compute_dtype(self.config._name_or_path, self.training)
        if asked is not None:
            asked = four_bits_of(asked, dtype, has_adapter=peft_config is not None, zero3=zero3)
        has_gpus = not self.launcher.use_cpu
        with self.plan.noting_warnings():
            self.lora = planned_lora(
                peft_config, self.training, self.config, dtype, has_gpus=has_gpus, quantization=asked
            )
        self.plan.lora = self.lora.choice

    def _check_images(self) -> None:
        if self.args.images is not None and self.config is not None and not is_multimodal(self.config):
            raise ValueError(f"--images {self.args.images}, but a {self.config.model_type} takes text alone")

    def _count_batch(self, nodes: tuple[NodeTopology, ...]) -> PlannedBatch:
        training = self.training
        prompt_tokens, assumed = prompt_tokens_of(training, self.args.prompt_tokens)
        self.plan.assume(assumed)
        text = None if self.config is None else self.config.get_text_config()
        return plan_batch(
            training,
            ranks=nodes[0].ranks_by_node,
            engines=nodes[0].engines_by_node,
            moves=nodes[0].engines_differ and training.vllm_balance_nodes is not False,
            prompt_tokens=prompt_tokens,
            engine_limit=training.vllm_max_model_length or getattr(text, "max_position_embeddings", None),
        )

    def _estimate(self, nodes: tuple[NodeTopology, ...], batch: PlannedBatch) -> None:
        """Estimate memory and weight sync from the shape of the model."""
        plan, config, optim = self.plan, self.config, self.training.optim
        try:
            job = self._placed_job(nodes, batch)
            plan.model, plan.estimates = job.shape, estimate(job)
        except (AttributeError, TypeError) as error:  # the configuration has other names
            plan.unknown.append(
                f"the memory of a {config.model_type} is left out: its configuration is not understood "
                f"({type(error).__name__}: {error})"
            )
            return
        errors, shortfalls = shortfalls_of(job, plan.estimates)
        plan.memory = "does not fit" if errors else "may not fit" if shortfalls else "fits"
        plan.errors += errors
        plan.warnings += shortfalls
        if not errors:
            plan.advice = advise(job, plan.estimates.engine, fits=lambda ranks: fits_with(job, ranks_per_node=ranks))
        if towers := job.shape.tower_parameters:
            is_trained = job.images is not None and job.images.is_trained
            plan.trains = describe_trained_parts(
                config.architectures[0],
                job.shape.towers,
                towers,
                takes_images=job.shape.takes_images,
                freezes=not is_trained,
            )
        if job.images is not None:
            plan.trains += f"; {caches_in_host_memory(self.training.engine_kwargs)}"
        if job.shape.layers_without_kv:
            plan.assume(
                f"the states of {job.shape.layers_without_kv} recurrent layers are not counted; ranks have "
                "flash-linear-attention and causal-conv1d for linear attention (grpo doctor --model looks)"
            )
        if not optim.startswith("adamw_torch"):
            plan.assume(f"the states of Adam with float32 moments; optim is {optim.value}")

    def _placed_job(self, nodes: tuple[NodeTopology, ...], batch: PlannedBatch) -> PlacedJob:
        training, config, lora = self.training, self.config, self.lora
        remote_code, reward_name = training.trust_remote_code, self.script.reward_model_name_or_path
        reward = self._read_config("reward_model_name_or_path", reward_name) if reward_name else None
        model = self.config._name_or_path
        dtype = compute_dtype(model, training)
        images = self._images()
        trains_towers = images is not None and images.is_trained
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
                four_bits=None if lora is None else lora.four_bits,
                takes_images=images is not None,
                trains_towers=trains_towers,
                trust_remote_code=remote_code,
            ),
            sync=sync_shape(
                config,
                dtype=dtype,
                bucket_bytes=training.vllm_sync_bucket_mb * 2**20,
                whole_experts=not any(training.engine_kwargs.get(key) for key in ONE_BY_ONE),
                lora=lora,
                takes_images=images is not None,
                trains_towers=trains_towers,
                trust_remote_code=remote_code,
            ),
            dtype=dtype,
            loaded_dtype=loaded_dtype(model, training),
            lora=None if lora is None else lora.choice,
            adapter_elements=0 if lora is None else lora.engine_elements,
            flash_attention="flash" in (self.model.attn_implementation or ""),
            reward_parameters=count_parameters(reward, trust_remote_code=remote_code) if reward is not None else 0,
            images=images,
        )

    def _images(self) -> Images | None:
        """Images of the prompts, if any."""
        args, training = self.args, self.training
        if args.images is None or not is_multimodal(self.config):
            return None
        images = images_of(
            self.config,
            meta_model(self.config, trust_remote_code=training.trust_remote_code),
            per_prompt=args.images,
            size=args.image_size,
            is_trained=not training.freeze_towers and self.lora is None,
        )
        if args.image_size is None:
            self.plan.assume(
                f"images of {round(images.pixels**0.5)} x {round(images.pixels**0.5)} pixels (--image-size)"
            )
        return images

    def _hardware(self) -> Hardware:
        args = self.args
        gpu = GPUS[args.gpu] if args.gpu else ASSUMED_GPU
        has_gpus = not self.launcher.use_cpu
        if has_gpus and not args.gpu:
            size = "" if args.gpu_memory else f" of {gpu.gib}GiB"
            speed = "" if args.gpu_tflops and args.gpu_tbps else f" as fast as an {gpu.name}"
            self.plan.assume(f"GPUs{size}{speed} (--gpu {', '.join(GPUS)})" if size or speed else None)
        return Hardware(
            gpu_bytes=(args.gpu_memory or gpu.gib * GIB) if has_gpus else None,
            tflops=args.gpu_tflops or gpu.tflops,
            tbps=args.gpu_tbps or gpu.tbps,
            is_a100=args.gpu == "a100",
        )
