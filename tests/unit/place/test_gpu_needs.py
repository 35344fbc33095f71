"""What GPUs need beside them, on machines that a test makes up: a driver's version, folders of headers, a PATH."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo import GRPOConfig, serving
from grpo.config.refusals import refuse_unsupported
from grpo.ops.doctor import gpus
from grpo.ops.doctor.records import Status
from grpo.ops.launch.agreement import report
from grpo.place import devices, gpu_needs
from grpo.place.devices import count_gpus
from grpo.place.gpu_needs import nccl_doubt, needed_branch, unmet_cpu_need, unmet_needs
from tests.support.doctored import examined

BUILD, OLD, NEW = "CUDA 13.0", "535.129.03", "580.65.06"
VERSION = sysconfig.get_python_version()
CPU_ONLY = {"NCCL_CUMEM_ENABLE": "0", "PATH": "/nowhere"}


class Node:
    """A node with GPUs that has all that they need, until a test takes something away."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self.include = folder / "bin", folder / "include"
        self.bin.mkdir()
        self.include.mkdir()
        self.header, self.driver_file = self.include / "Python.h", folder / "version"
        self.header.touch()
        self.install("gcc")
        self.drive(NEW)
        self.env = {"PATH": str(self.bin)}
        monkeypatch.setattr(gpu_needs, "_DRIVER_VERSION", self.driver_file)
        monkeypatch.setattr(gpu_needs, "_include_folder", lambda: self.include)
        monkeypatch.setattr(gpu_needs, "served_cuda", lambda: 0)
        monkeypatch.setattr(gpus, "query_gpus", lambda: ([], {}))
        self.shows(2, monkeypatch)

    @staticmethod
    def shows(count: int, monkeypatch: pytest.MonkeyPatch, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    def install(self, name: str) -> None:
        (self.bin / name).touch(0o755)

    def drive(self, version: str) -> None:
        self.driver_file.write_text(f"{version}\n")

    def take_away(self, what: str) -> None:
        if what == "driver":
            self.drive(OLD)
        else:
            (self.bin / "gcc" if what == "compiler" else self.header).unlink()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


REMEDIES = {
    "driver": ("GRPO-108", OLD, "CUDA 13.0", "branch 580", "cuda-compat-13-0"),
    "compiler": ("GRPO-109", "CC is unset", "apt install gcc", "export CC="),
    "header": ("GRPO-110", "no Python.h in ", f"apt install python{VERSION}-dev", "--managed-python"),
}


@pytest.mark.parametrize("missing", REMEDIES)
def test_unmet_needs_names_missing_part_and_fix(missing: str, node: Node) -> None:
    assert unmet_needs(BUILD, node.env) == []
    node.take_away(missing)
    (found,) = unmet_needs(BUILD, node.env)
    for part in REMEDIES[missing]:
        assert part in f"{found.what}: {found.fix}"


@pytest.mark.parametrize("missing", REMEDIES)
def test_count_gpus_with_unmet_need_raises_and_doctor_fails(missing: str, node: Node) -> None:
    healthy = examined(node.env)["kernels"]
    assert (healthy.status, count_gpus(node.env, use_cpu=False)) == (Status.PASS, 2)
    node.take_away(missing)
    with pytest.raises(devices.DeviceMistake, match=REMEDIES[missing][0]):
        count_gpus(node.env, use_cpu=False)
    assert count_gpus(node.env, use_cpu=True) == 0
    found = examined(node.env)
    assert found["gpus"].status is Status.PASS
    assert found["kernels"].status is Status.FAIL
    assert REMEDIES[missing][0] in found["kernels"].message
    assert REMEDIES[missing][2] in found["kernels"].message + found["kernels"].fix


def test_every_start_with_missing_header_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.take_away("header")
    monkeypatch.setenv("PATH", str(node.bin))
    monkeypatch.delenv("CC", raising=False)
    assert "GRPO-110" in report(False, {}).mistake
    with pytest.raises(ValueError, match="GRPO-110"):
        GRPOConfig(output_dir="unused", bf16=False, report_to="none")
    assert devices.main([]) == 1


def test_count_gpus_names_all_unmet_needs_at_once(node: Node) -> None:
    for what in REMEDIES:
        node.take_away(what)
    with pytest.raises(devices.DeviceMistake, match=r"GRPO-108.*GRPO-109.*GRPO-110"):
        count_gpus(node.env, use_cpu=False)


def test_gpu_needs_without_gpus_are_not_checked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for what in REMEDIES:
        node.take_away(what)
    node.shows(0, monkeypatch, cuda=None)
    assert count_gpus(CPU_ONLY, use_cpu=False) == 0
    assert not {"kernels", "nccl memory"} & examined(CPU_ONLY).keys()
    node.shows(2, monkeypatch)
    assert not {"kernels", "nccl memory"} & examined(CPU_ONLY, "--use_cpu").keys()


# --- the driver


@pytest.mark.parametrize(
    ("build", "driver", "fits"),
    [
        ("CUDA 13.0", "580.65.06", True),
        ("CUDA 13.2", "580.65.06", True),  # of the same major version
        ("CUDA 13.0", "575.57.08", False),
        ("CUDA 12.9", "525.60.13", True),
        ("CUDA 12.9", "515.105.01", False),
        ("CUDA 11.8", "450.80.02", True),
        ("CUDA 14.0", "600.1", True),  # not known
        ("CUDA 13.0", "", True),
        ("CUDA 13.0", "[N/A]", True),
        ("ROCm 7.0", "6.10", True),
        (None, OLD, True),
    ],
)
def test_unmet_needs_of_driver_branch_match_table(build: str | None, driver: str, fits: bool, node: Node) -> None:
    node.driver_file.unlink()
    assert (unmet_needs(build, node.env, driver=driver) == []) is fits


def test_unmet_needs_with_newer_served_cuda_accepts_old_driver(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward compatibility: an old driver, and libcuda of a newer one beside it."""
    node.drive(OLD)
    monkeypatch.setattr(gpu_needs, "served_cuda", lambda: 13)
    assert unmet_needs(BUILD, node.env) == []
    monkeypatch.setattr(gpu_needs, "served_cuda", lambda: 12)
    assert len(unmet_needs(BUILD, node.env)) == 1


@pytest.mark.parametrize(("answer", "served"), [("*v = 13000; return 0;", 13), ("return 999;", 0), (None, 0)])
def test_served_cuda_returns_major_version_of_libcuda(answer: str | None, served: int, tmp_path: Path) -> None:
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    if answer is None:
        (tmp_path / "libcuda.so.1").write_text("no library")
    else:
        (tmp_path / "cuda.c").write_text(f"int cuDriverGetVersion(int *v) {{ {answer} }}\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=tmp_path, check=True)
    code = "from grpo.place.gpu_needs import served_cuda; print(served_cuda())"
    printed = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert int(printed) == served


def test_count_gpus_without_gpu_names_driver_branch(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.shows(0, monkeypatch)
    node.drive(OLD)
    with pytest.raises(ValueError, match=rf"GRPO-101.*CUDA 13\.0 needs 580 or newer, and {OLD} is loaded"):
        count_gpus(node.env, use_cpu=False)
    node.driver_file.unlink()
    with pytest.raises(ValueError, match=r"GRPO-101.*\(nvidia-smi; CUDA 13\.0 needs 580 or newer\)"):
        count_gpus(node.env, use_cpu=False)
    assert [needed_branch(build) for build in ("CUDA 12.6", "CUDA 14.0", "ROCm 7.0", None)] == [525, None, None, None]


# --- the compiler and its header


@pytest.mark.parametrize(
    ("programs", "cc", "found"),
    [
        (["clang"], None, True),
        (["cc"], None, False),  # Triton does not look for it
        (["cc"], "cc", True),
        (["gcc"], "icx", False),  # CC alone counts
        (["gcc"], "", False),
        ([], "{bin}/mine", False),
        (["mine"], "{bin}/mine", True),
    ],
)
def test_unmet_needs_of_compiler_follow_cc_and_path(
    programs: list[str], cc: str | None, found: bool, node: Node
) -> None:
    node.take_away("compiler")
    for program in programs:
        node.install(program)
    env = node.env | ({} if cc is None else {"CC": cc.format(bin=node.bin)})
    assert (unmet_needs(BUILD, env) == []) is found


def test_unmet_needs_with_missing_cc_names_it(node: Node) -> None:
    (found,) = unmet_needs(BUILD, node.env | {"CC": "icx"})
    assert f"CC=icx is no program on PATH={node.bin}" in found.what


@pytest.mark.parametrize("variable", ["CPATH", "C_INCLUDE_PATH"])
def test_unmet_needs_finds_header_on_include_paths(variable: str, node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    node.take_away("header")
    env = node.env | {variable: f"/nowhere:{elsewhere}"}
    assert len(unmet_needs(BUILD, env)) == 1
    (elsewhere / "Python.h").touch()
    assert unmet_needs(BUILD, env) == []
    assert unmet_needs(BUILD, node.env, include=elsewhere) == []


@pytest.mark.parametrize("scheme", ["posix_local", "posix_prefix"])
def test_include_folder_in_any_scheme_is_posix_prefix(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's own scheme is no scheme elsewhere."""
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: scheme)
    assert gpu_needs._include_folder() == Path(sysconfig.get_path("include", "posix_prefix"))


# --- NCCL


@pytest.mark.parametrize(("value", "doubts"), [(None, False), ("0", True), (" 0 ", True), ("1", False), ("", False)])
def test_nccl_doubt_with_cumem_disabled_warns_in_doctor(value: str | None, doubts: bool, node: Node) -> None:
    env = node.env | ({} if value is None else {"NCCL_CUMEM_ENABLE": value})
    doubt = nccl_doubt(env)
    found = examined(env).get("nccl memory")
    assert (doubt is not None) == (found is not None) == doubts
    if doubt is not None and found is not None:
        assert (found.status, found.message, found.fix) == (Status.WARN, *doubt)
        assert "CUDA IPC" in found.message
        assert "unset NCCL_CUMEM_ENABLE" in found.fix


@pytest.mark.parametrize(("backend", "warned"), [("auto", True), ("nccl", True), ("shm", False)])
def test_engine_spec_with_nccl_cumem_disabled_logs_warning(
    backend: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setattr(serving, "engine_args", lambda *_: {})
    monkeypatch.setattr(serving, "sampling_settings", lambda args: {})
    place, args = SimpleNamespace(devices=("0", "1")), SimpleNamespace(vllm_sync_backend=backend)
    serving.engine_spec(args, SimpleNamespace(never_sampled=()), place)  # type: ignore[arg-type]
    assert ("WARNING: NCCL_CUMEM_ENABLE=0: " in caplog.text) is warned


def no_libnuma(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *_: object) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(gpu_needs.ctypes, "CDLL", load)


def test_cpu_engines_without_libnuma_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unmet_cpu_need() is None
    no_libnuma(monkeypatch)
    need = unmet_cpu_need()
    assert need is not None
    assert "no libnuma.so.1" in need.what
    assert "apt install libnuma1" in need.fix
    with pytest.raises(ValueError, match=r"no libnuma\.so\.1.*GRPO-111.*apt install libnuma1"):
        refuse_unsupported({"args": None})


def test_doctor_of_cpu_job_without_libnuma_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined({}, "--use_cpu")["cpu engines"].status is Status.PASS
    no_libnuma(monkeypatch)
    assert examined({}, "--use_cpu")["cpu engines"].status is Status.FAIL
