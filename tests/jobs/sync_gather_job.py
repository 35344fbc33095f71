"""What a weight sync gathers from real ZeRO-3 shards, against DeepSpeed's own gather; started by torchrun.

`python sync_gather_job.py SETTINGS.json`: `out`, a folder for `<rank>.json`; `cases`, each with ZeRO-3's configuration,
the dtype of training, parts of names that travel in `float32`, and whether experts travel `whole`, compared after an
optimizer step; `layers` of the model whose memory is measured.
"""

import ctypes
import gc
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from grpo.groups.process_groups import let_gloo_rest
from grpo.place.patches.deepspeed import leave_out_shared_memory_op
from grpo.weights import sync
from grpo.weights.buckets import Bucket, packed_bytes, packed_places
from grpo.weights.gather import ShardGather, has_plain_shards, is_zero3
from grpo.weights.shm import ShmTransport
from grpo.weights.source import GatheredSource
from grpo.weights.sync import WeightSyncer
from grpo.weights.wire_format import WireFormat
from tests.jobs.gather_ways import both_ways
from tests.jobs.padded_scores import changed_by_pads
from tests.support.nccl_stand_in import StandInEngine, StandInTransport, Wire, only_streams_stand_in
from tests.support.tiny_models import tiny_config

settings = json.loads(Path(sys.argv[1]).read_text())
leave_out_shared_memory_op()
deepspeed.init_distributed(dist_backend="gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trained_model(case: dict) -> nn.Module:
    """A model after one step, sharded."""
    return trained_engine(case).module


def step(engine: deepspeed.DeepSpeedEngine) -> None:
    ids = torch.randint(0, 509, (1, 16), generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def trained_engine(case: dict) -> deepspeed.DeepSpeedEngine:
    config = tiny_config(case.get("family", "qwen2-tied"))
    # Not divided by 3; and no padding row, which transformers would zero while it is partitioned.
    config.update({"vocab_size": 509, "intermediate_size": 254, "pad_token_id": None})
    torch.manual_seed(0)
    zero = {"stage": 3, "reduce_bucket_size": 1_000_000, **case["zero"]}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": case["dtype"] == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[case["dtype"]])
    for name, parameter in model.named_parameters():
        parameter.ds_tensor.normal_(std=0.02)  # transformers initialises nothing that is partitioned
        parameter.requires_grad_(name not in case.get("frozen", []))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=settings
    )
    step(engine)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    return engine


class Counted(ShardGather):
    """Counts what does not go through DeepSpeed's gather."""

    gathered = 0

    def gather(self, parameters: Sequence[nn.Parameter], places: Sequence[torch.Tensor] | None) -> None:
        self.gathered += len(parameters)
        super().gather(parameters, places)


def filled(source: GatheredSource, bucket: Bucket) -> dict[str, torch.Tensor]:
    places = packed_places(torch.empty(packed_bytes(bucket.metas), dtype=torch.uint8), bucket.metas)
    source.fill(bucket, places)
    return dict(zip([meta.name for meta in bucket.metas], places, strict=True))


def by_deepspeed(source: GatheredSource, bucket: Bucket) -> dict[str, torch.Tensor]:
    """The same bucket out of `GatheredParameters`, cast afterwards."""
    with deepspeed.zero.GatheredParameters([tensor for _, tensor in bucket.parameters if is_zero3(tensor)]):
        whole = {name: tensor.detach().clone() for name, tensor in bucket.parameters}
    return source._to_checkpoint(dict(whole)) | whole


def compare(case: dict) -> dict:
    model = trained_model(case)
    wire = DTYPES[case["wire"]]
    source = GatheredSource(model, wire_dtype=wire, bucket_bytes=2**18)
    in_float32 = [meta.name for meta in source.checkpoint_metas if any(part in meta.name for part in case["float32"])]
    whole = [stack.name for stack in source.experts] if case["whole"] else []
    source.adopt(WireFormat(dtypes=dict.fromkeys(in_float32, "float32"), whole_experts=tuple(whole)))
    receives = rank in case["receivers"]
    source.meet(receives=receives)
    assert source._gather is not None
    group = source._gather.group
    source._gather = gather = Counted(group, dtype=wire, receives=receives)
    different, compared = [], 0
    for bucket in source.plan().buckets:
        mine = filled(source, bucket) if receives else source.fill(bucket, None) or {}
        theirs = by_deepspeed(source, bucket)
        for name, tensor in mine.items():
            compared += tensor.numel()
            if not torch.equal(tensor, theirs[name].to(torch.float32 if name in in_float32 else wire)):
                different.append(name)
    parameters = list(model.parameters())
    return {
        "different": different,
        "compared": compared,
        "own": gather.gathered,
        "parameters": len(parameters),
        "padded": sum(parameter.ds_numel % num_ranks != 0 for parameter in parameters),
        "persistent": sum(parameter.ds_persist for parameter in parameters),
        "on_cpu": sum(parameter.ds_tensor.device.type == "cpu" for parameter in parameters),
        "detected": detection(parameters[0], group),
    }


def detection(parameter: nn.Parameter, group: dist.ProcessGroup) -> dict[str, bool]:
    """What is left to DeepSpeed, on a real parameter with one thing about it changed at a time."""
    found = {"as it is": has_plain_shards(parameter, group), "another group": has_plain_shards(parameter, None)}
    for name in ("nvme_swapper", "ds_secondary_tensor", "ds_zero_param_process_group"):
        original = getattr(parameter, name)
        setattr(parameter, name, object())
        found[name] = has_plain_shards(parameter, group)
        setattr(parameter, name, original)
    parameter.ds_tensor.ds_quant_scale = torch.ones(1)
    found["ds_quant_scale"] = has_plain_shards(parameter, group)
    del parameter.ds_tensor.ds_quant_scale
    cells = dict(zip(parameter.all_gather.__code__.co_freevars, parameter.all_gather.__closure__, strict=True))
    init = cells["self"].cell_contents
    assert isinstance(init, deepspeed.zero.Init)
    init.quantizer_module = object()
    found["quantizer_module"] = has_plain_shards(parameter, group)
    del init.quantizer_module
    return found


def peak_of_a_sync(num_layers: int) -> dict[str, int]:
    """By how many bytes this process grows at its highest while it brings a larger model together; rank 0 packs it."""
    config = tiny_config("qwen2-tied")
    larger = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": num_layers}
    config.update({**larger, "layer_types": ["full_attention"] * num_layers, "pad_token_id": None})
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=zero3):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source = GatheredSource(model, wire_dtype=torch.bfloat16, bucket_bytes=8 * 2**20)
    source.meet(receives=rank == 0)
    plan = source.plan()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = resident("VmRSS")
    transport = ShmTransport(buffer_bytes=source.buffer_bytes, num_workers=1) if rank == 0 else None
    for index, bucket in enumerate(plan.buckets):
        source.fill(bucket, None if transport is None else transport.places(index, bucket))
    return {
        "grown": resident("VmHWM") - before,
        "bucket": source.buffer_bytes,
        "model": plan.num_bytes,
        "buckets": len(plan.buckets),
    }


