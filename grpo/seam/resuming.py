"""Training that can be stopped and goes on exactly where it was: `ResumableTrainer` stands between TRL's and ours.

What TRL 1.16 and transformers 5.17 leave open here: a way to ask for a checkpoint and an end. Beside it
stand the order of prompts (`ordering`), what is in a checkpoint (`saving`), and whether it is whole (`resuming`).
"""

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from grpo.checkpoints.checkpoints import CompleteRecord, check_reshaped, newest_complete
from grpo.checkpoints.deepspeed_settings import check_deepspeed
from grpo.checkpoints.pickles import weights_only
from grpo.checkpoints.rank_state import random_states, restore_random_states
from grpo.checkpoints.resuming import CompleteCheckpoint, choose
from grpo.checkpoints.rotation import KEPT_QUARANTINED, bound_quarantine, delete_partial, kept_limit, quarantine
from grpo.faults.failure import FailureKind, FailureRecord, GenerationDropped, JobFailed, StepFailed
from grpo.faults.kinds import ends_job, kind_of, note_first_step, text_of
from grpo.faults.liveness import START_TIMEOUT_S
from grpo.faults.signals import LEAD_VARIABLE, StopLead, StopRequest, StopSignals
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups, as_one_node
from grpo.place.launch import host_name, read_launch
from grpo.place.log import FILE_ONLY
from grpo.place.patches.trl import SAMPLE_PRINTER
from grpo.place.topology import NodeTopology
from grpo.record.completions import plain_tool_calls, print_printable
from grpo.record.files import STATE_FILE, note_failure, note_run
from grpo.record.folder import RunFolder, record_early_failure
from grpo.record.progress import ProgressOnScreen
from grpo.record.provenance import arguments_of, changed_from_defaults, where_it_runs
from grpo.record.screen import what_came_of_it
from grpo.record.trackers import naming_run, open_tensorboard
from grpo.seam.ordering import OrderedTrainer
from grpo.seam.saving import sampling_of

KEPT_RESTARTS = 20
MEASURED_STEPS = 20  # of which the median is what a step takes

_log = logging.getLogger(__name__)


