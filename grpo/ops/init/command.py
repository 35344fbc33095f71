"""`grpo init DIR`: a folder with a training script, accelerate's files and the templates for clusters."""

import argparse
import shutil
import sys
from pathlib import Path

FILES = Path(__file__).parents[1] / "files"
# "train": recipes for the project's own script; this folder's script contains its settings.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "train")
SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to write; new, or empty")


def run(args: argparse.Namespace) -> int:
    """Run the command: returns 0, or 1 with the reason on stderr."""
    try:
        written = init(args.folder)
    except (OSError, ValueError) as error:
        print(f"grpo init: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.folder}: {', '.join(written)}\n"
        "train.py     your script: model, data, reward and settings on one page\n"
        "configs/     for --config_file: one per layout, and DeepSpeed's ZeRO-3 for torchrun\n"
        "launch/      for clusters; each file's head says how to start it\n\n"
        f"next: cd {args.folder}, then\n"
        "  grpo launch train.py                                 on all GPUs of this machine\n"
        "  grpo launch train.py --bf16 false --max_steps 2      no GPU: does it run\n"
        "  grpo launch --nodes a,b train.py                     the same line on every node"
    )
    return 0


def init(folder: Path) -> list[str]:
    """Write the files into `folder`, created if missing.

    Returns:
        Contents of `folder`, folders with a slash.

    Raises:
        ValueError: `folder` is not a folder, or not empty.
        OSError: it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder that is new, or empty")
    if inside := sorted(path.name for path in folder.iterdir()) if folder.exists() else []:
        more = f" and {len(inside) - SHOWN} more" if len(inside) > SHOWN else ""
        raise ValueError(f"{folder} is not empty, it holds {', '.join(inside[:SHOWN])}{more}: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(FILES.iterdir()):
        if path.is_dir():  # in a checkout a link to the project's own
            shutil.copytree(path, folder / path.name, ignore=LEFT_OUT)
        elif path.suffix == ".py":
            shutil.copy(path, folder)
    return [path.name + "/" * path.is_dir() for path in sorted(folder.iterdir())]
