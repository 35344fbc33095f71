"""How many ranks each node gets: the first number that anybody has given, held against the GPUs that are there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.place.files import Wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What flags, the scheduler and the job's files say of ranks and engines; None: nothing."""

    wishes: Wishes
    """Of the script's arguments and files, and the launcher's file."""
    flag: tuple[int, ...] | None = None
    """--ranks-per-node: of all nodes, or of each."""
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
    by_node: tuple[int, ...]
    why: str
    """Where the numbers come from, for the screen."""


def ranks_by_node(asked: Asked, gpus: Mapping[str, int]) -> Ranks:
    """The number of ranks on each node.

    Args:
        gpus: usable GPUs by node, in the order of the nodes.

    Raises:
        LostGPUs: some nodes cannot hold what the others can, and the job's checkpoint is for.
        ValueError: the ranks leave no engine a GPU; says what to write.
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
    if short and len(short) < len(gpus):  # all of them: somebody has moved the job, and the trainer says how
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
    """As `--ranks-per-node` takes it: one number, where all are equal."""
    return ",".join(map(str, counts if len({*counts}) > 1 else counts[:1]))


def counts_of(text: str) -> tuple[int, ...]:
    """What `short_list` has written."""
    return tuple(int(part) for part in text.split(","))
