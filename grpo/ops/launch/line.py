"""Command line of a node's launcher in `grpo launch`: accelerate's, or torchrun's."""

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from grpo.ops.launch.ranks import short_list
from grpo.ops.rendezvous.expected import Place
from grpo.record.provenance import command_without_secrets

WRAPPER = "grpo.ops.launch.script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Script of every rank."""

    name: str
    """A file, or with `is_module` a module."""
    arguments: tuple[str, ...]
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        return ["-m", WRAPPER, *(["-m"] if self.is_module else []), self.name, *self.arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Rendezvous of the launchers: ranks, this node, and the head's address."""

    ranks_by_node: tuple[int, ...]
    node_rank: int
    head_address: str
    port: int

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_by_node)

    @property
    def ranks(self) -> int:
        """Number of ranks on this node."""
        return self.ranks_by_node[self.node_rank]

    @property
    def processes(self) -> int:
        """Number of ranks on all nodes."""
        return sum(self.ranks_by_node)

    @property
    def nodes_differ(self) -> bool:
        """True if nodes have different numbers of ranks; accelerate starts `num_processes // num_machines` on each
        (1.15)."""
        return len({*self.ranks_by_node}) > 1


def note_misplaced(script: Script, own: Collection[str]) -> None:
    """Warn of the launcher's options among the script's: no error, as a script may have options of these names.

    Args:
        own: names of the launcher's options, with underscores.
    """
    flags = [word.split("=")[0] for word in script.arguments if word.startswith("--")]
    if behind := [flag for flag in flags if flag[2:].replace("-", "_") in own]:
        print(f"[grpo] {script.name} gets {', '.join(behind)}: options of grpo launch go before it", file=sys.stderr)


def own_file(*, on_gpus: bool) -> str:
    """Default file, for ZeRO-3. Without a file accelerate would read the user's default one."""
    return str(files("grpo.ops") / "files" / "configs" / ("1node.yaml" if on_gpus else "cpu.yaml"))


def accelerate_line(script: Script, at: Rendezvous, *, config_file: str) -> list[str]:
    """Make `accelerate launch …` for this node; its options override the file."""
    words = ["accelerate", "launch", "--config_file", config_file]
    words += ["--num_machines", str(at.num_nodes), "--num_processes", str(at.num_nodes * at.ranks)]
    words += ["--machine_rank", str(at.node_rank), "--main_process_port", str(at.port)]
    if at.num_nodes > 1:
        # The default, pdsh, starts the other nodes itself, over ssh.
        words += ["--main_process_ip", at.head_address, "--deepspeed_multinode_launcher", "standard"]
    return [*words, *script.words]


def torchrun_line(script: Script, at: Rendezvous) -> list[str]:
    """Make `torchrun …` for this node."""
    words = ["torchrun", "--nnodes", str(at.num_nodes), "--nproc_per_node", str(at.ranks)]
    words += ["--node_rank", str(at.node_rank), "--master_addr", at.head_address, "--master_port", str(at.port)]
    return [*words, *script.words]


def in_place_of(words: Sequence[str], script: Script, at: Rendezvous) -> tuple[list[str], dict[str, str]]:
    """Return the equivalent torchrun line, and its variables. Raises ValueError for a file refused by accelerate."""
    return torchrun_line(script, at), accelerate_variables(words) if words[0] == "accelerate" else {}


def accelerate_variables(line: Sequence[str]) -> dict[str, str]:
    """Environment variables accelerate would set for its ranks, by its own code, from an `accelerate launch` line.

    Excludes ACCELERATE_USE_CPU, which makes accelerate's ranks skip DeepSpeed (1.15).
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    args, file, has_file_s_precision = _validate_launch_command(launch_command_parser().parse_args(line[2:]))
    args.main_process_port = 0  # accelerate rejects a port in use, and torchrun checks its own
    fields = [*file.deepspeed_config, *(["mixed_precision"] if has_file_s_precision else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as `launch_command` does
    found = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def deepspeed_variables(config_file: str) -> dict[str, str]:
    """Variables for a DeepSpeed file under torchrun, read by transformers; accelerate's launcher sets the same ones
    (1.15)."""
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": config_file,
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    }


def replaced(file: Mapping[str, Any], at: Rendezvous) -> list[str]:
    """List the file's settings of machines and addresses overridden by this job: `num_machines: 4`."""
    here = {
        "num_machines": at.num_nodes,
        "num_processes": at.processes,
        "machine_rank": at.node_rank,
        "main_process_ip": at.head_address,
        "main_process_port": at.port,
    }
    # The files in configs/ have a text in place of ranks and addresses: `grpo launch` fills them in.
    given = {name: value for name, value in file.items() if " " not in str(value)}
    return [f"{name}: {given[name]}" for name, value in here.items() if given.get(name) not in (None, value)]


def check_file(file: Mapping[str, Any], name: str, *, launcher: str, processes: int) -> None:
    """Raise ValueError for the other launcher's file, or one that would start something else."""
    is_accelerates = "distributed_type" in file or "compute_environment" in file
    if launcher == "torchrun" and is_accelerates:
        raise ValueError(
            f"{name} is a file of accelerate's; torchrun takes DeepSpeed's, such as configs/zero3.json: give that, or "
            "leave --launcher torchrun out"
        )
    if launcher == "accelerate" and not is_accelerates:
        raise ValueError(
            f"{name} has no distributed_type: it is no file of accelerate's (configs/1node.yaml is one); DeepSpeed's "
            "goes with --launcher torchrun"
        )
    kind = str(file.get("distributed_type")).upper()
    if launcher == "accelerate" and kind in ("NO", "FALSE", "MULTI_CPU"):  # NO without quotes is YAML's false
        raise ValueError(
            f"{name} has distributed_type: {file['distributed_type']}, by which accelerate starts one process that "
            f"knows no others and hears no signals; this job has {processes}: write DEEPSPEED (as configs/1node.yaml "
            "and configs/cpu.yaml do) or MULTI_GPU, or take --launcher torchrun"
        )


def show(place: Place, at: Rendezvous, why: str, replaced: list[str], words: list[str]) -> None:
    """Print this node's launcher, and the reasons.

    Args:
        why: origin of the numbers of ranks.
        replaced: see `replaced`.
        words: of the launcher.
    """
    where = f", head {place.head} ({at.head_address}:{at.port})" if at.num_nodes > 1 else ""
    ranks = f"{at.ranks} rank{'s' if at.ranks > 1 else ''}"
    ranks += f", {' + '.join(map(str, at.ranks_by_node))} in all" if at.nodes_differ else " per node"
    print(f"[grpo] node {at.node_rank} of {at.num_nodes}: {ranks} ({why}){where}")
    if replaced:
        print(f"[grpo] instead of the file's {', '.join(replaced)}")
    print(f"[grpo] {shlex.join(command_without_secrets(words))}", flush=True)


def plan_line(config_file: str | None, script: Script, at: Rendezvous) -> str:
    """Make the `grpo plan` line of this job; a script's flags unknown to train.py are reported by it."""
    words = ["grpo", "plan", *(["--config_file", config_file] if config_file else [])]
    words += ["--ranks-per-node", short_list(at.ranks_by_node)] if at.nodes_differ else []
    words += [] if at.nodes_differ else ["--num_processes", str(at.processes)]
    words += ["--num_machines", str(at.num_nodes)]
    flags = script.arguments if script.arguments and script.arguments[0].startswith("-") else ()
    return shlex.join(command_without_secrets([*words, "--", *flags] if flags else words))
