"""Software that must be equal on all nodes before they start a job: versions, code, the variables of NCCL and gloo."""

import hashlib
import platform
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from grpo.ops.rendezvous.trouble import Trouble, list_nodes
from grpo.place.same_everywhere import COMPARED_PACKAGES, OF_THE_NODE, differing, read_variables, read_versions
from grpo.record.provenance import commit_of

_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Software of one node, and its variables.

    Example:
        Software(versions={"python": "3.12.8", "torch": "2.13.0"}, commit="1f3c9a0b42de", code_digest="9d1e0c7ab345",
                 variables={"NCCL_DEBUG_SUBSYS": "INIT"})
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed version by package, and of `python`; missing packages are left out."""
    commit: str = ""
    """Commit of the package's checkout; '' if it is none, or unknown to git."""
    code_digest: str = ""
    """Digest of the package's own source files: detects uncommitted edits."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """NCCL_* and GLOO_* of the environment, without those for logging."""


def read_software(env: Mapping[str, str]) -> Software:
    """Read this node's software."""
    # NCCL is a package of its own, with the CUDA version in its name.
    nccl = [found.name for found in metadata.distributions() if (found.name or "").startswith("nvidia-nccl")]
    folder = Path(__file__).parents[2]
    return Software(
        versions={"python": platform.python_version(), **read_versions((*COMPARED_PACKAGES, *nccl))},
        commit=(commit_of(__file__, timeout_s=_GIT_TIMEOUT_S)[0] or "")[:12],
        code_digest=code_digest(folder),
        variables=read_variables(env),
    )


def code_digest(folder: Path) -> str:
    """Digest of names and contents of the Python files below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


# -- between nodes ------------------------------------------------------------------------------------------------


def differences(
    nodes: Mapping[str, Mapping[str, Hashable]], fix: str = "", *, is_fatal: bool = True
) -> dict[str, Trouble]:
    """Differences between the nodes' settings, by name; each names the nodes outside the majority. On a tie the head's
    value, the first, is the reference."""
    found = {}
    for name, by_value in differing(list(nodes.values()), list(nodes)).items():
        order = sorted(by_value, key=lambda value: -len(by_value[value]))  # stable: the head's first on a tie
        shown = "; ".join(f"{value or 'none'} on {list_nodes(by_value[value])}" for value in order)
        outside = tuple(node for value in order[1:] for node in by_value[value])
        found[name] = Trouble(message=f"{name}: {shown}", fix=fix, nodes=outside, is_fatal=is_fatal)
    return found


def compare_software(nodes: Mapping[str, Software]) -> dict[str, list[Trouble]]:
    """Differences of `versions`, of `code` and of `variables`; the head comes first in `nodes`."""
    versions = differences({node: one.versions for node, one in nodes.items()})
    same_code = "check out the same commit on all nodes, or install from one shared folder"
    commits = {node: {"commit": one.commit} for node, one in nodes.items() if one.commit}
    files = "source files, in the same commit" if len(commits) == len(nodes) else "source files"
    code = differences(commits, same_code) or differences(
        {node: {files: one.code_digest} for node, one in nodes.items()}, same_code
    )
    variables = differences({node: one.variables for node, one in nodes.items()}, "export the same value on all nodes")
    for name in variables:
        if name.startswith(OF_THE_NODE):
            fix = "right if the nodes differ in hardware"
            variables[name] = replace(variables[name], fix=fix, is_fatal=False)
    return {
        "versions": [replace(one, fix=f"install the same {name} on all nodes") for name, one in versions.items()],
        "code": list(code.values()),
        "variables": [variables[name] for name in sorted(variables)],
    }
