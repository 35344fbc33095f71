"""What a first verification makes of padding with a GPT-2 under ZeRO-3, on several ranks."""

import deepspeed
import torch
import torch.distributed as dist
from trl.trainer.utils import add_fused_lm_head

from tests.support.own_positions import PADS, random_model, scores, verifier_of


def changed_by_pads() -> dict[str, float]:
    """Of the log-probabilities, by DeepSpeed's engine: before the verification, and after it in each of two steps.

    The ranks do not agree on how much the pads change: the last one is the only rank that sees a difference.
    """
    model = random_model("gpt2", dropout=0.0)
    add_fused_lm_head(model)
    wanted = scores(model, 0).detach()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def largest(mine: float) -> float:
        found = torch.tensor(mine if dist.get_rank() == dist.get_world_size() - 1 else 0.0)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def apart() -> float:
        found = scores(engine, PADS)
        engine.backward(found.sum())
        engine.step()
        return (found.detach() - wanted).abs().max().item()

    changed = {"before": apart()}
    verifier = verifier_of(engine.module, largest=largest)
    for number in (1, 2):
        verifier.verify(number, engines_work=False)
        changed[f"after {number}"] = apart()
    return changed
