"""Provenance of an attempt: arguments and command without secrets, installed versions, git commit."""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from grpo.place.same_everywhere import DISTRIBUTION, read_versions
from grpo.place.topology import NodeTopology

GIT_S = 2.0
MASK = "<masked>"
MAX_TEXT = 10_000  # characters of one value

_SECRET_NAME = re.compile(r"token|key|secret|passw|credential|authorization", re.IGNORECASE)
# Secrets recognised by their form, under any name: tokens of Hugging Face and OpenAI, credentials in a URL.
_SECRET_TEXT = re.compile(r"\b(hf_|api_org_|sk-)[A-Za-z0-9_\-]{16,}|(?<=://)[^/\s@]+(?=@)")
_NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", re.IGNORECASE)


def arguments_of(args: Any) -> dict[str, Any]:
    """Return a dataclass of arguments as JSON-compatible values, without secrets. Does not modify it.

    transformers' `to_dict` (5.17) would: it converts dtypes and quantisation settings in the user's dicts to text.
    """
    return {each.name: without_secrets(getattr(args, each.name), each.name) for each in fields(args) if each.init}


def changed_from_defaults(args: Any) -> list[str]:
    """Names of non-default fields, set by hand or derived from other fields."""

    def is_changed(each: Any) -> bool:
        default = each.default if each.default_factory is MISSING else each.default_factory()
        return without_secrets(getattr(args, each.name), each.name) != without_secrets(default, each.name)

    return [each.name for each in fields(args) if each.init and is_changed(each)]


def beside_options(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Trainer arguments beside `args` that decide which options apply, for readers of `run.json`."""
    from datasets import IterableDataset  # a launcher and a script's first lines have no need of it

    said = {name: True for name in ("tools", "environment_factory", "rollout_func") if arguments[name]}
    return said | ({"streams": True} if isinstance(arguments["train_dataset"], IterableDataset) else {})


def without_secrets(value: Any, name: str = "") -> Any:
    """Return `value` as JSON-compatible data; texts under secret names, and texts that look like secrets, are
    masked."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return without_secrets(value.value, name)
    if isinstance(value, Mapping):
        return {str(key): without_secrets(each, f"{name} {key}") for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets(each, name) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return arguments_of(value)
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return without_secrets(value.to_dict(), name)
    text = str(value).removeprefix("torch.")[:MAX_TEXT]
    return MASK if text and _SECRET_NAME.search(name) else _SECRET_TEXT.sub(MASK, text)


def command_without_secrets(argv: Sequence[str]) -> list[str]:
    """Return a command line with secrets masked: `--hub_token X`, `--hub_token=X`, and inside JSON. Numbers stay."""
    reported = []
    is_secret = False
    for argument in argv:
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and not _NUMBER.fullmatch(argument):
            is_secret = bool(_SECRET_NAME.search(name)) and not equals
            reported.append(f"{name}={_shown(value, name)}" if equals else _SECRET_TEXT.sub(MASK, argument))
        else:
            reported.append(_shown(argument, "token" if is_secret else ""))
    return reported


def _shown(value: str, name: str) -> str:
    if value.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(without_secrets(json.loads(value), name))
        except ValueError:
            pass
    return value if _NUMBER.fullmatch(value) else without_secrets(value, name)


def installed_versions() -> dict[str, str]:
    """Versions of the installed packages for training and sampling; missing ones are left out."""
    return {"grpo" if name == DISTRIBUTION else name: version for name, version in read_versions().items()}


def commit_of(script: str, *, timeout_s: float = GIT_S) -> tuple[str | None, bool | None]:
    """Return the commit of `script`'s repository, and True if tracked files have changed since.

    Each is None if unknown: no script, no repository, no git, or no answer in time. Runs no hook and takes no lock.
    """
    folder = Path(script).absolute().parent
    if not Path(script).is_file():
        return None, None
    deadline = time.monotonic() + timeout_s
    commit = _git(folder, ["rev-parse", "--verify", "HEAD"], deadline)
    if not commit:
        return None, None
    changes = _git(folder, ["status", "--porcelain", "--untracked-files=no", "--ignore-submodules"], deadline)
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, words: Sequence[str], deadline: float) -> str | None:
    # No fsmonitor: the repository could name any program. No lock: a commit may be in progress.
    line = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        git = subprocess.Popen(
            line,
            cwd=folder,
            env={**env, "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError:
        return None
    try:
        said, _ = git.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        git.kill()  # not waited for: a hanging file system may hold it, and would hold us
        return None
    return said.strip() if git.returncode == 0 else None


def provenance() -> dict[str, Any]:
    """Provenance of this process, independent of the arguments."""
    commit, is_dirty = commit_of(sys.argv[0])
    return {
        "command": command_without_secrets(sys.argv),
        "versions": installed_versions(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "commit": commit,
        "dirty": is_dirty,
    }


def describe_placement(places: Sequence[tuple[int, str]], topology: NodeTopology | None) -> dict[str, Any]:
    """Return the `topology` of `run.json`.

    Args:
        places: node and host of every rank.
        topology: of any rank; None for a job without engines of its own.
    """
    hosts, ranks = dict(places), Counter(node for node, _ in places)
    reported = {
        "num_nodes": len(hosts),
        "world_size": len(places),
        "ranks_by_node": [ranks[node] for node in sorted(hosts)],
        "hosts": [hosts[node] for node in sorted(hosts)],
    }
    if topology is None:
        return reported
    return reported | {
        "engines_by_node": list(topology.engines_by_node),
        "tensor_parallel_size": topology.tensor_parallel_size,
        "has_gpus": bool(topology.devices),
    }
