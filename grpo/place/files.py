"""Settings a job's files and flags ask for, read before the job runs: CPUs, a backend, number formats.

For the scripts in launch/ and for the doctor, which load neither TRL nor transformers. `grpo plan` reads all of them.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from grpo.place.spelling import did_you_mean

_OF_ACCELERATE = {"distributed_type", "compute_environment"}
_OF_TRAINING = {"model_name_or_path", "output_dir", "learning_rate", "reward_funcs", "num_generations", "max_steps"}
FORMATS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Settings from the files and the command line."""

    use_cpu: bool
    """True if the launcher's file, the training file or a flag asks for CPUs."""
    backend: str | None
    """`ddp_backend`; None: nccl with GPUs, gloo without."""
    dtypes: tuple[str, ...]
    """Dtypes of the tensors exchanged by ranks, by torch's names; always includes float32."""
    reserved_gpus: int | None
    """`vllm_reserved_gpus`."""
    tensor_parallel_size: int | None
    """`vllm_tensor_parallel_size`."""
    dataset_config: str | None
    has_engines: bool
    """True if the nodes host engines; False in TRL's own modes."""


def read_wishes(arguments: Sequence[str], *, config_file: str | None = None, reads_files: bool = True) -> Wishes:
    """Read the settings of a job with these arguments of `train.py`.

    Args:
        arguments: command line. Flags override the file named by `--config`; unknown flags are ignored.
        config_file: the launcher's file, or DeepSpeed's; may also be among the arguments.
        reads_files: False for another script's arguments: files they name may be anything, so none is read.

    Raises:
        ValueError: a file cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    valued = (
        "config",
        "config_file",
        "deepspeed",
        "ddp_backend",
        "model_name_or_path",
        "vllm_mode",
        "dataset_config",
        "vllm_reserved_gpus",
        "vllm_tensor_parallel_size",
    )
    for name in valued:
        # Without a value it is another script's own flag.
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?")
    parser.add_argument("--model", nargs="?", dest="model_name_or_path", default=argparse.SUPPRESS)
    for name in ("use_cpu", "use_vllm", "bf16", "fp16"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const="true")
    flags = {name: value for name, value in vars(parser.parse_known_args(arguments)[0]).items() if value is not None}
    if not reads_files:
        flags = {name: value for name, value in flags.items() if name not in ("config", "config_file", "deepspeed")}
    training = {**_read(flags.get("config"), "--config"), **flags}
    launcher = _read(flags.get("config_file", config_file), "--config_file")
    plugin = launcher.get("deepspeed_config") or {}
    files = (training.get("deepspeed"), plugin.get("deepspeed_config_file"))
    deepspeed = [launcher, *map(_read, files)]
    return Wishes(
        use_cpu=is_on(training.get("use_cpu")) or is_on(launcher.get("use_cpu")),
        backend=training.get("ddp_backend"),
        dtypes=_dtypes(training, str(launcher.get("mixed_precision") or "no"), deepspeed),
        reserved_gpus=_count(training, "vllm_reserved_gpus"),
        tensor_parallel_size=_count(training, "vllm_tensor_parallel_size"),
        dataset_config=training.get("dataset_config"),
        has_engines=training.get("vllm_mode", "local") == "local" and is_on(training.get("use_vllm", True)),
    )


def _count(training: dict[str, Any], name: str) -> int | None:
    """Return a count, or None if unset or not a number; the trainer refuses the latter."""
    value = training.get(name)
    return int(str(value)) if str(value).isdigit() else None


def add_job_arguments(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add the options that describe a job to a command; `wishes_of` reads them."""
    parser.add_argument("--config_file", metavar="FILE", help="of the launcher: accelerate's, or DeepSpeed's")
    parser.add_argument("--config", metavar="FILE", help="the training file of train.py")
    parser.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="flags of train.py, after `--`")


def wishes_of(args: argparse.Namespace) -> Wishes | None:
    """Read the job's settings; None if the command names no job.

    Raises:
        ValueError: a file cannot be read, or a word is neither an option nor its value.
    """
    if args.train_flags and not args.train_flags[0].startswith("-"):
        raise ValueError(f"{args.train_flags[0]} is no option; flags of train.py follow behind ` -- `")
    if not (args.config_file or args.config or args.train_flags):
        return None
    config = ["--config", args.config] if args.config else []
    return read_wishes([*config, *args.train_flags], config_file=args.config_file)