class ResumableTrainer(OrderedTrainer):
    """TRL's trainer with complete checkpoints, an exact resume, and an end on request.

    `train` ends the process with exit code 0 when it was asked to stop, so that no script goes on to save a
    half-trained model. Every rank of the job makes one at the same time, and calls `open_run` before `train`.
    """

    _signals: StopSignals
    _sound: CompleteCheckpoint | None = None
    """The one whose files the ranks have read last."""
    _step_ends: deque[float]
    """Of the last steps, by `time.monotonic`."""
    _resumes_by_itself = False
    """Whether it goes on from the newest checkpoint, and nobody has named one."""
    first_step = 0
    """Optimizer steps that earlier attempts have done."""
    _loading: contextlib.ExitStack
    """Open while a checkpoint is read: every `torch.load` has the allow-list, DeepSpeed's too."""

    def __init__(self, *args: Any, callbacks: list | None = None, **kwargs: Any) -> None:
        self._screen = ProgressOnScreen()
        super().__init__(*args, callbacks=[*(callbacks or []), self._screen], **kwargs)
        self.remove_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)

    # -- the run folder -------------------------------------------------------------------------------------------

    def open_run(
        self,
        args: TrainingArguments,
        signals: StopSignals,
        watch: FailureWatch | None = None,
        *,
        topology: NodeTopology | None = None,
        max_wait_s: float = 0.0,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the output folder and look at what is to be resumed, before anything slow starts. Collective.

        Args:
            watch: where this rank has one.
            topology: with engines; also for `run.json`, as is what stands there `beside` the options.
            max_wait_s: as `NodeGroups` takes it.

        Raises:
            ValueError: another job is in the folder, or the checkpoint does not fit this job.
        """
        self._signals, self._failure_watch = signals, watch
        launch = read_launch(os.environ)
        self._node_groups = NodeGroups(
            topology or as_one_node(launch),
            max_wait_s=max_wait_s,
            start_timeout_s=getattr(args, "start_timeout", START_TIMEOUT_S),
            watch=watch,
        )
        self._lead = StopLead(os.environ.get(LEAD_VARIABLE), self._say)
        self._at_step_end: dict[str, Any] | None = None

        note_run(Path(args.output_dir), os.environ)
        check_deepspeed(args.deepspeed_plugin and args.deepspeed_plugin.deepspeed_config)

        places = self._node_groups.all_gather(json.dumps([launch.node, host_name(os.environ)]))

        def enter() -> tuple[int, list[str]]:
            self._run = RunFolder(Path(args.output_dir), os.environ)
            where = where_it_runs([json.loads(place) for place in places], topology)
            others = beside or {}
            changed = [*others, *changed_from_defaults(args)]
            self._run.begin_attempt({**others, **arguments_of(args)}, where, changed=changed)
            signals.look = self._run.stop_request
            return self._run.attempt, self._run.drop_old_requests()

        self.attempt, notes = self._node_groups.by_rank_zero(enter, tuple[int, list[str]])
        self._say(*notes)
        self._choose(args, args.resume_from_checkpoint)

    def _choose(self, args: TrainingArguments, wish: str | bool | None) -> CompleteCheckpoint | None:
        """The checkpoint to resume from, every file of which is as it was written. Collective."""
        checkpoint, notes = choose(self._node_groups, wish, Path(args.output_dir), args.world_size, known=self._sound)
        self._say(*notes)
        if checkpoint is not None:
            check_reshaped(checkpoint.folder, checkpoint.record, sampling_of(args))
        self._sound = checkpoint
        found = "nothing" if checkpoint is None else checkpoint.folder
        _log.debug("resume_from_checkpoint is %r: goes on from %s", wish, found)
        return checkpoint

    def _say(self, *lines: str) -> None:
        for line in lines:
            _log.info("%s", line)

    def record_failure(self, why: str, kind: FailureKind, *, record: FailureRecord | None = None) -> None:
        """Tell this node's launcher, and on rank 0 write `failed` into the run's state. From any thread.

        Args:
            record: the job's, where it is known; `run.json` keeps it.
        """
        done = self.state.global_step if hasattr(self, "state") else 0
        failed: dict[str, Any] = {"why": why, "kind": kind, "nodes": () if record is None else record.nodes}
        failed |= {"step": done} if done else {}
        note_failure(os.environ, **failed)
        if self._run is None:
            return
        try:
            self._run.update(state="failed", requeue=False, failure=record, **failed)
        except OSError as error:  # a full disk may be the cause: it must not hide it
            self._say(f"cannot write {self._run.path / STATE_FILE}: {error}")

    def record_restart(self, what: str) -> None:
        """Say that an engine died and is back, on the screen and in the run's state."""
        if self._run is not None:
            step = self.state.global_step
            self._say(what)
            try:
                self._run.update(restarts=(*self._run.state.restarts, f"after step {step}: {what}")[-KEPT_RESTARTS:])
            except OSError as error:  # all is well again, and other ranks go on
                self._say(f"cannot write {self._run.path / STATE_FILE}: {error}")

    @contextlib.contextmanager
    def recording_failures(self, output_dir: str) -> Iterator[None]:
        """Around what may fail: the run's state says how it ended.

        Args:
            output_dir: where it is kept; before `open_run` only what ends the job is recorded.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                record = error.record if isinstance(error, JobFailed) else None
                self.record_failure(text_of(error), kind_of(error), record=record)
                if ends_job(error) and self._run is None and read_launch(os.environ).rank == 0:
                    record_early_failure(Path(output_dir), os.environ, text_of(error), kind_of(error))
            raise

    # -- training -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As TRL's. Ends the process when it was asked to stop.

        Args:
            resume_from_checkpoint: a complete checkpoint; True or "auto" for the newest complete one in `output_dir`,
                where "auto" starts afresh if there is none. None: what `args.resume_from_checkpoint` says.
        """
        with self.recording_failures(self.args.output_dir):
            wish = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
            self._resumes_by_itself = wish is True or wish == "auto"
            checkpoint = self._choose(self.args, wish)
            tracker_run = self._begin(checkpoint)
            self._signals.open()
            output, resume = None, None if checkpoint is None else str(checkpoint.folder)
            try:
                try:
                    with naming_run(self.args, tracker_run):
                        output = super().train(resume_from_checkpoint=resume, **kwargs)
                except GenerationDropped as dropped:
                    self._stop, self._must_resume = self._stop or StopRequest(why=dropped.why, requeue=True), True
                    self._save_last_step()
                except StepFailed:
                    self._must_resume = True
                    self._save_last_step()
                    self._finish_saving()
                    # The first rank to fail ends the others, and the checkpoint is to be complete.
                    self._node_groups.meet()
                    raise
                self._end(self._stop if output is None or self.state.global_step < self.state.max_steps else None)
            finally:
                self._loading.close()
                self._screen.close()
                self._signals.close()  # a second SIGTERM is no reason to fail at the end
            return output

    def _begin(self, checkpoint: CompleteCheckpoint | None) -> str:
        """Ready the run folder and ourselves for going on after `checkpoint`; trackers' id of the run. Collective."""
        self._stop = self._at_step_end = None
        self._loading = contextlib.ExitStack()
        self._step_ends = deque(maxlen=MEASURED_STEPS)
        self._step = self._step_began_at = 0  # of a second `train`, too; a checkpoint says otherwise below
        self._buffered_inputs, self._stream_pass = None, (0, 0)
        first_step = self._saved_step = self.first_step = 0 if checkpoint is None else checkpoint.record.step
        if checkpoint is not None:
            note_first_step()
            if self._failure_watch is not None:
                self._failure_watch.enter("resume")
            self._say(*what_differs(checkpoint.record, sampling_of(self.args)))
        if (kept := kept_limit(self.args.save_total_limit)) != self.args.save_total_limit and kept is not None:
            self._say(f"save_total_limit {self.args.save_total_limit}: {kept} are kept, in case one is damaged")

        def begin() -> str:
            assert self._run is not None
            self._clear_away(self._run, first_step)
            self._run.cut_metrics(first_step)
            tracker_run = self._run.tracker_run(resumed=checkpoint is not None)
            open_tensorboard(self.callback_handler.callbacks, self._run.path, tracker_run, first_step=first_step)
            self._run.update(
                state="running",
                step=first_step,
                checkpoint=None if checkpoint is None else str(checkpoint.folder),
                from_step=first_step,
            )
            return tracker_run

        tracker_run = self._node_groups.by_rank_zero(begin, str)
        _log.debug("training begins after step %d, of %d", first_step, self.args.max_steps)
        if not any(isinstance(callback, _StepEnds) for callback in self.callback_handler.callbacks):
            self.add_callback(_StepEnds(self))
        if checkpoint is not None:
            self._say(f"attempt {self.attempt} goes on after step {first_step}, from {checkpoint.folder}")
            self._loading.enter_context(weights_only())  # until `train_begins`; last, for `train` closes it
        return tracker_run

    def _clear_away(self, run: RunFolder, first_step: int) -> None:
        """Quarantine what other branches of the run have left, and delete what nobody can use. On rank 0."""
        for folder in delete_partial(run.path):
            self._say(f"{folder} was not finished by an earlier attempt: deleted")
        for folder in quarantine(run.path, after_step=first_step, attempt=run.previous_attempt):
            self._say(f"{folder} is what was {folder.name}: this attempt starts before it")
        if first_step and self._resumes_by_itself:  # what a person's start quarantines, a person deletes
            for folder in bound_quarantine(run.path):
                self._say(f"{folder} was quarantined, and {KEPT_QUARANTINED} later ones are: deleted")

    @property
    def is_stopping(self) -> bool:
        """Whether training ends before its last step because somebody asked."""
        return self._stop is not None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.log_completions:
            super().log(logs, start_time)
            return
        # TRL prints a table, and writes one.
        with self._screen.aside(), plain_tool_calls(self._logs), SAMPLE_PRINTER.applied(print_printable):
            super().log(logs, start_time)

    def train_begins(self) -> None:
        """What was resumed from is loaded."""
        self._loading.close()
        if self._failure_watch is not None and self._failure_watch.phase == "resume":
            self._failure_watch.enter("train")

    # -- the end of a step ----------------------------------------------------------------------------------------

    def after_step(self, control: TrainerControl) -> None:
        """Agree whether to stop here. Collective, at the end of every optimizer step."""
        note_first_step()
        _log.debug("step %d ends", self.state.global_step)
        self._look_at_saving()
        before, self._step_began_at = self._step_began_at, self._step
        self._at_step_end = {"batch": self._buffered_inputs, "rng": random_states()}
        if self._stop is None:
            wish = (self._run.stop_request() if self._run is not None else None) or self._signals.request
            code = self._node_groups.largest(0 if wish is None else 1 + (not wish.requeue))
            if code:
                self._stop = wish or StopRequest(why="another rank was asked to stop", requeue=code == 1)
                _log.info("stops after this generation batch: %s", self._stop.why, extra=FILE_ONLY)
                self._signals.request = self._signals.request or self._stop  # engines are not missed from now on
        if not ends_generation_batch(before, self._step, self._steps_per_batch):
            return
        self._lead.batch_ended(time.monotonic())
        self._metrics["train"]["run/longest_batch_s"] = [self._lead.longest_batch_s]
        if self._stop is None or self.state.global_step >= self.state.max_steps:
            self._stop = None
            return
        control.should_save = control.should_training_stop = control.should_log = True
        control.should_evaluate = False  # the time may be short

    def _end(self, stop: StopRequest | None) -> None:
        """Say how the run ended; one that was asked to stop ends here, every rank with exit code 0. Collective."""
        self._finish_saving()
        step = self.state.global_step
        if self._run is not None:
            newest = newest_complete(self._run.path)
            self._run.update(
                state="finished" if stop is None else "stopped",
                why="" if stop is None else stop.why,
                requeue=stop is not None and stop.requeue and not self._run.a_person_asks,
                step=step,
                checkpoint=None if newest is None else str(newest),
            )
            self._run.answer_requests()
            if stop is None:
                history = self.state.log_history
                self._say(*what_came_of_it(history, self._run.path, first_step=self.first_step))
            else:
                self._say(f"stopped after step {step} as asked ({stop.why}); newest checkpoint: {newest}")
        self._signals.request = None
        if stop is not None:
            self.close()
            self._node_groups.meet()
            self.leave()
            raise SystemExit(0)

    def leave(self) -> None:
        """This rank is about to end as it should."""

    def close(self) -> None:
        """Let another job into the output folder."""
        if self._run is not None:
            self._run.release()

    def _save_last_step(self) -> None:
        """After a generation that was dropped: the state of the last finished step. Collective."""
        if self._at_step_end is None or self._saved_step == self.state.global_step:
            return  # it stands already: what was resumed from, or saved at this step
        self._step, self._buffered_inputs = self._step_began_at, self._at_step_end["batch"]
        restore_random_states(self._at_step_end["rng"])
        self._save_checkpoint(self.model_wrapped, None)


class _StepEnds(TrainerCallback):
    """Brings the beginning of training, and the end of a step, to the trainer."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.train_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.after_step(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer.is_stopping:  # it has saved; transformers ends the epoch all the same
            control.should_save = control.should_evaluate = False


def ends_generation_batch(before: int, now: int, per_batch: int) -> bool:
    """Whether a generation batch ends in an optimizer step, which need not end with it.

    Args:
        before: micro-batches that were trained on when the step began; `now` when it ended.
        per_batch: micro-batches of a generation batch, each as often as it is trained on.
    """
    return before // per_batch != now // per_batch


def what_differs(record: CompleteRecord, now: dict[str, int]) -> list[str]:
    """What to say of a resume that does not go on with the settings of the checkpoint."""
    if record.reshaped_from is not None:
        return [
            f"the checkpoint was written by {record.reshaped_from} training processes and made for "
            f"{record.world_size}: weights, moments and prompts are the same, random numbers are not (docs/resume.md)"
        ]
    before = record.sampling
    changed = ", ".join(f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name) != now[name])
    return [f"resuming with other settings than the checkpoint's is not exact: {changed}"] if changed else []
