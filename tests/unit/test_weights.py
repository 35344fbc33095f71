"""Buckets, chunks, the probe, and all of the NCCL path up to the collective, against vLLM's own classes."""

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

from grpo.engine.client import EngineError
from grpo.engine.plugin import NCCL_BACKEND, SHM_BACKEND, register
from grpo.weights import nccl, push
from grpo.weights.proof import gap_between, is_due, probe_prompts
from grpo.weights.push import NodeEngines, Pusher
from grpo.weights.shm import make_chunks
from grpo.weights.source import GatheredSource, make_buckets
from tests.tiny_models import tiny_config

MB = 2**20


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([], 10, []),
        ([3, 3, 3], 10, [[0, 1, 2]]),
        ([3, 3, 5, 1], 6, [[0, 1], [2, 3]]),
        ([20, 3, 3], 6, [[0], [1, 2]]),  # larger than a bucket: alone
        ([3, 20, 3], 6, [[0], [1], [2]]),
        ([6, 6], 6, [[0], [1]]),
        ([0, 6, 0], 6, [[0, 1, 2]]),
    ],
)
def test_buckets(sizes: list[int], limit: int, buckets: list[list[int]]) -> None:
    assert make_buckets(sizes, limit) == buckets


def test_chunks_are_aligned_ordered_and_fit() -> None:
    metas = [ParamMeta(f"p{i}", torch.bfloat16, (size,)) for i, size in enumerate([3, 40, 64, 1, 1])]
    chunks = make_chunks(metas, 256)
    assert [[m.name for m in chunk.metas] for chunk in chunks] == [["p0", "p1"], ["p2", "p3", "p4"]]
    assert chunks[0].offsets == (0, 64)  # 6 bytes, then 80 at the next line: 144; 128 more do not fit after 192
    assert chunks[1].offsets == (0, 128, 192)
    with pytest.raises(ValueError, match="p1 has 80 bytes, the buffer 64"):
        make_chunks(metas, 64)


def model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen2-tied", "llama-untied", "gemma2-tied", "phi3-fused", "qwen3-moe"])
def test_the_source_yields_what_save_pretrained_writes(family: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    trained = model(family)
    trained.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB // 4)
    assert len(source.buckets) > 2
    sent = dict(source)
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(sent[name], tensor), name
    described = source.metadata()
    assert [meta.name for meta in described] == list(sent)
    assert source.wire_bytes == sum(t.numel() * t.element_size() for t in saved.values())


def test_a_tied_weight_travels_once_and_in_the_wire_dtype() -> None:
    source = GatheredSource(model("qwen2-tied"), wire_dtype=torch.bfloat16, bucket_bytes=MB)
    pairs = list(source)
    assert "lm_head.weight" not in dict(pairs)
    assert len(pairs) == len({name for name, _ in pairs})
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in pairs)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs
    ]


