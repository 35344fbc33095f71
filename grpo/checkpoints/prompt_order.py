"""Which prompts are in which generation batch: a function of seed, epoch and position alone."""

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler


class GenerationSampler(Sampler[int]):
    """TRL's `RepeatSampler` order, with the permutation of an epoch worked out from seed and epoch.

    TRL's draws one permutation after the other from one generator, so a run that resumes in its second epoch replays
    the first one's order (1.16). Epoch 0 is the same in both.

    Args:
        num_prompts: rows of the data set.
        prompts_per_batch: different prompts of a generation batch, over all ranks.
        num_generations: how often each stands in the batch, next to itself.
        repeats: how often a generation batch comes: once for each micro-batch that it is trained on.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        prompts_per_batch: int,
        num_generations: int,
        repeats: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        self.num_prompts = len(data_source)
        self.prompts_per_batch = prompts_per_batch
        self.num_generations = num_generations
        self.repeats = repeats
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._last_permutation: tuple[int, list[int]] | None = None  # with its epoch

    @property
    def num_batches(self) -> int:
        """Generation batches of an epoch; rows that do not fill one more are left out, other ones in each epoch."""
        return self.num_prompts // self.prompts_per_batch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def permutation(self, epoch: int) -> list[int]:
        """The order of the rows in `epoch`."""
        if not self.shuffle:
            return list(range(self.num_prompts))
        if self._last_permutation is None or self._last_permutation[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._last_permutation = epoch, torch.randperm(self.num_prompts, generator=generator).tolist()
        return self._last_permutation[1]

    def generation_batch(self, epoch: int, index: int) -> list[int]:
        """Rows of generation batch `index` of `epoch` over all ranks, copies included."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"generation batch {index} of {self.num_batches}")
        return self._rows(self.permutation(epoch), index)

    def _rows(self, permutation: list[int], index: int) -> list[int]:
        first = index * self.prompts_per_batch
        return [row for row in permutation[first : first + self.prompts_per_batch] for _ in range(self.num_generations)]

    def __iter__(self) -> Iterator[int]:
        permutation = self.permutation(self.epoch)
        for index in range(self.num_batches):
            rows = self._rows(permutation, index)
            for _ in range(self.repeats):
                yield from rows

    def __len__(self) -> int:
        return self.num_batches * self.prompts_per_batch * self.num_generations * self.repeats


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

    Read from the data set by row number. The data loader is not touched: looking one batch ahead in it would set
    accelerate's end-of-data flag a batch too early, and with it gradient accumulation (1.15).

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
