"""Made-up launches and placements: the variables of torchrun, nodes of eight GPUs, whole jobs."""

from grpo.place.launch import read_launch
from grpo.place.topology import plan_node

EIGHT = tuple(str(i) for i in range(8))


def torchrun_env(rank, world_size, local_world_size, **changes):
    env = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": rank // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
    } | changes
    return {name: str(value) for name, value in env.items() if value is not None}


def launch(rank=0, world_size=7, local_world_size=7):
    return read_launch(torchrun_env(rank, world_size, local_world_size))


def plan(launch, devices=EIGHT, *, reserved=None, size=1, engines=None, **kwargs):
    return plan_node(
        launch,
        devices,
        reserved_gpus=reserved,
        tensor_parallel_size=size,
        engines_per_node=engines,
        host=kwargs.pop("host", "n0"),
        **kwargs,
    )


def job(gpus_per_node=(8, 8, 7, 8), ranks=6):
    world_size = ranks * len(gpus_per_node)
    return [
        plan(launch(rank, world_size, ranks), EIGHT[: gpus_per_node[rank // ranks]], host=f"h{rank // ranks}")
        for rank in range(world_size)
    ]
