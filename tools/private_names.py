"""The names of other libraries that are no documented interface of theirs, and that this project builds on.

Held against what is installed by `tests/unit/seam/test_table.py`, which also finds a name that is used and not listed.
Names that get another value for the whole process stand in `grpo/place/patches`, and need no row here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Use = Literal["overrides", "calls", "reads", "assigns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """One name, and the strongest use that is made of it."""

    owner: str
    """The class that defines it, or the module, with dots."""
    name: str
    use: Use
    signature: str = ""
    """Of a function, without annotations; `...` stands for further parameters. Empty for a value."""

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


def _functions(owner: str, use: Use, signatures: str) -> Iterator[PrivateName]:
    """Of lines such as `name(self, argument=None)`."""
    for line in signatures.strip().splitlines():
        name, bracket, rest = line.strip().partition("(")
        yield PrivateName(owner=owner, name=name, use=use, signature=bracket + rest)


def _values(owner: str, use: Use, names: str) -> Iterator[PrivateName]:
    """Of names with spaces between them."""
    for name in names.split():
        yield PrivateName(owner=owner, name=name, use=use)


_TRL = "trl.trainer.grpo_trainer.GRPOTrainer"
_TRAINER = "transformers.trainer.Trainer"
_ARGUMENTS = "transformers.training_args.TrainingArguments"
_TRANSFER = "vllm.distributed.weight_transfer.base.WeightTransferEngine"
_NCCL = "vllm.distributed.weight_transfer.nccl_engine.NCCLWeightTransferEngine"
_ZERO = "deepspeed.runtime.zero.partition_parameters"
_C10D = "torch.distributed.distributed_c10d"

DOCUMENTED = (
    *_functions(_TRAINER, "calls", "add_callback(self, callback)\nremove_callback(self, callback)"),
    *_values(_TRAINER, "reads", "accelerator args callback_handler control eval_dataset is_deepspeed_enabled model"),
    *_values(_TRAINER, "reads", "model_wrapped optimizer processing_class state train_dataset"),
)
"""Of transformers' trainer: arguments of its own and of its callbacks, and what its pages tell others to use."""

