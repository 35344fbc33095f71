"""`grpo launch`: the same line for every node, real launchers, and a script without a trainer."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from grpo.ops.launch.faulty_host import read_faulty_host
from tests.support.launching import (
    BIN,
    ROOT,
    end_tree,
    free_port,
    metrics_in,
    tiny_job_script,
)

MISTAKE_JOB = str(ROOT / "tests" / "jobs" / "mistake_job.py")
ADDRESSES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
END_S = 240  # 8 s alone
DONE, FAILED, START_AGAIN, INTERRUPTED = 0, 1, 85, 130


@dataclass
class Nodes:
    """Nodes of one job, all on this machine."""

    folder: Path
    port: int = field(default_factory=free_port)
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self, node: int, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{node}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(BIN / "grpo"), "launch", "--port", str(self.port), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(env or {})},
            )
        self.started.append(process)
        return process

    def wait(self) -> list[int]:
        return [process.wait(END_S) for process in self.started]

    def said(self, node: int) -> str:
        return (self.folder / f"{node}.log").read_text()

    def reported(self, rank: int) -> dict:
        return json.loads((self.folder / f"{rank}.json").read_text())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    running = Nodes(tmp_path / "job")
    yield running
    for process in running.started:
        end_tree(process)


def by_names(node: int, nodes: Nodes) -> tuple[list[str], dict[str, str]]:
    return ["--nodes", ",".join(ADDRESSES[:2]), "--node-rank", str(node)], {}


def by_hostfile(node: int, nodes: Nodes) -> tuple[list[str], dict[str, str]]:
    nodes.folder.mkdir(exist_ok=True)
    (nodes.folder / "hosts").write_text("".join(f"{address} slots=8\n" for address in ADDRESSES))
    return ["--hostfile", str(nodes.folder / "hosts"), "--node-rank", str(node), "--launcher", "torchrun"], {}


def by_pet(node: int, nodes: Nodes) -> tuple[list[str], dict[str, str]]:
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d"}
    address = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    return [], {**variables, **address}


def by_ranks(node: int, nodes: Nodes) -> tuple[list[str], dict[str, str]]:
    """Nodes that differ: torchrun's line, for accelerate starts as many on all."""
    words, env = by_names(node, nodes)
    return [*words, "--ranks-per-node", "2,1"], env


@pytest.mark.parametrize(
    ("reported_by", "counts"),
    [
        pytest.param(by_names, (1, 1), id="names"),
        pytest.param(by_hostfile, (1, 1, 1), id="hostfile"),
        pytest.param(by_pet, (2, 2), id="PET"),
        pytest.param(by_ranks, (2, 1), id="ranks"),
    ],
)
def test_launch_on_several_nodes_starts_one_job(reported_by, counts: tuple[int, ...], nodes: Nodes) -> None:
    count, differ = len(counts), len({*counts}) > 1
    places = [(node, local_rank) for node, each in enumerate(counts) for local_rank in range(each)]
    temporary = nodes.folder.parent / "tmp"
    temporary.mkdir()
    settings = (ROOT / "configs" / "4node.yaml").read_text().replace("bf16", "'no'")  # which is for GPUs
    (temporary / "4node.yaml").write_text(settings)
    file = ["--config_file", str(temporary / "4node.yaml")] if reported_by is by_names else []
    for node in range(count):
        words, env = reported_by(node, nodes)
        env["TMPDIR"] = str(temporary)
        more = [*file, "--output-dir", str(nodes.folder / "run"), "--resume", "auto"]
        nodes.start(node, *words, *more, MISTAKE_JOB, str(nodes.folder), "two words", "--output_dir=x", env=env)
    assert nodes.wait() == [DONE] * count, [nodes.said(node) for node in range(count)]
    assert not [*temporary.glob("torchelastic_*"), *temporary.glob("grpo-*")]
    started = set()
    for rank, (place, local_rank) in enumerate(places):
        found = nodes.reported(rank)
        assert found["argv"] == [MISTAKE_JOB, str(nodes.folder), "two words", "--output_dir=x"], "nothing is appended"
        assert (found["name"], found["neighbour"]) == ("__main__", "mistake_job_neighbour")
        reported = found["reported"]
        assert (reported["WORLD_SIZE"], reported["GROUP_RANK"]) == (str(len(places)), str(place))
        assert (reported["LOCAL_RANK"], reported["LOCAL_WORLD_SIZE"]) == (str(local_rank), str(counts[place]))
        assert (reported["GRPO_OUTPUT_DIR"], reported["GRPO_RESUME"]) == (str(nodes.folder / "run"), "auto")
        assert not [name for name in reported if name.startswith("PET_")]
        assert reported.get("ACCELERATE_USE_DEEPSPEED") == (None if reported_by is by_hostfile else "true")
        started.add(reported["GRPO_STARTED"])
    assert len(started) == 1, "the attempt has one name on all nodes"
    for node in range(count):
        said = nodes.said(node)
        assert f"[grpo] node {node} of {count}: {counts[node]} rank" in said
        assert ("2 + 1 in all (--ranks-per-node)" in said) == differ
        launcher = "torchrun --nnodes" if reported_by is by_hostfile or differ else "accelerate launch --"
        assert f"{' ' if differ else '[grpo] '}{launcher}" in said
        assert ("instead of the file's num_machines: 4, num_processes: 28" in said) == bool(file)
        assert len(said.splitlines()) <= 6, said


