"""What is sampled ahead: this rank's prompts of the generation batch that follows the present one.

Read from the data set by row number. The data loader is not touched: looking one batch ahead in it would set
accelerate's end-of-data flag a batch too early, and with it gradient accumulation (1.15).
"""

from collections.abc import Callable
from typing import Any

from grpo.sampler import GenerationSampler


def prompts_of_batch(
    number: int,
    sampler: GenerationSampler,
    dataset: Any,
    *,
    rank: int,
    world_size: int,
    tokenize: Callable[[list[Any]], list[list[int]]],
) -> list[list[int]]:
    """Token ids of a rank's rows, copies included, of generation batch `number` of the run, counted from 0.

    Args:
        rank: among `world_size` ranks; accelerate deals a generation batch out to them in order.
        tokenize: token ids of a list of prompts, as training does it.
    """
    rows = sampler.generation_batch(*divmod(number, sampler.num_batches))
    share = len(rows) // world_size
    rows = rows[rank * share : (rank + 1) * share]
    different = list(dict.fromkeys(rows))
    token_ids = tokenize([dataset[row]["prompt"] for row in different])
    of_row = dict(zip(different, token_ids, strict=True))
    return [of_row[row] for row in rows]
