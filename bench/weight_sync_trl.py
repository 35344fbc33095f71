"""TRL 1.16's ways from ZeRO-3's shards to vLLM, for `bench.weight_sync`: its own iteration, one parameter after the
other."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from transformers import PretrainedConfig
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from grpo.weights.buckets import MIN_BUCKETS, Bucket, ParamMeta, described
from grpo.weights.sender import Sender
from grpo.weights.sync import WeightSyncer


class TrlWays:
    """Methods are collective and return the seconds of this rank; the engine, transport and calls are the syncer's.

    Args:
        model: the trainer's, under ZeRO-3.
        wire_dtype: in which parameters travel. TRL gathers and sends what the trainer holds: here it gathers that,
            and need not send float32.
        dtypes: those of the parameters, by name, that travel in another one.
        timeout_s: deadline of a call to the engine.
    """

    held: Sequence[str] = ()
    """What the engine keeps."""

    def __init__(
        self,
        model: torch.nn.Module,
        syncer: WeightSyncer,
        *,
        wire_dtype: torch.dtype,
        dtypes: Mapping[str, torch.dtype],
        timeout_s: float,
    ) -> None:
        self._model, self._syncer, self._timeout_s = model, syncer, timeout_s
        self._wire_dtype, self._dtypes = wire_dtype, dtypes
        self._buckets: list[Bucket] | None = None
        wire_bytes = [parameter.ds_numel * wire_dtype.itemsize for parameter in model.parameters()]
        self.largest_bytes = max(wire_bytes)
        self.chunk_bytes = sum(wire_bytes) // MIN_BUCKETS
        """As many chunks as buckets of ours. TRL's are of 1 GiB, which would be all of a small model at once."""

    def _meta(self, name: str, tensor: torch.Tensor) -> ParamMeta:
        return ParamMeta(name, self._dtypes.get(name, self._wire_dtype), tuple(tensor.shape))

    def one_call_each(self) -> float:
        """`VLLMClient.update_named_param` for each parameter: gathered, cast, packed, loaded, and then the next."""

        def send(parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
            transport, engines = self._syncer._transport, self._syncer._engines
            assert transport is not None
            transport.begin()
            engines.start_weight_update()
            for number, (name, tensor) in enumerate(parameters):
                bucket = Bucket(parameters=(), metas=(self._meta(name, tensor),))
                transport.places(0, bucket)[0].copy_(tensor)
                reported = {**described(bucket.metas), "sizes": [1], "timeout_s": self._timeout_s}
                with ThreadPoolExecutor(1) as thread:
                    update = thread.submit(
                        engines.update_weights, reported | {"held": self.held if number == 0 else []}
                    )
                    transport.start_sending(0, bucket)
                    update.result()
            self._syncer._finish(0, {})
            transport.end()

        return self._timed(send)

    def packed_stream(self) -> float:
        """Server mode, `VLLMClient.update_named_params`: gathered parameters are kept until a chunk is full, which is
        packed and loaded while the next one is gathered.

        TRL's worker knows of all chunks from one call, and so does ours. Chunks are packed where the engine reads them,
        with the cast, and three may be on their way where TRL has two buffers.
        """
        if self._buckets is None:  # the first time: all ranks walk with each other to learn what comes
            shapes = [(name, torch.empty_like(tensor, device="meta")) for name, tensor in self._parameters()]
            chunks = self._chunks(shapes)
            self._buckets = [
                Bucket(parameters=(), metas=tuple(self._meta(*each) for each in chunk)) for chunk in chunks
            ]
        buckets = self._buckets

        def send(parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
            transport = self._syncer._transport
            assert transport is not None
            sender = Sender(
                transport, self._syncer._engines, buckets, held=self.held, sums_bits=False, timeout_s=self._timeout_s
            )
            for bucket, chunk in zip(buckets, self._chunks(parameters), strict=True):
                assert [meta.name for meta in bucket.metas] == [name for name, _ in chunk]
                places = sender.places(bucket)
                for place, (_, tensor) in zip(places or (), chunk, strict=places is not None):
                    place.copy_(tensor)
                sender.send(bucket)
            error = sender.finish(lambda: self._syncer._finish(0, {}))
            transport.end()
            if error is not None:
                raise error

        return self._timed(send)

    def _chunks(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Cut as vLLM's `pack_tensors` does: a chunk is full with the parameter that makes it larger than the limit."""
        chunk: list[tuple[str, torch.Tensor]] = []
        for name, tensor in parameters:
            chunk.append((name, tensor))
            if sum(each.numel() for _, each in chunk) * self._wire_dtype.itemsize > self.chunk_bytes:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def load_in_process(self, engine_model: torch.nn.Module) -> float:
        """Colocate mode: each rank gathers each parameter, and the engine's model in its process loads it."""

        def load(parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in parameters:
                engine_model.load_weights([(name, tensor)])

        return self._timed(load, everywhere=True)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As TRL walks through them. Collective."""
        generation = object.__new__(VLLMGeneration)  # its constructor wants an engine of TRL's
        generation._dist = object.__new__(DistributedBackend)
        generation._dist.zero_stage, generation._dist.fsdp_version = 3, None
        generation.model = self._model
        return generation._iter_named_params()

    def _timed(self, take: Callable[[Iterator[tuple[str, torch.Tensor]]], None], *, everywhere: bool = False) -> float:
        """With TRL's parameters, of which the ranks that send nothing take part in the gathers alone."""
        dist.barrier()
        begun = time.perf_counter()
        if everywhere or self._syncer._transport is not None:
            take(self._parameters())
        else:
            for _ in self._parameters():
                pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def engine_model(folder: Path, config: PretrainedConfig, device: str) -> torch.nn.Module:
    """The model that a vLLM engine in this process would have, without the engine. Collective.

    Its weights are not packed for a CPU's kernels: vLLM's would then take no more (0.31), and on GPUs nothing is.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.save_pretrained(folder)
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, enforce_eager=True
    )
    with mock.patch.dict(os.environ):  # vLLM sets variables that the engines to come must not inherit
        vllm_config = arguments.create_engine_config()
        with set_current_vllm_config(vllm_config):
            init_distributed_environment(
                dist.get_world_size(), dist.get_rank(), local_rank=dist.get_rank(), backend=dist.get_backend()
            )
            ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(torch.bfloat16), torch.device(device):
                return initialize_model(vllm_config)
