"""Training that can be stopped and goes on exactly where it was: `ResumableTrainer` stands between TRL's and ours.

What TRL 1.16 and transformers 5.17 leave open here: the order of prompts after a resume (`GenerationSampler`), the
position in the generation batch and the batch itself, the synchronised reference model, whether a checkpoint is whole,
and a way to ask for one.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.job.failure import GenerationDropped
from grpo.job.job_group import JobGroup
from grpo.job.launch import read_launch
from grpo.job.mistakes import is_before_first_step, is_mistake, note_first_step
from grpo.job.signals import LEAD_VARIABLE, StopLead, StopRequest, StopSignals
from grpo.job.watch import FailureWatch
from grpo.run.checkpoints import (
    BYTES_PER_PARAMETER,
    COMPLETE_FILE,
    check_free_space,
    check_world_size,
    choose_checkpoint,
    newest_complete,
    read_complete,
    rotate,
    set_aside,
    write_complete,
)
from grpo.run.folder import METRICS_FILE, STATE_FILE, RunFolder, note_run, record_mistake
from grpo.run.prompt_order import GenerationSampler
from grpo.run.rank_state import load_own_shards, own_shards, random_states, restore_random_states
from grpo.run.screen import say, what_came_of_it
from grpo.run.trl_trainer import TRLTrainer

VISIBLE_S = 60.0  # until rank 0 sees what the others have written


class ResumableTrainer(TRLTrainer):
    """TRL's trainer with complete checkpoints, an exact resume, and an end on request.

    `train` ends the process with exit code 0 when it was asked to stop, so that no script goes on to save a
    half-trained model. Every rank of the job makes one at the same time, and calls `open_run` before `train`.
    """

    _signals: StopSignals
    _job: JobGroup
    _run: RunFolder | None = None
    """On global rank 0."""
    _stop: StopRequest | None = None
    """What every rank has agreed on."""
    _step_began_at: int = 0
    """The number of the first micro-batch of this optimizer step."""

    # -- the run folder -------------------------------------------------------------------------------------------

    def open_run(self, args: TrainingArguments, signals: StopSignals, watch: FailureWatch | None = None) -> None:
        """Take the output folder and look at what is to be resumed, before anything slow starts. Collective.

        Args:
            watch: where this rank has one.

        Raises:
            ValueError: another job is in the folder, or the checkpoint does not fit this job.
        """
        self._signals = signals
        self._job = JobGroup(watch=watch)
        self._lead = StopLead(os.environ.get(LEAD_VARIABLE), self._say)
        self._at_step_end: dict[str, Any] | None = None

        note_run(Path(args.output_dir), os.environ)

        def enter() -> tuple[int, list[str]]:
            self._run = RunFolder(Path(args.output_dir), os.environ)
            signals.look = self._run.stop_request
            return self._run.attempt, self._run.drop_old_requests()

        self.attempt, notes = self._job.by_rank_zero(enter)
        self._say(*notes)
        self._choose(args, args.resume_from_checkpoint)

    def _choose(self, args: TrainingArguments, wish: str | bool | None) -> Path | None:
        """The checkpoint to resume from. Collective; rank 0 looks."""

        def choose() -> tuple[Path | None, list[str]]:
            folder, notes = choose_checkpoint(wish, Path(args.output_dir))
            if folder is not None:
                check_world_size(folder, read_complete(folder), args.world_size)
            return folder, notes

        folder, notes = self._job.by_rank_zero(choose)
        self._say(*notes)
        return folder

    def _say(self, *lines: str) -> None:
        if self._run is not None:  # rank 0
            say(*lines)

    def record_failure(self, cause: str, *, can_heal: bool) -> None:
        """Write `failed` into the run's state; without effect on other ranks than 0. From any thread."""
        if self._run is None:
            return
        try:
            self._run.update(state="failed", why=cause, can_heal=can_heal, requeue=False)
        except OSError as error:  # a full disk may be the cause: it must not hide it
            self._say(f"cannot write {self._run.path / STATE_FILE}: {error}")

    @contextlib.contextmanager
    def recording_failures(self, output_dir: str) -> Iterator[None]:
        """Around what may fail: the run's state says how it ended.

        Args:
            output_dir: where it is kept; before `open_run` what is recorded are mistakes alone.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                mistake = is_mistake(error, before_first_step=is_before_first_step())
                self.record_failure(f"{type(error).__name__}: {error}", can_heal=not mistake)
                if mistake and self._run is None and read_launch(os.environ).rank == 0:
                    record_mistake(Path(output_dir), os.environ, error)
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
            checkpoint = self._choose(self.args, wish)
            self._begin(checkpoint)
            self._signals.open()
            output, resume = None, None if checkpoint is None else str(checkpoint)
            try:
                try:
                    output = super().train(resume_from_checkpoint=resume, **kwargs)
                except GenerationDropped as dropped:
                    self._stop = self._stop or StopRequest(why=dropped.why, requeue=True)
                    self._save_last_step()
                self._end(self._stop if output is None or self.state.global_step < self.state.max_steps else None)
            finally:
                self._signals.close()  # a second SIGTERM is no reason to fail at the end
            return output

    def _begin(self, checkpoint: Path | None) -> None:
        """Ready the run folder and ourselves for going on after `checkpoint`. Collective."""
        self._stop = self._at_step_end = None
        self._step = self._step_began_at = 0  # of a second `train`, too; a checkpoint says otherwise below
        self._buffered_inputs = None
        record = None if checkpoint is None else read_complete(checkpoint)
        self._complete_step = first_step = 0 if record is None else record.step
        if record is not None:
            note_first_step()
        if record is not None and (changed := _differences(record.sampling, self._sampling())):
            self._say(f"resuming with other settings than the checkpoint's is not exact: {changed}")

        def begin() -> str:
            assert self._run is not None
            name = f"abandoned.attempt-{self._run.previous_attempt}"
            for folder in set_aside(self._run.path, after_step=first_step, name=name):
                self._say(f"{folder} is what was {folder.name}: this attempt starts before it")
            self._run.cut_metrics(first_step)
            tracker_run = self._run.tracker_run(resumed=record is not None)
            self._run.update(
                state="running", step=first_step, checkpoint=None if checkpoint is None else str(checkpoint)
            )
            return tracker_run

        tracker_run = self._job.by_rank_zero(begin)
        os.environ.setdefault("WANDB_RUN_ID", tracker_run)  # read by wandb.init
        os.environ.setdefault("WANDB_RESUME", "allow")
        if self.args.run_name is None:
            self.args.run_name = f"{Path(self.args.output_dir).name}-{tracker_run}"  # Trackio goes on by name
        if not any(isinstance(callback, _StepEnds) for callback in self.callback_handler.callbacks):
            self.add_callback(_StepEnds(self))
        if checkpoint is not None:
            self._say(f"attempt {self.attempt} goes on after step {first_step}, from {checkpoint}")

    def _sampling(self) -> dict[str, int]:
        return {
            "generation_batch_size": self.args.generation_batch_size,
            "num_generations": self.num_generations,
            "steps_per_generation": self.args.steps_per_generation,
            "num_iterations": self.num_iterations,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "seed": self.args.seed,
        }

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = GenerationSampler(
            self.train_dataset if dataset is None else dataset,
            prompts_per_batch=self.args.generation_batch_size // self.num_generations,
            num_generations=self.num_generations,
            repeats=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )
        return self._sampler

    def _run_epoch(self, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers looks only after one more step (5.17)
            self.control.should_training_stop = True
            return
        # accelerate's `set_epoch` does not reach a sampler behind skipped batches (1.15)
        if hasattr(self, "_sampler"):
            self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(**kwargs)

    @property
    def is_stopping(self) -> bool:
        """Whether training ends before its last step because somebody asked."""
        return self._stop is not None

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # transformers deletes all but the best checkpoint here, and loads it (5.17): not before a resume.
        limit, load_best = self.args.save_total_limit, self.args.load_best_model_at_end
        self.args.save_total_limit = None
        self.args.load_best_model_at_end = load_best and not self.is_stopping
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit, self.args.load_best_model_at_end = limit, load_best

    # -- the end of a step ----------------------------------------------------------------------------------------

    @property
    def _steps_per_batch(self) -> int:
        """Micro-batches that a generation batch is trained on."""
        return self.args.steps_per_generation * self.num_iterations

    def after_step(self, control: TrainerControl) -> None:
        """Agree whether to stop here. Collective, at the end of every optimizer step."""
        note_first_step()
        before, self._step_began_at = self._step_began_at, self._step
        self._at_step_end = {"batch": self._buffered_inputs, "rng": random_states()}
        if self._stop is None:
            wish = (self._run.stop_request() if self._run is not None else None) or self._signals.request
            code = self._job.largest(0 if wish is None else 1 + (not wish.requeue))
            if code:
                self._stop = wish or StopRequest(why="another rank was asked to stop", requeue=code == 1)
                self._signals.request = self._signals.request or self._stop  # engines are not missed from now on
        if before // self._steps_per_batch == self._step // self._steps_per_batch:
            return  # in the middle of a generation batch
        self._lead.batch_ended(time.monotonic())
        self._metrics["train"]["run/longest_batch_s"] = [self._lead.longest_batch_s]
        if self._stop is None or self.state.global_step >= self.state.max_steps:
            self._stop = None
            return
        control.should_save = control.should_training_stop = control.should_log = True
        control.should_evaluate = False  # the time may be short

    def _end(self, stop: StopRequest | None) -> None:
        """Say how the run ended; one that was asked to stop ends here, every rank with exit code 0. Collective."""
        step = self.state.global_step
        if self._run is not None:
            newest, _ = newest_complete(self._run.path)
            self._run.update(
                state="finished" if stop is None else "stopped",
                why="" if stop is None else stop.why,
                requeue=stop is not None and stop.requeue and not self._run.a_person_asks,
                step=step,
                checkpoint=None if newest is None else str(newest),
            )
            self._run.answer_requests()
            if stop is None:
                folder = self._run.path
                self._say(*what_came_of_it(self.state.log_history, folder, metrics_file=METRICS_FILE))
            else:
                self._say(f"stopped after step {step} as asked ({stop.why}); newest checkpoint: {newest}")
        self._signals.request = None
        if stop is not None:
            self.close()
            self._job.meet()
            self.leave()
            raise SystemExit(0)

    def leave(self) -> None:
        """This rank is about to end as it should."""

    def close(self) -> None:
        """Let another job into the output folder."""
        if self._run is not None:
            self._run.release()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that says when it is complete; older ones go only after that. Collective."""
        begun = time.monotonic()
        args, step = self.args, self.state.global_step
        run_dir = Path(self._get_output_dir(trial=trial))
        folder = run_dir / f"checkpoint-{step}"

        def prepare() -> None:
            run_dir.mkdir(parents=True, exist_ok=True)
            (folder / COMPLETE_FILE).unlink(missing_ok=True)
            newest, _ = newest_complete(run_dir)
            num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters())
            size = sum(read_complete(newest).files.values()) if newest else num_parameters * BYTES_PER_PARAMETER
            check_free_space(run_dir, size)

        self._job.by_rank_zero(prepare)
        limit, args.save_total_limit = args.save_total_limit, None  # transformers deletes before all have written
        only_model = args.save_only_model
        args.save_only_model = only_model and self._stop is None  # a stop is meant to be resumed
        try:
            super()._save_checkpoint(model, trial)
            resumable = not args.save_only_model
        finally:
            args.save_total_limit, args.save_only_model = limit, only_model
        folder.mkdir(exist_ok=True)  # with save_only_model transformers makes it on rank 0 alone
        torch.save(self._rollout_state(), folder / f"rollout_state_{args.process_index}.pt")
        self._job.meet()

        def complete() -> None:
            deadline = time.monotonic() + VISIBLE_S
            while missing := [r for r in range(args.world_size) if not (folder / f"rollout_state_{r}.pt").exists()]:
                if time.monotonic() < deadline:
                    time.sleep(0.5)  # what a network file system knows of a folder may be some seconds old
                    continue
                raise ValueError(
                    f"rank 0 does not see in {folder} what ranks {missing} wrote: put output_dir on a file system that "
                    "all nodes share"
                )
            write_complete(
                folder, step=step, world_size=args.world_size, sampling=self._sampling(), resumable=resumable
            )
            best = self.state.best_model_checkpoint
            rotate(run_dir, limit=limit, keep={folder, *([Path(best)] if best else [])})
            if self._run is not None and resumable:
                self._run.update(step=step, checkpoint=str(folder))

        self._job.by_rank_zero(complete)
        if resumable:
            self._complete_step = step
        self._lead.saved(begun, time.monotonic())
        self._metrics["train"]["run/save_s"] = [self._lead.save_s]

    def _save_last_step(self) -> None:
        """After a generation that was dropped: the state of the last finished step. Collective."""
        if self._at_step_end is None or self._complete_step == self.state.global_step:
            return  # it stands already: what was resumed from, or saved at this step
        self._step, self._buffered_inputs = self._step_began_at, self._at_step_end["batch"]
        restore_random_states(self._at_step_end["rng"])
        self._save_checkpoint(self.model_wrapped, None)

    def _rollout_state(self) -> dict[str, Any]:
        """What this rank needs beyond transformers' own files to go on in the middle of a generation batch."""
        state: dict[str, Any] = {"step": self._step, "batch": None, "reference": None}
        if self._step % self._steps_per_batch:
            state["batch"] = self._buffered_inputs
        if self.args.sync_ref_model and self.ref_model is not None:
            state["reference"] = own_shards(self.ref_model)
        return state

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / f"rollout_state_{self.args.process_index}.pt"
        state = torch.load(path, map_location="cpu", weights_only=True)
        self._step = self._step_began_at = state["step"]
        self._buffered_inputs = send_to_device(state["batch"], self.args.device)
        if state["reference"] is not None and self.ref_model is not None:
            load_own_shards(self.ref_model, state["reference"])


class _StepEnds(TrainerCallback):
    """Brings the end of a step, and of a save, to the trainer."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.after_step(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer.is_stopping:  # it has saved; transformers ends the epoch all the same
            control.should_save = control.should_evaluate = False


def _differences(before: dict[str, int], now: dict[str, int]) -> str:
    return ", ".join(f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name) != now[name])
