"""The launcher's settings: torchrun's variables, and the arguments of `accelerate launch`.

The only module that reads torchrun's variables.
"""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

LINE_VARIABLE = "GRPO_LAUNCH_LINE"  # command line of the launcher that `grpo launch` runs, and its pid


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process's place in the job, from the launcher."""

    rank: int
    """Global rank, 0 .. world_size - 1."""
    world_size: int
    """Training processes of the job."""
    local_rank: int
    """Rank on the node, 0 .. local_world_size - 1."""
    local_world_size: int
    """Training processes of this node."""
    node: int
    """Number of the node (torchrun agent), 0 .. num_nodes - 1."""
    num_nodes: int
    """Torchrun agents of the job."""
    launched: bool = True
    """False without a launcher: one process, started with `python`."""
    ranks_by_node: tuple[int, ...] = ()
    """Training processes of each node, once the nodes have exchanged them. Before that, every node is assumed to have
    as many as this one."""

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def node_ranks(self) -> range:
        """Global ranks of this node; the first one is the local main."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def nodes(self) -> list[range]:
        """Return the ranks of every node; the first one of each is its local main."""
        counts = self.ranks_by_node or (self.local_world_size,) * self.num_nodes
        return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def host_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name of this machine (a job can exclude it by this name), else its host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def read_launch(env: Mapping[str, str]) -> Launch:
    """Read torchrun's variables; `accelerate launch` runs torchrun and sets the same ones.

    If GROUP_RANK and GROUP_WORLD_SIZE are missing, they are derived, assuming LOCAL_WORLD_SIZE consecutive ranks on
    every node. Nodes may differ in size; only `check_nodes` sees all of them.

    Raises:
        ValueError: variables are missing, are not numbers or contradict each other.
    """
    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    names = (*required, "GROUP_RANK", "GROUP_WORLD_SIZE")
    present = {name: env[name] for name in names if env.get(name, "") != ""}
    if not present:
        return Launch(rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, num_nodes=1, launched=False)
    shown = " ".join(f"{name}={value}" for name, value in present.items())
    if missing := [name for name in required if name not in present]:
        raise ValueError(
            f"the launcher set {shown}, but not {', '.join(missing)} [GRPO-107]: start the script with accelerate "
            "launch or torchrun, which set them all (with several machines and DeepSpeed, the accelerate config needs "
            "deepspeed_multinode_launcher: standard), or unset the variables to run one process"
        )
    if bad := [name for name, value in present.items() if not re.fullmatch(r"[0-9]+", value)]:
        raise ValueError(f"{', '.join(bad)} must be whole numbers from 0 up, but the environment has {shown}")
    rank, world_size, local_rank, local_world_size = (int(present[name]) for name in required)

    def contradiction(why: str) -> ValueError:
        return ValueError(f"the launcher's variables contradict each other: {shown}: {why}; unset what is left over")

    if local_world_size < 1 or local_world_size > world_size:
        raise contradiction("LOCAL_WORLD_SIZE must be between 1 and WORLD_SIZE")
    if rank >= world_size or local_rank >= local_world_size or local_rank > rank:
        raise contradiction(
            "ranks count from 0, so RANK < WORLD_SIZE, LOCAL_RANK < LOCAL_WORLD_SIZE, LOCAL_RANK <= RANK"
        )
    if "GROUP_WORLD_SIZE" not in present and world_size % local_world_size:
        raise contradiction("WORLD_SIZE is no multiple of LOCAL_WORLD_SIZE")
    num_nodes = int(present.get("GROUP_WORLD_SIZE", world_size // local_world_size))
    if "GROUP_RANK" not in present and rank % local_world_size != local_rank:
        raise contradiction("without GROUP_RANK, LOCAL_RANK must be RANK modulo LOCAL_WORLD_SIZE")
    node = int(present.get("GROUP_RANK", rank // local_world_size))
    if node >= num_nodes or num_nodes > world_size or (num_nodes == 1) != (local_world_size == world_size):
        raise contradiction(f"they give {num_nodes} nodes, of which this is node {node} (counted from 0)")
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=node,
        num_nodes=num_nodes,
    )


def head_address() -> str:
    """Address of the job's store, on the node of rank 0."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


LAUNCH_FOLDER = "grpo-launch-"
"""Prefix of a launch's own folder for temporary files."""


def agent_pid() -> int | None:
    """Pid of the torchrun agent that started this process; None without one."""
    return os.getppid() if os.environ.get("TORCHELASTIC_RUN_ID") else None


def agent_folder() -> Path | None:
    """Folder of `grpo launch` for temporary files, such as the ranks' error files; None under another launcher."""
    parents = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or "/").parents
    return next((folder for folder in parents if folder.name.startswith(LAUNCH_FOLDER)), None)


