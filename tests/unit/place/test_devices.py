"""From the environment that a scheduler makes to what ranks and engines see of it: no process and no GPU.

What a value of CUDA_VISIBLE_DEVICES means is asked of torch's own parser, and of vLLM's where it has one.
"""

import ast
import importlib.util
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.cuda import _parse_visible_devices

from grpo import GRPOConfig
from grpo.engine.environment import engine_environment
from grpo.groups.agreement import check_nodes
from grpo.ops.plan.job import PlannedConfig, read_launcher, read_training
from grpo.place import devices
from grpo.place.devices import DeviceMistake, count_gpus, device_tokens
from grpo.place.files import read_wishes
from grpo.place.launch import asks_for_cpu
from grpo.place.topology import NodeTopology, read_topology
from tests.support.launching import ROOT
from tests.support.made_up_jobs import torchrun_env

UUIDS = [f"GPU-{index}{index}c4d1e2-90ab-cdef-0123-456789abcdef" for index in range(8)]


# --- names


@pytest.mark.parametrize(
    ("visible", "count", "tokens"),
    [
        (None, 3, ("0", "1", "2")),
        (None, 0, ()),
        ("", 0, ()),
        ("4,5,6,7", 4, ("4", "5", "6", "7")),
        (" 6 , 2", 2, ("6", "2")),
        ("3,1,-1,0", 2, ("3", "1")),
        ("3,,0", 1, ("3",)),
        ("-1", 0, ()),
        ("0,0,1", 0, ()),  # twice: CUDA shows nothing
        ("1,2,9", 2, ("1", "2")),  # there is no GPU 9
        ("1x,+2", 2, ("1", "2")),
        (f"1,{UUIDS[0]}", 1, ("1",)),
        ("1,MIG-8a", 1, ("1",)),
        (",".join(UUIDS[:2]), 2, tuple(UUIDS[:2])),
        (", ".join(UUIDS[:2]), 2, tuple(UUIDS[:2])),
        (", ".join(UUIDS[:2]), 1, (UUIDS[0],)),  # torch ends the list at the space
        (f"{UUIDS[0]},1", 1, (UUIDS[0],)),
        (f"{UUIDS[0]},{UUIDS[0]}", 0, ()),
    ],
)
def test_device_tokens_match_table(visible: str | None, count: int, tokens: tuple[str, ...]) -> None:
    assert device_tokens({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, count) == tokens


@pytest.mark.parametrize("visible", ["0,1", "", "0,1,1,2", "0,1,-1,2"])
def test_device_tokens_with_fewer_names_than_gpus_raises(visible: str) -> None:
    with pytest.raises(ValueError, match="sees 3 GPUs, but CUDA_VISIBLE_DEVICES="):
        device_tokens({"CUDA_VISIBLE_DEVICES": visible}, 3)


def test_device_tokens_of_uuid_prefix_raises() -> None:
    """CUDA and torch take it, and NVML, which vLLM asks, does not."""
    visible = f"{UUIDS[0][:12]},{UUIDS[1][:12]}"
    with pytest.raises(
        ValueError, match=rf"beginning of its UUID, {UUIDS[0][:12]}, and vLLM wants all of it: write wh"
    ):
        device_tokens({"CUDA_VISIBLE_DEVICES": visible}, 2)


@pytest.mark.parametrize("visible", ["MIG-3c,MIG-4d", "MIG-GPU-8a/1/0", " MIG-3c"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_device_tokens_of_mig_slices_raises(visible: str, count: int) -> None:
    with pytest.raises(ValueError, match=rf"is '{visible}', .* \[GRPO-106\]"):
        device_tokens({"CUDA_VISIBLE_DEVICES": visible}, count)


# --- from the scheduler to the engine


class Node:
    """All ranks of one node and its engines, with the physical GPUs that each of them ends on.

    Args:
        shown: the scheduler's value of CUDA_VISIBLE_DEVICES for each rank, or one for all; None: it sets none.
        gpus: of the machine.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        shown: "str | list[str | None] | None",
        *,
        ranks: int,
        gpus: int = 8,
        **settings: int | None,
    ) -> None:
        self._monkeypatch, self._gpus = monkeypatch, gpus
        values = shown if isinstance(shown, list) else [shown] * ranks
        self.topologies: list[NodeTopology] = []
        self.trains: list[int] = []
        for rank, value in enumerate(values):
            env = torchrun_env(rank, ranks, ranks) | ({} if value is None else {"CUDA_VISIBLE_DEVICES": value})
            seen = self.sees(env)
            monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: len(seen))
            asked = {"reserved_gpus": None, "tensor_parallel_size": 1, "engines_per_node": None, **settings}
            topology = read_topology(use_cpu=False, env=env, **asked)  # type: ignore[arg-type]
            self.topologies.append(topology)
            self.trains.append(seen[rank])  # a rank takes the device of its local rank
        check_nodes(self.topologies)
        self.environments = [
            engine_environment(
                env,
                devices=names,
                tensor_parallel_size=topology.tensor_parallel_size,
                engines_per_node=topology.num_engines,
            )
            for names in topology.engines
        ]
        self.serves = [self.sees(environment) for environment in self.environments]

    def owned(self) -> list[int]:
        """By ranks and engines, sorted; twice where two have the same."""
        return sorted(itertools.chain(self.trains, *self.serves))

    def sees(self, env: Mapping[str, str]) -> list[int]:
        """Physical GPUs, in the order in which a process with this environment numbers them."""
        with self._monkeypatch.context() as context:
            context.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if "CUDA_VISIBLE_DEVICES" in env:
                context.setenv("CUDA_VISIBLE_DEVICES", env["CUDA_VISIBLE_DEVICES"])
            found = _parse_visible_devices()
        return [index if isinstance(index, int) else UUIDS.index(index) for index in found][: self._gpus]


@pytest.mark.parametrize(
    ("shown", "trains", "serves"),
    [
        pytest.param(None, [0, 1, 2, 3, 4, 5, 6], [[7]], id="nobody sets it"),
        pytest.param("0,1,2,3,4,5,6,7", [0, 1, 2, 3, 4, 5, 6], [[7]], id="each task is shown all"),
        pytest.param("7,6,5,4,3,2,1,0", [7, 6, 5, 4, 3, 2, 1], [[0]], id="in another order"),
        pytest.param(",".join(UUIDS), [0, 1, 2, 3, 4, 5, 6], [[7]], id="UUIDs"),
        pytest.param(",".join(UUIDS[::-1]), [7, 6, 5, 4, 3, 2, 1], [[0]], id="UUIDs in another order"),
    ],
)
def test_placement_on_whole_node_gives_each_gpu_one_owner(
    shown: str | None, trains: list[int], serves: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, shown, ranks=7)
    assert (node.trains, node.serves) == (trains, serves)
    assert node.owned() == list(range(8)), "each GPU has one owner"


@pytest.mark.parametrize(
    ("shown", "settings", "trains", "serves"),
    [
        pytest.param("1,3,4,6,7", {}, [1, 3], [[4], [6], [7]], id="three engines"),
        pytest.param("1,3,6,4", {"tensor_parallel_size": 2}, [1, 3], [[6, 4]], id="tensor parallel 2"),
        pytest.param(
            ",".join(UUIDS[index] for index in (6, 1, 5, 2, 7, 0)),
            {"tensor_parallel_size": 2, "reserved_gpus": 4},
            [6, 1],
            [[5, 2], [7, 0]],
            id="UUIDs, two engines of two",
        ),
    ],
)
def test_placement_on_part_of_node_uses_visible_gpus(
    shown: str, settings: dict[str, int], trains: list[int], serves: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, shown, ranks=2, **settings)
    assert (node.trains, node.serves) == (trains, serves)


@pytest.mark.parametrize("names", [[str(index) for index in range(8)], UUIDS], ids=["ids", "UUIDs"])
def test_placement_of_two_jobs_on_node_shares_no_gpu(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    halves = names[0::2], names[1::2]
    jobs = [Node(monkeypatch, ",".join(half), ranks=3) for half in halves]
    assert [job.owned() for job in jobs] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [job.serves for job in jobs] == [[[6]], [[7]]]


def test_placement_with_gpus_per_task_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """--gpus-per-task: the engine's GPU is nobody's, and every rank's list is another one."""
    with pytest.raises(ValueError, match=r"GRPO-102.*--gpus-per-node instead of"):
        Node(monkeypatch, ["0", "1", "2"], ranks=3)
    with pytest.raises(
        ValueError, match=r"make them visible to every rank .*--gpus-per-node.* instead of --gpus-per-ta"
    ):
        Node(monkeypatch, ["0,1", "2,3", "4,5"], ranks=3)
    with pytest.raises(ValueError, match=r"visible GPUs differs between ranks of one node.*not --gpus-per-task"):
        Node(monkeypatch, ["0,1,2", "3,4,5"], ranks=2)


# --- a Slurm that shows none


def looks_built_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None, gpus: int, *, hip: str | None = None) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_count_gpus_of_gpu_build_without_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake(
        cuda: str | None = "12.9", gpus: int = 0, *, hip: str | None = None, use_cpu: bool = False, **env: str
    ) -> str | None:
        looks_built_for(monkeypatch, cuda, gpus, hip=hip)
        try:
            assert count_gpus(env, use_cpu=use_cpu) == gpus
        except DeviceMistake as error:
            return str(error)
        return None

    assert mistake(cuda=None) is mistake(gpus=8) is mistake(use_cpu=True) is None
    text = mistake()
    assert text is not None
    for part in ("CUDA 12.9", "[GRPO-101]", "CUDA_VISIBLE_DEVICES is unset", "--gres=gpu:8", "--gpus-per-node=8"):
        assert part in text
    assert "driver" in text
    assert "use_cpu: true" in text
    assert "sees no GPU (CUDA_VISIBLE_DEVICES='')" in str(mistake(CUDA_VISIBLE_DEVICES=""))
    assert "built for ROCm 7.0" in str(mistake(cuda=None, hip="7.0"))


def test_torch_build_names_cuda_or_rocm_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, hip, build in ((None, None, None), ("12.9", None, "CUDA 12.9"), (None, "7.0", "ROCm 7.0")):
        looks_built_for(monkeypatch, cuda, 0, hip=hip)
        assert devices.torch_build() == build


def test_count_gpus_with_unusable_gpus_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts GPUs even where the driver is too old for this build's CUDA."""
    looks_built_for(monkeypatch, "12.9", 8)
    assert count_gpus({}, use_cpu=False) == 8
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees no GPU"):
        count_gpus({}, use_cpu=False)
    assert count_gpus({}, use_cpu=True) == 0
    assert count_gpus({"ACCELERATE_USE_CPU": "true"}, use_cpu=False) == 0
    with pytest.raises(ValueError, match=r"\(MIG\)"):
        count_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"}, use_cpu=False)


def test_config_of_gpu_build_without_gpu_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def config(**settings: object) -> GRPOConfig:
        return GRPOConfig(output_dir="unused", bf16=False, report_to="none", **settings)

    assert config().use_cpu, "this build runs on CPUs without being asked to"
    looks_built_for(monkeypatch, "12.9", 0)
    with pytest.raises(ValueError, match=r"built for CUDA 12.9, but sees no GPU.*--gres=gpu:8.*use_cpu: true"):
        config()
    assert config(use_cpu=True).use_cpu
    launcher = tmp_path / "cpu.yaml"
    launcher.write_text((ROOT / "configs" / "cpu.yaml").read_text())
    command = ["/usr/bin/python3", "/venv/bin/accelerate", "launch", "--config_file", str(launcher), "train.py"]
    monkeypatch.setattr("grpo.config.parent_argv", lambda: command)
    assert config().use_cpu, "the launcher's file asks for CPUs"
    launcher.write_text(launcher.read_text().replace("use_cpu: true", "use_cpu: false"))
    with pytest.raises(ValueError, match="sees no GPU"):
        config()
    looks_built_for(monkeypatch, "12.9", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    with pytest.raises(ValueError, match=r"slices of a GPU \(MIG\)"):
        config()


def test_config_with_gpu_launcher_file_on_cpu_machine_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before DeepSpeed finds that the script's formats are others."""
    words = ["accelerate", "launch", "--config_file", str(ROOT / "configs" / "1node.yaml"), "train.py"]
    monkeypatch.setattr("grpo.config.parent_argv", lambda: words)
    looks_built_for(monkeypatch, None, 0)
    with pytest.raises(ValueError, match=r"1node\.yaml is for GPUs \(mixed_precision: bf16\).*configs/cpu\.yaml"):
        GRPOConfig(output_dir="unused", report_to="none")
    assert GRPOConfig(output_dir="unused", report_to="none", use_cpu=True).use_cpu
    looks_built_for(monkeypatch, "12.9", 8)
    assert not asks_for_cpu(words)


def test_plan_config_without_gpu_has_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    looks_built_for(monkeypatch, "12.9", 0)
    launcher = read_launcher(str(ROOT / "configs" / "4node.yaml"), None, None)
    planned = read_training(None, [], launcher).training
    assert isinstance(planned, PlannedConfig)
    assert planned.refusal is None


def test_use_cpu_is_read_from_flags_and_files(tmp_path: Path) -> None:
    assert asks_for_cpu(["accelerate", "launch", "--cpu", "train.py"])
    assert not asks_for_cpu(["accelerate", "launch", "--config_file", str(ROOT / "configs/1node.yaml"), "train.py"])
    assert not asks_for_cpu(["torchrun", "train.py", "--cpu"])
    recipe = tmp_path / "train.yaml"
    recipe.write_text("use_cpu: true\nbf16: false\n")
    cpu, gpu = (str(ROOT / "configs" / name) for name in ("cpu.yaml", "4node.yaml"))
    for arguments, asks in (
        ([], False),
        (["--use_cpu"], True),
        (["--use_cpu", "True", "--max_steps=5"], True),
        (["--use-cpu=true"], True),
        (["--config", str(recipe)], True),
        ([f"--config={recipe}", "--use_cpu", "false"], False),
        (["--config_file", cpu], True),
        (["--config_file", gpu], False),
    ):
        assert read_wishes(arguments).use_cpu is asks, arguments
    with pytest.raises(ValueError, match=r"gone\.yaml cannot be read"):
        read_wishes(["--config", "gone.yaml"])


# --- ROCm


def vllm_accepts_rocm_lists(env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs vLLM's own comparison, taken out of its source: the module itself cannot be imported without a GPU."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "platforms" / "rocm.py").read_text()
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "_sync_hip_cuda_env_vars"]
    scope: dict = {"os": os}
    exec(compile(ast.Module([function], []), "rocm.py", "exec"), scope)
    with monkeypatch.context() as context:
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            context.delenv(name, raising=False)
            if name in env:
                context.setenv(name, env[name])
        scope["_sync_hip_cuda_env_vars"]()


def test_device_tokens_with_rocm_lists_raises_with_working_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {"HIP_VISIBLE_DEVICES": "4,5,6,7"}
    engine = engine_environment(inherited, devices=("7",), tensor_parallel_size=1, engines_per_node=1)
    with pytest.raises(ValueError, match="Inconsistent GPU visibility"):  # this is what is kept from happening
        vllm_accepts_rocm_lists(engine, monkeypatch)
    with pytest.raises(
        ValueError, match=r"has HIP_VISIBLE_DEVICES=4,5,6,7.*export CUDA_VISIBLE_DEVICES=4,5,6,7; unset HIP_VISIBLE_DEV"
    ):
        device_tokens(inherited, 4, rocm=True)
    both = {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "4,5"}
    with pytest.raises(ValueError, match="=THE GPUS OF THIS JOB; unset HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES"):
        device_tokens(both, 2, rocm=True)
    # As the error says to do it: one list, which torch's build for ROCm and vLLM's read alike.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    reported = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    engine = engine_environment(
        reported, devices=device_tokens(reported, 4, rocm=True)[-1:], tensor_parallel_size=1, engines_per_node=1
    )
    vllm_accepts_rocm_lists(engine, monkeypatch)
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", engine["CUDA_VISIBLE_DEVICES"])
    assert _parse_visible_devices() == [7]


def test_device_tokens_of_cuda_build_ignore_rocm_lists() -> None:
    """Without GRES flags Slurm exports the lists of every maker: a build for CUDA has no use for them."""
    env = {"CUDA_VISIBLE_DEVICES": "2,3", "ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}
    assert device_tokens(env, 2) == ("2", "3")


def test_devices_command_prints_gpu_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    looks_built_for(monkeypatch, "12.9", 8)
    assert (devices.main(["--max_steps", "5"]), capsys.readouterr().out) == (0, "8\n")
    assert (devices.main(["--use_cpu"]), capsys.readouterr().out) == (0, "0\n")
    looks_built_for(monkeypatch, "12.9", 0)
    assert devices.main(["--max_steps", "5"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(r".*CUDA 12\.9.* \[GRPO-101\]", captured.err)
    assert devices.main(["--config", "gone.yaml"]) == 1
    assert "gone.yaml" in capsys.readouterr().err