def test_rendezvous_with_missing_node_names_it_on_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    words = ["--nodes", ",".join(ADDRESSES), "--join-timeout", "6"]
    for node in (0, 2):
        nodes.start(node, *words, "--node-rank", str(node), MISTAKE_JOB, str(nodes.folder))
    headless = Nodes(tmp_path / "headless", started=nodes.started)
    headless.start(1, *words, "--port", str(free_port()), "--node-rank", "1", MISTAKE_JOB, str(headless.folder))
    assert nodes.wait() == [START_AGAIN] * 3, "they may come the next time"
    for node in (0, 2):
        assert "127.0.0.2 did not come within 6 s" in nodes.said(node)
        assert "[GRPO-302]" in nodes.said(node)
    assert "the head 127.0.0.1" in headless.said(1)
    assert "within 6 s [GRPO-303]" in headless.said(1)
    for each in (nodes, headless):
        assert not list(each.folder.glob("*.json")), "no launcher was started"
        assert "Traceback" not in "".join(log.read_text() for log in each.folder.glob("*.log"))


def test_rendezvous_with_differing_nodes_names_differences_on_all(nodes: Nodes) -> None:
    nodes.folder.mkdir()
    for node in (0, 1):
        own = nodes.folder / f"node{node}"
        own.mkdir()
        (own / "x.yaml").write_text(f"distributed_type: DEEPSPEED\nnum_processes: {node + 1}\n")
        (own / "script.py").write_text("")
        words = ["--nodes", ",".join(ADDRESSES[:2]), "--node-rank", str(node)]
        launched = Nodes(nodes.folder, port=nodes.port, started=nodes.started)
        with contextlib.chdir(own):
            launched.start(
                node, *words, "--config_file", "x.yaml", "script.py", str(node), env={"NCCL_ALGO": f"{node}"}
            )
    assert nodes.wait() == [FAILED, FAILED], "the next start would find the same"
    for node in (0, 1):
        said = nodes.said(node)
        assert "NCCL_ALGO: 0 on 127.0.0.1; 1 on 127.0.0.2" in said
        assert "--config_file x.yaml: " in said
        assert "arguments: 0 on 127.0.0.1; 1 on 127.0.0.2" in said
        assert "script script.py" not in said, "the same on both"


