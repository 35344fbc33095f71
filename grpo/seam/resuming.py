"""Stop and resume: training goes on exactly where it was stopped.

TRL 1.16 and transformers 5.17 have no request to save a checkpoint and stop. Related: the order of prompts
(`ordering`), the content of a checkpoint (`saving`), and the choice of a complete one (`checkpoints/resuming.py`).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.checkpoints.checkpoints import CompleteRecord, check_reshaped, newest_complete
from grpo.checkpoints.pickles import weights_only
from grpo.checkpoints.rank_state import random_states, restore_random_states
from grpo.checkpoints.resuming import CompleteCheckpoint, choose
from grpo.checkpoints.rotation import KEPT_QUARANTINED, bound_quarantine, delete_partial, kept_limit, quarantine
from grpo.faults.failure import GenerationDropped, StepFailed
from grpo.faults.kinds import note_steps
from grpo.faults.signals import StopRequest
from grpo.place.log import FILE_ONLY
from grpo.record.folder import RunFolder
from grpo.record.screen import closing_lines
from grpo.record.trackers import naming_run, open_tensorboard
from grpo.seam.ordering import PromptOrder
from grpo.seam.run import JobRun, say
from grpo.seam.saving import Saving, sampling_of
from grpo.seam.view import TrainerView

_log = logging.getLogger(__name__)


class Resuming:
    """Begins training from a checkpoint, and ends it on request.

    Args:
        cut: called on rank 0 with the first step: removes records of later steps that another part has written.
    """

    def __init__(
        self, view: TrainerView, run: JobRun, order: PromptOrder, saving: Saving, cut: Callable[[RunFolder, int], None]
    ) -> None:
        self._view, self._run, self._order, self._saving, self._cut = view, run, order, saving, cut
        self._sound: CompleteCheckpoint | None = None
        """Checkpoint whose files the ranks have verified last."""
        self._loading = contextlib.ExitStack()
        """Open while a checkpoint is read: every `torch.load`, DeepSpeed's included, uses the allow-list."""
        self._at_step_end: dict[str, Any] | None = None
        self.first_step = 0
        """Number of optimizer steps done by earlier attempts."""

    def choose(self, args: TrainingArguments, wish: str | bool | None) -> CompleteCheckpoint | None:
        """Choose the checkpoint to resume from, and verify its files' checksums. Collective.

        Returns:
            The checkpoint; None to start afresh.

        Raises:
            ValueError: it does not fit this job.
        """
        found = choose(self._run.groups, wish, Path(args.output_dir), args.world_size, known=self._sound)
        checkpoint, notes = found
        say(*notes)
        if checkpoint is not None:
            check_reshaped(checkpoint.folder, checkpoint.record, sampling_of(args))
        self._sound = checkpoint
        folder = "nothing" if checkpoint is None else checkpoint.folder
        _log.debug("resume_from_checkpoint is %r: goes on from %s", wish, folder)
        return checkpoint

    # -- training -------------------------------------------------------------------------------------------------

    def train(self, wish: str | bool | None, train: Callable[[str | None], Any]) -> Any:
        """Train from a checkpoint, and return the result of `train`. Exits with code 0 if asked to stop. Collective.

        Args:
            wish: a complete checkpoint; True or "auto" for the newest complete one in `output_dir`, where "auto" starts
                afresh if there is none. None for `args.resume_from_checkpoint`.
            train: trains from the given checkpoint folder, or afresh if None.
        """
        run, args = self._run, self._view.args
        wish = args.resume_from_checkpoint if wish is None else wish
        checkpoint = self.choose(args, wish)
        tracker_run = self._begin(checkpoint, by_itself=wish is True or wish == "auto")
        run.signals.open()
        output = None
        try:
            try:
                with naming_run(args, tracker_run):
                    output = train(None if checkpoint is None else str(checkpoint.folder))
            except GenerationDropped as dropped:
                run.stop, run.must_resume = run.stop or StopRequest(why=dropped.why, requeue=True), True
                self._save_last_step()
            except StepFailed:
                run.must_resume = True
                self._save_last_step()
                self._saving.finish()
                # The first rank to fail ends the others, so the checkpoint must be complete by then.
                run.groups.meet()
                raise
            is_cut_short = output is None or self._view.state.global_step < self._view.state.max_steps
            self._end(run.stop if is_cut_short else None)
        finally:
            self._loading.close()
            run.signals.close()  # a second SIGTERM must not fail the end
        return output

    def _begin(self, checkpoint: CompleteCheckpoint | None, *, by_itself: bool) -> str:
        """Prepare the run folder and this object to go on from `checkpoint`. Collective.

        Args:
            by_itself: True if the checkpoint was found as the newest one, not named by the user.

        Returns:
            The trackers' id of the run.
        """
        run, view = self._run, self._view
        run.stop = self._at_step_end = None
        self._loading = contextlib.ExitStack()
        view.batch_in_use = None
        self._order.go_to(0, (0, 0))  # for a second `train`, too; loading a checkpoint sets it again
        first_step = self._saving.saved_step = self.first_step = 0 if checkpoint is None else checkpoint.record.step
        if checkpoint is not None:
            note_steps(checkpoint.record.step)
            if run.watch is not None:
                run.watch.enter("resume")
            say(*changed_sampling(checkpoint.record, sampling_of(view.args)))
        limit = view.args.save_total_limit
        if (kept := kept_limit(limit)) != limit and kept is not None:
            say(f"save_total_limit {limit}: {kept} are kept, in case one is damaged")

        def begin() -> str:
            assert run.folder is not None
            self._clear_away(run.folder, first_step, by_itself=by_itself)
            self._cut(run.folder, first_step)
            run.folder.cut_metrics(first_step)
            tracker_run = run.folder.tracker_run(resumed=checkpoint is not None)
            open_tensorboard(view.callback_handler.callbacks, run.folder.path, tracker_run, first_step=first_step)
            run.folder.update(
                state="running",
                step=first_step,
                checkpoint=None if checkpoint is None else str(checkpoint.folder),
                from_step=first_step,
            )
            return tracker_run

        tracker_run = run.groups.by_rank_zero(begin, str)
        _log.debug("training begins after step %d, of %d", first_step, view.args.max_steps)
        if checkpoint is not None:
            say(f"attempt {run.attempt} goes on after step {first_step}, from {checkpoint.folder}")
            self._loading.enter_context(weights_only())  # until `begins`; last, as `train` closes it
        return tracker_run

    def _clear_away(self, folder: RunFolder, first_step: int, *, by_itself: bool) -> None:
        """Quarantine checkpoints of abandoned branches of the run, and delete partial ones. On rank 0."""
        for partial in delete_partial(folder.path):
            say(f"{partial} was not finished by an earlier attempt: deleted")
        for aside in quarantine(folder.path, after_step=first_step, attempt=folder.previous_attempt):
            say(f"{aside.name} is quarantined as {aside}: this attempt starts before it")
        if first_step and by_itself:  # with a checkpoint named by the user, nothing is deleted
            for old in bound_quarantine(folder.path):
                say(f"{old} was quarantined, and {KEPT_QUARANTINED} later ones are: deleted")

    def begins(self) -> None:
        """End the reading of the checkpoint: it is loaded."""
        self._loading.close()
        if self._run.watch is not None and self._run.watch.phase == "resume":
            self._run.watch.enter("train")

    # -- the end of a step ----------------------------------------------------------------------------------------

    def after_step(self, control: TrainerControl) -> None:
        """Agree whether to stop here. Collective, at the end of every optimizer step."""
        run, view = self._run, self._view
        note_steps(view.state.global_step)
        _log.debug("step %d ends", view.state.global_step)
        self._saving.look_at()
        before, now = self._order.end_step()
        self._at_step_end = {"batch": view.batch_in_use, "rng": random_states()}
        if run.stop is None:
            wish = (run.folder.stop_request() if run.folder is not None else None) or run.signals.request
            code = run.groups.largest(0 if wish is None else 1 + (not wish.requeue))
            if code:
                run.stop = wish or StopRequest(why="another rank was asked to stop", requeue=code == 1)
                _log.info("stops after this generation batch: %s", run.stop.why, extra=FILE_ONLY)
                run.signals.request = run.signals.request or run.stop  # a lost engine is no failure from now on
        if not ends_generation_batch(before, now, view.steps_per_batch):
            return
        run.lead.batch_ended(time.monotonic())
        view.note_newest("run/longest_batch_s", run.lead.longest_batch_s)
        if run.stop is None or view.state.global_step >= view.state.max_steps:
            run.stop = None
            return
        control.should_save = control.should_training_stop = control.should_log = True
        control.should_evaluate = False  # little time may be left

    def _end(self, stop: StopRequest | None) -> None:
        """Report how the run ended. A run that was asked to stop exits here, every rank with code 0. Collective."""
        self._saving.finish()
        run, state = self._run, self._view.state
        if (folder := run.folder) is not None:
            newest = newest_complete(folder.path)
            folder.update(
                state="finished" if stop is None else "stopped",
                why="" if stop is None else stop.why,
                requeue=stop is not None and stop.requeue and not folder.a_person_asks,
                step=state.global_step,
                checkpoint=None if newest is None else str(newest),
            )
            folder.answer_requests()
            if stop is None:
                say(*closing_lines(state.log_history, folder.path, first_step=self.first_step))
            else:
                say(f"stopped after step {state.global_step} as asked ({stop.why}); newest checkpoint: {newest}")
        run.signals.request = None
        if stop is not None:
            self._view.trainer.close()
            run.groups.meet()
            if run.watch is not None:
                run.watch.leave()
            raise SystemExit(0)

    def _save_last_step(self) -> None:
        """Save the state of the last finished step, after a dropped generation. Collective."""
        if self._at_step_end is None or self._saving.saved_step == self._view.state.global_step:
            return  # saved already: the checkpoint resumed from, or this step's
        self._order.back_to_step()
        self._view.batch_in_use = self._at_step_end["batch"]
        restore_random_states(self._at_step_end["rng"])
        self._view.save_checkpoint()


