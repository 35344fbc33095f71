"""Number of ranks per node: from the first source with one, checked against the GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.place.files import Wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Ranks and engines requested by flags, the scheduler and the job's files; None: not given."""

    wishes: Wishes
    """Settings of the script's arguments and files, and of the launcher's file."""
    flag: tuple[int, ...] | None = None
    """--ranks-per-node: one for all nodes, or one for each."""
    scheduler: str | None = None
    """PET_NPROC_PER_NODE: a number, or `auto` and the like, which leave it open."""
    file: str = ""
    """Launcher's file, for messages."""
    num_processes: int | None = None
    """Number in the file, for all its machines."""
    num_machines: int | None = None
    """Number in the file."""
    resumed_ranks: int | None = None
    """Ranks of the checkpoint to resume."""


class LostGPUs(ValueError):
    """A node has fewer GPUs than before: other nodes would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    by_node: tuple[int, ...]
    why: str
    """Origin of the numbers, for the screen."""


def ranks_by_node(asked: Asked, gpus: Mapping[str, int]) -> Ranks:
    """Determine the number of ranks on each node.

    Args:
        gpus: usable GPUs by node, in the order of the nodes.

    Raises:
        LostGPUs: some nodes cannot hold the ranks of the job's checkpoint, while others can.
        ValueError: the ranks leave no GPU for an engine; has the fix.
    """
    wishes = asked.wishes
    engine = wishes.reserved_gpus if wishes.reserved_gpus is not None else wishes.tensor_parallel_size or 1
    engine = engine if wishes.has_engines else 0  # TRL's own modes: no GPU is kept from the ranks
    ranks = _first_given(asked, [*gpus.values()], engine)
    if fewest := [count for count in ranks.by_node if count < 1]:
        raise ValueError(f"{fewest[0]} ranks per node ({ranks.why}): a node needs at least 1")
    full = [
        (node, each) for (node, each), count in zip(gpus.items(), ranks.by_node, strict=True) if count + engine > each
    ]
    if full or sum(ranks.by_node) != asked.resumed_ranks:
        _check_resumed(asked, gpus, engine)
    for node, each in full:
        if each:
            raise ValueError(_too_many(ranks, engine, node, gpus))
    return ranks


def _check_resumed(asked: Asked, gpus: Mapping[str, int], engine: int) -> None:
    if not asked.resumed_ranks or asked.resumed_ranks % len(gpus):
        return
    ranks = asked.resumed_ranks // len(gpus)
    short = [f"{node} has {count} usable GPUs" for node, count in gpus.items() if count < ranks + engine]
    if short and len(short) < len(gpus):  # if all are short, the job was moved, and the trainer explains the fix
        raise LostGPUs(
            f"{', '.join(short)}, and the checkpoint that the job goes on from is for {asked.resumed_ranks} ranks, "
            f"{ranks} on each node beside {engine} for an engine: start it on other nodes, or make a checkpoint for "
            "fewer ranks (grpo reshape)"
        )


def _first_given(asked: Asked, gpus: Sequence[int], engine: int) -> Ranks:
    nodes, on_gpus = len(gpus), all(gpus)

    def alike(count: int, why: str) -> Ranks:
        return Ranks(by_node=(count,) * nodes, why=why)

    def left(kept: int, what: str) -> Ranks:
        whose = "the" if len({*gpus}) > 1 else f"{gpus[0]}"
        of = " of each node" if len({*gpus}) > 1 else ""
        return Ranks(by_node=tuple(max(1, count - kept) for count in gpus), why=f"{whose} GPUs{of} less {what}")

    if asked.flag is not None:
        if len(asked.flag) not in (1, nodes):
            given = ",".join(map(str, asked.flag))
            raise ValueError(f"--ranks-per-node {given} is for {len(asked.flag)} nodes, and there are {nodes}")
        return Ranks(by_node=asked.flag * (nodes if len(asked.flag) == 1 else 1), why="--ranks-per-node")
    if asked.scheduler is not None and asked.scheduler.isdigit():
        return alike(int(asked.scheduler), "PET_NPROC_PER_NODE")
    reserved = asked.wishes.reserved_gpus
    if on_gpus and reserved is not None:
        return left(reserved, f"vllm_reserved_gpus {reserved}")
    if asked.num_processes is not None and (on_gpus or asked.wishes.use_cpu):
        machines = asked.num_machines or 1
        if asked.num_processes % machines:
            raise ValueError(
                f"{asked.file} has num_processes: {asked.num_processes}, no multiple of its num_machines: {machines}: "
                "write a multiple, or give --ranks-per-node"
            )
        why = f"num_processes {asked.num_processes} / num_machines {machines} of {asked.file}"
        return alike(asked.num_processes // machines, why)
    return left(engine, f"{engine} for an engine") if on_gpus else alike(1, "no GPU here")


def _too_many(ranks: Ranks, engine: int, node: str, gpus: Mapping[str, int]) -> str:
    here, has = ranks.by_node[[*gpus].index(node)], gpus[node]
    if has <= engine:
        return (
            f"{node} has {has} usable GPU{'s' * (has > 1)}, too few to train beside the {engine} of an engine: make "
            "more visible (Slurm: --gres=gpu:8), or lower vllm_reserved_gpus or vllm_tensor_parallel_size"
        )
    fitting = [min(count, each - engine) for count, each in zip(ranks.by_node, gpus.values(), strict=True)]
    return (
        f"{here} rank{'s' * (here > 1)} per node ({ranks.why}) leave no engine a GPU: {node} has {has}, of which an "
        f"engine takes {engine}: give --ranks-per-node {short_list(fitting)}"
    )


def short_list(counts: Sequence[int]) -> str:
    """Format for `--ranks-per-node`: one number if all are equal."""
    return ",".join(map(str, counts if len({*counts}) > 1 else counts[:1]))


def counts_of(text: str) -> tuple[int, ...]:
    """Parse the result of `short_list`."""
    return tuple(int(part) for part in text.split(","))
