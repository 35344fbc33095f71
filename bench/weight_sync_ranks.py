"""What one rank of `bench.weight_sync` measures: a dense model, and one with experts."""

import contextlib
import ctypes
import functools
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from bench.report import interleave
from bench.weight_sync_trl import TrlWays, engine_model
from grpo.engine.client import EngineClient
from grpo.engine.environment import engine_environment
from grpo.engine.messages import EngineSpec
from grpo.place.devices import device_tokens
from grpo.weights.buckets import NUM_BUFFERS, ParamMeta, packed_bytes, packed_places
from grpo.weights.engine_args import transfer_args
from grpo.weights.gather import ShardGather
from grpo.weights.sender import Sender
from grpo.weights.source import GatheredSource, WeightSyncPlan
from grpo.weights.sync import WeightSyncer
from grpo.weights.wire_format import WireFormat, ask_engines

START_S, CALL_S = 200.0, 60.0
WIRE_DTYPE = torch.bfloat16


def start_engine(settings: dict[str, Any], model: Path, config: PretrainedConfig, **more: Any) -> EngineClient:
    """The engine of this rank, which builds `config`.

    Args:
        more: arguments of vLLM's engine.
    """
    config.save_pretrained(model)
    arguments = {
        "model": str(model),
        "tokenizer": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "load_format": "dummy",
        **transfer_args(settings["backend"]),
        "max_model_len": 256,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 2**28,
        **more,
    }
    gpus = device_tokens(os.environ, settings["gpus"]) if settings["gpus"] else ()
    return EngineClient(
        EngineSpec(engine_args=arguments, sampling={}),
        name="the engine",
        environment=engine_environment(os.environ, devices=gpus[-1:], tensor_parallel_size=1, engines_per_node=1),
        log_path=model.with_suffix(".log"),
    )


def dense_model(settings: dict[str, Any]) -> PretrainedConfig:
    """What is synced."""
    return Qwen2Config(
        **settings["shape"],
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )


def under_zero3() -> contextlib.AbstractContextManager[None]:
    """Parameters that are made in here are partitioned over the ranks."""
    return deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 8, "zero_optimization": {"stage": 3}})


def adopted(client: EngineClient | None, source: GatheredSource) -> WireFormat:
    """The form in which tensors travel, as the engine of rank 0 says once it is ready. Collective."""
    answer: list[WireFormat | None] = [None]
    if client is not None:
        client.wait_ready(START_S)
        answer = [ask_engines([client], source.question, CALL_S)]
    dist.broadcast_object_list(answer, src=0)
    assert answer[0] is not None
    source.adopt(answer[0])
    return answer[0]