class StepEnds(TrainerCallback):
    """Callback for the start of training, with the model wrapped and the checkpoint loaded, and for each step's end.

    Args:
        run: its `stop` is set if training ends early on request.
        begins: called when training begins.
        after_step: called at each step's end.
    """

    def __init__(
        self, run: JobRun, begins: Sequence[Callable[[], None]], after_step: Callable[[TrainerControl], None]
    ) -> None:
        self._run, self._begins, self._after_step = run, begins, after_step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for begin in self._begins:
            begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._after_step(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._run.stop is not None:  # saved already; transformers still ends the epoch
            control.should_save = control.should_evaluate = False


def ends_generation_batch(before: int, now: int, per_batch: int) -> bool:
    """True if a generation batch ended within an optimizer step.

    Args:
        before: number of trained micro-batches at the step's start.
        now: the same at its end.
        per_batch: micro-batches per generation batch, counted as often as each is trained on.
    """
    return before // per_batch != now // per_batch


def changed_sampling(record: CompleteRecord, now: dict[str, int]) -> list[str]:
    """Return lines for the screen if the job's settings differ from the checkpoint's."""
    if record.reshaped_from is not None:
        return [
            f"the checkpoint was written by {record.reshaped_from} training processes and made for "
            f"{record.world_size}: weights, moments and prompts are the same, random numbers are not (docs/resume.md)"
        ]
    before = record.sampling
    changed = ", ".join(f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name) != now[name])
    return [f"resuming with other settings than the checkpoint's is not exact: {changed}"] if changed else []
