"""Of which code a result is: a digest of what a cell exercises, whatever has changed elsewhere."""

from functools import cache
from pathlib import Path

from tests.faults.matrix import NODES, Cell
from tools.code_digest import ROOT, digest_of

ALWAYS = (
    "grpo/*.py",
    "grpo/config/**/*.py",
    "grpo/engine/**/*.py",
    "grpo/faults/**/*.py",
    "grpo/groups/**/*.py",
    "grpo/place/**/*.py",
    "grpo/rollout/*.py",
    "grpo/seam/**/*.py",
    "grpo/weights/**/*.py",
    "tests/faults/judge.py",
    "tests/faults/strike.py",
    "tests/jobs/fault_job.py",
    "tests/support/contract.py",
    "tests/support/left_over.py",
)
"""What starts, runs and ends in every cell; not the checks before a start, nor what a run writes for its readers."""
OF_PHASES = {"save": ("grpo/checkpoints/**/*.py",), "resume": ("grpo/checkpoints/**/*.py",)}
OF_TWO_NODES = ("grpo/ops/launch/**/*.py", "grpo/ops/rendezvous/**/*.py")
OF_REWARDS = ("grpo/rewards/**/*.py",)
OF_SURROUNDINGS = (
    "tests/faults/surroundings.py",
    "tests/support/memory_groups.py",
    "tests/support/networks.py",
    "tests/support/stuck_engine.py",
)


def code_of(cell: Cell) -> str:
    """A digest of what the cell is and of the code that it exercises, as it stands in the working tree."""
    patterns = [*ALWAYS, *OF_PHASES.get(cell.phase, ())]
    patterns += OF_TWO_NODES if NODES[cell.layout] > 1 else ()
    patterns += OF_REWARDS if cell.fault.name.startswith("reward") else ()
    patterns += OF_SURROUNDINGS if cell.fault.act not in ("kill", "stop", "asked") else ()
    paths = (path for pattern in patterns for path in _files(pattern))
    return digest_of(paths, ROOT, also=repr(cell))


@cache
def _files(pattern: str) -> tuple[Path, ...]:
    return tuple(ROOT.glob(pattern))
