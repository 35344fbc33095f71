"""Read a job from its files on any machine: no process is started, no group is joined."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from grpo.config.checks import check_data_parallel
from grpo.ops.train.arguments import Arguments, parse_arguments
from grpo.ops.train.elsewhere import ConfigElsewhere
from grpo.place.files import read_settings
from grpo.place.launch import accelerate_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Settings of accelerate or torchrun."""

    num_processes: int
    """Training processes of all nodes."""
    num_machines: int
    use_cpu: bool = False
    mixed_precision: str = "no"
    """'no', 'bf16' or 'fp16'."""
    zero_optimization: dict[str, Any] | None = None
    """DeepSpeed's section `zero_optimization`; None if the launcher does not configure DeepSpeed."""
    ranks_by_node: tuple[int, ...] = ()
    """Ranks of each node for `grpo launch`; (): the same number on all nodes, as with accelerate."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return self.ranks_by_node or (self.num_processes // self.num_machines,) * self.num_machines


def read_launcher(
    config_file: str | None,
    num_processes: int | None,
    num_machines: int | None,
    ranks_by_node: tuple[int, ...] | None = None,
) -> Launcher:
    """Read the accelerate file; flags take precedence. Without a file, use torchrun's numbers.

    Args:
        ranks_by_node: `--ranks-per-node` of `grpo launch`: one number for all nodes, or one for each.

    Raises:
        ValueError: accelerate would refuse the file, or numbers are missing or contradict each other.
    """
    if ranks_by_node is not None:
        nodes = num_machines or (len(ranks_by_node) if len(ranks_by_node) > 1 or config_file is None else None)
        nodes = nodes or read_launcher(config_file, None, None).num_machines
        if len(ranks_by_node) not in (1, nodes) or num_processes is not None:
            given = ",".join(map(str, ranks_by_node))
            raise ValueError(
                f"--ranks-per-node {given}, and num_machines is {nodes}: give one number for all nodes or one for "
                "each, and no --num_processes"
            )
        counts = ranks_by_node * (nodes if len(ranks_by_node) == 1 else 1)
        return replace(read_launcher(config_file, sum(counts), nodes), ranks_by_node=counts)
    if config_file is None:
        if num_processes is None:
            raise ValueError(
                "there is nothing to plan: give --config_file FILE (accelerate's), --num_processes N, or --model"
            )
        return Launcher(num_processes=num_processes, num_machines=num_machines or 1)
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    read_settings(config_file, "--config_file")  # reports errors of the file in one line
    config = load_config_from_file(config_file)
    if not isinstance(config, ClusterConfig):
        raise ValueError(f"--config_file {config_file} is for {config.compute_environment}: only clusters are planned")
    if config.distributed_type == "FSDP":
        raise ValueError(
            f"--config_file {config_file} has distributed_type: FSDP, but local mode trains with DeepSpeed, DDP or one "
            "process: take configs/1node.yaml or configs/4node.yaml as a start"
        )
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in config.parallelism_config.items()}
    check_data_parallel(
        ParallelismConfig(**{name: int(size) for name, size in sizes.items() if name.endswith("_size")}),
        f"--config_file {config_file}: parallelism_config",
    )
    flags = {"--num_processes": num_processes, "--num_machines": num_machines}
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    processes, machines = accelerate_request(["accelerate", "launch", "--config_file", config_file, *words, "train.py"])
    if processes is None or processes < 1 or machines is None or machines < 1:
        raise ValueError(f"--config_file {config_file} leaves num_processes or num_machines open: write both into it")
    zero = _zero_optimization(config.deepspeed_config) if config.distributed_type == "DEEPSPEED" else None
    return Launcher(
        num_processes=processes,
        num_machines=machines,
        use_cpu=bool(config.use_cpu),
        mixed_precision=str(config.mixed_precision or "no"),
        zero_optimization=zero,
    )


def _zero_optimization(deepspeed_config: Mapping[str, Any]) -> dict[str, Any]:
    """Build the section as accelerate's plugin does; missing keys have DeepSpeed's defaults."""
    if file := deepspeed_config.get("deepspeed_config_file"):
        return read_deepspeed(file)
    return {
        "stage": int(deepspeed_config.get("zero_stage", 2)),
        "offload_optimizer": {"device": deepspeed_config.get("offload_optimizer_device", "none")},
        "offload_param": {"device": deepspeed_config.get("offload_param_device", "none")},
    }


def zero_of(launcher: Launcher, training: "PlannedConfig") -> dict[str, Any]:
    """Return DeepSpeed's `zero_optimization`: the launcher's, else the training file's.

    Raises:
        ValueError: the file cannot be read.
    """
    zero = launcher.zero_optimization
    if zero is None and training.deepspeed_file is not None:
        zero = read_deepspeed(training.deepspeed_file)
    return zero or {"stage": 0}


def read_deepspeed(config: "str | dict[str, Any]") -> dict[str, Any]:
    """Return the `zero_optimization` section of a DeepSpeed configuration, given as a path or a dict."""
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"the DeepSpeed configuration {config} cannot be read: {error}") from None
    assert isinstance(config, dict)
    return config.get("zero_optimization") or {"stage": 0}


class PlannedConfig(ConfigElsewhere):
    """`GRPOConfig` as on a rank of the planned job."""

    launcher: ClassVar[Launcher] = Launcher(num_processes=1, num_machines=1)
    """Launcher of the job; set on a subclass by `read_training`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.bf16 or self.fp16):
            self.mixed_precision = self.launcher.mixed_precision

    @property
    def num_ranks(self) -> int:
        return self.launcher.num_processes

    world_size = num_ranks


def read_training(config: str | None, flags: Sequence[str], launcher: Launcher) -> Arguments:
    """Parse the arguments as `train.py --config CONFIG FLAGS` would; `training` is a `PlannedConfig`.

    Without a model these are the demo's settings, as in `train.py`.

    Raises:
        ValueError: unknown keys or flags, or an unreadable file.
    """

    config_type = type("ConfigOfThisJob", (PlannedConfig,), {"launcher": launcher})
    argv = [*(["--config", config] if config is not None else []), *flags]
    arguments = parse_arguments(argv, config_type=config_type, world_size=launcher.num_processes)
    model, training = arguments.model, arguments.training
    init_kwargs = {"revision": model.model_revision, "dtype": model.dtype}
    training.model_init_kwargs = {**init_kwargs, **(training.model_init_kwargs or {})}
    return arguments
