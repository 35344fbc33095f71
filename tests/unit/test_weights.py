"""Buckets, chunks, the probe, and all of the NCCL path up to the collective, against vLLM's own classes."""

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from grpo.engine.client import EngineError
from grpo.engine.plugin import NCCL_BACKEND, SHM_BACKEND, register
from grpo.weights import nccl
from grpo.weights.buckets import NUM_BUFFERS, ParamMeta, make_buckets, packed_bytes, packed_offsets, packed_places
from grpo.weights.completeness import unsent_names
from grpo.weights.gather import put_rows
from grpo.weights.layers import frozen_names, layer_groups
from grpo.weights.proof import gap_between, is_due, probe_prompts
from grpo.weights.push import NodeEngines, Pusher
from grpo.weights.sender import Sender
from grpo.weights.source import GatheredSource
from grpo.weights.worker import NCCLUpdateInfo
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


def test_a_packed_buffer_is_aligned_and_in_order() -> None:
    metas = [ParamMeta(f"p{i}", torch.bfloat16, (size,)) for i, size in enumerate([3, 40, 64])]
    assert packed_offsets(metas) == [0, 64, 192]  # 6 bytes, then 80, which take two lines
    assert packed_bytes(metas) == 320
    assert (packed_offsets(metas, 1), packed_bytes(metas, 1)) == ([0, 6, 86], 214)
    buffer = torch.zeros(packed_bytes(metas), dtype=torch.uint8)
    for index, place in enumerate(packed_places(buffer, metas)):
        assert (place.dtype, place.shape) == (metas[index].dtype, metas[index].shape)
        place.fill_(1.0)
    assert buffer.view(torch.bfloat16).sum() == 3 + 40 + 64
    assert (packed_offsets([]), packed_bytes([])) == ([], 0)


@pytest.mark.parametrize(("numel", "ranks"), [(12, 3), (10, 3), (7, 4), (2, 3), (1, 1), (5, 1)])
def test_shards_are_put_together_without_their_padding(numel: int, ranks: int) -> None:
    shard = -(-numel // ranks)
    rows = torch.arange(ranks * shard, dtype=torch.float32).view(ranks, shard)
    expected = torch.arange(numel, dtype=torch.bfloat16)
    at_once, one_by_one = torch.full((2, numel), -1, dtype=torch.bfloat16)
    put_rows(at_once, rows, 0)
    for rank in range(ranks):
        put_rows(one_by_one, rows[rank : rank + 1], rank)
    put_rows(one_by_one, rows[:0], 0)  # the ranks before rank 0
    assert torch.equal(at_once, expected)
    assert torch.equal(one_by_one, expected)


def model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)


def walk(source: GatheredSource) -> dict[str, torch.Tensor]:
    """Everything that the next push of `source` takes."""
    taken = {}
    for bucket in source.plan().buckets:
        buffer = torch.empty(packed_bytes(bucket.metas), dtype=torch.uint8)
        places = packed_places(buffer, bucket.metas)
        source.fill(bucket, places)
        source.fill(bucket, None)  # a rank that takes part alone
        taken |= dict(zip([meta.name for meta in bucket.metas], places, strict=True))
    return taken


