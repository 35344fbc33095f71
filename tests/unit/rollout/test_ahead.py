"""What a checkpoint keeps of the batches that are sampled ahead."""

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from grpo.rollout import ahead
from grpo.rollout.ahead import GenerationBatches, Progress
from grpo.rollout.packing import UNFINISHED, pack_completions
from grpo.rollout.prompts import Prompts


class UnderWay:
    """A sampler whose batches are there when they have been asked after often enough, or never."""

    def __init__(self, *, asked: float, is_stuck: bool = False, report: Any = None, logprob: float = -1.0) -> None:
        self.left, self.stuck, self.num_collected, self.logprob = asked, is_stuck, 0, logprob
        self.report = report or SimpleNamespace(not_finite=None, num_refused=0, dumps=lambda: "a report")

    def submit(self, prompts: Prompts, base_seed: int, **more: Any) -> str:
        return "pending"

    def is_finished(self, pending: str | None) -> bool:
        self.left -= 1
        return self.left <= 0

    def is_stuck(self, pending: str | None) -> bool:
        return self.stuck

    def collect(self, pending: str | None) -> Any:
        self.num_collected += 1
        return pack_completions([[7]], [[-1.0]], [0], [0]), [self.report]

    def so_far(self, pending: Sequence[str | None]) -> Any:
        return [pack_completions([[7]], [[self.logprob]], [0], [UNFINISHED])] * len(pending)


NO_NUMBERS = SimpleNamespace(not_finite="log-probabilities are no numbers", num_refused=0)


@pytest.mark.parametrize(
    ("sampler", "hurried_after", "how", "kept_as"),
    [
        (UnderWay(asked=3), 9, {}, "whole"),
        (UnderWay(asked=math.inf), 3, {}, "parts"),  # SIGTERM comes while it is waited for
        (UnderWay(asked=math.inf, is_stuck=True), math.inf, {}, "parts"),
        (UnderWay(asked=math.inf), math.inf, {"in_flight": True}, "parts"),
        (UnderWay(asked=0, report=NO_NUMBERS), math.inf, {}, "nothing"),  # of which every resume would end
        (UnderWay(asked=math.inf, logprob=math.nan), 3, {}, "nothing"),
        (UnderWay(asked=math.inf), 3, {"continues": False}, "nothing"),
    ],
    ids=["there in time", "SIGTERM", "no engines", "in flight", "no numbers", "no number", "a grammar"],
)
def test_checkpoint_of_lookahead_batches_keeps_trainable_samples(
    sampler: UnderWay, hurried_after: float, how: dict[str, bool], kept_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "POLL_S", 0.01)
    prompts, looks = Prompts.of([[5, 6]]), itertools.count()
    progress = Progress(step=1, mode="train", versions=1)
    batches = GenerationBatches(
        sampler,  # type: ignore[arg-type]
        seed=1,
        user_seed=None,
        progress=lambda: progress,
        lookahead=1,
        prompts_of=lambda number: prompts,
        **how,
    )
    batches.sample_ahead()
    kept = batches.kept(versions=2, gives_up=lambda: next(looks) >= hurried_after)
    assert [(each["lag"], len(each["reports"])) for each in kept] == {
        "whole": [(1, 1)],
        "parts": [(1, 0)],
        "nothing": [],
    }[kept_as]
    assert bool(sampler.num_collected) == (kept_as == "whole" or sampler.report is NO_NUMBERS)
    of_another_version = [{**each, "reports": ["{}"]} for each in kept]
    before = len(batches._under_way)
    batches.resume(of_another_version)
    assert len(batches._under_way) == before
