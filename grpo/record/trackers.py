"""What trackers (`report_to`) are reported, so that the attempts of a run are one run to them.

W&B goes on by id, Trackio by name, TensorBoard by folder. What an attempt logged after the checkpoint that the next one
goes on from: TensorBoard forgets it; W&B and Trackio keep it beside what is logged again.
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
    """Tell W&B and Trackio which run it is; afterwards another trainer of this process is another run. On every rank.

    A `WANDB_RUN_ID` that is there is the user's own.
    """
    wished = {"WANDB_RUN_ID": tracker_run, "WANDB_RESUME": "allow"}  # read by wandb.init, in transformers' callback
    ours = {name: value for name, value in wished.items() if name not in os.environ}
    run_name = args.run_name
    if run_name is None:
        args.run_name = f"{Path(args.output_dir).name}-{tracker_run}"  # Trackio goes on by name
    os.environ.update(ours)
    try:
        yield
    finally:
        args.run_name = run_name
        for name in ours:
            os.environ.pop(name, None)


def open_tensorboard(callbacks: list[TrainerCallback], output_dir: Path, tracker_run: str, *, first_step: int) -> None:
    """Let transformers' callback, if there is one, go on in the run's own folder. On rank 0.

    It would begin `runs/<date>_<host>` in each attempt (5.17), which is another run to TensorBoard.

    Args:
        first_step: the step after which this attempt goes on; what an earlier one wrote of later steps is forgotten.
    """
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is None:
            folder = callback.logging_dir or str(output_dir / TENSORBOARD_FOLDER / tracker_run)
            callback.logging_dir = folder  # as TENSORBOARD_LOGGING_DIR says, where it does
            callback.tb_writer = callback._SummaryWriter(log_dir=folder, purge_step=first_step + 1)
