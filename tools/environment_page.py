"""The list of environment variables: `python -m tools.environment_page` writes docs/environment.md.

A test holds the names here against those that the package, its launcher files and the Makefile read.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from tools.markdown import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "environment.md"
READ_IN = (
    "grpo/**/*.py",
    "launch/*",
    "configs/*",
    "Makefile",
    "train.py",
    "docker/*",
    "tests/slurm.py",
    "tests/chromium.py",
)

RUN = {
    "GRPO_LOG": ("`info`", "Level of the log: `debug`, or by package: `weights,engine`, `warning,faults=debug`."),
    "GRPO_TRACEBACK": (
        "`0`",
        "`1` prints tracebacks of configuration errors, and of ranks that end for another one, too.",
    ),
    "GRPO_OUTPUT_DIR": ("the script's", "Overrides `output_dir`. `grpo launch --output-dir` sets it."),
    "GRPO_RESUME": ("the script's", "Overrides `resume_from_checkpoint`. `grpo launch --resume` sets it."),
    "GRPO_JOB": ("`SLURM_JOB_ID`, else host and process", "Id of the job: the attempts of one job share it."),
    "GRPO_ATTEMPT": ("`SLURM_RESTART_COUNT`, else counted", "Number of this attempt within the job, from 0."),
    "GRPO_STOP_LEAD_S": (
        "none",
        "Seconds between the scheduler's signal and the end of the job; the trainer warns when a checkpoint does "
        "not fit.",
    ),
    "GRPO_ENGINE_ENV": (
        "none",
        "Secrets to pass to engines, by name or prefix: `NAME,PREFIX_*`. Engines inherit no others but the Hub's "
        "token.",
    ),
    "GRPO_CODE_REWARD_UNISOLATED": (
        "`0`",
        "`1` lets `code_reward` run programs without a sandbox where the machine gives none. Read "
        "[Recipes](recipes.md#rewards-for-code) first.",
    ),
}
TEMPLATES = {
    "GRPO_ENVIRONMENT": (
        "`.venv/bin/activate`",
        "File to source first: a virtual environment, or `module load` lines.",
    ),
    "GRPO_CONFIG_FILE": (
        "none; `configs/zero3.json` with torchrun",
        "The launcher's file: accelerate's YAML, or DeepSpeed's JSON.",
    ),
    "GRPO_RANKS_PER_NODE": ("counted", "Training processes on each node."),
    "GRPO_STOP_S": ("600", "Longest step and checkpoint, in seconds; not above the seconds of `--signal`."),
    "GRPO_MAX_CRASHES": ("3", "Crashes in a row without a newer complete checkpoint, after which the job ends."),
    "GRPO_SPARE_NODES": ("0", "How many of `--nodes` wait to replace one that is lost or faulty."),
}
OTHERS = {
    "CUDA_VISIBLE_DEVICES": (
        "all",
        "GPUs of this node: the ranks take the first ones, the engines the last. Numbers or UUIDs; no MIG slices.",
    ),
    "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME": (
        "none",
        "Network interface for NCCL and for gloo. Set both where nodes have several.",
    ),
    "PYTORCH_ALLOC_CONF": (
        "none",
        "`expandable_segments:True` helps against fragmented GPU memory ([out of memory](out_of_memory.md)).",
    ),
    "OMP_NUM_THREADS": (
        "cores divided by ranks",
        "Threads of each rank on CPUs; `grpo launch` sets it where you do not.",
    ),
    "CC": ("gcc or clang", "C compiler for Triton, on GPUs."),
    "TMPDIR": ("`/tmp`", "Folder for temporary files: sockets, the model's description for an engine."),
    "VLLM_CACHE_ROOT, TORCHINDUCTOR_CACHE_DIR": (
        "in `/tmp`",
        "Folders for compiled kernels of engines; choose one of the node, with file locks.",
    ),
    "VLLM_*": (
        "vLLM's",
        "Reach the engines. Engines default to `VLLM_LOGGING_LEVEL=ERROR` and `VLLM_NO_USAGE_STATS=1`.",
    ),
    "HF_HOME, HF_HUB_OFFLINE, HF_TOKEN": (
        "Hugging Face's",
        "Cache, offline mode and token of the Hub; engines get them too.",
    ),
    "WANDB_*, TRACKIO_*, TENSORBOARD_LOGGING_DIR": (
        "the tracker's",
        "Read by the trackers ([trackers](trackers.md)); `WANDB_RUN_ID` is set for you unless you set it.",
    ),
    "SLURM_*, PET_*, JOB_COMPLETION_INDEX, NNODES": (
        "the scheduler's",
        "Which nodes there are, and which one this is ([launching](launch.md#what-each-schedulers-variables-mean)).",
    ),
    "ACCELERATE_*": (
        "the launcher's",
        "Set by `accelerate launch` from its file. `ACCELERATE_USE_CPU=true` asks for CPUs.",
    ),
    "PIP_EXTRA_INDEX_URL": (
        "pip's",
        "Where pip finds torch's CPU build for `make install` ([installing](install.md)).",
    ),
}
DEVELOPMENT = {
    "GRPO_TEST_SLURM": ("none", "`install`: `make test` installs Debian's Slurm for its tests, as root."),
    "GRPO_TEST_CHROMIUM": ("none", "`install`: the same for the browser that opens the HTML report."),
}
INTERNAL = {
    "GRPO_ENGINE_FOLDER": "private folder of an engine, for its own processes",
    "GRPO_LAUNCHED": "when the launcher began",
    "GRPO_STARTED": "when the attempt began",
    "GRPO_LAUNCH_LINE": "the command that `grpo launch` ran",
    "GRPO_RUN_NOTE": "file with the place of the run, for the node's launcher",
}
"""Set by one process of a job for another."""

HEAD = """# Environment variables

One list. You can run every job without setting any of them. Options of the trainer are not here: they are fields of
[`GRPOConfig`](options.md).
"""


def read_by_the_code() -> set[str]:
    """Names that begin with `GRPO_` in the package, in its launcher files and in what starts the tests."""
    files = (path for pattern in READ_IN for path in sorted(ROOT.glob(pattern)) if path.is_file())
    return {name for path in files for name in re.findall(r"\bGRPO_[A-Z][A-Z_]*[A-Z]\b", path.read_text())}


def parts() -> Iterator[str]:
    yield HEAD
    for heading, variables in (
        ("A run", RUN),
        ("Slurm templates and `launch/local_2node.sh`", TEMPLATES),
        ("Of other programs", OTHERS),
        ("Tests", DEVELOPMENT),
    ):
        rows = [[", ".join(f"`{name}`" for name in names.split(", ")), *cells] for names, cells in variables.items()]
        yield f"## {heading}\n\n{table(['variable', 'default', 'meaning'], rows)}\n"
    listed = "; ".join(f"`{name}` ({meaning})" for name, meaning in INTERNAL.items())
    yield f"## Set by the job itself\n\nDo not set these: {listed}.\n"


def page() -> str:
    return "\n".join(parts())


if __name__ == "__main__":
    PAGE.write_text(page())
