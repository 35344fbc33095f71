"""What the proof of a weight sync takes for the trainer's log-probabilities, against their definition."""

from collections.abc import Callable

import pytest
import torch

# Largest difference to log_softmax of the model's own logits: the order of sums, TF32 where a kernel takes it; and for
# bf16 its 8 bits of a logit.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.15}


@pytest.mark.requires("transformers", "trl")
@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", ["qwen3-tied", "llama-untied"])
def test_trainer_logprobs_match_log_softmax(
    family: str, dtype: torch.dtype, device: torch.device, figure: Callable[[str, float, str], None]
) -> None:
    from transformers import AutoModelForCausalLM

    from grpo.weights.probe import probe_prompts, trainer_logprobs
    from tests.support.tiny_models import VOCAB_SIZE, tiny_config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # logits that differ: a model as initialised gives every token nearly the same
    model = model.to(device=device, dtype=dtype)
    prompts = probe_prompts(VOCAB_SIZE, 64)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    scored = torch.from_numpy(trainer_logprobs(model, {"input_ids": torch.tensor(prompts)}, autocast))

    ids = torch.tensor(prompts, device=device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=ids).logits
    plain = torch.log_softmax(logits.float(), dim=-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2).cpu()
    assert scored.shape == plain.shape
    assert plain.std() > 0.5, "every token is as likely: nothing was compared"
    difference = (scored - plain).abs()
    figure(f"{family} {str(dtype).removeprefix('torch.')}: mean", difference.mean().item(), "nats")
    figure("largest", difference.max().item(), "nats")
    assert difference.max() < LIMITS[dtype]
