"""Every logged step as one JSON object per line, whatever trackers are configured."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """Writes `<output_dir>/metrics.jsonl` on global rank 0; a fresh run begins a fresh file, a resumed one appends."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / METRICS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            if state.global_step == 0:
                path.write_text("")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            path = Path(args.output_dir) / METRICS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as lines:
                lines.write(json.dumps({"step": state.global_step, **logs}) + "\n")
