"""Settings of trackers (`report_to`), so that all attempts of a run appear as one run.

W&B continues by id, Trackio by name, TensorBoard by folder. Steps logged after the checkpoint a later attempt resumes
from: TensorBoard drops them; W&B and Trackio keep both versions.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

TENSORBOARD_FOLDER = "tensorboard"


@contextlib.contextmanager
def naming_run(args: TrainingArguments, tracker_run: str) -> Iterator[None]:
    """Name the run for W&B and Trackio in a `with` block; another trainer of this process is another run. On every
    rank.

    An existing `WANDB_RUN_ID` is the user's, and is kept.
    """
    wished = {"WANDB_RUN_ID": tracker_run, "WANDB_RESUME": "allow"}  # read by wandb.init, in transformers' callback
    ours = {name: value for name, value in wished.items() if name not in os.environ}
    run_name = args.run_name
    if run_name is None:
        args.run_name = f"{Path(args.output_dir).name}-{tracker_run}"  # Trackio continues by name
    os.environ.update(ours)
    try:
        yield
    finally:
        args.run_name = run_name
        for name in ours:
            os.environ.pop(name, None)


def open_tensorboard(callbacks: list[TrainerCallback], output_dir: Path, tracker_run: str, *, first_step: int) -> None:
    """Let transformers' TensorBoard callback, if there is one, continue in the run's own folder. On rank 0.

    By default it would start `runs/<date>_<host>` in each attempt (5.17): another run for TensorBoard.

    Args:
        first_step: step this attempt resumes after; later steps of earlier attempts are dropped.
    """
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is None:
            folder = callback.logging_dir or str(output_dir / TENSORBOARD_FOLDER / tracker_run)
            callback.logging_dir = folder  # TENSORBOARD_LOGGING_DIR, if set
            callback.tb_writer = callback._SummaryWriter(log_dir=folder, purge_step=first_step + 1)