def test_a_walk_that_its_consumer_left_is_finished() -> None:
    source = GatheredSource(model("qwen2-tied"), wire_dtype=torch.float32, bucket_bytes=MB // 4)
    begun = source.walks_begun
    walk = iter(source)
    next(walk)
    source.finish_walk(begun)
    assert next(walk, None) is None
    begun = source.walks_begun
    source.finish_walk(begun)  # a push that failed before it began to walk
    assert source.walks_begun == begun + 1


def test_the_probe_is_fixed_and_leaves_special_tokens_out() -> None:
    probe = probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert probe == probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert (len(probe), {len(prompt) for prompt in probe}) == (4, {32})
    assert not {0, 1, 50} & {token for prompt in probe for token in prompt}
    assert {len(prompt) for prompt in probe_prompts(100, 10)} == {9}


def test_gaps() -> None:
    gap = gap_between([[-1.0, -2.0], [-3.0, -4.0]], np.array([[-1.0, -2.5], [-3.0, -4.0]]))
    assert (gap.mean, gap.max) == (0.125, 0.5)
    assert gap_between([[float("nan")]], np.array([[-1.0]])).mean == float("inf")
    assert [number for number in range(1, 41) if is_due(number)] == [*range(1, 11), 20, 30, 40]


# -- the push group of a node ---------------------------------------------------------------------------------------


class RecordingEngine:
    """Stands for an `EngineClient`; records what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> bool:
        self.calls.append((method, kwargs))
        return True


def test_node_engines_speak_the_protocol_and_give_each_engine_its_ranks() -> None:
    engines = [RecordingEngine(), RecordingEngine(), RecordingEngine()]
    client = NodeEngines(engines, tensor_parallel_size=2, timeout_s=1.0)  # type: ignore[arg-type]
    assert isinstance(client, VLLMWeightSyncClient)
    info = NCCLWeightTransferInitInfo(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=7)
    client.init_weight_transfer_engine(dataclasses.asdict(info))
    offsets = [engine.calls[0][1]["init_info"]["rank_offset"] for engine in engines]
    assert offsets == [1, 3, 5]  # rank 0 sends; two workers for each engine
    client.next_version = "17"
    client.finish_weight_update()
    assert all(engine.calls[-1] == ("finish_weight_update", {"weight_version": "17"}) for engine in engines)


def test_a_refusing_engine_does_not_leave_the_others_in_the_broadcast() -> None:
    """One engine fails at once; the other sits in a broadcast until the transport is aborted."""
    aborted = threading.Event()

    class Refusing(RecordingEngine):
        def call(self, method: str, timeout_s: float, **kwargs: Any) -> bool:
            raise EngineError("does not take it")

    class Waiting(RecordingEngine):
        def call(self, method: str, timeout_s: float, **kwargs: Any) -> bool:
            assert aborted.wait(30)
            raise EngineError("was aborted")

    client = NodeEngines([Waiting(), Refusing()], tensor_parallel_size=1, timeout_s=30)  # type: ignore[list-item]
    client.on_failure = aborted.set
    with pytest.raises(EngineError, match="does not take it"):
        client.update_weights({})
    assert aborted.is_set()


def test_both_backends_are_registered_once_under_our_names() -> None:
    register()
    register()
    assert {NCCL_BACKEND, SHM_BACKEND} <= WeightTransferEngineFactory._registry.keys()
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from grpo.weights.worker import CountedReload

    for name in (NCCL_BACKEND, SHM_BACKEND):
        assert issubclass(WeightTransferEngineFactory._registry[name](), CountedReload)
    assert issubclass(WeightTransferEngineFactory._registry[NCCL_BACKEND](), NCCLWeightTransferEngine)


def test_the_nccl_handshake_up_to_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's real sender with real init infos; only the communicator itself, which needs GPUs, stands in."""
    opened = []
    monkeypatch.setattr(
        "vllm.distributed.weight_transfer.nccl_engine.open_trainer_endpoint",
        lambda info: opened.append(info) or "communicator",
    )
    monkeypatch.setattr(push, "get_open_port", lambda: 4711)
    engines = [RecordingEngine(), RecordingEngine()]
    source = GatheredSource(model("qwen2-tied"), wire_dtype=torch.bfloat16, bucket_bytes=MB)
    settings: dict[str, Any] = {
        "backend": "nccl", "tensor_parallel_size": 2, "bucket_bytes": MB, "timeout_s": 1.0
    }  # fmt: skip
    pusher = Pusher(source, engines, **settings)  # type: ignore[arg-type]
    pusher.connect()
    assert isinstance(pusher._sender, nccl.NodeNCCLSender)
    assert pusher._sender.is_sender
    assert (opened[0].master_address, opened[0].master_port, opened[0].world_size) == ("127.0.0.1", 4711, 5)
    worker_infos = [NCCLWeightTransferInitInfo(**engine.calls[0][1]["init_info"]) for engine in engines]
    assert [info.rank_offset for info in worker_infos] == [1, 3]
    assert all((info.world_size, info.master_port, info.packed) == (5, 4711, True) for info in worker_infos)
    bystander = Pusher(source, None, **settings)  # a rank that is not its node's local main
    bystander.connect()
    assert not bystander._sender.is_sender  # type: ignore[union-attr]
    assert len(opened) == 1
