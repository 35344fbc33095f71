"""Between TRL's trainer and ours: the order of prompts, which can be read ahead, and again after a resume.

What TRL 1.16 and transformers 5.17 leave open here: `RepeatSampler` has one running generator and no epochs, a
subclass's own sampler is drawn from as training goes on, and a stream is resumed in its first pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpo.checkpoints.prompt_order import DrawnSampler, GenerationSampler, prompts_of_batch, rows_of_batch
from grpo.seam.saving import SavingTrainer


class OrderedTrainer(SavingTrainer):
    """A trainer whose prompts come in an order that follows from seed, epoch and position."""

    prompt_order: Callable[[int], Sequence[int]] | None = None
    """The rows of an epoch in the order in which they come, by its number; see `GenerationSampler`."""

    def _comes(self, number: int) -> bool:
        """Whether training does not end before the generation batch with this number."""
        micro_batches_left = (self.state.max_steps - self.state.global_step) * self.args.gradient_accumulation_steps
        micro_batches_left -= self._step - self._step_began_at
        return number * self._steps_per_batch < self._step + micro_batches_left

    @property
    def _place(self) -> dict[str, int]:
        """This rank among those that a generation batch is dealt out to."""
        return {"rank": self.accelerator.process_index, "world_size": self.accelerator.num_processes}

    def rows_of_batch(self, number: int) -> list[dict[str, Any]] | None:
        """This rank's rows of a generation batch that follows, copies included; None when training ends before it."""
        if not self._comes(number):
            return None
        assert self._sampler is not None, "lookahead in a stream is refused"
        return [self.train_dataset[row] for row in rows_of_batch(number, self._sampler, **self._place)]

    def prompts_of_batch(self, number: int) -> list[list[int]] | None:
        """Token ids of their prompts."""
        if not self._comes(number):
            return None
        assert self._sampler is not None, "lookahead in a stream is refused"
        return prompts_of_batch(
            number,
            self._sampler,
            self.train_dataset,
            tokenize=lambda prompts: self._tokenize_prompts(prompts)[0],
            **self._place,
        )

    @property
    def _batch_layout(self) -> dict[str, int]:
        """What samplers have to know."""
        return {
            "prompts_per_batch": self.args.generation_batch_size // self.num_generations,
            "num_generations": self.num_generations,
            "repeats": self._steps_per_batch,
            "seed": self.args.seed,
        }

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        rows = self.train_dataset if dataset is None else dataset
        self._sampler = GenerationSampler(
            rows,
            shuffle=self.shuffle_dataset,
            spare_groups=getattr(self.args, "spare_groups", 0),
            order=self.prompt_order,
            **self._batch_layout,
        )
        return self._sampler

    def _get_dataloader(self, *args: Any, sampler_fn: Any = None, is_training: bool = False, **kwargs: Any) -> Any:
        """transformers'. What a subclass's `_get_train_sampler` returns can be read ahead, and again after a resume."""
        known = partial(self._known_order, sampler_fn) if is_training else sampler_fn
        return super()._get_dataloader(*args, sampler_fn=known, is_training=is_training, **kwargs)

    def _known_order(self, sampler_fn: Callable[[Any], Any], dataset: Any) -> GenerationSampler:
        self._sampler = None
        sampler = sampler_fn(dataset)
        if not isinstance(sampler, GenerationSampler):
            if getattr(self.args, "spare_groups", 0):
                raise ValueError(
                    f"spare_groups is {self.args.spare_groups} with a sampler of _get_train_sampler, which gives no "
                    "spare prompts: set it to 0, or give the order as prompt_order"
                )
            sampler = DrawnSampler(sampler, inside=self._sampler, **self._batch_layout)
        self._sampler = sampler
        return sampler

    def _run_epoch(self, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers looks only after one more step (5.17)
            self.control.should_training_stop = True
            return
        # accelerate's `set_epoch` does not reach a sampler behind skipped batches (1.15)
        passes, began = self._stream_pass
        if self._sampler is not None:
            self._sampler.set_epoch(kwargs["epoch"])
        elif kwargs["epoch"] < passes:  # over a stream; transformers resumes in the first, however short it is (5.17)
            return
        elif kwargs["epoch"] == passes:
            kwargs |= {"epochs_trained": passes, "steps_trained_in_current_epoch": self._step - began}
        else:
            self._stream_pass = kwargs["epoch"], self._step
        super()._run_epoch(**kwargs)
