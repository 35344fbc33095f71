"""The weight sync group of a node: its protocol, and all of the NCCL path up to the collective, against vLLM's own
classes."""

import base64
import dataclasses
import importlib
import os
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import pynccl_wrapper
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from grpo.engine.client import EngineError
from grpo.weights import nccl, sync
from grpo.weights.buckets import ParamMeta
from grpo.weights.engine_args import BACKENDS
from grpo.weights.node_engines import NodeEngines
from grpo.weights.reload import CountedReload
from grpo.weights.source import GatheredSource
from grpo.weights.sync import WeightSyncer
from grpo.weights.wire_format import WireFormat
from grpo.weights.worker import BucketsInfo, CountedNCCLEngine
from tests.support.engines import Script, ScriptedEngine, agree
from tests.support.nccl_stand_in import (
    CpuStream,
    EngineEnd,
    StandInTransport,
    Wire,
    only_streams_stand_in,
)
from tests.support.tiny_models import tiny_model


def refuse(method: str, kwargs: dict[str, Any]) -> Any:
    raise EngineError("does not take it")


def test_node_engines_give_each_engine_its_rank_offset() -> None:
    engines = [ScriptedEngine() for _ in range(3)]
    client = NodeEngines(engines, tensor_parallel_size=2, timeout_s=1.0)
    assert isinstance(client, VLLMWeightSyncClient)
    info = NCCLWeightTransferInitInfo(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=7)
    client.init_weight_transfer_engine(dataclasses.asdict(info))
    offsets = [engine.calls[0][1]["init_info"]["rank_offset"] for engine in engines]
    assert offsets == [1, 3, 5]  # rank 0 sends; two workers for each engine
    client.finish_weight_update("17")
    assert all(engine.calls[-1] == ("finish_weight_update", {"weight_version": "17"}) for engine in engines)


def test_node_engines_with_refusing_engine_abort_broadcast() -> None:
    """One engine fails at once; the other sits in a broadcast until the transport is aborted."""
    aborted = threading.Event()

    def wait(method: str, kwargs: dict[str, Any]) -> Any:
        assert aborted.wait(30)
        raise EngineError("was aborted")

    engines = [ScriptedEngine(script=Script(control=control)) for control in (wait, refuse)]
    client = NodeEngines(engines, tensor_parallel_size=1, timeout_s=30)
    client.on_failure = aborted.set
    with pytest.raises(EngineError, match="does not take it"):
        client.update_weights({})
    assert aborted.is_set()


def test_weight_transfer_backends_are_registered() -> None:
    known = {transport: WeightTransferEngineFactory._registry[name]() for transport, name in BACKENDS.items()}
    assert all(issubclass(engine, CountedReload) for engine in known.values())
    assert issubclass(known["nccl"], NCCLWeightTransferEngine)


class Communicator:
    """Stands for vLLM's NCCL communicator, which needs GPUs."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        assert (src, tensor.dtype) == (0, torch.uint8)
        self.sent.append(tensor.clone())


UNIQUE_ID = bytes(range(128))


class Library:
    """Stands for NCCL itself, where a communicator's id comes from."""

    def ncclGetUniqueId(self) -> pynccl_wrapper.ncclUniqueId:
        return pynccl_wrapper.ncclUniqueId.from_buffer_copy(UNIQUE_ID)


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only streams, which need GPUs, stand in."""
    only_streams_stand_in(monkeypatch)
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", Library)
    monkeypatch.setattr(nccl.NcclTransport, "device", "cpu")


def test_connect_with_refusing_engine_reports_at_once(without_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[EngineError] = []

    def open_endpoint(*args: Any) -> None:
        deadline = time.monotonic() + 20
        while not reported and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError("NCCL error: remote process exited")

    monkeypatch.setattr(nccl_common, "uid_init_process_group", open_endpoint)
    source = GatheredSource(tiny_model("qwen2-tied"), wire_dtype=torch.bfloat16, bucket_bytes=2**17)
    settings: dict[str, Any] = {
        "backend": "nccl",
        "tensor_parallel_size": 1,
        "timeout_s": 5.0,
        "on_trouble": reported.append,
    }
    syncer = WeightSyncer(source, [ScriptedEngine(script=Script(control=refuse))], **settings)
    with pytest.raises(EngineError, match="does not take it"):
        syncer.connect()
    assert [str(error) for error in reported] == ["does not take it"]


def test_nccl_transport_without_nccl_raises_before_engine_calls(
    without_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(Library):
        def __init__(self) -> None:
            raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", Missing)
    engine = ScriptedEngine()
    with pytest.raises(RuntimeError, match=r"GRPO-501.*set vllm_sync_backend to 'shm'"):
        nccl.NcclTransport(buffer_bytes=16, num_workers=1).open(engine, lambda error: None)  # type: ignore[arg-type]
    assert engine.calls == []


def test_nccl_worker_joins_by_unique_id_without_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own code of a worker, up to NCCL."""
    joined = []
    monkeypatch.setattr(nccl_common, "uid_init_process_group", lambda *args: joined.append(args) or Communicator())
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", lambda *args, **kwargs: pytest.fail("a store"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    worker = object.__new__(CountedNCCLEngine)  # its constructor wants an engine
    worker.model_update_group = None
    worker.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=2, rank=1)
    encoded = base64.b64encode(UNIQUE_ID).decode()
    info = NCCLWeightTransferInitInfo(nccl_unique_id_b64=encoded, rank_offset=3, world_size=5, packed=True)
    worker.init_transfer_engine(info)
    assert joined == [(UNIQUE_ID, 4, 5, 3)]