TABLE: tuple[PrivateName, ...] = (
    # TRL
    *_functions(
        _TRL,
        "overrides",
        """
        _calculate_rewards(self, inputs, prompts, completions, completion_ids_list)
        _generate(self, prompts)
        _generate_and_score_completions(self, inputs)
        _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False)
        _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, ...)
        _get_train_sampler(self, dataset=None)
        _load_optimizer_and_scheduler(self, checkpoint)
        _prepare_inputs(self, generation_batch)
        _save_checkpoint(self, model, trial)
        _tokenize_prompts(self, prompts)
        _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields)
        compute_loss(self, model, inputs, ...)
        log(self, logs, start_time=None)
        """,
    ),
    *_functions(
        _TRL,
        "calls",
        """
        _compute_loss(self, model, inputs)
        _get_tool_suffix_ids(self, tool_messages)
        """,
    ),
    *_values(_TRL, "reads", "_environment_pool _logs _metrics aux_loss_enabled chat_template environment_factories"),
    *_values(_TRL, "reads", "environments eos_token_ids ref_model reward_func_names reward_weights rollout_func tools"),
    *_values(_TRL, "assigns", "_buffered_inputs _last_loaded_step _pending_extra_logs _step async_loop log_multimodal"),
    *_values(_TRL, "assigns", "reward_funcs use_vllm vllm_generation"),
    *_values("trl.trainer.grpo_config.GRPOConfig", "reads", "_VALID_DICT_FIELDS"),
    # `LocalVLLM` stands where an object of this class does.
    *_functions(
        "trl.generation.vllm_generation.VLLMGeneration",
        "overrides",
        """
        sync_weights(self)
        generate(self, prompts, images, num_generations, profiler=None)
        """,
    ),
    # transformers
    *_functions(
        _TRAINER,
        "overrides",
        """
        _finalize_training(self, trial, num_train_samples, start_time)
        _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, ...)
        _load_from_checkpoint(self, resume_from_checkpoint, model=None)
        _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, ...)
        _run_epoch(self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, ...)
        evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')
        save_model(self, output_dir=None, _internal_call=False)
        train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)
        """,
    ),
    *_functions(
        _TRAINER,
        "calls",
        """
        _get_output_dir(self, trial)
        _prepare_input(self, data)
        _save(self, output_dir=None, state_dict=None)
        """,
    ),
    *_functions(_ARGUMENTS, "overrides", "_setup_devices(self)"),
    *_values(_ARGUMENTS, "assigns", "_n_gpu"),
    *_values("transformers.configuration_utils.PreTrainedConfig", "reads", "_name_or_path"),
    *_values("transformers.modeling_utils.PreTrainedModel", "reads", "_keep_in_fp32_modules"),
    *_values("transformers.core_model_loading", "assigns", "_weight_conversions"),
    *_values("transformers.integrations.deepspeed", "reads", "_hf_deepspeed_config_weak_ref"),
    *_values("transformers.integrations.integration_utils.TensorBoardCallback", "reads", "_SummaryWriter"),
    *_values("transformers.integrations.integration_utils.TensorBoardCallback", "assigns", "logging_dir tb_writer"),
    # vLLM
    *_functions(
        _TRANSFER,
        "overrides",
        """
        finish_weight_update(self)
        init_transfer_engine(self, init_info)
        receive_weights(self, update_info)
        shutdown(self)
        start_weight_update(self)
        update_weights(self, update_info)
        """,
    ),
    *_functions(_TRANSFER, "calls", "parse_update_info(self, update_dict)\nreset_weight_update_target(self)"),
    *_values("vllm.v1.worker.gpu_worker.Worker", "assigns", "_weight_update_active"),
    *_values(_TRANSFER, "reads", "device model model_config parallel_config"),
    *_functions(_NCCL, "overrides", "init_transfer_engine(self, init_info)\nreceive_weights(self, update_info)"),
    *_values(_NCCL, "reads", "model_update_group"),
    *_values("vllm.lora.worker_manager.WorkerLoRAManager", "reads", "_adapter_manager lora_config vocab_size"),
    *_values("vllm.lora.lora_model.LoRAModel", "assigns", "is_3d_lora_weight"),
    *_values("vllm.v1.engine.async_llm.AsyncLLM", "reads", "output_processor"),
    *_values("vllm.v1.engine.output_processor.OutputProcessor", "reads", "request_states"),
    *_values(
        "vllm.v1.engine.output_processor.RequestState",
        "reads",
        "detokenizer external_req_id parent_req request_index",
    ),
    *_values("vllm.v1.engine.parallel_sampling.ParentRequest", "reads", "output_aggregator"),
    *_values(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts", "reads", "_use_zentorch isa"
    ),
    *_functions("vllm.model_executor.model_loader.reload.layerwise", "calls", "_get_original_loader(tensor)"),
    # accelerate and DeepSpeed
    *_functions("accelerate.commands.launch", "calls", "_validate_launch_command(args)"),
    *_values("accelerate.accelerator.Accelerator", "reads", "deepspeed_engine_wrapped"),
    *_values("accelerate.utils.deepspeed.DeepSpeedEngineWrapper", "reads", "engine"),
    *_values(_ZERO, "reads", "ds_id ds_numel ds_process_group ds_quant_scale ds_secondary_tensor ds_shape ds_status"),
    *_values(_ZERO, "reads", "ds_tensor ds_zero_param_process_group"),
    *_functions(
        "deepspeed.runtime.engine.DeepSpeedEngine",
        "calls",
        """
        zero_gather_16bit_weights_on_model_save(self)
        zero_optimization_partition_weights(self)
        """,
    ),
    # torch, and Python
    *_functions(_C10D, "calls", "_get_default_store()\n_set_pg_timeout(timeout, group=None)"),
    *_values(_C10D, "reads", "_world"),
    *_values("torch.nn.modules.module.Module", "reads", "_non_persistent_buffers_set _parameters"),
    *_functions("argparse.ArgumentParser", "calls", "_get_formatter(self)"),
    *_values("argparse._ActionsContainer", "assigns", "_actions _option_string_actions"),
    # Of classes in C++, which no test can look into: an untyped storage's address, a tensor's count of writes, a
    # group's of collectives.
    *_values("torch.C++", "reads", "_cdata _get_sequence_number_for_group _version"),
)