def _dtypes(training: dict[str, Any], mixed_precision: str, deepspeed: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Dtypes in collectives: float32 (norms, losses, gradients reduced in it), and those of weights and gradients."""
    fp16 = is_on(training.get("fp16"))
    bf16 = not fp16 and bool(training.get("model_name_or_path"))  # the defaults: TRL's, and those of the demo
    if training.get("bf16") is not None:
        bf16 = is_on(training["bf16"])
    found = {name for name, is_on in (("bf16", bf16), ("fp16", fp16)) if is_on} or {mixed_precision}
    for file in deepspeed:
        found |= {name for name in ("bf16", "fp16") if is_on((file.get(name) or {}).get("enabled"))}
        found.add(str(file.get("communication_data_type")))
    return ("float32", *sorted({FORMATS[name] for name in found & FORMATS.keys()} - {"float32"}))


def _read(file: Any, option: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file; a mapping is returned as it is. `option`: as in `read_settings`."""
    if not isinstance(file, str):
        return file or {}
    if file.lstrip().startswith("{"):
        return _parse(file, "the settings in braces")
    return read_settings(file, option)


def read_settings(file: str, option: str = "", *, takes_json: bool = True) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Args:
        option: the flag that named the file: for the message, and because `--config` and `--config_file` are mixed up.
        takes_json: the file's reader accepts JSON that is not valid YAML, such as JSON indented with tabs.

    Raises:
        ValueError: the file cannot be read (one line with the position of the error), or belongs to the other option.
    """
    what = f"{option} {file}".strip()
    found = _parse(read_text(Path(file), what), what, takes_json=takes_json)
    if option == "--config" and (keys := _OF_ACCELERATE & found.keys()):
        raise ValueError(f"{what} is accelerate's file ({min(keys)}): the launcher takes it, as --config_file {file}")
    if option == "--config_file" and not _OF_ACCELERATE & found.keys() and (keys := _OF_TRAINING & found.keys()):
        raise ValueError(
            f"{what} is a training file ({min(keys)}): write --config {file}; --config_file takes accelerate's, such "
            "as configs/1node.yaml"
        )
    return found


def read_text(path: Path, what: str) -> str:
    """Return a file's text.

    Raises:
        ValueError: the file cannot be read. The message has the reason, and a similar name from the same folder.
    """
    try:
        return path.read_text()
    except FileNotFoundError:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        where = f"{path.absolute().parent}{did_you_mean(path.name, names)}"
        raise ValueError(f"{what} cannot be read: there is no such file in {where}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def settings_of(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the file named by `--config` on a command line; {} without one. Raises as
    `read_settings`."""
    if "--config" in argv[-1:]:
        raise ValueError("--config is followed by no file: write --config FILE.yaml")
    file = flag_of(argv, "config")
    return {} if file is None else read_settings(file, "--config", takes_json=False)


def flag_of(argv: Sequence[str], name: str) -> str | None:
    """Return the value of `--name` on a command line, even an invalid one."""
    words = [word for arg in argv for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    return dict(itertools.pairwise(words)).get(f"--{name}")


def _parse(text: str, what: str, *, takes_json: bool = True) -> dict[str, Any]:
    try:
        node = yaml.compose(text)
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = "" if mark is None else f": line {mark.line + 1}, column {mark.column + 1}"
        if takes_json and "'\\t'" in problem and text.lstrip().startswith("{"):
            return _parse_json(text, what)
        fix = ": YAML is indented with spaces, not with tabs" if "'\\t'" in problem else ""
        raise ValueError(f"{what} cannot be read{place}: {problem.splitlines()[0]}{fix}") from None
    if not isinstance(found, dict):
        shown = "nothing" if found is None else json.dumps(found, default=str)[:40]
        raise ValueError(f"{what} holds no settings, but {shown}: write lines like `max_steps: 100`")
    keys: dict[str, int] = {}
    for key, _ in node.value:
        if key.value in keys:
            line = key.start_mark.line + 1
            raise ValueError(f"{what}, line {line}: {key.value} stands in line {keys[key.value]} already: remove one")
        keys[key.value] = key.start_mark.line + 1
    return found


def _parse_json(text: str, what: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{what} cannot be read: {place}: {error.msg}") from None


def is_on(value: Any) -> bool:
    """True for `true` as files and command lines write it. DeepSpeed's `auto` is False: another setting decides."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")
