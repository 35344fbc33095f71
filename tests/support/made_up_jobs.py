"""Made-up launches and placements: the variables of torchrun, nodes of eight GPUs, whole jobs."""

from collections.abc import Sequence
from typing import Any

from grpo.place.launch import Launch, read_launch
from grpo.place.topology import NodeTopology, plan_node

EIGHT = tuple(str(i) for i in range(8))


def torchrun_env(rank: int, world_size: int, local_world_size: int, **changes: int | str | None) -> dict[str, str]:
    env = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": rank // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
    }
    return {name: str(value) for name, value in {**env, **changes}.items() if value is not None}


def launch(rank: int = 0, world_size: int = 7, local_world_size: int = 7) -> Launch:
    return read_launch(torchrun_env(rank, world_size, local_world_size))


def plan(
    launch: Launch,
    devices: Sequence[str] = EIGHT,
    *,
    reserved: int | None = None,
    size: int = 1,
    engines: int | None = None,
    **more: Any,
) -> NodeTopology:
    return plan_node(
        launch,
        devices,
        reserved_gpus=reserved,
        tensor_parallel_size=size,
        engines_per_node=engines,
        **{"host": "n0", **more},
    )


def job(gpus_per_node: Sequence[int] = (8, 8, 7, 8), ranks: int | Sequence[int] = 6) -> list[NodeTopology]:
    """
    Args:
        ranks: of every node, or of each.
    """
    counts = [ranks] * len(gpus_per_node) if isinstance(ranks, int) else ranks
    places = [(node, local_rank) for node, count in enumerate(counts) for local_rank in range(count)]
    return [
        plan(
            Launch(
                rank=rank,
                world_size=len(places),
                local_rank=local_rank,
                local_world_size=counts[node],
                node=node,
                num_nodes=len(counts),
            ),
            EIGHT[: gpus_per_node[node]],
            host=f"h{node}",
        )
        for rank, (node, local_rank) in enumerate(places)
    ]
