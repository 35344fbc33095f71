"""How many ranks a node gets: the first number that anybody has given, held against the GPUs that are there."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo.place.files import Wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What flags, the scheduler and the job's files say of ranks and engines; None: nothing."""

    wishes: Wishes
    """Of the script's arguments and files, and the launcher's file."""
    flag: int | None = None
    """--ranks-per-node."""
    scheduler: str | None = None
    """PET_NPROC_PER_NODE: a number, or `auto` and the like, which leave it open."""
    file: str = ""
    """The launcher's file, for messages."""
    num_processes: int | None = None
    """The file's, of all its machines."""
    num_machines: int | None = None
    """The file's."""
    resumed_ranks: int | None = None
    """Of the checkpoint that the job goes on from."""


class LostGPUs(ValueError):
    """A node has fewer GPUs than it had: other nodes would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    per_node: int
    why: str
    """Where the number comes from, for the screen."""


def ranks_per_node(asked: Asked, gpus: Mapping[str, int]) -> Ranks:
    """The number of ranks on every node.

    Args:
        gpus: usable GPUs by node; the smallest node counts, for torchrun wants the same number on all.

    Raises:
        LostGPUs: some nodes cannot hold what the others can, and the job's checkpoint is for.
        ValueError: the ranks leave no engine a GPU; says what to write.
    """
    smallest = min(gpus, key=lambda node: gpus[node])
    wishes = asked.wishes
    engine = wishes.reserved_gpus if wishes.reserved_gpus is not None else wishes.tensor_parallel_size or 1
    engine = engine if wishes.has_engines else 0  # TRL's own modes: no GPU is kept from the ranks
    _check_resumed(asked, gpus, engine)
    ranks = _first_given(asked, gpus[smallest], engine)
    if ranks.per_node < 1:
        raise ValueError(f"{ranks.per_node} ranks per node ({ranks.why}): a node needs at least 1")
    if gpus[smallest] and ranks.per_node + engine > gpus[smallest]:
        raise ValueError(_too_many(ranks, engine, smallest, gpus[smallest]))
    return ranks


def _check_resumed(asked: Asked, gpus: Mapping[str, int], engine: int) -> None:
    if not asked.resumed_ranks or asked.resumed_ranks % len(gpus):
        return
    ranks = asked.resumed_ranks // len(gpus)
    short = [f"{node} has {count} usable GPUs" for node, count in gpus.items() if count < ranks + engine]
    if short and len(short) < len(gpus):  # all of them: somebody has moved the job, and the trainer says how
        raise LostGPUs(
            f"{', '.join(short)}, and the checkpoint that the job goes on from is for {asked.resumed_ranks} ranks, "
            f"{ranks} on each node beside {engine} for an engine: start it on other nodes, or make a checkpoint for "
            "fewer ranks (grpo reshape)"
        )


def _first_given(asked: Asked, smallest: int, engine: int) -> Ranks:
    if asked.flag is not None:
        return Ranks(per_node=asked.flag, why="--ranks-per-node")
    if asked.scheduler is not None and asked.scheduler.isdigit():
        return Ranks(per_node=int(asked.scheduler), why="PET_NPROC_PER_NODE")
    reserved = asked.wishes.reserved_gpus
    if smallest and reserved is not None:
        why = f"{smallest} GPUs less vllm_reserved_gpus {reserved}"
        return Ranks(per_node=max(1, smallest - reserved), why=why)
    if asked.num_processes is not None and (smallest or asked.wishes.use_cpu):
        machines = asked.num_machines or 1
        if asked.num_processes % machines:
            raise ValueError(
                f"{asked.file} has num_processes: {asked.num_processes}, no multiple of its num_machines: {machines}: "
                "write a multiple, or give --ranks-per-node"
            )
        why = f"num_processes {asked.num_processes} / num_machines {machines} of {asked.file}"
        return Ranks(per_node=asked.num_processes // machines, why=why)
    if smallest:
        return Ranks(per_node=max(1, smallest - engine), why=f"{smallest} GPUs less {engine} for an engine")
    return Ranks(per_node=1, why="no GPU here")


def _too_many(ranks: Ranks, engine: int, node: str, gpus: int) -> str:
    asked = f"{ranks.per_node} rank{'s' * (ranks.per_node > 1)} per node ({ranks.why})"
    if gpus <= engine:
        return (
            f"{node} has {gpus} usable GPU{'s' * (gpus > 1)}, too few to train beside the {engine} of an engine: make "
            "more visible (Slurm: --gres=gpu:8), or lower vllm_reserved_gpus or vllm_tensor_parallel_size"
        )
    return (
        f"{asked} leave no engine a GPU: {node} has {gpus}, of which an engine takes {engine}: give --ranks-per-node "
        f"{gpus - engine}"
    )