class Ranks:
    """What this rank measures; every method but the constructor is collective."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.settings = dist.get_rank(), settings
        config = dense_model(settings)
        self.client = start_engine(settings, Path(settings["folder"]) / "model", config) if self.rank == 0 else None
        with under_zero3():
            self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings["shards"]))
        self._meet(GatheredSource(self.model, wire_dtype=WIRE_DTYPE, bucket_bytes=settings["bucket_mb"] * 2**20))

    def _meet(self, source: GatheredSource) -> None:
        wire_format = adopted(self.client, source)
        self.versions = 0
        self.cpu_seconds: dict[str, list[float]] = {}
        self.grown_bytes: dict[str, int] = {}
        self.source = source
        self.syncer = WeightSyncer(
            self.source,
            [] if self.client is None else [self.client],
            backend=self.settings["backend"],
            tensor_parallel_size=1,
            timeout_s=CALL_S,
        )
        dtypes = {name: getattr(torch, dtype) for name, dtype in wire_format.dtypes.items()}
        self.trl = TrlWays(self.model, self.syncer, wire_dtype=WIRE_DTYPE, dtypes=dtypes, timeout_s=CALL_S)

    # -- all of it at once --------------------------------------------------------------------------------------------

    def own_sync(self, *, checks_bits: bool = False) -> float:
        dist.barrier()
        self.versions += 1
        report, error = self.syncer.sync(self.versions, checks_bits=checks_bits)
        if error is not None:
            raise error
        return report.total_s

    # -- the parts alone ----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> WeightSyncPlan:
        return self.source.plan()

    def _gathers(self) -> dict[str, ShardGather]:
        """Both ways in which shards may travel; collective."""
        group = next(self.model.parameters()).ds_process_group
        return {
            way: ShardGather(group, dtype=WIRE_DTYPE, receives=self.client is not None, all_gather=way == "all-gather")
            for way in ("exchange", "all-gather")
        }

    def received_bytes(self, gather: ShardGather) -> int:
        """What a weight sync brings to this rank from the others; collective."""
        total = 0
        for bucket in self.plan.buckets:
            shards = [parameter.ds_tensor for _, parameter in bucket.parameters]
            received = gather.exchange(shards)
            own_rows = int(received.shape[0] == dist.get_world_size())
            total += (received.shape[0] - own_rows) * received.shape[1] * WIRE_DTYPE.itemsize
        gather.release()
        return total

    def exchange(self) -> float:
        """Cast shards to the sending rank, bucket by bucket; nothing is put together."""
        gather = self.gathers["exchange"]
        lengths = [sum(p.ds_tensor.numel() for _, p in bucket.parameters) for bucket in self.plan.buckets]
        device = next(self.model.parameters()).ds_tensor.device
        cast = torch.zeros(max(lengths), dtype=WIRE_DTYPE, device=device)

        def run() -> None:
            for length in lengths:
                gather.exchange([cast[:length]])

        seconds = self._timed("exchange", run)
        gather.release()
        return seconds

    def sync_by(self, way: str) -> float:
        """Our weight sync, with the gather that it takes over NCCL, or the one that it takes over gloo."""
        own, self.source._gather = self.source._gather, self.gathers[way]
        try:
            return self.own_sync()
        finally:
            self.source._gather = own

    def all_gather(self) -> float:
        lengths = [sum(p.ds_tensor.numel() for _, p in bucket.parameters) for bucket in self.plan.buckets]
        device = next(self.model.parameters()).device
        shard = torch.zeros(max(lengths), dtype=WIRE_DTYPE, device=device)
        whole = torch.zeros(max(lengths) * dist.get_world_size(), dtype=WIRE_DTYPE, device=device)

        def run() -> None:
            for length in lengths:
                dist.all_gather_single(whole[: length * dist.get_world_size()], shard[:length])

        return self._timed("all-gather", run)

    def pack(self) -> float:
        """Each rank casts its own shards into a buffer as large as they are: together, every byte is copied once."""
        shards = [[p.ds_tensor for _, p in bucket.parameters] for bucket in self.plan.buckets]
        metas = [[ParamMeta("", WIRE_DTYPE, tuple(shard.shape)) for shard in bucket] for bucket in shards]
        device = next(self.model.parameters()).device
        buffer = torch.zeros(max(map(packed_bytes, metas)), dtype=torch.uint8, device=device)
        places = [packed_places(buffer, bucket) for bucket in metas]

        def run() -> None:
            for bucket_shards, bucket_places in zip(shards, places, strict=True):
                for place, shard in zip(bucket_places, bucket_shards, strict=True):
                    place.copy_(shard)

        return self._timed("pack", run)

    def load(self) -> float:
        """The engine loads what stands in the packed buffers, bucket by bucket; the values are of other ones."""

        def run() -> None:
            if self.client is None:
                return
            transport, engines = self.syncer._transport, self.syncer._engines
            assert transport is not None
            sender = Sender(
                transport, engines, self.plan.buckets, held=self.plan.held, sums_bits=False, timeout_s=CALL_S
            )
            for bucket in self.plan.buckets:
                sender.places(bucket)
                sender.send(bucket)
            error = sender.finish(lambda: self.syncer._finish(0, {}))
            transport.end()
            if error is not None:
                raise error

        return self._timed("load", run)

    def _timed(self, name: str, run: Callable[[], None]) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        begun, cpu_begun = time.perf_counter(), self._cpu_s()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        self.cpu_seconds.setdefault(name, []).append(self._cpu_s() - cpu_begun)
        return seconds

    def _cpu_s(self) -> float:
        """Of this rank, and of the workers of its engine."""
        total = time.process_time()
        if self.client is not None:
            engine = psutil.Process(self.client.pid).children(recursive=True)
            workers = [process for process in engine if "Worker" in "".join(process.cmdline())]
            for process in workers or engine:
                times = process.cpu_times()
                total += times.user + times.system
        return total

    # -- all of it ----------------------------------------------------------------------------------------------------

    def growth(self, run: Callable[[], object]) -> int:
        """Bytes by which this process grew at its highest; on a GPU, what its tensors took there."""
        gc.collect()
        if self.settings["device"] == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            return torch.cuda.max_memory_allocated() - before
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = psutil.Process().memory_info().rss
        run()
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return peak_kib * 1024 - before

    def _in_process(self) -> Callable[[], float]:
        folder = Path(self.settings["folder"]) / f"in-process-{self.rank}"
        loading = engine_model(folder, dense_model(self.settings), self.settings["device"])
        run = functools.partial(self.trl.load_in_process, loading)
        run()  # first touches
        return run

    def measure(self) -> dict[str, Any]:
        def connect_and_sync() -> None:
            self.syncer.connect()
            self.own_sync()

        self.grown_bytes["own weight sync"] = self.growth(connect_and_sync)
        # With the packed buffers that TRL has, one or two: here they are ours.
        largest, two_chunks = (self.trl.largest_bytes, 2 * self.trl.chunk_bytes) if self.client else (0, 0)
        self.grown_bytes["one call for each parameter"] = self.growth(self.trl.one_call_each) + largest
        self.grown_bytes["TRL's packed stream"] = self.growth(self.trl.packed_stream) + two_chunks
        in_process = self._in_process()
        self.gathers = self._gathers()
        received = {way: self.received_bytes(gather) for way, gather in self.gathers.items()}
        other = "exchange" if self.settings["device"] == "cuda" else "all-gather"
        for phase in (self.exchange, self.all_gather, self.pack, self.load):  # first touches, connections
            phase()
        self.cpu_seconds.clear()
        variants = {
            "own weight sync": self.own_sync,
            "own weight sync, bits checked": lambda: self.own_sync(checks_bits=True),
            f"own weight sync by {other}": lambda: self.sync_by(other),
            "one call for each parameter": self.trl.one_call_each,
            "TRL's packed stream": self.trl.packed_stream,
            "TRL loads in the process": in_process,
            "exchange": self.exchange,
            "all-gather": self.all_gather,
            "pack": self.pack,
            "load": self.load,
        }
        return {
            "seconds": interleave(variants, self.settings["repetitions"]),
            "cpu_seconds": self.cpu_seconds,
            "grown_bytes": self.grown_bytes,
            "received_bytes": received,
            "parameters": sum(parameter.ds_numel for parameter in self.model.parameters()),
            "wire_mb": round(self.plan.num_bytes / 2**20),
            "buckets": len(self.plan.buckets),
            "bucket_mb": round(self.source.buffer_bytes / 2**20),
            "num_buffers": NUM_BUFFERS,
            "chunk_mb": round(self.trl.chunk_bytes / 2**20),
            "backend": self.settings["backend"],
        }


class ExpertRanks:
    """A mixture of experts, synced to one engine in two ways in turn: every projection of a layer's experts as one
    tensor, which the engine loads in one call for each part, and experts one by one.

    Its constructor and `measure` are collective.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings, rank = settings, dist.get_rank()
        config = Qwen3MoeConfig(
            **settings["experts"],
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            num_experts_per_tok=8,
            vocab_size=4096,
            max_position_embeddings=1024,
            mlp_only_layers=[],
            architectures=["Qwen3MoeForCausalLM"],
        )
        folder = Path(settings["folder"])
        self.client = start_engine(settings, folder / "experts", config) if rank == 0 else None
        with under_zero3():
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings["shards"]))
        self._source = GatheredSource(model, wire_dtype=WIRE_DTYPE, bucket_bytes=settings["bucket_mb"] * 2**20)
        at_once = adopted(self.client, self._source)
        self._formats = {"experts at once": at_once, "experts one by one": replace(at_once, whole_experts=())}
        self.syncer = WeightSyncer(
            self._source,
            [] if self.client is None else [self.client],
            backend=settings["backend"],
            tensor_parallel_size=1,
            timeout_s=CALL_S,
        )

    def _sync(self, name: str) -> float:
        self._source.adopt(self._formats[name])
        dist.barrier()
        report, error = self.syncer.sync(0)
        if error is not None:
            raise error
        return report.total_s

    def measure(self) -> dict[str, Any]:
        variants = {name: functools.partial(self._sync, name) for name in self._formats}
        self._source.adopt(self._formats["experts one by one"])  # what needs more space in a buffer
        self.syncer.connect()
        for run in variants.values():
            run()
        tensors = {}
        for name, wire_format in self._formats.items():
            self._source.adopt(wire_format)
            tensors[name] = len(self._source.plan().metas)
        return {"seconds": interleave(variants, self._settings["repetitions"]), "tensors": tensors}
