"""Checkpoints of a run: written, flushed beside training, completed, read back.

A save holds training only while the ranks write. Their files are flushed to the disk during the next steps
(`checkpoints/background.py`). Then `complete.json` is written, and only after it older checkpoints are deleted.
"""

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model, send_to_device
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from transformers.trainer_pt_utils import remove_dummy_checkpoint
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from grpo.checkpoints.background import BackgroundSave, deadline_for
from grpo.checkpoints.checkpoints import files_in, newest_complete, read_complete, write_complete, writer_of
from grpo.checkpoints.rank_state import first_not_finite, load_own_shards, own_shards
from grpo.checkpoints.rotation import begin_partial, check_free_space, rotate, size_of, to_rotate
from grpo.config.models import sampling_settings
from grpo.faults.failure import FailureKind, GrpoError, JobFailed
from grpo.place.log import FILE_ONLY
from grpo.place.timeouts import USUAL, Timeouts
from grpo.record.durable import FileSum
from grpo.seam.ordering import PromptOrder
from grpo.seam.run import JobRun, say
from grpo.seam.view import TrainerView

_log = logging.getLogger(__name__)

ODD_NORMS = 3  # in a row, until a warning
MAX_NAMED = 5
SAMPLING: tuple[str, ...] = ("generation_batch_size", "num_generations", "steps_per_generation", "num_iterations")
SAMPLING += ("gradient_accumulation_steps", "seed", "spare_groups")
BYTES_PER_PARAMETER = 16  # weights, and master weights and two moments in float32; 14 where weights are bfloat16
WORDS_OF_A_FULL_DISK = ("inline_container", "iostream error", "No space left")
"""Messages of torch's writer (2.13), two, and safetensors'. Free space alone is no sign: by the time it is read,
another rank may have freed some."""
NEARLY_FULL_BYTES = 2**24  # a failed write with less than this free has failed for lack of space


def sampling_of(args: Any) -> dict[str, int]:
    """Return the settings that determine the prompts of each step."""
    return {name: getattr(args, name) for name in SAMPLING}


