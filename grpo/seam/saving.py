"""Checkpoints of a run: what is written, when it counts, and what is read back.

A save holds training only while the ranks write. What they have written goes to the disk beside the next steps
(`background`); `complete.json` comes after it, and only then older checkpoints go.
"""

import contextlib
import errno
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
from transformers import TrainingArguments
from transformers.trainer_pt_utils import remove_dummy_checkpoint
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from grpo.checkpoints.background import BackgroundSave, deadline_for
from grpo.checkpoints.checkpoints import files_in, newest_complete, read_complete, write_complete, writer_of
from grpo.checkpoints.prompt_order import GenerationSampler
from grpo.checkpoints.rank_state import first_not_finite, load_own_shards, own_shards
from grpo.checkpoints.rotation import begin_partial, check_free_space, rotate, size_of, to_rotate
from grpo.faults.failure import FailureKind, GrpoError, JobFailed
from grpo.faults.signals import StopLead, StopRequest
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.log import FILE_ONLY
from grpo.place.timeouts import USUAL, Timeouts
from grpo.record.durable import FileSum
from grpo.record.folder import RunFolder
from grpo.seam.pictured import PicturedTrainer

_log = logging.getLogger(__name__)

ODD_NORMS = 3  # in a row, until a warning
MAX_NAMED = 5
BYTES_PER_PARAMETER = 16  # weights, and master weights and two moments in float32; 14 where weights are bfloat16
WORDS_OF_A_FULL_DISK = ("inline_container", "iostream error", "No space left")
"""Torch's writer's (2.13), two of them, and safetensors': by the time they are read another rank may have made
space."""
NEARLY_FULL_BYTES = 2**24  # a write of torch's that failed with so little left has failed for want of space


def sampling_of(args: TrainingArguments) -> dict[str, int]:
    """The settings that say which prompts come at which step."""
    return {
        "generation_batch_size": args.generation_batch_size,
        "num_generations": args.num_generations,
        "steps_per_generation": args.steps_per_generation,
        "num_iterations": args.num_iterations,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "seed": args.seed,
        "spare_groups": getattr(args, "spare_groups", 0),
    }


