"""Record of a plan, and its verdict. Imports little: a missing file is reported before TRL is loaded."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from grpo.ops.plan.memory_budget import GIB

if TYPE_CHECKING:
    from grpo.ops.plan.batch import PlannedBatch
    from grpo.ops.plan.estimates import Estimates
    from grpo.ops.plan.job import Launcher
    from grpo.ops.plan.model_shape import ModelShape
    from grpo.ops.plan.speed import SizeAdvice
    from grpo.place.topology import NodeTopology
    from grpo.preflight.lora import LoraChoice

Memory = Literal["fits", "may not fit", "does not fit", "unknown"]


@dataclass(slots=True, kw_only=True)
class Plan:
    """Plan of a job, filled in step by step. A field that could not be computed is None; `errors` or `unknown` say
    why."""

    errors: list[str] = field(default_factory=list)
    """Impossible settings: exit code 1."""
    unknown: list[str] = field(default_factory=list)
    """Reasons why memory is not estimated: exit code 1 too."""
    warnings: list[str] = field(default_factory=list)
    """Valid but probably unintended settings, and shortfalls mended by a smaller micro-batch."""
    assumptions: list[str] = field(default_factory=list)
    memory: Memory = "unknown"
    """Verdict on memory, by estimate; "may not fit": fits with a smaller micro-batch."""
    launcher: "Launcher | None" = None
    gpus_per_node: tuple[int, ...] | None = None
    nodes: "tuple[NodeTopology, ...] | None" = None
    """Placement as the local main of each node will see it."""
    batch: "PlannedBatch | None" = None
    lora: "LoraChoice | None" = None
    """LoRA in the engines, merged or as an adapter; None without LoRA."""
    model: "ModelShape | None" = None
    trains: str = ""
    """Trained parts of a multimodal model."""
    estimates: "Estimates | None" = None
    advice: "SizeAdvice | None" = None
    """Advice on the number of inference GPUs, by estimate; None if there is none to give."""

    @property
    def works(self) -> bool:
        return not self.errors and not self.unknown

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn a user's mistake raised in the block into one line of `errors`; the block ends there."""
        from grpo.faults.kinds import is_users
        from grpo.ops.mistakes import message_of

        try:
            yield
        except Exception as error:
            if not is_users(error):
                raise
            message = " ".join(line.strip() for line in message_of(error).splitlines())
            self.errors += [message] if message not in self.errors else []

    @contextlib.contextmanager
    def noting_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        self.warnings += dict.fromkeys(str(warning.message) for warning in caught)

    def assume(self, what: str | None) -> None:
        if what is not None:
            self.assumptions.append(what)

    def verdict(self) -> str:
        """Summarize the plan in one line.

        Example: 'fits: 26.0 of 80 GiB on a training GPU, 668 sequences at once on an engine, about 172 s a step;
          reserve 2
        instead of 1 would be 156 s'.
        """
        figures = self._figures()
        if self.errors and self.memory != "does not fit":
            what = f"cannot work: {len(self.errors)} mistake{'s' if len(self.errors) > 1 else ''}"
            return what + (f"; by its memory it {self.memory}: {figures}" if figures else "")
        if not figures:
            return "unknown: memory is not estimated"
        return f"{self.memory}: {figures}"

    def _figures(self) -> str:
        estimates, advice = self.estimates, self.advice
        if estimates is None or self.batch is None:
            return ""
        training, engine = estimates.training, estimates.engine
        if training.capacity_bytes is None:
            text = f"{training.peak_bytes / GIB:.1f} GiB of the host's memory in a rank"
        else:
            text = f"{training.peak_bytes / GIB:.1f} of {training.capacity_bytes / GIB:.4g} GiB on a training GPU"
        text += f", {min(engine.sequences_at_once, engine.max_num_seqs)} sequences at once on an engine"
        if advice is None:
            return text
        from grpo.ops.plan.speed import length

        steps = self.batch.optimizer_steps_per_generation
        now, then = length(advice.step_s / steps), length(advice.reserve_step_s / steps)
        text += f", {'' if now.startswith('less') else 'about '}{now} a step"
        return text if now == then else f"{text}; reserve {advice.reserve} instead of {advice.reserved} would be {then}"