def test_start_sending_raises_nccl_error_unless_aborted(without_gpus: None) -> None:
    """What NCCL raises then says less than the engine's own error; unaborted, NCCL's is the error."""
    transport = nccl.NcclTransport(buffer_bytes=16, num_workers=1)

    class Failing(Communicator):
        is_aborted = True

        def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
            super().broadcast(tensor, src, stream)
            if self.is_aborted:
                transport.abort()  # as an engine's failure does from another thread, meanwhile
            raise RuntimeError("NCCL error: unhandled system error")

        def destroy(self) -> None:
            pass

    communicator = transport._communicator = Failing()
    bucket: Any = SimpleNamespace(metas=[ParamMeta("w", torch.bfloat16, torch.Size([4]))])
    transport.places(0, bucket)
    transport.start_sending(0, bucket)
    assert len(communicator.sent) == 1
    assert transport._aborted.is_set()
    transport.places(1, bucket)
    transport.start_sending(1, bucket)  # nobody has said so to the main thread yet
    assert transport.is_taken(1, 0.0)
    alone = nccl.NcclTransport(buffer_bytes=16, num_workers=1)
    communicator = alone._communicator = Failing()
    communicator.is_aborted = False
    alone.places(0, bucket)
    with pytest.raises(EngineError, match="unhandled system error"):
        alone.start_sending(0, bucket)


def test_start_sending_aborted_before_broadcast_skips_it(without_gpus: None) -> None:
    """It is freed by then."""
    transport = nccl.NcclTransport(buffer_bytes=16, num_workers=1)

    class Freed(Communicator):
        def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
            pytest.fail("a communicator that is gone")

        def destroy(self) -> None:
            pass

    class Waiting(CpuStream):
        def wait_stream(self, stream: Any) -> None:
            transport.abort()

    transport._communicator, transport._stream = Freed(), Waiting()  # type: ignore[assignment]
    bucket = SimpleNamespace(metas=[ParamMeta("w", torch.bfloat16, torch.Size([4]))])
    transport.places(0, bucket)  # type: ignore[arg-type]
    transport.start_sending(0, bucket)  # type: ignore[arg-type]
    assert transport._aborted.is_set()


def test_load_transport_keeps_cudnn_and_compile_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform for CUDA turns cuDNN's attention off, in the one rank of a node that imports it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")

    def imported(name: str) -> Any:
        torch.backends.cuda.enable_cudnn_sdp(not before)
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        return SimpleNamespace(current_platform=None)

    monkeypatch.setattr(importlib, "import_module", imported)
    sync.load_transport("nccl")
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "7"
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    sync.load_transport("nccl")
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ


def test_interrupted_sync_leaves_no_thread(without_gpus: None) -> None:
    before = set(threading.enumerate())
    source = GatheredSource(tiny_model("qwen2-tied"), wire_dtype=torch.bfloat16, bucket_bytes=2**17)
    engine = ScriptedEngine()
    syncer = WeightSyncer(source, [engine], backend="shm", tensor_parallel_size=1, timeout_s=5.0)
    syncer.connect()
    fill, filled = source.fill, []

    def interrupted(bucket: Any, places: Any) -> None:
        if len(filled) == 1:
            raise KeyboardInterrupt
        filled.append(bucket)
        fill(bucket, places)

    source.fill = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        syncer.sync(1)
    deadline = time.monotonic() + 30
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)  # no join: one of them may not have been started yet
    assert [thread.name for thread in left] == []
    assert "finish_weight_update" not in [method for method, _ in engine.calls]