def writes_to_what_is_frozen() -> dict[str, list[str]]:
    """What this rank sees of them: of none, of one by DeepSpeed's gather, of one to its own shard."""
    name = "model.norm.weight"
    zero = {"stage3_param_persistence_threshold": 0}
    engine = trained_engine({"dtype": "float32", "zero": zero, "frozen": [name, "model.embed_tokens.weight"]})
    source = GatheredSource(engine.module, wire_dtype=torch.bfloat16, bucket_bytes=2**16)
    norm = engine.module.get_parameter(name)
    source.mark_sent()
    step(engine)
    seen = {"a step": source.written(by_sums=True)}
    with deepspeed.zero.GatheredParameters([norm], modifier_rank=0):
        if rank == 0:
            norm.data.add_(1)
    seen["by a gather"] = source.written(by_sums=False)
    source.send_again([name])
    source.mark_sent()
    if rank == 1:
        norm.ds_tensor.data.add_(1)
    return seen | {"to a shard": source.written(by_sums=True)}


def over_a_wire_that_breaks() -> dict[str, object]:
    """A weight sync whose fourth broadcast fails on rank 0, one after it over the same group, and one over a fresh
    group."""
    model = trained_model({"dtype": "float32", "zero": {}})
    source = GatheredSource(model, wire_dtype=torch.bfloat16, bucket_bytes=2**16)
    fills = []
    fill = source.fill
    source.fill = lambda bucket, places: (fills.append(bucket), fill(bucket, places))  # type: ignore[method-assign]
    only_streams_stand_in(pytest.MonkeyPatch())

    def connected(wire: Wire) -> tuple[WeightSyncer, StandInEngine]:
        sync.TRANSPORTS["nccl"] = partial(StandInTransport, wire)
        engine = StandInEngine(wire)
        engines = [engine] if rank == 0 else []
        syncer = WeightSyncer(source, engines, backend="nccl", tensor_parallel_size=1, timeout_s=60)  # type: ignore[arg-type]
        syncer.connect()
        return syncer, engine

    syncer, _ = connected(Wire("cpu", fails_at=3))
    errors = [str(syncer.sync(version)[1] or "") for version in (1, 2)]
    walked = len(fills)
    syncer, engine = connected(Wire("cpu"))
    _, error = syncer.sync(3)
    different = []
    for bucket in source.plan().buckets:
        for name, tensor in by_deepspeed(source, bucket).items():
            if rank == 0 and not torch.equal(engine.arrived[name], tensor.to(torch.bfloat16)):
                different.append(name)
    return {
        "errors": errors,
        "walked": walked,
        "buckets": len(source.plan().buckets),
        "fresh error": str(error or ""),
        "different": different,
        "arrived": len(engine.arrived),
    }


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


results = {"memory": peak_of_a_sync(settings["layers"])}  # first: what others freed would hide what this takes
results["ways"] = both_ways()
results["padding"] = changed_by_pads()
results["broken wire"] = over_a_wire_that_breaks()
results["frozen"] = writes_to_what_is_frozen()
results |= {name: compare(case) for name, case in settings["cases"].items()}
(Path(settings["out"]) / f"{rank}.json").write_text(json.dumps(results))
let_gloo_rest()  # as at the end of every job of ours
