"""Every logged step as one JSON object per line, whatever trackers are configured."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.run_folder import METRICS_FILE


class MetricsFile(TrainerCallback):
    """Appends to `<output_dir>/metrics.jsonl` on global rank 0; `RunFolder` has cut it to the steps that count."""

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
