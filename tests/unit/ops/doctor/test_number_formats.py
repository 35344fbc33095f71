"""Which formats a backend carries: gloo as it is, gloo with faults, and what of it a job is told."""

import multiprocessing.dummy
import threading
from pathlib import Path

import pytest
import torch

from grpo.ops.doctor import number_formats, report
from grpo.ops.doctor.records import Finding, Status
from grpo.ops.doctor.report import Asked, examine
from grpo.place.files import read_wishes
from tests.support.launching import ROOT

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


def examined(env: dict[str, str], *flags: str) -> dict[str, Finding]:
    """What a node says, by the name of the check, with this build of torch or what a test makes of it."""
    asked = Asked(
        gpus_per_node=None, output_dir=None, model=None, dataset=None, job=read_wishes(flags) if flags else None
    )
    return {finding.check: finding for finding in examine("a", asked, env, peers=()).findings}


def test_formats_that_gloo_carries() -> None:
    """Seen with torch 2.13: all of them."""
    found = examined({})["number formats"]
    assert found.status is PASS, found.message
    assert found.message.startswith("gloo carries float32, bfloat16, float16 (all-reduce, reduce-scatter, all-gather, ")
    job = examined({}, "--model_name_or_path", "m", "--ddp_backend", "gloo")["number formats"]
    assert job.message.startswith("gloo carries float32, bfloat16 (")
    gone = examined({}, "--ddp_backend", "nccl")["number formats"]
    assert (gone.status, "takes two GPUs" in gone.message) == (WARN, True)


def test_formats_are_tried_in_processes_too() -> None:
    """As on GPUs, where NCCL wants them apart."""
    assert number_formats.try_processes("gloo", on_gpus=False, timeout_s=300) == []


def test_processes_that_cannot_start_or_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads in their place."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no link\nat init.cc")

    monkeypatch.setattr(number_formats, "get_context", lambda _: multiprocessing.dummy)
    monkeypatch.setattr(number_formats, "_be_process", refuse)
    with pytest.raises(ChildProcessError, match=r"a nccl rank of this machine could not start: no link$"):
        number_formats.try_processes("nccl")
    is_over = threading.Event()
    threading.Timer(0.3, is_over.set).start()
    monkeypatch.setattr(number_formats, "_be_process", lambda *_: is_over.wait())
    with pytest.raises(TimeoutError, match="two nccl ranks of this machine did not end within 0 s"):
        number_formats.try_processes("nccl", timeout_s=0.1)


class BrokenGloo:
    """A gloo group that cannot do some things; the rest goes to a real one."""

    def __init__(self, *args: object) -> None:
        self.group = REAL_GLOO(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(self.group, name)

    def _reduce_scatter_base(self, result: torch.Tensor, given: torch.Tensor) -> object:
        if given.dtype is torch.bfloat16:
            raise RuntimeError("Invalid scalar type\nException raised from reduce_scatter")
        return self.group._reduce_scatter_base(result, given)

    def allreduce(self, tensors: list[torch.Tensor]) -> object:
        if tensors[0].dtype is torch.float16:
            tensors[0][3:] += 1  # adds up wrongly, and says nothing
        return self.group.allreduce(tensors)


REAL_GLOO = torch.distributed.ProcessGroupGloo


def test_a_format_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", BrokenGloo)
    broken = number_formats.try_gloo()
    assert [(one.operation, one.dtype) for one in broken] == [("reduce-scatter", "bfloat16"), ("all-reduce", "float16")]
    assert [one.why for one in broken] == ["Invalid scalar type", "element 3 is 14 and should be 12"]

    bf16 = examined({}, "--model_name_or_path", "m")["number formats"]
    assert bf16.status is FAIL
    assert bf16.message == (
        "gloo does not carry bfloat16 (two ranks of this node, on CPUs): reduce-scatter: Invalid scalar type"
    )
    assert "communication_data_type: fp32 in DeepSpeed's file" in bf16.fix
    assert "bf16: false" in bf16.fix
    assert "ddp_backend: nccl" in bf16.fix
    assert examined({}, "--model_name_or_path", "m", "--bf16", "false")["number formats"].status is PASS
    # Nobody has said what the job trains in.
    unknown = number_formats.judge_formats(broken, where="here", backend="gloo", job=None)
    assert [finding.status for finding in unknown] == [WARN, WARN]
    assert unknown[0].fix.startswith("if the job trains in bfloat16: ")
    worst = [number_formats.Broken(operation="broadcast", dtype="float32", why="no")]
    (always,) = number_formats.judge_formats(worst, where="here", backend="nccl", job=None)
    assert (always.status, "communication_data_type" in always.fix) == (FAIL, False)


def test_ranks_that_do_not_end_are_no_verdict_on_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(backend: str, dtypes: object) -> list[number_formats.Broken]:
        raise TimeoutError(f"two {backend} ranks of this machine did not end within 18 s")

    monkeypatch.setattr(number_formats, "try_processes", silent)
    (finding,) = report._number_formats(None, 8)
    assert (finding.status, finding.message) == (WARN, "two nccl ranks of this machine did not end within 18 s")


@pytest.mark.parametrize(
    ("flags", "launcher", "dtypes"),
    [
        ([], "4node.yaml", ["bfloat16"]),  # the demo has no format of its own: the launcher's counts
        ([], "cpu.yaml", []),
        (["--model_name_or_path", "m"], "cpu.yaml", ["bfloat16"]),  # TRL's default
        (["--model_name_or_path", "m", "--bf16", "false"], "cpu.yaml", []),
        (["--fp16"], "zero3.json", ["float16"]),
        (["--config", "configs/train/gsm8k_qwen2.5_7b.yaml"], None, ["bfloat16"]),
        (["--bf16", "--deepspeed", '{"communication_data_type": "fp16"}'], None, ["bfloat16", "float16"]),
        (["--deepspeed", '{"bf16": {"enabled": true}}'], None, ["bfloat16"]),
    ],
)
def test_formats_of_a_job(flags: list[str], launcher: str | None, dtypes: list[str]) -> None:
    flags = [str(ROOT / flag) if flag.startswith("configs/") else flag for flag in flags]
    file = None if launcher is None else str(ROOT / "configs" / launcher)
    assert read_wishes(flags, config_file=file).dtypes == ("float32", *dtypes)


def test_a_machine_where_gloo_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no address to listen at\nat gloo/transport")

    monkeypatch.setattr("torch.distributed.ProcessGroupGloo", refuse)
    with pytest.raises(ChildProcessError, match=r"could not start: no address to listen at$"):
        number_formats.try_gloo(["float32"])


def test_a_file_that_holds_no_settings(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match=r"train.yaml holds no settings, but \[1\]"):
        read_wishes(["--config", str(tmp_path / "train.yaml")])


def test_a_model_and_a_dataset_are_looked_for_where_asked(tmp_path: Path) -> None:
    nothing = tmp_path / "model"
    nothing.mkdir()
    asked = Asked(gpus_per_node=None, output_dir=None, model=str(nothing), dataset=str(tmp_path), job=None)
    found = {finding.check: finding.status for finding in examine("a", asked, {}, peers=()).findings}
    assert (found["model"], found["dataset"]) == (FAIL, PASS)
