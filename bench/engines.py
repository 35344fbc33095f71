"""Real engines without a trainer, for the benchmarks of generation and dispatch."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from grpo import GRPOConfig
from grpo.config.models import EngineModel
from grpo.engine.client import EngineClient
from grpo.engine.environment import engine_environment
from grpo.place.devices import visible_devices
from grpo.place.topology import NodeTopology
from grpo.serving import engine_spec

START_S = 300.0

SIZES = {
    # a step costs what Python costs, however many sequences it has: as on a GPU that waits for its memory
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    # a step costs more with every sequence
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
}
VOCAB_SIZE = 2048


def save_model(folder: Path, size: str, *, weights: bool = False) -> Path:
    """A made-up Qwen3's configuration and tokenizer; its weights only where something is to load them."""
    shape = SIZES[size]
    model_config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        num_key_value_heads=shape["num_attention_heads"] // 2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        dtype="bfloat16",
        **shape,
    )
    model_config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB_SIZE)}}))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    if weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def engine_model(folder: Path) -> EngineModel:
    return EngineModel(path=str(folder), tokenizer=str(folder), revision=None, dtype=torch.bfloat16)


def config(output_dir: Path, device: str, **settings: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(output_dir), use_cpu=device == "cpu", bf16=device == "cuda", report_to="none", **settings
    )


def topology_of(device: str, num_engines: int) -> NodeTopology:
    """One process and `num_engines` engines; on GPUs they take the visible ones in turn, and may share one."""
    gpus = visible_devices(os.environ) if device == "cuda" else ()
    return NodeTopology(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node=0,
        num_nodes=1,
        launched=False,
        host="here",
        devices=gpus,
        reserved_devices=gpus,
        engines=tuple((gpus[index % len(gpus)],) if gpus else () for index in range(num_engines)),
        tensor_parallel_size=1,
    )


@contextlib.contextmanager
def started(args: GRPOConfig, model: Path, num_engines: int) -> Iterator[tuple[list[EngineClient], list[int]]]:
    """Engines with made-up weights, on CPU each on a core of its own; and how many sequences each runs at once."""
    topology = topology_of("cpu" if args.use_cpu else "cuda", num_engines)
    spec = engine_spec(args, engine_model(model), topology)
    cores = sorted(os.sched_getaffinity(0))
    clients: list[EngineClient] = []
    try:
        for index, devices in enumerate(topology.engines):
            if not devices:
                os.sched_setaffinity(0, {cores[index % len(cores)]})  # the engine inherits it
            try:
                clients.append(
                    EngineClient(
                        spec,
                        name=f"engine {index}",
                        environment=engine_environment(
                            os.environ, devices=devices, tensor_parallel_size=1, engines_per_node=1
                        ),
                        log_path=Path(args.output_dir) / f"engine-{index}.log",
                    )
                )
            finally:
                os.sched_setaffinity(0, set(cores))
        yield clients, [client.wait_ready(START_S).max_num_seqs for client in clients]
    finally:
        for client in clients:
            client.close()