class Saving:
    """Writes checkpoints that say when they are complete, and reads them back."""

    def __init__(self, view: TrainerView, run: JobRun, order: PromptOrder) -> None:
        self._view, self._run, self._order = view, run, order
        self._pending: Callable[[], BackgroundSave] | None = None
        """Starts the background part of a save; waits for the `on_save` callbacks."""
        self._last: BackgroundSave | None = None
        """Last save, if it may still be under way."""
        self._callbacks_follow = False
        self._is_saving = False
        """True while transformers writes a checkpoint."""
        self._norm_seen_at = 0
        """Step of the newest gradient norm."""
        self._odd_norms = 0
        """Number of steps in a row with a gradient that was not finite."""
        self.saved_step = 0
        """Last step with a checkpoint, complete or under way."""

    # -- a save -------------------------------------------------------------------------------------------------------

    def save(self, run_dir: Path, write: Callable[[], None]) -> None:
        """Save a checkpoint; older ones are deleted once it is complete. Collective.

        Args:
            write: writes TRL's and transformers' files into a folder of `run_dir`.

        Raises:
            GrpoError: weights are not finite.
            OSError: the disk is full.
        """
        self.finish()
        self._check_finite()
        begun = time.monotonic()
        run, args, step = self._run, self._view.args, self._view.state.global_step
        folder = run_dir / f"checkpoint-{step}"
        ahead = self._keep_ahead()
        limit, args.save_total_limit = args.save_total_limit, None  # transformers deletes before all have written
        only_model = args.save_only_model
        args.save_only_model = only_model and run.stop is None and not run.must_resume  # else it must be resumable
        resumable = not args.save_only_model
        _log.info("%s begins", folder.name, extra=FILE_ONLY)
        try:
            run.groups.by_rank_zero(lambda: self._prepare(folder, limit))
            with reporting_a_full_disk(folder, args.process_index, args.world_size):
                self._is_saving = True
                write()
                folder.mkdir(exist_ok=True)  # rank 0 has made it, but another node may not see it yet
                torch.save(self.rollout_state() | {"ahead": ahead}, folder / f"rollout_state_{args.process_index}.pt")
        finally:
            self._is_saving = False
            args.save_total_limit, args.save_only_model = limit, only_model
        run.groups.meet()
        run.groups.by_rank_zero(lambda: see_all(folder, args.world_size))
        best = self._view.state.best_model_checkpoint
        keep = {folder, *([Path(best)] if best else [])}

        def complete(sums: Mapping[str, FileSum]) -> None:
            write_complete(
                folder,
                step=step,
                world_size=args.world_size,
                sampling=sampling_of(args),
                resumable=resumable,
                sums=sums,
            )
            run.lead.completed(begun, time.monotonic())
            _log.info("%s is complete, after %.1f s", folder.name, time.monotonic() - begun, extra=FILE_ONLY)
            if run.folder is not None and resumable:
                run.folder.update(step=step, checkpoint=str(folder))
            rotate(run_dir, limit=limit, keep=keep)

        now = time.monotonic()
        run.lead.saved(begun, now)
        _log.debug("%s is written by all ranks, after %.1f s", folder.name, now - begun)
        self._view.note_newest("run/save_s", now - begun)
        if resumable:
            self.saved_step = step
        self._pending = partial(
            BackgroundSave,
            folder,
            rank=args.process_index,
            world_size=args.world_size,
            deadline_s=deadline_for(self._bytes_of_state),
            complete=complete,
        )
        if not self._callbacks_follow:
            self._start_background_save()

    def _check_finite(self) -> None:
        """Refuse to save weights that are not finite: the last complete checkpoint is the one to resume. Collective.

        Raises:
            GrpoError: on every rank. The next attempt resumes that checkpoint; if it fails again, the job ends.
        """
        names = self._run.groups.all_gather(first_not_finite(self._view.model))
        if odd := [f"{name} on rank {rank}" for rank, name in enumerate(names) if name]:
            raise GrpoError(
                f"after step {self._view.state.global_step} weights are not finite: {', '.join(odd[:MAX_NAMED])}: no "
                "checkpoint is made of them; the last complete one is from before. Look at grad_norm and loss of the "
                "steps since then: a lower learning_rate, or max_grad_norm [GRPO-711]",
                kind=FailureKind.USER,
            )

    def look_at_norm(self, grad_norm: Any) -> None:
        """Warn of gradients that are not finite: DeepSpeed skips such steps without a message."""
        step = self._view.state.global_step
        if grad_norm is None or step == self._norm_seen_at:  # given again at an epoch's end
            return
        self._norm_seen_at = step
        self._odd_norms = 0 if math.isfinite(grad_norm) else self._odd_norms + 1
        if self._odd_norms and self._odd_norms % ODD_NORMS == 0:
            _log.warning(
                "WARNING: the gradients of the last %d steps were not finite [GRPO-712]: DeepSpeed leaves such steps "
                "out; without DeepSpeed the weights are not finite either by now",
                self._odd_norms,
            )

    @contextlib.contextmanager
    def with_callbacks(self) -> Iterator[None]:
        """Delay the background part of a save to the block's end, so that it includes files that callbacks add in
        `on_save`."""
        self._callbacks_follow = True
        try:
            yield
        finally:
            self._callbacks_follow = False
        self._start_background_save()

    def _start_background_save(self) -> None:
        """Start flushing the checkpoint's files to the disk, beside the next steps."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._last = pending()

    def save_model(
        self, folder: str, is_internal: bool, save: Callable[[], None], save_without_weights: Callable[[], None]
    ) -> None:
        """Save the model by transformers' `save`, but without weights in a checkpoint whose shards hold them.

        With `stage3_gather_16bit_weights_on_model_save` off, transformers would write all shards twice: here, and with
        the optimizer's states (5.17).

        Args:
            is_internal: True if transformers calls it as part of a checkpoint.
        """
        if not (is_internal and self.writes_only_shards):
            save()
            return
        if self._view.args.should_save:
            save_without_weights()
        remove_dummy_checkpoint(self._view.args.should_save, folder, [WEIGHTS_NAME, SAFE_WEIGHTS_NAME])

    @property
    def writes_only_shards(self) -> bool:
        """True while a checkpoint is written that has its weights in ZeRO-3's partitions alone."""
        view = self._view
        if not self._is_saving or not view.is_deepspeed_enabled or view.args.save_only_model:
            return False
        if is_peft_model(view.model):
            return False  # adapters are gathered, in PEFT's own layout
        engine = view.model_wrapped
        return engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save()

    def _prepare(self, folder: Path, limit: int | None) -> None:
        """Check the free space, and mark the checkpoint as partial. On rank 0.

        Raises:
            OSError: too little space is free.
        """
        run_dir = folder.parent
        run_dir.mkdir(parents=True, exist_ok=True)
        newest = newest_complete(run_dir)
        size = sum(read_complete(newest).files.values()) if newest else self._bytes_of_state
        if folder.exists():
            size -= size_of(folder)  # will be overwritten
        check_free_space(run_dir, size, rotated=to_rotate(run_dir, limit=limit, keep={folder}))
        begin_partial(folder)

    @property
    def _bytes_of_state(self) -> int:
        """Approximate size of a checkpoint."""
        saved = self._view.model.parameters()
        if is_peft_model(self._view.model):
            saved = (parameter for parameter in saved if parameter.requires_grad)
        return sum(getattr(p, "ds_numel", p.numel()) for p in saved) * BYTES_PER_PARAMETER

    def finish(self) -> None:
        """Wait until the last save is on the disk; on rank 0, until it is complete. Raises the save's error."""
        saving, self._last = self._last, None
        if saving is None:
            return
        with self._run.during("save"):
            saving.wait()
        if self._run.folder is not None:  # rank 0, which completes
            self._view.note_newest("run/save_until_complete_s", self._run.lead.save_s)

    def look_at(self) -> None:
        """Raise the last save's error, if it has one by now. Does not wait."""
        if self._last is not None and self._last.is_done:
            self.finish()

    @contextlib.contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Keep all checkpoints while transformers ends training, where it deletes all but the best one and loads it
        (5.17). The best one is still loaded, unless training stops to be resumed."""
        self.finish()
        args = self._view.args
        limit, load_best = args.save_total_limit, args.load_best_model_at_end
        args.save_total_limit, args.load_best_model_at_end = None, load_best and self._run.stop is None
        try:
            yield
        finally:
            args.save_total_limit, args.load_best_model_at_end = limit, load_best

    # -- state of a rank beyond transformers' own files ---------------------------------------------------------------

    def rollout_state(self) -> dict[str, Any]:
        """Return this rank's state for a resume in the middle of a generation batch."""
        view, sampler = self._view, self._order.sampler
        state: dict[str, Any] = {"step": view.micro_batches, "batch": None, "reference": None}
        if sampler is None:
            state["pass"] = self._order.stream_pass
        elif sampler.is_drawn:
            state["order"] = sampler.digest(self._order.num_batches)
        if view.micro_batches % view.steps_per_batch:
            state["batch"] = view.batch_in_use
        if view.args.sync_ref_model and view.ref_model is not None:
            state["reference"] = own_shards(view.ref_model)
        return state

    def load(self, checkpoint: Path) -> None:
        view, sampler = self._view, self._order.sampler
        path = checkpoint / f"rollout_state_{view.args.process_index}.pt"
        state = torch.load(path, map_location="cpu", weights_only=True)
        # `grpo reshape` counts generation batches: with another number of ranks, a batch has other micro-batches.
        batches = state.get("generation_batches")
        step = state["step"] if batches is None else batches * view.steps_per_batch
        self._order.go_to(step, state.get("pass", (0, 0)))
        view.batch_in_use = send_to_device(state["batch"], view.args.device)
        if sampler is not None and sampler.is_drawn and "order" in state:
            sampler.check(self._order.num_batches, state["order"])
        self._resume_ahead(state.get("ahead"))
        if state["reference"] is not None and view.ref_model is not None:
            load_own_shards(view.ref_model, state["reference"])

    def _keep_ahead(self) -> dict[str, Any] | None:
        """Return asynchronously sampled batches for a checkpoint. Collective."""
        if not self._view.args.local_mode or self._run.must_resume:  # too few engines are left
            return None
        batches = self._view.engines.keep_ahead(lambda: self._run.signals.is_hurried)
        return {"settings": sampling_as_text(self._view.args), "batches": batches}

    def _resume_ahead(self, kept: dict[str, Any] | None) -> None:
        if not self._view.args.local_mode:
            return
        engines = self._view.engines
        engines.kept_batches = []
        if not kept or not self._view.args.generation_lookahead:
            return
        if kept["settings"] == sampling_as_text(self._view.args):
            engines.kept_batches = kept["batches"]
        elif kept["batches"]:
            say("sampling settings have changed: the batches under way are sampled again")


