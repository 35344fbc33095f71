"""Parts of a trainer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo.config import GRPOConfig
from grpo.record.progress import ProgressOnScreen
from grpo.seam.episodes import Episodes
from grpo.seam.evaluating import Evaluation
from grpo.seam.guarding import BatchGuard
from grpo.seam.observing import BatchRecords, Timing
from grpo.seam.old_logprobs import OldLogprobs
from grpo.seam.ordering import PromptOrder
from grpo.seam.pictured import Pictures
from grpo.seam.resuming import Resuming
from grpo.seam.run import JobRun
from grpo.seam.saving import Saving
from grpo.seam.scoring import BatchRewards
from grpo.seam.sparing import SpareGroups
from grpo.seam.trimming import Trimming
from grpo.seam.view import TrainerView


class TrainerParts:
    """Parts around TRL's trainer. A part sees the trainer through a `TrainerView`, and other parts only if given them.

    Args:
        arguments: the trainer's arguments, by name.
    """

    def __init__(
        self, trainer: Any, arguments: Mapping[str, Any], prompt_order: Callable[[int], Sequence[int]] | None
    ) -> None:
        args: GRPOConfig = arguments["args"]
        func, tools = arguments["rollout_func"], arguments["tools"] or ()
        self.view = view = TrainerView(trainer)
        self.run = run = JobRun(view)
        self.screen = ProgressOnScreen()
        self.records = BatchRecords(view, run, self.screen)
        self.timing = Timing(view, run)
        self.order = PromptOrder(view, prompt_order)
        self.saving = Saving(view, run, self.order)
        self.resuming = Resuming(view, run, self.order, self.saving, self.records.cut)
        self.trimming = Trimming(view)
        self.pictures = Pictures(view, self.trimming)
        self.evaluation = Evaluation(view, run, self.records)
        self.old_logprobs = OldLogprobs(view, clips_on_engines=args.local_mode and args.old_logprobs == "engine")
        self.private_folder: Any = None
        """Folder of a model that engines read in another form; removed with the trainer."""
        # The rest is for local mode alone.
        self.rewards = BatchRewards(view, run, self.timing)
        self.episodes = Episodes(view, run, self.order, self.rewards, func=func, tools=tools)
        self.spares = SpareGroups(view, run, self.order, self.rewards)
        self.guard = BatchGuard(view, run, self.records)
