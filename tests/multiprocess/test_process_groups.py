"""Groups are made without a hang where the default group is bound to a device, and within a deadline."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import BIN, ROOT, free_port, start

JOB = ROOT / "tests" / "jobs" / "group_job.py"


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [pytest.param(1, 3, marks=pytest.mark.long), (2, 2)])
def test_new_gloo_groups_with_bound_default_group_split_no_communicator(
    nodes: int, ranks_per_node: int, tmp_path: Path
) -> None:
    port = free_port()

    def command(node: int) -> list[str]:
        flags = [f"--nnodes={nodes}", f"--node_rank={node}", f"--nproc_per_node={ranks_per_node}"]
        return [str(BIN / "torchrun"), *flags, "--master_addr=127.0.0.1", f"--master_port={port}", str(JOB), str(out)]

    out = tmp_path / "out"
    world_size = nodes * ranks_per_node
    job = start(command, out, nodes=nodes, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    try:
        codes = job.wait(300)
    finally:
        job.end()
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert sorted(found) == [str(rank) for rank in range(world_size)], job.fail("ranks did not get through")
    for rank, results in found.items():
        late, (kind, said) = results.pop("late", None), results.pop("refused")
        assert kind == ("UnicodeDecodeError" if rank == "0" else "JobFailed")
        assert "no text" in said
        assert rank == "0" or "node 0 (" in said, said
        assert results == {
            "largest": world_size - 1,
            "gathered": [str(rank) for rank in range(world_size)],
            "exchanged": [10 * rank for rank in range(world_size)],
            "decided": [7, [0, None]],
            "bound": True,  # again
            "sprung": results["sprung"],
        }
        assert results["sprung"] == (rank != "0")
        if rank != "1":
            assert "within 2 s [GRPO-307]: ranks [1] did not come" in late
    assert "the process groups have waited for ranks 1 (" in job.output()
    assert all(codes), codes
    assert "node 0 (" in job.output()
    assert re.search(r"rank 1, phase 'process groups': .* within 1 s \[GRPO-307\]", job.output())


FINISHED = """
import sys
import torch
import torch.distributed as dist
from grpo.groups.process_groups import new_gloo_groups

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
(group,) = new_gloo_groups([[0]], timeout_s=60, creation_timeout_s=60)
backend = group._get_backend(torch.device("cpu"))
tensors = [torch.ones(1) for _ in range(100_000)]  # whom gloo's thread lets go one by one, when all is done
backend.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
"""


def test_gloo_group_at_interpreter_exit_ends_without_abort() -> None:
    """They need the interpreter to let go of tensors; without it the process aborts. The group is still held."""
    ended = subprocess.run([sys.executable, "-c", FINISHED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
