"""Groups that teach: fields of `GRPOConfig` about which groups a batch is trained on, and their checks."""

import math
from dataclasses import dataclass
from typing import Any

from grpo.config.documented import documented
from grpo.place.launch import either, multiples_around


@documented
@dataclass
class GroupConfig:
    """Fields about groups whose completions all have the same reward, which teach nothing."""

    spare_groups: int = 0
    """Groups that each generation batch samples beyond those that it trains on. Trained are the first ones, in the
    order of the data, whose completions have different rewards; flat groups fill up. 0: all groups that are sampled are
    trained on."""
    max_flat_batches: int = 50
    """With spare_groups: how many generation batches in a row may have no group with different rewards; then the job
    ends, as nothing is learnt any more. 0: any number."""


def check_groups(args: Any) -> None:
    """Raises ValueError: names the value and what may stand there."""
    for name in ("spare_groups", "max_flat_batches"):
        value = getattr(args, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is {value!r}; it is a whole number, 0 or more")
    if not args.spare_groups:
        return
    unit = args.num_ranks // math.gcd(args.num_ranks, args.num_generations)
    if args.spare_groups % unit:
        near = either([count for count in multiples_around(args.spare_groups, unit) if count])
        raise ValueError(
            f"spare_groups is {args.spare_groups}, whose {args.spare_groups * args.num_generations} completions "
            f"{args.num_ranks} ranks cannot share evenly: set it to {near}"
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config has {name}, which deals rows out in another order than spare_groups reads them: "
                "remove it, or set spare_groups to 0"
            )


def refuse_with_spare_groups(arguments: dict[str, Any], *, takes_images: bool) -> None:
    """What has no rows to spare, or leaves things behind that a row would need elsewhere.

    Raises:
        ValueError: names the argument and the way out.
    """
    count = arguments["args"].spare_groups
    if not count:
        return
    for name in ("environment_factory", "rollout_func"):
        if arguments[name]:
            raise ValueError(
                f"spare_groups is {count} with {name}: a row may be trained on by another rank than the one that "
                "sampled it, and what it keeps there cannot follow; set spare_groups to 0"
            )
    if takes_images:
        raise ValueError(
            f"spare_groups is {count}, but the prompts come with images, which stay with their rank: set it to 0"
        )
    if not hasattr(arguments["train_dataset"], "__len__"):
        raise ValueError(
            f"spare_groups is {count}, and reads rows by their number, which a streamed data set does not have: set "
            "dataset_streaming to False, or spare_groups to 0"
        )
