"""A node examined by the doctor."""

from argparse import Namespace
from types import SimpleNamespace

from grpo.ops.doctor.records import Finding
from grpo.ops.doctor.report import examine
from grpo.place.files import read_wishes


def examined(env: dict[str, str], *flags: str) -> dict[str, Finding]:
    """What a node says, by the name of the check, with this build of torch or what a test makes of it."""
    asked, job = Namespace(gpus_per_node=None, output_dir=None, model=None, dataset=None), None
    if flags:
        job = read_wishes(flags)
    return {finding.check: finding for finding in examine("a", asked, job, env, peers=()).findings}


GIB = 1 << 30


def space(free_bytes: int, *, inodes: int = 10**6, all_inodes: int = 10**7) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_blocks=10**13, f_favail=inodes, f_files=all_inodes)