def test_nccl_sync_with_stand_in_communicator_sends_all_parameters(
    without_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's real init and update infos; only streams and the communicator, which need GPUs, stand in."""
    opened, communicator = [], Communicator()
    monkeypatch.setattr(nccl_common, "uid_init_process_group", lambda *args: opened.append(args) or communicator)
    engines = [ScriptedEngine(), ScriptedEngine()]
    trained = tiny_model("qwen2-tied")
    source = GatheredSource(trained, wire_dtype=torch.bfloat16, bucket_bytes=2**17)
    settings: dict[str, Any] = {"backend": "nccl", "tensor_parallel_size": 2, "timeout_s": 5.0}
    syncer = WeightSyncer(source, engines, **settings)
    syncer.connect()
    assert opened == [(UNIQUE_ID, 0, 5, 0)]
    worker_infos = [NCCLWeightTransferInitInfo(**engine.calls[0][1]["init_info"]) for engine in engines]
    assert [info.rank_offset for info in worker_infos] == [1, 3]
    assert all((info.world_size, info.packed) == (5, True) for info in worker_infos)
    for info in worker_infos:  # over the engines' own sockets, and no port where anybody could come first
        assert (info.nccl_unique_id_bytes, info.master_address, info.master_port) == (UNIQUE_ID, None, None)

    report, error = syncer.sync(3)
    assert error is None
    calls = engines[1].calls
    assert [calls[1][0], *(name for name, _ in calls[-2:])] == [
        "start_weight_update", "finish_weight_update", "reset_prefix_cache"
    ]  # fmt: skip
    assert calls[-1][1] == {"reset_connector": True}  # without it KV that was offloaded stays, of the weights before
    (update,) = [BucketsInfo(**kwargs["update_info"]) for name, kwargs in calls if name == "update_weights"]
    assert len(update.buckets()) == len(communicator.sent) == len(source.plan().buckets) > 2
    arrived = {}
    for metas, packed in zip(update.buckets(), communicator.sent, strict=True):
        names, shapes, dtypes = zip(*((meta.name, [*meta.shape], meta.dtype) for meta in metas), strict=True)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        arrived |= dict(unpack_tensor(packed, [*names], [*shapes], [*dtypes], sizes))
    for name, parameter in trained.named_parameters():
        assert torch.equal(arrived[name], parameter.to(torch.bfloat16)), name
    assert report.num_bytes == sum(packed.numel() for packed in communicator.sent)

    bystander = WeightSyncer(source, [], **settings)  # a rank that is not its node's local main
    bystander.connect()
    assert len(opened) == 1
    report, error = bystander.sync(4)
    assert (report.num_bytes, report.send_s, error) == (0, 0.0, None)


def test_nccl_worker_receives_exact_weights_from_transport(without_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers in float32 among bfloat16, experts at once; only the wire and the model behind the worker stand in."""
    trained = tiny_model("glm4-moe")
    source = GatheredSource(trained, wire_dtype=torch.bfloat16, bucket_bytes=2**15)
    routers = {meta.name: "float32" for meta in source.checkpoint_metas if ".gate." in meta.name}
    source.adopt(WireFormat(dtypes=routers, whole_experts=tuple(stack.name for stack in source.experts)))
    assert routers
    assert source.experts
    wire = Wire("cpu")
    arrived: dict[str, torch.Tensor] = {}

    worker = object.__new__(CountedNCCLEngine)  # its constructor wants an engine
    worker.model_update_group, worker.device = EngineEnd(wire), torch.device("cpu")  # type: ignore[assignment]
    worker._received, worker._held = set(), set()
    worker._parts = {}
    monkeypatch.setattr(worker, "load", lambda tensors: arrived.update((n, t.clone()) for n, t in tensors))

    def load(method: str, kwargs: dict[str, Any]) -> Any:
        if method == "update_weights":
            worker.receive_weights(BucketsInfo(**kwargs["update_info"]))
        return agree(method, kwargs)

    monkeypatch.setitem(sync.TRANSPORTS, "nccl", partial(StandInTransport, wire))
    engine = ScriptedEngine(script=Script(control=load))
    syncer = WeightSyncer(source, [engine], backend="nccl", tensor_parallel_size=1, timeout_s=30.0)
    syncer.connect()
    _, error = syncer.sync(1)
    assert error is None
    assert wire.num_sent > 10
    sent = dict(trained.named_parameters()) | dict(trained.named_buffers())
    assert {*routers, *(stack.name for stack in source.experts)} <= arrived.keys()
    for name, tensor in arrived.items():
        dtype = torch.float32 if name in routers else torch.bfloat16
        assert torch.equal(tensor, sent[name].to(dtype)), name
        assert tensor.dtype == dtype, name


@pytest.mark.parametrize(("backend", "loads"), [("nccl", True), ("shm", False)])
def test_load_transport_imports_vllm_transfer_only_for_nccl(backend: str, loads: bool) -> None:
    script = f"import sys; from grpo.weights.sync import load_transport; load_transport({backend!r}); "
    script += "print('vllm.distributed.weight_transfer.nccl_common' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert printed.splitlines()[-1] == str(loads)