class SavingTrainer(PicturedTrainer):
    """TRL's trainer with checkpoints that say when they are complete."""

    _node_groups: NodeGroups
    _lead: StopLead
    _sampler: GenerationSampler | None = None
    """Of training; None for a stream."""
    _stream_pass: tuple[int, int] = (0, 0)
    """How often a stream was read to its end, and the number of the first micro-batch since."""
    _run: RunFolder | None = None
    """On global rank 0."""
    _failure_watch: FailureWatch | None = None
    """Where this rank has one."""
    _stop: StopRequest | None = None
    """What every rank has agreed on."""
    _pending_save: Callable[[], BackgroundSave] | None = None
    """Of a save whose callbacks have not been heard yet."""
    _norm_seen_at = 0
    """The step of the newest gradient that was looked at."""
    _odd_norms = 0
    """Steps in a row whose gradient was not finite."""
    _callbacks_follow = False
    _saving: BackgroundSave | None = None
    """The last save, as long as it may be on its way to the disk."""
    _must_resume = False
    """Whether the job is about to end for want of engines."""
    _is_saving = False
    """Whether transformers is writing a checkpoint."""
    _saved_step: int = 0
    """The last step whose state is in a checkpoint, or on its way there."""
    _step_began_at: int = 0
    """The number of the first micro-batch of this optimizer step."""

    @property
    def _steps_per_batch(self) -> int:
        """Micro-batches that a generation batch is trained on."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def _num_batches(self) -> int:
        """Generation batches that training has begun."""
        return -(-self._step // self._steps_per_batch)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that says when it is complete; older ones go only after that. Collective."""
        self._finish_saving()
        self._check_finite()
        begun = time.monotonic()
        args, step = self.args, self.state.global_step
        run_dir = Path(self._get_output_dir(trial=trial))
        folder = run_dir / f"checkpoint-{step}"
        ahead = self.keep_ahead()
        limit, args.save_total_limit = args.save_total_limit, None  # transformers deletes before all have written
        only_model = args.save_only_model
        args.save_only_model = only_model and self._stop is None and not self._must_resume  # these are to be resumed
        resumable = not args.save_only_model
        _log.info("%s begins", folder.name, extra=FILE_ONLY)
        try:
            self._node_groups.by_rank_zero(lambda: self._prepare(folder, limit))
            with reporting_a_full_disk(folder, args.process_index, args.world_size):
                self._is_saving = True
                super()._save_checkpoint(model, trial)
                folder.mkdir(exist_ok=True)  # rank 0 has, but another node may not know yet
                torch.save(self._rollout_state() | {"ahead": ahead}, folder / f"rollout_state_{args.process_index}.pt")
        finally:
            self._is_saving = False
            args.save_total_limit, args.save_only_model = limit, only_model
        self._node_groups.meet()
        self._node_groups.by_rank_zero(lambda: see_all(folder, args.world_size))
        best = self.state.best_model_checkpoint
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
            self._lead.completed(begun, time.monotonic())
            _log.info("%s is complete, after %.1f s", folder.name, time.monotonic() - begun, extra=FILE_ONLY)
            if self._run is not None and resumable:
                self._run.update(step=step, checkpoint=str(folder))
            rotate(run_dir, limit=limit, keep=keep)

        now = time.monotonic()
        self._lead.saved(begun, now)
        _log.debug("%s is written by all ranks, after %.1f s", folder.name, now - begun)
        self._metrics["train"]["run/save_s"] = [now - begun]
        if resumable:
            self._saved_step = step
        self._pending_save = partial(
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
        names = self._node_groups.all_gather(first_not_finite(self.model))
        if odd := [f"{name} on rank {rank}" for rank, name in enumerate(names) if name]:
            raise GrpoError(
                f"after step {self.state.global_step} weights are not finite: {', '.join(odd[:MAX_NAMED])}: no "
                "checkpoint is made of them; the last complete one is from before. Look at grad_norm and loss of the "
                "steps since then: a lower learning_rate, or max_grad_norm [GRPO-711]",
                kind=FailureKind.USER,
            )

    def _look_at_norm(self, grad_norm: Any) -> None:
        """Warn where steps are lost: at a gradient that is not finite DeepSpeed leaves the step out, without a word."""
        if grad_norm is None or self.state.global_step == self._norm_seen_at:  # it comes once more at an epoch's end
            return
        self._norm_seen_at = self.state.global_step
        self._odd_norms = 0 if math.isfinite(grad_norm) else self._odd_norms + 1
        if self._odd_norms and self._odd_norms % ODD_NORMS == 0:
            _log.warning(
                "WARNING: the gradients of the last %d steps were not finite [GRPO-712]: DeepSpeed leaves such steps "
                "out, and without it the weights are no numbers by now",
                self._odd_norms,
            )

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """transformers'. What callbacks add to a checkpoint in `on_save`, behind the save itself, belongs to it."""
        self._look_at_norm(grad_norm)
        self._callbacks_follow = True
        try:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        finally:
            self._callbacks_follow = False
        self._start_background_save()

    def _start_background_save(self) -> None:
        """Let what the ranks have written of a checkpoint go to the disk, beside the next steps."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            self._saving = pending()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers'; in a checkpoint whose shards hold the weights it adds no other copy of them.

        With `stage3_gather_16bit_weights_on_model_save` off, transformers writes all shards here, and once more with
        the optimizer's states (5.17).
        """
        folder = Path(output_dir or self.args.output_dir)
        if not (_internal_call and self._is_saving and self._has_only_shards):
            super().save_model(output_dir, _internal_call=_internal_call)
        else:
            if self.args.should_save:
                self._save(str(folder), state_dict={})
            remove_dummy_checkpoint(self.args.should_save, str(folder), [WEIGHTS_NAME, SAFE_WEIGHTS_NAME])
        if self.args.should_save and self._processor is not None:
            self._processor.save(folder)

    @property
    def _has_only_shards(self) -> bool:
        """Whether a checkpoint's weights are ZeRO-3's partitions alone."""
        if not self.is_deepspeed_enabled or self.args.save_only_model or is_peft_model(self.model):
            return False  # adapters are put together, in PEFT's own layout
        engine = self.model_wrapped
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
        saved = self.model.parameters()
        if is_peft_model(self.model):
            saved = (parameter for parameter in saved if parameter.requires_grad)
        return sum(getattr(p, "ds_numel", p.numel()) for p in saved) * BYTES_PER_PARAMETER

    def _during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Name what this rank is doing, for the record of a failure."""
        return contextlib.nullcontext() if self._failure_watch is None else self._failure_watch.during(phase)

    def _finish_saving(self) -> None:
        """Until the last save is on this rank's disk, on rank 0 until it is complete. Raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with self._during("save"):
            saving.wait()
        if self._run is not None:  # rank 0, which completes
            self._metrics["train"]["run/save_until_complete_s"] = [self._lead.save_s]

    def _look_at_saving(self) -> None:
        """Without waiting: raises what went wrong with the last save."""
        if self._saving is not None and self._saving.is_done:
            self._finish_saving()

    def keep_ahead(self) -> Any:
        """What a checkpoint has of batches that are sampled ahead; `resume_ahead` is given it. Collective."""

    def resume_ahead(self, kept: Any) -> None: ...

    def _rollout_state(self) -> dict[str, Any]:
        """What this rank needs beyond transformers' own files to go on in the middle of a generation batch."""
        state: dict[str, Any] = {"step": self._step, "batch": None, "reference": None}
        if self._sampler is None:
            state["pass"] = self._stream_pass
        if self._sampler is not None and self._sampler.is_drawn:
            state["order"] = self._sampler.digest(self._num_batches)
        if self._step % self._steps_per_batch:
            state["batch"] = self._buffered_inputs
        if self.args.sync_ref_model and self.ref_model is not None:
            state["reference"] = own_shards(self.ref_model)
        return state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The active adapter too where there is another one beside it, of which alone transformers thinks then (5.17):
        PEFT saves `default` in the folder itself, and TRL's reference in one below."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        loaded = self.model if model is None else model
        if is_peft_model(loaded) and (Path(resume_from_checkpoint) / SAFETENSORS_WEIGHTS_NAME).exists():
            loaded.load_adapter(resume_from_checkpoint, loaded.active_adapters[0], is_trainable=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        assert checkpoint is not None, "transformers has looked (5.17)"
        path = Path(checkpoint) / f"rollout_state_{self.args.process_index}.pt"
        state = torch.load(path, map_location="cpu", weights_only=True)
        # `grpo reshape` counts generation batches: other ranks need another number of micro-batches for each.
        batches = state.get("generation_batches")
        self._step = self._step_began_at = state["step"] if batches is None else batches * self._steps_per_batch
        self._buffered_inputs = send_to_device(state["batch"], self.args.device)
        self._stream_pass = state.get("pass", (0, 0))
        if self._sampler is not None and self._sampler.is_drawn and "order" in state:
            self._sampler.check(self._num_batches, state["order"])
        self.resume_ahead(state.get("ahead"))
        if state["reference"] is not None and self.ref_model is not None:
            load_own_shards(self.ref_model, state["reference"])

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # transformers deletes all but the best checkpoint here, and loads it (5.17): not before a resume.
        self._finish_saving()
        limit, load_best = self.args.save_total_limit, self.args.load_best_model_at_end
        self.args.save_total_limit = None
        self.args.load_best_model_at_end = load_best and self._stop is None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit, self.args.load_best_model_at_end = limit, load_best


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
