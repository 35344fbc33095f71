"""Checkpoints of a run: what is written, when it counts, and what is read back.

A save holds training only while the ranks write. What they have written goes to the disk beside the next steps
(`background`); `complete.json` comes after it, and only then older checkpoints go.
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
"""Torch's writer's (2.13), two of them, and safetensors': by the time they are read another rank may have made
space."""
NEARLY_FULL_BYTES = 2**24  # a write of torch's that failed with so little left has failed for want of space


def sampling_of(args: Any) -> dict[str, int]:
    """The settings that say which prompts come at which step."""
    return {name: getattr(args, name) for name in SAMPLING}


class Saving:
    """Writes checkpoints that say when they are complete, and reads them back."""

    def __init__(self, view: TrainerView, run: JobRun, order: PromptOrder) -> None:
        self._view, self._run, self._order = view, run, order
        self._pending: Callable[[], BackgroundSave] | None = None
        """Of a save whose callbacks have not been heard yet."""
        self._last: BackgroundSave | None = None
        """The last save, as long as it may be on its way to the disk."""
        self._callbacks_follow = False
        self._is_saving = False
        """Whether transformers is writing a checkpoint."""
        self._norm_seen_at = 0
        """The step of the newest gradient that was looked at."""
        self._odd_norms = 0
        """Steps in a row whose gradient was not finite."""
        self.saved_step = 0
        """The last step whose state is in a checkpoint, or on its way there."""

    # -- a save -------------------------------------------------------------------------------------------------------

    def save(self, run_dir: Path, write: Callable[[], None]) -> None:
        """A checkpoint that says when it is complete; older ones go only after that. Collective.

        Args:
            write: TRL's and transformers', into a folder of `run_dir`.
        """
        self.finish()
        self._check_finite()
        begun = time.monotonic()
        run, args, step = self._run, self._view.args, self._view.state.global_step
        folder = run_dir / f"checkpoint-{step}"
        ahead = self._keep_ahead()
        limit, args.save_total_limit = args.save_total_limit, None  # transformers deletes before all have written
        only_model = args.save_only_model
        args.save_only_model = only_model and run.stop is None and not run.must_resume  # these are to be resumed
        resumable = not args.save_only_model
        _log.info("%s begins", folder.name, extra=FILE_ONLY)
        try:
            run.groups.by_rank_zero(lambda: self._prepare(folder, limit))
            with reporting_a_full_disk(folder, args.process_index, args.world_size):
                self._is_saving = True
                write()
                folder.mkdir(exist_ok=True)  # rank 0 has, but another node may not know yet
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
        """Weights that are no numbers are not saved: the checkpoint before them is the one to go on from. Collective.

        Raises:
            GrpoError: on every rank; the next start goes on from that checkpoint, and another failure is the last.
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
        """Warn where steps are lost: at a gradient that is not finite DeepSpeed leaves the step out, without a word."""
        step = self._view.state.global_step
        if grad_norm is None or step == self._norm_seen_at:  # it comes once more at an epoch's end
            return
        self._norm_seen_at = step
        self._odd_norms = 0 if math.isfinite(grad_norm) else self._odd_norms + 1
        if self._odd_norms and self._odd_norms % ODD_NORMS == 0:
            _log.warning(
                "WARNING: the gradients of the last %d steps were not finite [GRPO-712]: DeepSpeed leaves such steps "
                "out, and without it the weights are no numbers by now",
                self._odd_norms,
            )

    @contextlib.contextmanager
    def with_callbacks(self) -> Iterator[None]:
        """While a step is logged, saved and evaluated: what callbacks add to a checkpoint in `on_save`, behind the save
        itself, belongs to it."""
        self._callbacks_follow = True
        try:
            yield
        finally:
            self._callbacks_follow = False
        self._start_background_save()

    def _start_background_save(self) -> None:
        """Let what the ranks have written of a checkpoint go to the disk, beside the next steps."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._last = pending()

    def save_model(
        self, folder: str, is_internal: bool, save: Callable[[], None], save_without_weights: Callable[[], None]
    ) -> None:
        """Save the model, by transformers' `save`; in a checkpoint whose shards hold the weights no other copy of them.

        With `stage3_gather_16bit_weights_on_model_save` off, transformers writes all shards here, and once more with
        the optimizer's states (5.17).
        """
        if not (is_internal and self.writes_only_shards):
            save()
            return
        if self._view.args.should_save:
            save_without_weights()
        remove_dummy_checkpoint(self._view.args.should_save, folder, [WEIGHTS_NAME, SAFE_WEIGHTS_NAME])

    @property
    def writes_only_shards(self) -> bool:
        """Whether a checkpoint is written of whose weights ZeRO-3's partitions are all there is."""
        view = self._view
        if not self._is_saving or not view.is_deepspeed_enabled or view.args.save_only_model:
            return False
        if is_peft_model(view.model):
            return False  # adapters are put together, in PEFT's own layout
        engine = view.model_wrapped
        return engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save()

    def _prepare(self, folder: Path, limit: int | None) -> None:
        """Look whether there is space, and say that the checkpoint is not complete. On rank 0."""
        run_dir = folder.parent
        run_dir.mkdir(parents=True, exist_ok=True)
        newest = newest_complete(run_dir)
        size = sum(read_complete(newest).files.values()) if newest else self._bytes_of_state
        if folder.exists():
            size -= size_of(folder)  # is written over
        check_free_space(run_dir, size, rotated=to_rotate(run_dir, limit=limit, keep={folder}))
        begin_partial(folder)

    @property
    def _bytes_of_state(self) -> int:
        """Of a checkpoint, roughly."""
        saved = self._view.model.parameters()
        if is_peft_model(self._view.model):
            saved = (parameter for parameter in saved if parameter.requires_grad)
        return sum(getattr(p, "ds_numel", p.numel()) for p in saved) * BYTES_PER_PARAMETER

    def finish(self) -> None:
        """Until the last save is on this rank's disk, on rank 0 until it is complete. Raises what went wrong."""
        saving, self._last = self._last, None
        if saving is None:
            return
        with self._run.during("save"):
            saving.wait()
        if self._run.folder is not None:  # rank 0, which completes
            self._view.note_newest("run/save_until_complete_s", self._run.lead.save_s)

    def look_at(self) -> None:
        """Without waiting: raises what went wrong with the last save."""
        if self._last is not None and self._last.is_done:
            self.finish()

    @contextlib.contextmanager
    def keeping_all(self) -> Iterator[None]:
        """While transformers ends training, where it deletes all but the best checkpoint, and loads it (5.17): not
        before a resume."""
        self.finish()
        args = self._view.args
        limit, load_best = args.save_total_limit, args.load_best_model_at_end
        args.save_total_limit, args.load_best_model_at_end = None, load_best and self._run.stop is None
        try:
            yield
        finally:
            args.save_total_limit, args.load_best_model_at_end = limit, load_best

    # -- what a rank needs beyond transformers' own files -------------------------------------------------------------

    def rollout_state(self) -> dict[str, Any]:
        """To go on in the middle of a generation batch."""
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
        # `grpo reshape` counts generation batches: other ranks need another number of micro-batches for each.
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
        """What a checkpoint has of batches that are sampled ahead. Collective."""
        if not self._view.args.local_mode or self._run.must_resume:  # for want of engines
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
    """The active adapter too where there is another one beside it, of which alone transformers thinks then (5.17):
    PEFT saves `default` in the folder itself, and TRL's reference in one below."""
    if is_peft_model(model) and (checkpoint / SAFETENSORS_WEIGHTS_NAME).exists():
        model.load_adapter(str(checkpoint), model.active_adapters[0], is_trainable=True)


def sampling_as_text(args: Any) -> str:
    """What has to be the same for batches that were sampled ahead of a checkpoint to be taken after it."""
    settings = sampling_settings(args) | {"max_model_len": args.vllm_max_model_length}
    return json.dumps(settings, sort_keys=True, default=str)


def see_all(folder: Path, world_size: int, timeouts: Timeouts = USUAL) -> None:
    """Until what all ranks have written is here. On rank 0."""
    deadline = time.monotonic() + timeouts.visible_s
    while missing := [rank for rank in range(world_size) if not (folder / f"rollout_state_{rank}.pt").exists()]:
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank 0 does not see in {folder} what ranks {missing} wrote [GRPO-708]: put output_dir on a file "
                "system that all nodes share"
            )
        time.sleep(0.5)  # what a network file system knows of a folder may be some seconds old


@contextlib.contextmanager
def reporting_a_full_disk(folder: Path, rank: int, world_size: int) -> Iterator[None]:
    """Say of a failed write that the disk is full; torch's writer names a line of its source instead (2.13).

    What this rank has written of the checkpoint goes, so that the failure's record finds space.

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
