"""What the seam asks of a node's engines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo.rollout.ahead import GenerationBatch
from grpo.rollout.packing import Completions
from grpo.rollout.turns.episode import Episode
from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import ToolRunner
from grpo.weights.delivery import WeightDelivery


class LocalEngines(Protocol):
    """The engines as scoring, episodes and metrics see them; `LocalVLLM` is what they are."""

    last_batch: GenerationBatch | None
    eval_sampling: Mapping[str, Any]
    """vLLM's sampling arguments of the evaluation that runs, in place of training's."""

    def keep(
        self, completions: Completions, prompt_ids: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Take these rows, which other ranks may have sampled, for this rank's of the last batch."""

    def wait_for_batches(self) -> None:
        """Wait for all batches that are sampled ahead. Collective."""

    @property
    def delivery(self) -> WeightDelivery:
        """Once the engines have weights."""

    @property
    def refused_rows(self) -> list[bool] | None:
        """Of the last batch, this rank's rows that are left out; None where the whole job has none."""

    @property
    def sampler(self) -> Sampler:
        """Of the batch that a rollout function makes now."""

    @property
    def last_episodes(self) -> tuple[list[Episode], ToolRunner | None]:
        """Of the last batch, this rank's episodes, and who ran their tools."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps of the weights by which the last batch was asked for."""

    def roll_out(self, func: Callable[[], dict[str, Any]], prompts: Sequence[Any]) -> dict[str, Any]:
        """Run a rollout function of the user's. Collective."""

    def metrics(self, mode: str) -> dict[str, float]:
        """Of the last generation batch, and of a weight sync that is not yet logged for `mode`."""

    def by_node(self) -> dict[str, list[float]]:
        """The newest figures of each node, in their order."""
