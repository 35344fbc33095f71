"""What accelerate was asked to start: it starts less without a word when the numbers do not divide."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
    num_processes, num_machines = args.num_processes, args.num_machines
    if args.config_file is not None or (os.path.isfile(default_config_file) and not args.cpu):
        try:
            config = load_config_from_file(args.config_file)
        except OSError:  # a relative path, and the script has changed its directory: nothing can be said
            return num_processes, num_machines
        if config.compute_environment == ComputeEnvironment.LOCAL_MACHINE:
            num_processes = config.num_processes if num_processes is None else num_processes
            num_machines = config.num_machines if num_machines is None else num_machines
    return num_processes, num_machines


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
