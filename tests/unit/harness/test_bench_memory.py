"""What `bench.overlap --device cuda` needs of a GPU, by what autograd keeps on a CPU and by `grpo plan`."""

import pytest
import torch

from bench.overlap import PROMPT_TOKENS, SHAPES, model_config
from examples.demo_model import build_tokenizer
from grpo.ops.plan.model_shape import shape_of
from grpo.ops.plan.training_memory import saved_bytes_per_token
from tests.support.activations import micro_batch, saved_by_autograd

MOST = 60 * 2**30
BYTES_PER_PARAMETER = (
    4 * 4 + 2
)  # float32 weights, gradients and two moments; the copies in bfloat16 that autocast keeps


def saved(num_layers: int, tokens: int) -> int:
    config = model_config(build_tokenizer(), hidden_size=SHAPES["cuda"]["hidden_size"], num_hidden_layers=num_layers)
    with torch.autocast("cpu", torch.bfloat16):
        return saved_by_autograd(config, torch.float32, 1, tokens)


@pytest.fixture(scope="module")
def kept_by_autograd() -> float:
    """Bytes for each token and layer: without what does not grow with them, the weights' copies first of all."""
    return (saved(2, 96) - saved(1, 96) - saved(2, 32) + saved(1, 32)) / 64


def test_overlap_benchmark_on_cuda_fits_60_gib(kept_by_autograd: float) -> None:
    sizes = SHAPES["cuda"]
    config = model_config(
        build_tokenizer(), hidden_size=sizes["hidden_size"], num_hidden_layers=sizes["num_hidden_layers"]
    )
    shape = shape_of(config, "overlap")
    states = BYTES_PER_PARAMETER * shape.num_parameters
    (layer,) = shape.layers
    tokens = PROMPT_TOKENS + sizes["completion_tokens"]
    batch = micro_batch(sizes["micro_batch"], tokens)
    planned = saved_bytes_per_token(shape, layer, batch)
    for per_token in (kept_by_autograd, planned):
        assert states + per_token * sizes["micro_batch"] * tokens * sizes["num_hidden_layers"] < MOST
        assert per_token * sizes["completions"] * tokens * sizes["num_hidden_layers"] > MOST, "a micro-batch of all"
    assert sizes["completions"] % sizes["micro_batch"] == sizes["micro_batch"] % 8 == 0  # num_generations
