"""The order of prompts, which can be read ahead, and again after a resume.

What TRL 1.16 and transformers 5.17 leave open here: `RepeatSampler` has one running generator and no epochs, a
subclass's own sampler is drawn from as training goes on, and a stream is resumed in its first pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

from grpo.checkpoints.prompt_order import DrawnSampler, GenerationSampler, prompts_of_rows, rows_of_batch
from grpo.seam.view import TrainerView


class PromptOrder:
    """Prompts in an order that follows from seed, epoch and position; and the position.

    Args:
        order: the rows of an epoch in the order in which they come, by its number; see `GenerationSampler`.
    """

    def __init__(self, view: TrainerView, order: Callable[[int], Sequence[int]] | None) -> None:
        self._view, self._order = view, order
        self.sampler: GenerationSampler | None = None
        """Of training; None for a stream."""
        self.stream_pass = (0, 0)
        """How often a stream was read to its end, and the number of the first micro-batch since."""
        self._step_began_at = 0
        """The number of the first micro-batch of this optimizer step."""

    # -- the position -------------------------------------------------------------------------------------------------

    def go_to(self, micro_batch: int, stream_pass: tuple[int, int]) -> None:
        self._view.micro_batches = self._step_began_at = micro_batch
        self.stream_pass = stream_pass

    def end_step(self) -> tuple[int, int]:
        """Micro-batches that were trained on when the optimizer step began, and now that it ends."""
        before, self._step_began_at = self._step_began_at, self._view.micro_batches
        return before, self._step_began_at

    def back_to_step(self) -> None:
        """To where the last optimizer step has ended."""
        self._view.micro_batches = self._step_began_at

    @property
    def num_batches(self) -> int:
        """Generation batches that training has begun."""
        return -(-self._view.micro_batches // self._view.steps_per_batch)

    # -- batches that follow ------------------------------------------------------------------------------------------

    def _comes(self, number: int) -> bool:
        """Whether training does not end before the generation batch with this number."""
        view = self._view
        left = (view.state.max_steps - view.state.global_step) * view.args.gradient_accumulation_steps
        left -= view.micro_batches - self._step_began_at
        return number * view.steps_per_batch < view.micro_batches + left

    def _numbers(self, number: int) -> list[int] | None:
        """Of this rank's rows of a generation batch that follows, copies included; None when training ends before."""
        if not self._comes(number):
            return None
        assert self.sampler is not None, "lookahead in a stream is refused"
        accelerator = self._view.accelerator
        rank, world_size = accelerator.process_index, accelerator.num_processes
        return rows_of_batch(number, self.sampler, rank=rank, world_size=world_size)

    def rows_of_batch(self, number: int) -> list[dict[str, Any]] | None:
        """These rows."""
        numbers = self._numbers(number)
        return None if numbers is None else [self._view.train_dataset[row] for row in numbers]

    def prompts_of_batch(self, number: int) -> list[list[int]] | None:
        """Token ids of their prompts."""
        numbers, view = self._numbers(number), self._view
        return None if numbers is None else prompts_of_rows(numbers, view.train_dataset, view.tokenize)

    # -- samplers -----------------------------------------------------------------------------------------------------

    @property
    def _batch_layout(self) -> dict[str, int]:
        """What samplers have to know."""
        args = self._view.args
        return {
            "prompts_per_batch": args.generation_batch_size // args.num_generations,
            "num_generations": args.num_generations,
            "repeats": self._view.steps_per_batch,
            "seed": args.seed,
        }

    def sampler_of(self, rows: Any) -> GenerationSampler:
        """In the place of TRL's."""
        args = self._view.args
        self.sampler = GenerationSampler(
            rows, shuffle=args.shuffle_dataset, spare_groups=args.spare_groups, order=self._order, **self._batch_layout
        )
        return self.sampler

    def known(self, sampler_fn: Callable[[Any], Any], dataset: Any) -> GenerationSampler:
        """One that can be read ahead, and again after a resume, by whatever sampler a subclass's `_get_train_sampler`
        returns."""
        self.sampler = None
        sampler = sampler_fn(dataset)
        if not isinstance(sampler, GenerationSampler):
            if spares := self._view.args.spare_groups:
                raise ValueError(
                    f"spare_groups is {spares} with a sampler of _get_train_sampler, which gives no spare prompts: set "
                    "it to 0, or give the order as prompt_order"
                )
            sampler = DrawnSampler(sampler, inside=self.sampler, **self._batch_layout)
        self.sampler = sampler
        return sampler

    def run_epoch(self, run: Callable[..., None], *, epoch: int, **more: Any) -> None:
        """Take an epoch's steps by transformers' `_run_epoch`."""
        if self._view.state.global_step >= self._view.state.max_steps:  # it looks only after one more step (5.17)
            self._view.control.should_training_stop = True
            return
        # accelerate's `set_epoch` does not reach a sampler behind skipped batches (1.15)
        passes, began = self.stream_pass
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
        elif epoch < passes:  # over a stream; transformers resumes in the first, however short it is (5.17)
            return
        elif epoch == passes:
            more |= {"epochs_trained": passes, "steps_trained_in_current_epoch": self._view.micro_batches - began}
        else:
            self.stream_pass = epoch, self._view.micro_batches
        run(epoch=epoch, **more)
