"""What is sampled ahead: this rank's prompts of the generation batch that follows the present one.

Read from the data set by row number. The data loader is not touched: looking one batch ahead in it would set
accelerate's end-of-data flag a batch too early, and with it gradient accumulation (1.15).
"""

from collections.abc import Callable
from typing import Any

from grpo.sampler import GenerationSampler


class FollowingPrompts:
    """Knows the prompts of any generation batch of a run.

    Args:
        rank: among `world_size` ranks; accelerate deals a generation batch out to them in order.
        tokenize: token ids of a list of prompts, as training does it.
    """

    def __init__(
        self,
        sampler: GenerationSampler,
        dataset: Any,
        *,
        rank: int,
        world_size: int,
        tokenize: Callable[[list[Any]], list[list[int]]],
    ) -> None:
        self._sampler = sampler
        self._dataset = dataset
        self._rank = rank
        self._world_size = world_size
        self._tokenize = tokenize

    def of_batch(self, number: int) -> list[list[int]]:
        """Token ids of this rank's rows, copies included, of generation batch `number` of the run, counted from 0."""
        rows = self._sampler.generation_batch(*divmod(number, self._sampler.num_batches))
        share = len(rows) // self._world_size
        rows = rows[self._rank * share : (self._rank + 1) * share]
        different = list(dict.fromkeys(rows))
        token_ids = self._tokenize([self._dataset[row]["prompt"] for row in different])
        of_row = dict(zip(different, token_ids, strict=True))
        return [of_row[row] for row in rows]
