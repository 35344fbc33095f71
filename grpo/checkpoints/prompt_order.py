"""Prompts of each generation batch: a function of seed, epoch and position alone."""

import collections
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from grpo.checkpoints.rank_state import random_states, restore_random_states, seeded_states


class GenerationSampler(Sampler[int]):
    """TRL's `RepeatSampler` order, with each epoch's permutation computed from seed and epoch.

    TRL's draws all permutations from one generator, so a run resumed in its second epoch repeats the first one's order
    (1.16). Epoch 0 is the same in both.

    Args:
        data_source: the data set, of which only the length is used.
        prompts_per_batch: distinct prompts of a generation batch, over all ranks.
        num_generations: copies of each prompt in the batch, adjacent.
        repeats: how often a generation batch is repeated: once for each micro-batch trained on it.
        spare_groups: further distinct prompts of a generation batch, sampled too.
        order: returns the rows of an epoch, in order, by the epoch's number; deterministic, with the same number of
            rows for each epoch. None: all rows, shuffled or not.

    Raises:
        ValueError: `order` returns something else.
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
        spare_groups: int = 0,
        order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.num_rows = self.num_prompts = len(data_source)
        self.prompts_per_batch = prompts_per_batch
        self.num_generations = num_generations
        self.repeats = repeats
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.spare_groups = spare_groups
        self._order = order
        self._last_permutation: tuple[int, list[int]] | None = None  # with its epoch
        if order is not None:
            self.num_prompts = len(self.permutation(0))

    @property
    def is_drawn(self) -> bool:
        """True if users' code determines the rows."""
        return self._order is not None

    @property
    def num_batches(self) -> int:
        """Generation batches per epoch; leftover rows, too few for a batch, are dropped, different ones in each
        epoch."""
        return self.num_prompts // (self.prompts_per_batch + self.spare_groups)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def permutation(self, epoch: int) -> list[int]:
        """Row order of `epoch`."""
        if not self.shuffle and self._order is None:
            return list(range(self.num_prompts))
        if self._last_permutation is None or self._last_permutation[0] != epoch:
            if self._order is not None:
                self._last_permutation = epoch, self._ordered(self._order, epoch)
                return self._last_permutation[1]
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._last_permutation = epoch, torch.randperm(self.num_prompts, generator=generator).tolist()
        return self._last_permutation[1]

    def _ordered(self, order: Callable[[int], Sequence[int]], epoch: int) -> list[int]:
        rows = [int(row) for row in order(epoch)]
        if wrong := [row for row in rows if not 0 <= row < self.num_rows]:
            raise ValueError(
                f"prompt_order gives row {wrong[0]} in epoch {epoch}, but the data set has {self.num_rows}: give "
                "numbers of rows, from 0"
            )
        if self._last_permutation is not None and len(rows) != self.num_prompts:
            raise ValueError(
                f"prompt_order gives {len(rows)} rows in epoch {epoch}, and {self.num_prompts} before: give equally "
                "many for each epoch, by which steps are counted"
            )
        return rows

    def generation_batch(self, epoch: int, index: int) -> list[int]:
        """Rows of generation batch `index` of `epoch` over all ranks, copies included, without spare groups."""
        return self.sampled_batch(epoch, index)[: self.prompts_per_batch * self.num_generations]

    def sampled_batch(self, epoch: int, index: int) -> list[int]:
        """Rows of a generation batch, spare groups included."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"generation batch {index} of {self.num_batches}")
        return [row for row in self._prompts(epoch, index) for _ in range(self.num_generations)]

    def _prompts(self, epoch: int, index: int) -> list[int]:
        """Distinct rows of a generation batch, spare groups included."""
        size = self.prompts_per_batch + self.spare_groups
        return self.permutation(epoch)[index * size : (index + 1) * size]

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        for index in range(self.num_batches):
            rows = self.generation_batch(epoch, index)
            for _ in range(self.repeats):
                yield from rows

    def __len__(self) -> int:
        return self.num_batches * self.prompts_per_batch * self.num_generations * self.repeats

    def digest(self, num_batches: int) -> str:
        """Hash of the rows of the present epoch, up to the first `num_batches` generation batches of the run."""
        epoch, last = divmod(num_batches - 1, self.num_batches)
        drawn = [self._prompts(epoch, index) for index in range(last + 1)]
        return hashlib.blake2b(np.asarray(drawn, np.int64).tobytes(), digest_size=8).hexdigest()

    def check(self, num_batches: int, digest: str) -> None:
        """Compare the present rows with those before the checkpoint.

        Raises:
            ValueError: they differ.
        """
        if self.digest(num_batches) != digest:
            raise ValueError(
                f"{self._owner} gives other rows than before the checkpoint, so that this run "
                "cannot go on where it was [GRPO-213]: let its order follow from the data set, the epoch and random "
                "numbers alone, or begin a new run with the checkpoint's folder as the model"
            )

    @property
    def _owner(self) -> str:
        return "prompt_order"


class DrawnSampler(GenerationSampler):
    """Order of any other sampler: a generation batch is drawn at its first use, and kept.

    So reading ahead gives the same rows as training. A resumed run draws again from the first epoch, with random states
    of Python, NumPy and torch reserved for this sampler: if the sampler depends on nothing else, its rows are the same,
    which `digest` verifies.

    Args:
        sampler: yields each row `num_generations` times in a row. It yields a generation batch `repeats` times; only
            the first one is used. It may have `set_epoch`.
        inside: the trainer's own sampler, if the other one may wrap it.

    Raises:
        ValueError: its rows have another form, here or when a batch is drawn.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        prompts_per_batch: int,
        num_generations: int,
        repeats: int,
        seed: int,
        inside: GenerationSampler | None = None,
    ) -> None:
        self._sampler, self._inside = sampler, inside
        size = len(sampler) if hasattr(type(sampler), "__len__") else 0
        super().__init__(
            range(size // (num_generations * repeats)),
            prompts_per_batch=prompts_per_batch,
            num_generations=num_generations,
            repeats=repeats,
            shuffle=False,
            seed=seed,
        )
        self._random = seeded_states(seed)
        if not self.num_batches:
            raise self._makes_no_groups(f"has {size} rows, less than a generation batch, or no length")
        self._drawn: dict[int, list[list[int]]] = {}  # prompts of each batch, for this epoch and the one before
        with self._own_random_numbers():
            self._begin(0)
            self._draw_until(1)

    def _prompts(self, epoch: int, index: int) -> list[int]:
        with self._own_random_numbers():
            while self._now < epoch:
                self._draw_until(self.num_batches)
                collections.deque(self._rows, maxlen=0)  # rows that fill no batch
                self._begin(self._now + 1)
            if self._now == epoch:
                self._draw_until(index + 1)
        return self._drawn[epoch][index]

    @property
    def is_drawn(self) -> bool:
        return True

    @property
    def _owner(self) -> str:
        return f"the sampler of _get_train_sampler, {_name(self._sampler)},"

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        outside = random_states()
        restore_random_states(self._random)
        try:
            yield
        finally:
            self._random = random_states()
            restore_random_states(outside)

    def _begin(self, epoch: int) -> None:
        self._now = epoch
        self._drawn = {number: drawn for number, drawn in self._drawn.items() if number == epoch - 1} | {epoch: []}
        for each in (self._inside, self._sampler):
            if (set_epoch := getattr(each, "set_epoch", None)) is not None:
                set_epoch(epoch)
        self._rows = iter(self._sampler)

    def _draw_until(self, num_batches: int) -> None:
        """Draw batches of this epoch up to this number."""
        drawn = self._drawn[self._now]
        while len(drawn) < num_batches:
            drawn.append(self._draw())

    def _draw(self) -> list[int]:
        """Draw the prompts of the next generation batch."""
        size = self.prompts_per_batch * self.num_generations
        rows = [int(row) for row in itertools.islice(self._rows, size * self.repeats)][:size]
        prompts = rows[:: self.num_generations]
        if len(rows) < size or rows != [row for row in prompts for _ in range(self.num_generations)]:
            raise self._makes_no_groups(f"gives the rows {', '.join(map(str, rows[:12]))} …")
        return prompts

    def _makes_no_groups(self, what: str) -> ValueError:
        return ValueError(
            f"the sampler of _get_train_sampler, {_name(self._sampler)}, {what}: it has to give each row "
            f"num_generations ({self.num_generations}) times in a row, {self.prompts_per_batch} different ones for a "
            f"generation batch, and that batch {self.repeats} times, as trl.trainer.utils.RepeatSampler does"
        )


def _name(sampler: Any) -> str:
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"


def rows_of_batch(number: int, sampler: GenerationSampler, *, rank: int, world_size: int) -> list[int]:
    """Return a rank's row numbers, copies included; accelerate distributes a generation batch to ranks in order."""
    rows = sampler.sampled_batch(*divmod(number, sampler.num_batches))
    share = len(rows) // world_size
    return rows[rank * share : (rank + 1) * share]


def prompts_of_rows(
    rows: Sequence[int], dataset: Any, tokenize: Callable[[list[Any]], list[list[int]]]
) -> list[list[int]]:
    """Return the token ids of the prompts in rows with these numbers, copies included.

    Reads the data set by row number. The data loader is not used: reading ahead in it would set accelerate's
    end-of-data flag a batch too early, and so break gradient accumulation (1.15).

    Args:
        tokenize: returns token ids of a list of prompts, as in training.
    """
    different = list(dict.fromkeys(rows))
    token_ids = tokenize([dataset[row]["prompt"] for row in different])
    of_row = dict(zip(different, token_ids, strict=True))
    return [of_row[row] for row in rows]
