"""Order of prompts: can be read ahead, and is the same after a resume.

In TRL 1.16 and transformers 5.17, `RepeatSampler` has one running generator and no epochs, a subclass's own sampler can
be read only as training goes on, and a stream is always resumed in its first pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

from grpo.checkpoints.prompt_order import DrawnSampler, GenerationSampler, prompts_of_rows, rows_of_batch
from grpo.seam.view import TrainerView


class PromptOrder:
    """Order of prompts, determined by seed, epoch and position; and the position of training.

    Args:
        order: returns an epoch's row numbers in order, given its number; see `GenerationSampler`.
    """

    def __init__(self, view: TrainerView, order: Callable[[int], Sequence[int]] | None) -> None:
        self._view, self._order = view, order
        self.sampler: GenerationSampler | None = None
        """Training's sampler; None for a stream."""
        self.stream_pass = (0, 0)
        """Number of a stream's finished passes, and number of the first micro-batch of the present one."""
        self._step_began_at = 0
        """Number of the first micro-batch of this optimizer step."""

    # -- the position -------------------------------------------------------------------------------------------------

    def go_to(self, micro_batch: int, stream_pass: tuple[int, int]) -> None:
        self._view.micro_batches = self._step_began_at = micro_batch
        self.stream_pass = stream_pass

    def end_step(self) -> tuple[int, int]:
        """Return the number of trained micro-batches at the optimizer step's start and now, at its end."""
        before, self._step_began_at = self._step_began_at, self._view.micro_batches
        return before, self._step_began_at

    def back_to_step(self) -> None:
        """Return to the position at the last optimizer step's end."""
        self._view.micro_batches = self._step_began_at

    @property
    def num_batches(self) -> int:
        """Number of generation batches that training has begun."""
        return -(-self._view.micro_batches // self._view.steps_per_batch)

    # -- later batches ------------------------------------------------------------------------------------------------

    def _comes(self, number: int) -> bool:
        """True if training reaches generation batch `number`."""
        view = self._view
        left = (view.state.max_steps - view.state.global_step) * view.args.gradient_accumulation_steps
        left -= view.micro_batches - self._step_began_at
        return number * view.steps_per_batch < view.micro_batches + left

    def _numbers(self, number: int) -> list[int] | None:
        """Return this rank's row numbers of a later generation batch, copies included; None if training ends before."""
        if not self._comes(number):
            return None
        assert self.sampler is not None, "lookahead in a stream is refused"
        accelerator = self._view.accelerator
        rank, world_size = accelerator.process_index, accelerator.num_processes
        return rows_of_batch(number, self.sampler, rank=rank, world_size=world_size)

    def rows_of_batch(self, number: int) -> list[dict[str, Any]] | None:
        """Return this rank's rows of a later generation batch; None if training ends before."""
        numbers = self._numbers(number)
        return None if numbers is None else [self._view.train_dataset[row] for row in numbers]

    def prompts_of_batch(self, number: int) -> list[list[int]] | None:
        """Return the prompts' token ids of these rows; None if training ends before."""
        numbers, view = self._numbers(number), self._view
        return None if numbers is None else prompts_of_rows(numbers, view.train_dataset, view.tokenize)

    # -- samplers -----------------------------------------------------------------------------------------------------

    @property
    def _batch_layout(self) -> dict[str, int]:
        """Layout of generation batches, as samplers take it."""
        args = self._view.args
        return {
            "prompts_per_batch": args.generation_batch_size // args.num_generations,
            "num_generations": args.num_generations,
            "repeats": self._view.steps_per_batch,
            "seed": args.seed,
        }

    def sampler_of(self, rows: Any) -> GenerationSampler:
        """Make the sampler used in place of TRL's."""
        args = self._view.args
        self.sampler = GenerationSampler(
            rows, shuffle=args.shuffle_dataset, spare_groups=args.spare_groups, order=self._order, **self._batch_layout
        )
        return self.sampler

    def known(self, sampler_fn: Callable[[Any], Any], dataset: Any) -> GenerationSampler:
        """Return a sampler that can be read ahead and resumed, around any sampler of a subclass's `_get_train_sampler`.

        Raises:
            ValueError: spare groups with a sampler of a subclass.
        """
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
        """Train an epoch by transformers' `_run_epoch`."""
        if self._view.state.global_step >= self._view.state.max_steps:  # checked only after one more step (5.17)
            self._view.control.should_training_stop = True
            return
        # accelerate's `set_epoch` does not reach the sampler of a loader that skips batches (1.15)
        passes, began = self.stream_pass
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
        elif epoch < passes:  # over a stream; transformers always resumes in the first one (5.17)
            return
        elif epoch == passes:
            more |= {"epochs_trained": passes, "steps_trained_in_current_epoch": self._view.micro_batches - began}
        else:
            self.stream_pass = epoch, self._view.micro_batches
        run(epoch=epoch, **more)