def test_launch_of_two_jobs_at_once_fails_on_same_port_only(nodes: Nodes, tmp_path: Path) -> None:
    """Of one node each: nothing is shared. On the same port, two heads: the second one says so."""
    other = Nodes(tmp_path / "other", started=nodes.started)
    for each in (nodes, other):
        each.start(0, MISTAKE_JOB, str(each.folder))
    assert nodes.wait() == [DONE, DONE], (nodes.said(0), other.said(0))
    words = ["--nodes", ",".join(ADDRESSES[:2]), "--node-rank", "0", "--join-timeout", "600"]
    first = nodes.start(0, *words, MISTAKE_JOB, str(nodes.folder))
    parent = psutil.Process(first.pid)
    while not [found for found in parent.net_connections() if found.status == psutil.CONN_LISTEN]:
        assert first.poll() is None
    second = other.start(0, *words, "--port", str(nodes.port), MISTAKE_JOB, str(other.folder))
    assert second.wait(END_S) == START_AGAIN
    assert f"cannot open its store on port {nodes.port}" in other.said(0)
    assert "another --port" in other.said(0)
    first.send_signal(signal.SIGINT)
    assert first.wait(END_S) == INTERRUPTED
    assert nodes.said(0).splitlines()[-1] == "grpo launch: interrupted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such.py"], "there is no script no_such.py in"),
        (["--config_file", "none.yaml", MISTAKE_JOB], "none.yaml cannot be read"),
        (["--config_file", "tab.yaml", MISTAKE_JOB], "--config_file tab.yaml cannot be read: line 2, column 1: "),
        (["--config_file", "list.yaml", MISTAKE_JOB], "list.yaml holds no settings"),
        (["--config_file", "quoted.yaml", MISTAKE_JOB], "quoted.yaml has num_processes: '2': write a whole number"),
        (["--config_file", "zero3.json", MISTAKE_JOB], "zero3.json has no distributed_type"),
        (["--launcher", "torchrun", "--config_file", "cpu.yaml", MISTAKE_JOB], "cpu.yaml is a file of accelerate's"),
        (["--nodes", "a,b", MISTAKE_JOB], "none of a, b is this machine"),
        (["--ranks-per-node", "0", MISTAKE_JOB], "0 ranks per node (--ranks-per-node): a node needs at least 1"),
        (["--rank", "1", MISTAKE_JOB], "unrecognized arguments: --rank"),
    ],
)
def test_launch_with_wrong_options_names_mistake(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "tab.yaml").write_text("distributed_type: DEEPSPEED\n\tnum_processes: 2\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "quoted.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: '2'\n")
    (tmp_path / "zero3.json").write_text((ROOT / "configs" / "zero3.json").read_text())
    (tmp_path / "cpu.yaml").write_text((ROOT / "configs" / "cpu.yaml").read_text())
    done = subprocess.run(
        [str(BIN / "grpo"), "launch", *words], cwd=tmp_path, capture_output=True, text=True, timeout=END_S, check=False
    )
    assert done.returncode in (FAILED, 2), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 12


def test_interrupt_of_launch_without_trainer_ends_ranks(nodes: Nodes) -> None:
    process = nodes.start(0, "--ranks-per-node", "2", MISTAKE_JOB, str(nodes.folder), "wait")
    while not all((nodes.folder / f"{rank}.json").exists() for rank in (0, 1)):
        assert process.poll() is None, nodes.said(0)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(END_S) == INTERRUPTED, nodes.said(0)
    assert not psutil.wait_procs(ranks, timeout=30)[1]
    assert "[grpo] ended by SIGINT" in nodes.said(0)


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        pytest.param("raise KeyError('answer')", [], ["KeyError: 'answer'", "script.py:1"], id="raises"),
        pytest.param("import no_such_package", [], ["No module named 'no_such_package'", "script.py:1"], id="imports"),
        pytest.param("def reward(:", [], ["script.py:1: invalid syntax"], id="syntax"),
        pytest.param(
            "import argparse; argparse.ArgumentParser().parse_args()",
            ["--x"],
            ["unrecognized arguments: --x"],
            id="flag",
        ),
    ],
)
def test_report_of_script_error_prints_once(
    script: str, arguments: list[str], said: list[str], nodes: Nodes, tmp_path: Path
) -> None:
    """By rank 0, without the launcher's summary, and recorded where a scheduler looks."""
    (tmp_path / "script.py").write_text(script)
    words = ["--launcher", "torchrun", "--ranks-per-node", "2", "--output-dir", str(tmp_path / "run")]
    nodes.start(0, *words, str(tmp_path / "script.py"), *arguments)
    assert nodes.wait() == [FAILED], nodes.said(0)
    lines = [
        line for line in nodes.said(0).splitlines() if "[grpo] node 0" not in line and "[grpo] torchrun" not in line
    ]
    assert len(lines) <= 6, lines
    assert "Traceback" not in nodes.said(0)
    for part in said:
        assert nodes.said(0).count(part) == 1, nodes.said(0)
    assert lines[-1] == "[grpo] not started again: this would fail again"
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["state"], state["kind"]) == ("failed", "user")