@pytest.mark.parametrize("family", ["qwen2-tied", "llama-untied", "gemma2-tied", "phi3-fused", "qwen3-moe"])
def test_the_source_yields_what_save_pretrained_writes(family: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    trained = model(family)
    trained.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB // 4)
    sent = walk(source)
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(sent[name], tensor), name
    plan = source.plan()
    assert len(plan.buckets) > 2
    assert plan.num_bytes == sum(t.numel() * t.element_size() for t in saved.values())
    assert plan.held == ()


def test_a_tied_weight_travels_once_and_in_the_wire_dtype() -> None:
    trained = model("qwen2-tied")
    sent = walk(GatheredSource(trained, wire_dtype=torch.bfloat16, bucket_bytes=MB))
    assert "lm_head.weight" not in sent
    for name, parameter in trained.named_parameters():
        assert torch.equal(sent[name], parameter.to(torch.bfloat16)), name


def test_buckets_keep_to_the_limit_and_a_small_model_is_cut_too() -> None:
    trained = model("qwen2-tied")
    for limit in (MB // 8, MB, 512 * MB):
        source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=limit)
        largest = max(packed_bytes(bucket.metas) for bucket in source.plan().buckets)
        assert largest <= source.buffer_bytes <= max(limit, 512 * 128 * 4)  # the embedding is larger than MB // 8
    assert len(source.plan().buckets) > 1  # of a limit that would take all of the model


# -- what is frozen -------------------------------------------------------------------------------------------------


def test_which_parameters_may_share_a_layer_of_the_engine() -> None:
    groups = layer_groups(model("qwen2-tied"))
    layer = "model.layers.1"
    fused = [f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    assert len({groups[name] for name in fused}) == 1
    assert groups[f"{layer}.mlp.gate_proj.weight"] == groups[f"{layer}.mlp.up_proj.weight"]
    alone = ["self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    apart = {groups[f"{layer}.{name}.weight"] for name in alone}
    apart |= {groups[name] for name in ("model.embed_tokens.weight", "model.norm.weight", fused[0])}
    assert len(apart) == 7
    untied = layer_groups(model("llama-untied"))
    assert untied["lm_head.weight"] != untied["model.embed_tokens.weight"]
    experts = layer_groups(model("qwen3-moe"))
    assert len({group for name, group in experts.items() if ".layers.0.mlp." in name}) == 1  # router and experts


def test_vllm_fuses_no_two_parameters_that_are_told_apart() -> None:
    """Read from vLLM's own tables of all its models, without importing them."""
    import ast
    import importlib.util
    from pathlib import Path

    from grpo.weights.layers import OUTPUT_PROJECTIONS

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    seen = 0
    for path in (Path(spec.origin).parent / "model_executor" / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                if getattr(node.targets[0], "id", "") != "packed_modules_mapping":
                    continue
                for value in node.value.values:
                    if isinstance(value, ast.List) and len(value.elts) > 1:
                        parts = [ast.literal_eval(part) for part in value.elts]
                        leaves = {part.rpartition(".")[2] for part in parts}
                        assert not leaves & set(OUTPUT_PROJECTIONS), f"{path.name}: {parts}"
                        assert len({part.rpartition(".")[0] for part in parts}) == 1, f"{path.name}: {parts}"
                        seen += 1
    assert seen > 50  # the tables were found


def test_a_frozen_layer_is_sent_once_and_a_layer_with_one_trained_parameter_always() -> None:
    trained = model("qwen2-tied")
    for name, parameter in trained.named_parameters():
        trains = name in ("model.layers.0.self_attn.k_proj.bias", "model.layers.1.mlp.down_proj.weight")
        parameter.requires_grad_(trains)
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    everything = set(walk(source))
    assert source.plan().held == ()  # nothing was sent yet
    source.mark_sent()
    kinds = ("weight", "bias")
    qkv = {f"model.layers.0.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in kinds}
    again = set(walk(source))
    assert again == qkv | {"model.layers.1.mlp.down_proj.weight"}
    assert set(source.plan().held) == everything - again
    trained.get_input_embeddings().requires_grad_(True)  # trained from now on
    assert set(walk(source)) == again | {"model.embed_tokens.weight"}


def test_nothing_frozen_is_told_from_nothing_trained() -> None:
    trained = model("llama-untied")
    assert frozen_names(trained) == frozenset()
    trained.requires_grad_(False)
    assert frozen_names(trained) == {name for name, _ in trained.named_parameters()}


# -- the sending thread ---------------------------------------------------------------------------------------------


class ScriptedTransport:
    """A transport whose buffers hold nothing; records what was started."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.started: list[int] = []

    def places(self, index: int, bucket: Any) -> list[torch.Tensor]:
        return []

    def update_info(self, index: int, bucket: Any) -> dict[str, Any]:
        return {"names": [bucket], "buffer": index}

    def start_sending(self, index: int, bucket: Any) -> None:
        self.started.append(index)


class ScriptedEngines:
    """Engines that answer an update when they are let, and refuse the one of bucket `refuses`."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[Any] = []
        self.may_answer = threading.Semaphore(0)
        self._refuses = refuses

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        assert self.may_answer.acquire(timeout=30)
        self.calls.append((info["names"][0], info["buffer"], tuple(info["held"])))
        if info["names"] == [self._refuses]:
            raise EngineError("does not take it")


def sender_of(engines: ScriptedEngines, in_flight: int = 1) -> tuple[Sender, ScriptedTransport]:
    transport = ScriptedTransport(in_flight)
    return Sender(transport, engines, held=["kept"], timeout_s=5.0), transport  # type: ignore[arg-type]


def test_buckets_are_filled_while_others_are_sent_and_no_buffer_before_its_answer() -> None:
    engines = ScriptedEngines()
    sender, transport = sender_of(engines)
    for index in range(NUM_BUFFERS):
        assert sender.free_buffer() == index  # nothing has been answered yet
        sender.send(index, f"bucket {index}")  # type: ignore[arg-type]
    freed = threading.Event()
    waiting = threading.Thread(target=lambda: (sender.free_buffer(), freed.set()))
    waiting.start()
    assert not freed.wait(0.3)
    engines.may_answer.release()
    assert freed.wait(5)
    waiting.join()
    sender.send(0, "bucket 3")  # type: ignore[arg-type]
    engines.may_answer.release(NUM_BUFFERS)
    assert sender.finish(lambda: engines.calls.append("finish")) is None
    buffers = [*range(NUM_BUFFERS), 0]
    updates = [(f"bucket {k}", buffer, ("kept",) if k == 0 else ()) for k, buffer in enumerate(buffers)]
    assert engines.calls == ["start", *updates, "finish"]
    assert transport.started == buffers
    assert sender.busy_s > 0.2


def test_the_next_update_waits_at_the_engines_while_one_is_loaded() -> None:
    engines = ScriptedEngines()
    under_way = threading.Barrier(2)

    def update(info: dict[str, Any]) -> None:
        under_way.wait(5)  # broken unless two updates are there at once
        engines.calls.append(info["names"][0])

    engines.update_weights = update  # type: ignore[method-assign]
    sender, _ = sender_of(engines, in_flight=2)
    for index in range(4):
        buffer = sender.free_buffer()
        assert buffer is not None
        sender.send(buffer, f"bucket {index}")  # type: ignore[arg-type]
    assert sender.finish(lambda: engines.calls.append("finish")) is None
    assert (engines.calls[0], engines.calls[-1]) == ("start", "finish")
    assert sorted(engines.calls[1:-1]) == [f"bucket {index}" for index in range(4)]
    assert 0 < sender.busy_s < 5


def test_after_a_refusal_nothing_more_is_sent_and_the_error_is_kept() -> None:
    engines = ScriptedEngines(refuses="bucket 1")
    engines.may_answer.release(10)
    sender, _ = sender_of(engines)
    sent = 0
    for index in range(NUM_BUFFERS + 3):
        buffer = sender.free_buffer()
        if buffer is not None:
            sender.send(buffer, f"bucket {index}")  # type: ignore[arg-type]
            sent += 1
    error = sender.finish(lambda: engines.calls.append("finish"))
    assert isinstance(error, EngineError)
    assert [call[0] for call in engines.calls[1:]] == ["bucket 0", "bucket 1"]  # and no finish
    assert sent <= 1 + NUM_BUFFERS


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
    client.finish_weight_update("17")
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


class Communicator:
    """Stands for vLLM's NCCL communicator, which needs GPUs."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        assert (src, tensor.dtype) == (0, torch.uint8)
        self.sent.append(tensor.clone())


class Stream:
    def wait_stream(self, stream: Any) -> None:
        pass


def test_the_nccl_push_up_to_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's real init and update infos; only streams and the communicator, which need GPUs, stand in."""
    opened, communicator = [], Communicator()
    monkeypatch.setattr(nccl, "open_trainer_endpoint", lambda info: opened.append(info) or communicator)
    monkeypatch.setattr(nccl, "get_open_port", lambda: 4711)
    monkeypatch.setattr(nccl, "DEVICE", "cpu")
    for name, stand_in in (("Stream", Stream), ("current_stream", Stream), ("set_stream", lambda stream: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    engines = [RecordingEngine(), RecordingEngine()]
    trained = model("qwen2-tied")
    source = GatheredSource(trained, wire_dtype=torch.bfloat16, bucket_bytes=MB // 8)
    settings: dict[str, Any] = {"backend": "nccl", "tensor_parallel_size": 2, "timeout_s": 5.0}
    pusher = Pusher(source, engines, **settings)  # type: ignore[arg-type]
    pusher.connect()
    assert (opened[0].master_address, opened[0].master_port, opened[0].world_size) == ("127.0.0.1", 4711, 5)
    worker_infos = [NCCLWeightTransferInitInfo(**engine.calls[0][1]["init_info"]) for engine in engines]
    assert [info.rank_offset for info in worker_infos] == [1, 3]
    assert all((info.world_size, info.master_port, info.packed) == (5, 4711, True) for info in worker_infos)

    report, error = pusher.push(3)
    assert error is None
    calls = engines[1].calls
    assert [calls[1][0], *(name for name, _ in calls[-2:])] == [
        "start_weight_update", "finish_weight_update", "reset_prefix_cache"
    ]  # fmt: skip
    updates = [NCCLUpdateInfo(**kwargs["update_info"]) for name, kwargs in calls if name == "update_weights"]
    assert len(updates) == len(communicator.sent) == len(source.plan().buckets) > 2
    arrived = {}
    for update, packed in zip(updates, communicator.sent, strict=True):
        assert packed.numel() <= worker_infos[0].packed_buffer_size_bytes  # so the worker receives it in one piece
        dtypes = [getattr(torch, name) for name in update.dtype_names]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(update.shapes, dtypes, strict=True)]
        arrived |= dict(unpack_tensor(packed, update.names, update.shapes, dtypes, sizes))
    for name, parameter in trained.named_parameters():
        assert torch.equal(arrived[name], parameter.to(torch.bfloat16)), name
    assert report.num_bytes == sum(packed.numel() for packed in communicator.sent)

    bystander = Pusher(source, None, **settings)  # a rank that is not its node's local main
    bystander.connect()
    assert len(opened) == 1
    report, error = bystander.push(4)
    assert (report.num_bytes, report.send_s, error) == (0, 0.0, None)


def test_a_push_is_checked_by_name_too() -> None:
    known = {"a", "b", "c"}
    assert unsent_names(known=set(), received=known, held=()) == []
    assert unsent_names(known=known, received={"a", "b"}, held={"c"}) == []
    assert unsent_names(known=known, received={"a"}, held={"c"}) == ["b: not sent, and not among the frozen ones"]
    assert unsent_names(known=set(), received={"a"}, held={"c"}) == ["c: left out, but never sent before"]
