"""What a real ZeRO-3 engine holds between steps and in each phase of one, by the storage of its tensors; started by
torchrun.

`python zero_memory_job.py SETTINGS.json`, a list of cases: `ranks`, how many of the job's take part; `model`, a
configuration's folder; `lora`, settings of adapters, or null; `deepspeed`, its configuration; `sequences`, `tokens`,
`checkpointing`, `tile_columns` of a micro-batch; `bucket_bytes` and `wire` of a weight sync; `defaults` to report;
`out`, a folder for `<rank>.json`. A case has a process of its own, forked when all is imported: nothing
of the one before is alive in it.
"""

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import trl.kernels.chunked_logprob
import trl.trainer.utils
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.ops.plan.sync_memory import experts_at_once
from grpo.place.patches.deepspeed import leave_out_shared_memory_op
from grpo.weights.adapters import Lora
from grpo.weights.buckets import NUM_BUFFERS, packed_places
from grpo.weights.gather import ShardGather
from grpo.weights.source import GatheredSource
from tests.jobs.live_tensors import LiveTensors


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def as_one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is one kernel on a GPU and takes no memory there, but several operations on a CPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
    setattr(trl.kernels.chunked_logprob, name, as_one_operation(getattr(trl.kernels.chunked_logprob, name)))


def run_case(number: int, settings: dict[str, Any]) -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # the launcher's
    rank, world_size = int(os.environ["RANK"]), settings["ranks"]
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", store=dist.PrefixStore(f"case {number}", store), rank=rank, world_size=world_size)
    trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE = settings["tile_columns"]
    leave_out_shared_memory_op()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"]), dtype=torch.float32)
    model.train()
    if settings["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = None
    if settings["lora"] is not None:
        wrapped = get_peft_model(model, LoraConfig(**settings["lora"]), autocast_adapter_dtype=False)  # as TRL's
        model.enable_input_require_grads()
        lora = Lora(wrapped, merges=False)
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)  # as transformers' default
    engine, zero, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings["deepspeed"])
    ids = torch.randint(2, model.config.vocab_size, (settings["sequences"], settings["tokens"]))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # padding, as in a real batch

    def forward_and_backward() -> None:
        labels = ids.masked_fill(mask == 0, -100)
        engine.backward(-engine(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs.mean())

    def sync_over(transport: str) -> int:
        """The most that is alive in a weight sync whose source is gathered as over `transport`, up to the packed
        buffers.

        Over NCCL all ranks receive, and the packed buffers are on the device; shared memory is no rank's own.
        """
        source = GatheredSource(
            engine.module,
            wire_dtype=getattr(torch, settings["wire"]),
            bucket_bytes=settings["bucket_bytes"],
            lora=lora,
        )
        source.adopt(experts_at_once(source))
        sends = dist.get_rank() == 0
        source.meet(receives=sends)
        group, by_nccl = source._gather.group, transport == "nccl"
        source._gather = ShardGather(group, dtype=source.wire_dtype, receives=sends, all_gather=by_nccl)
        packed = [source.buffer_bytes] * min(NUM_BUFFERS, len(source.plan().buckets)) if sends else []

        def sync() -> None:
            buffers = [torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in packed]
            for index, bucket in enumerate(source.plan().buckets):
                source.fill(bucket, packed_places(buffers[index % NUM_BUFFERS], bucket.metas) if sends else None)
            source.end_sync()

        # The least of some: gloo's thread may hold a block that was given back for a moment longer.
        return min(live.peak_of(sync) for _ in range(4)) - (0 if by_nccl else sum(packed))

    forward_and_backward()
    engine.step()
    moments = [value for state in zero.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    states = [zero.lp_param_buffer, zero.grad_partitions_flat_buffer, *zero.fp32_partitioned_groups_flat, *moments]
    states += [master.grad for master in zero.fp32_partitioned_groups_flat if master.grad is not None]  # offload
    whole = [parameter.data for parameter in model.parameters() if parameter.ds_persist]
    base = [parameter.ds_tensor for parameter in model.parameters() if not parameter.requires_grad]
    gc.collect()
    measured = {
        "base": storage_bytes(base),
        "states": storage_bytes(states),
        "reduce_bucket": storage_bytes(bucket.buffer for bucket in zero.ipg_buckets.values()),
        "persistent": storage_bytes(whole),
        "defaults": {name: getattr(DeepSpeedZeroConfig(), name) for name in settings["defaults"]},
    }
    if dist.get_world_size() == 1:
        measured["persistent"] = 0  # views of the only shard
    del moments, states, whole, base
    live = LiveTensors()
    measured["phases"] = {"always": live.now}
    measured["phases"]["forward and backward"] = live.peak_of(forward_and_backward)
    measured["phases"]["optimizer step"] = live.peak_of(engine.step)
    measured["phases"]["sync"] = {transport: sync_over(transport) for transport in ("nccl", "shm")}
    gc.collect()
    measured["phases"]["afterwards"] = live.now
    (Path(settings["out"]) / f"{engine.global_rank}.json").write_text(json.dumps(measured))


for number, settings in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    if int(os.environ["RANK"]) >= settings["ranks"]:
        continue
    process = multiprocessing.get_context("fork").Process(target=run_case, args=(number, settings))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"case {number} ended with {process.exitcode}")
