"""What accelerate was asked to start: it starts less without a word when the numbers do not divide."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.topology import Launch


def parent_argv() -> list[str]:
    """The command line of the process that started this one; [] when it cannot be read."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")[:-1]


def accelerate_request(argv: Sequence[str]) -> tuple[int | None, int | None]:
    """(num_processes, num_machines) that an `accelerate launch` command line asked for; None for what it left open.

    As accelerate does: the command line goes before the config file, and without --config_file the default one is read
    unless --cpu is given. (None, None) when `argv` is another command.
    """
    args, config = _read_request(argv)
    asked = {name: getattr(args, name, None) for name in ("num_processes", "num_machines")}
    values = [getattr(config, name, None) if value is None else value for name, value in asked.items()]
    return values[0], values[1]


def asks_for_cpu(argv: Sequence[str]) -> bool:
    """Whether a command line is `accelerate launch --cpu`, or its file says `use_cpu: true`.

    Accelerate tells its ranks by ACCELERATE_USE_CPU, but not those that it starts with DeepSpeed (1.15).
    """
    args, config = _read_request(argv)
    return bool(getattr(args, "cpu", False) or getattr(args, "use_cpu", False) or getattr(config, "use_cpu", False))


def _read_request(argv: Sequence[str]) -> tuple[Any, Any]:
    """The parsed options of an `accelerate launch` command line, and the file that it reads; None for what there is
    not: another command, no file, one that cannot be read, one that is not for machines of one's own."""
    arguments = _accelerate_arguments(argv)
    if arguments is None:
        return None, None
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import ComputeEnvironment

    try:
        args = launch_command_parser().parse_args(arguments)
    except SystemExit:  # argparse's way to refuse; accelerate has already taken this line, so it was no such line
        return None, None
    if args.config_file is None and (args.cpu or not os.path.isfile(default_config_file)):
        return args, None
    try:
        config = load_config_from_file(args.config_file)
    except OSError:  # a relative path, and the script has changed its directory: nothing can be said
        return args, None
    return args, config if config.compute_environment == ComputeEnvironment.LOCAL_MACHINE else None


def _accelerate_arguments(argv: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch` in the command line of a process, with or without the interpreter before it."""
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


def check_accelerate_request(num_processes: int | None, num_machines: int | None, launch: "Launch") -> None:
    """Raises ValueError when accelerate started fewer processes than it was asked for.

    It starts `num_processes // num_machines` on every node and says nothing about the rest.
    """
    if num_processes is None or num_machines is None or num_machines < 1 or num_processes % num_machines == 0:
        return
    raise ValueError(
        f"num_processes {num_processes} is no multiple of num_machines {num_machines}: accelerate started "
        f"{launch.local_world_size} processes on each machine, {launch.world_size} in all: write num_processes: "
        f"{either(multiples_around(num_processes, num_machines))} in the accelerate config or on the command line"
    )


def multiples_around(value: int, step: int) -> list[int]:
    return [multiple for multiple in (value // step * step, value // step * step + step) if multiple > 0]


def either(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values)