def test_launch_after_rank_error_prints_resume_line_without_summary(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise RuntimeError('CUDA error: uncorrectable ECC error')\n")
    run = tmp_path / "run"
    words = ["--launcher", "torchrun", "--ranks-per-node", "2", "--output-dir", str(run)]
    nodes.start(0, *words, str(tmp_path / "script.py"))
    assert nodes.wait() == [START_AGAIN], nodes.said(0)
    said = nodes.said(0)
    assert "Traceback" in said
    assert "Root Cause" not in said
    last = said.splitlines()[-1]
    assert last.startswith("[grpo] failed: RuntimeError: CUDA error: uncorrectable ECC error")
    assert last.endswith(f"; {run}; the same line with --resume auto goes on from the beginning")


@pytest.mark.long
def test_reward_error_behind_first_step_prints_its_line_and_resume_line(
    nodes: Nodes, tiny_model: Path, tmp_path: Path
) -> None:
    """By the rank that called it, without a traceback, which is in its log."""
    run = tmp_path / "run"
    config = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    script = tiny_job_script(tiny_model, tmp_path / "own", config=config, hold="reward-error-3")
    nodes.start(0, "--ranks-per-node", "2", "--output-dir", str(run), *script, "--node-rank", "0")
    assert nodes.wait() == [START_AGAIN], nodes.said(0)
    said = nodes.said(0)
    assert "Traceback" not in said
    assert f"[grpo] {script[0]} gets --node-rank: options of grpo launch go before it" in said
    place = 'in reward: raise ZeroDivisionError("a reward of the'
    assert said.count(place) == said.count("tiny_job.py:") == 1, said
    record, last = said.splitlines()[-2:]
    assert record.startswith("[grpo] failed: node 0")
    assert record.endswith("rank 1, phase 'reward': ZeroDivisionError: a reward of the user's went wrong")
    raised = "reward function reward failed [GRPO-623]: ZeroDivisionError"
    assert last == f"{raised}; {run}; the same line with --resume auto goes on from checkpoint-2"
    log = next((run / "logs").glob("rank-*-1.attempt-0.log")).read_text()
    assert "Traceback" in log
    assert re.search(r"in reward\n\s+raise ZeroDivisionError", log)


def test_out_of_memory_is_reported_once_and_ends_job(nodes: Nodes, tmp_path: Path) -> None:
    """Of another rank too: no traceback, no summary, no other start, and how to plan it."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "def compute_loss():\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')\n"
        "compute_loss()\n"
    )
    words = ["--launcher", "torchrun", "--ranks-per-node", "2", "--output-dir", str(tmp_path / "run")]
    nodes.start(0, *words, str(tmp_path / "script.py"), "--beta", "0")
    assert nodes.wait() == [FAILED], nodes.said(0)
    said = nodes.said(0)
    assert "Traceback" not in said
    assert said.count("in the forward pass [GRPO-631]: ") == 1, said
    last = "[grpo] what each phase needs: grpo plan --num_processes 2 --num_machines 1 -- --beta 0"
    assert said.splitlines()[-2:] == ["[grpo] not started again: this would fail again", last]
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["state"], state["kind"]) == ("failed", "memory")


@pytest.mark.timeout(1200)
def test_launch_after_signal_or_stop_file_resumes_at_next_step(nodes: Nodes, tiny_model: Path, tmp_path: Path) -> None:
    """The same line goes on where Ctrl-C, a stop file and at last, with an engine, a SIGTERM have stopped it."""
    run, own = tmp_path / "run", tmp_path / "own"
    ends = {signal.SIGINT: START_AGAIN, None: DONE, signal.SIGTERM: START_AGAIN}
    steps = 0
    for attempt, (asked_by, code) in enumerate(ends.items()):
        without = {"use_vllm": False, "vllm_sync_bucket_mb": 512, "vllm_engine_kwargs": None}
        config = {"max_steps": 100_000, **({} if asked_by is signal.SIGTERM else without)}
        script = tiny_job_script(tiny_model, own, config=config)
        words = ["--ranks-per-node", "2", "--output-dir", str(run), "--resume", "auto", *script]
        process = nodes.start(0, *words)
        while (
            not (run / "metrics.jsonl").exists() or metrics_in(run)[-1:] == [] or metrics_in(run)[-1]["step"] <= steps
        ):
            assert process.poll() is None, nodes.said(0)
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        if asked_by is None:
            (run / "stop").touch()
        else:
            process.send_signal(asked_by)
        assert process.wait(END_S) == code, nodes.said(0)
        assert not psutil.wait_procs(children, timeout=30)[1]
        state = json.loads((run / "run_state.json").read_text())
        found = (state["state"], state["requeue"], state["attempt"])
        assert found == ("stopped", code == START_AGAIN, attempt), nodes.said(0)
        assert state["step"] > steps
        steps = state["step"]
        assert f"output_dir is {run} (GRPO_OUTPUT_DIR), not {own}" in nodes.said(0)
        assert f"stopped after step {steps}" in nodes.said(0).splitlines()[-1]
    assert [line["step"] for line in metrics_in(run)] == list(range(1, steps + 1))
    assert not list(run.glob("crashes*"))


@pytest.mark.long
def test_launch_after_doctor_fail_starts_nothing(nodes: Nodes, tmp_path: Path) -> None:
    words = ["--doctor", "--max-crashes", "2", "--output-dir", str(tmp_path / "run"), MISTAKE_JOB, str(nodes.folder)]
    for code in (START_AGAIN, FAILED):  # a crash each
        process = nodes.start(0, *words, env={"NCCL_SOCKET_IFNAME": "no-such-interface"})
        assert process.wait(END_S) == code, nodes.said(0)
        assert "NCCL_SOCKET_IFNAME=no-such-interface selects no interface" in " ".join(nodes.said(0).split())
        assert not list(nodes.folder.glob("*.json"))
    assert nodes.start(0, *words).wait(END_S) == DONE, nodes.said(0)
    assert nodes.reported(0)["reported"]["RANK"] == "0"


def test_launch_after_doctor_fail_on_one_node_records_faulty_host(nodes: Nodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--doctor", "--nodes", ",".join(ADDRESSES[:2]), "--output-dir", str(run), MISTAKE_JOB, str(nodes.folder)]
    for node in (0, 1):
        env = {"NCCL_SOCKET_IFNAME": "no-such-interface"} if node else {}
        nodes.start(node, "--node-rank", str(node), *words, env=env)
    assert nodes.wait() == [START_AGAIN] * 2, nodes.said(0) + nodes.said(1)
    failure = json.loads((run / "run.json").read_text())["attempts"][-1]["failure"]
    assert (failure["node"], failure["host"], failure["phase"]) == (1, ADDRESSES[1], "doctor"), nodes.said(0)
    assert read_faulty_host(run, json.loads((run / "run_state.json").read_text())) == ADDRESSES[1]