def load_trained_adapter(model: Any, checkpoint: Path) -> None:
    """Load the active adapter. With a second adapter beside it, transformers loads only that one (5.17): PEFT saves
    `default` in the checkpoint's folder, and TRL's reference in a folder below."""
    if is_peft_model(model) and (checkpoint / SAFETENSORS_WEIGHTS_NAME).exists():
        model.load_adapter(str(checkpoint), model.active_adapters[0], is_trainable=True)


def sampling_as_text(args: Any) -> str:
    """Return the settings that must be equal for a resume to use a checkpoint's asynchronously sampled batches."""
    settings = sampling_settings(args) | {"max_model_len": args.vllm_max_model_length}
    return json.dumps(settings, sort_keys=True, default=str)


def see_all(folder: Path, world_size: int, timeouts: Timeouts = USUAL) -> None:
    """Wait until rank 0 sees the files of all ranks. On rank 0.

    Raises:
        ValueError: some are missing after `timeouts.visible_s`.
    """
    deadline = time.monotonic() + timeouts.visible_s
    while missing := [rank for rank in range(world_size) if not (folder / f"rollout_state_{rank}.pt").exists()]:
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank 0 does not see in {folder} what ranks {missing} wrote [GRPO-708]: put output_dir on a file "
                "system that all nodes share"
            )
        time.sleep(0.5)  # a network file system may show a folder as it was some seconds ago


@contextlib.contextmanager
def reporting_a_full_disk(folder: Path, rank: int, world_size: int) -> Iterator[None]:
    """Turn a failed write on a full disk into a clear error; torch's writer names a line of its source (2.13).

    Deletes this rank's files of the checkpoint, so that the failure record finds space.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except JobFailed:  # another rank's failure
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        full = shutil.disk_usage(folder.parent)
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        is_full = is_full or any(words in str(error) for words in WORDS_OF_A_FULL_DISK)
        if not is_full and full.free > NEARLY_FULL_BYTES:
            raise
        for name in files_in(folder):
            if writer_of(name, world_size) == rank:
                with contextlib.suppress(OSError):
                    os.unlink(folder / name)
        newest = newest_complete(folder.parent)
        raise OSError(
            errno.ENOSPC,
            f"no space left in {folder.parent} while rank {rank} wrote {folder.name} [GRPO-702]: {full.free / 1e9:.2f} "
            f"GB of {full.total / 1e9:.2f} GB are free. The newest complete checkpoint is {newest}; free space, or "
            f"lower save_total_limit. {type(error).__name__}: {error}",
        ) from error
