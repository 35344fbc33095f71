"""What a plan found out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo.job.topology import NodeTopology
    from grpo.plan.batch import Batch
    from grpo.plan.estimates import Estimates
    from grpo.plan.job import Launcher
    from grpo.plan.model_shape import ModelShape
    from grpo.plan.placement import Layout


@dataclass(slots=True, kw_only=True)
class Plan:
    """What was found out, filled in as it is; what could not be is None, and `errors` or `assumptions` say why."""

    errors: list[str]
    """What cannot work: exit code 1."""
    warnings: list[str]
    """What works, but probably not as meant, and what does not fit by an estimate."""
    assumptions: list[str]
    launcher: "Launcher | None" = None
    gpus_per_node: "tuple[int, ...] | None" = None
    nodes: "tuple[NodeTopology, ...] | None" = None
    """The placement as the local main of each node will see it."""
    best_layout: "Layout | None" = None
    """Where the placement does not work, or nodes differ."""
    batch: "Batch | None" = None
    model: "ModelShape | None" = None
    estimates: "Estimates | None" = None