def parent_argv() -> list[str]:
    """Return the command line of the launcher that started this process; [] if it cannot be read.

    `grpo launch` runs another launcher's code and passes that launcher's line in `LINE_VARIABLE`.
    """
    try:
        reported = json.loads(os.environ.get(LINE_VARIABLE) or "{}")
        if reported.get("pid") == os.getppid():
            return list(reported["argv"])
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")[:-1]


def accelerate_request(argv: Sequence[str]) -> tuple[int | None, int | None]:
    """Return (num_processes, num_machines) of an `accelerate launch` command line; None for a value it leaves open.

    Follows accelerate: flags override the config file, and without --config_file the default file is read unless --cpu
    is given. (None, None) if `argv` is another command.
    """
    args, config = _read_request(argv)
    asked = {name: getattr(args, name, None) for name in ("num_processes", "num_machines")}
    values = [getattr(config, name, None) if value is None else value for name, value in asked.items()]
    return values[0], values[1]


def asks_for_cpu(argv: Sequence[str]) -> bool:
    """True for `accelerate launch --cpu`, and for a file with `use_cpu: true`.

    Accelerate sets ACCELERATE_USE_CPU for its ranks, but not for those it starts with DeepSpeed (1.15).
    """
    args, config = _read_request(argv)
    return bool(getattr(args, "cpu", False) or getattr(args, "use_cpu", False) or getattr(config, "use_cpu", False))


def check_is_for_cpus(argv: Sequence[str]) -> None:
    """Check an `accelerate launch` command line on a machine without GPUs, for a job that did not ask for CPUs.

    Raises:
        ValueError: the line is for GPUs. DeepSpeed would fail later, with a less helpful message.
    """
    args, config = _read_request(argv)
    precision = getattr(args, "mixed_precision", None) or getattr(config, "mixed_precision", None)
    if str(precision) in ("bf16", "fp16"):
        raise ValueError(
            f"{getattr(args, 'config_file', None) or 'the line of accelerate launch'} is for GPUs (mixed_precision: "
            f"{precision}), and there is none here: on CPUs take configs/cpu.yaml, or write use_cpu: true into it"
        )


def _read_request(argv: Sequence[str]) -> tuple[Any, Any]:
    """Return the parsed options of an `accelerate launch` command line, and its config file.

    Each is None if missing: another command, no file, an unreadable one, or one for managed machines.
    """
    arguments = _accelerate_arguments(argv)
    if arguments is None:
        return None, None
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import ComputeEnvironment

    try:
        args = launch_command_parser().parse_args(arguments)
    except SystemExit:  # argparse refuses by exiting; accelerate accepted its line, so this is another command
        return None, None
    if args.config_file is None and (args.cpu or not os.path.isfile(default_config_file)):
        return args, None
    try:
        config = load_config_from_file(args.config_file)
    except OSError:  # a relative path, and the script has changed its directory: the file is unknown
        return args, None
    return args, config if config.compute_environment == ComputeEnvironment.LOCAL_MACHINE else None


def _accelerate_arguments(argv: Sequence[str]) -> list[str] | None:
    """Return the arguments after `accelerate launch`, with or without the interpreter in front; None for another
    command."""
    words = list(argv)
    if words and Path(words[0]).name.startswith("python"):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if words[0] in ("-X", "-W") else 1]
    match words:
        case ["-m", "accelerate.commands.launch", *arguments]:
            return arguments
        case ["-m", "accelerate.commands.accelerate_cli", "launch", *arguments]:
            return arguments
        case [program, "launch", *arguments] if Path(program).name == "accelerate":
            return arguments
        case [program, *arguments] if Path(program).name == "accelerate-launch":
            return arguments
    return None


def check_accelerate_request(num_processes: int | None, num_machines: int | None, launch: Launch) -> None:
    """Raise ValueError if accelerate started fewer processes than asked for.

    It starts `num_processes // num_machines` on every node and drops the remainder silently.
    """
    if num_processes is None or num_machines is None or num_machines < 1 or num_processes % num_machines == 0:
        return
    raise ValueError(
        f"num_processes {num_processes} is no multiple of num_machines {num_machines}: accelerate started "
        f"{launch.local_world_size} processes on each machine, {launch.world_size} in all [GRPO-104]: write "
        f"num_processes: {either(multiples_around(num_processes, num_machines))} in the accelerate config or on the "
        "command line; nodes that differ take grpo launch --ranks-per-node, or torchrun"
    )


def multiples_around(value: int, step: int) -> list[int]:
    return [multiple for multiple in (value // step * step, value // step * step + step) if multiple > 0]


def either(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values)
