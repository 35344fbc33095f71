"""`grpo launch`, before it becomes a launcher and after it."""

import argparse
import contextlib
import os
import re
import signal
import socket
import threading
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

from grpo.faults.failure import FailureKind
from grpo.ops.launch import agent, command, line
from grpo.ops.launch.agent import Ending
from grpo.ops.launch.line import Rendezvous, Script
from grpo.ops.launch.next_attempt import DONE, FAILED
from grpo.ops.rendezvous.expected import Place
from grpo.place.files import read_settings
from grpo.record.files import note_failure
from grpo.record.folder import RunFolder
from tests.support.launching import ROOT


def read(*words: str) -> tuple[argparse.Namespace, Script]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(words)
    return args, command.script_of(args)


@pytest.mark.parametrize(
    ("words", "module", "arguments"),
    [
        ((), True, ()),
        (("--config_file", "f.yaml"), True, ()),
        (("--nodes", "a,b", "--", "--max_steps", "3"), True, ("--max_steps", "3")),
        (("--config_file", "f.yaml", "-m", "mine.train", "--max_steps", "3"), True, ("--max_steps", "3")),
        (("--nodes", "a,b", "train.py", "--config", "x.yaml"), False, ("--config", "x.yaml")),
    ],
)
def test_script_of_without_script_returns_package_module(
    words: tuple[str, ...], module: bool, arguments: tuple
) -> None:
    _, script = read(*words)
    name = "mine.train" if "-m" in words else "train.py" if "train.py" in words else "grpo.train"
    assert (script.name, script.is_module, script.arguments) == (name, module, arguments)


def test_launch_with_unreadable_script_config_reads_flags(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\n")
    flags = ["--config", str(tmp_path / "mine.toml"), "--vllm_reserved_gpus", "2", "--use_cpu"]
    asked, is_readable = command._asked(*read("mine.py", *flags), file={})
    assert (asked.wishes.reserved_gpus, asked.wishes.use_cpu, is_readable) == (2, True, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), r"4node.yaml is for 4 nodes, and none is named: give --nodes .* --num_machines 1 to train on this one"),
        (("--num_machines", "2"), r"--num_machines is 2, and the nodes are \S+: name all with --nodes"),
        (("--num_machines", "1"), ""),
        (("--nodes", "n1", "--node-rank", "0"), ""),
    ],
)
def test_launch_of_multinode_file_without_nodes_is_refused(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "_meet_and_launch", lambda *_: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "mine.py").touch()
    args, _ = read("--config_file", str(ROOT / "configs" / "4node.yaml"), *words, str(tmp_path / "mine.py"))
    assert command.run(args) == (2 if said else 0)
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(("flags", "is_refused"), [((), True), (("--use_cpu",), False)])
def test_launch_of_gpu_file_without_gpus_is_refused_unless_use_cpu(flags: tuple[str, ...], is_refused: bool) -> None:
    file = str(ROOT / "configs" / "1node.yaml")
    args, script = read("--config_file", file, "train.py", *flags)
    at = Rendezvous(ranks_by_node=(1,), node_rank=0, head_address="127.0.0.1", port=1)
    settings = read_settings(file)
    asked, _ = command._asked(args, script, settings)
    assert command._line(args, script, settings, at, asked, on_gpus=True)[:2] == ["accelerate", "launch"]
    refused = pytest.raises(ValueError, match=r"1node\.yaml is for GPUs .*configs/cpu\.yaml")
    with refused if is_refused else contextlib.nullcontext():
        command._line(args, script, settings, at, asked, on_gpus=False)


def test_launch_after_out_of_memory_prints_plan_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_launcher(*_: object, **__: object) -> Ending:
        note_failure(os.environ, "CUDA out of memory", FailureKind.MEMORY)
        return Ending(has_succeeded=False, rank=0)

    monkeypatch.setattr(agent, "run_launcher", run_launcher)
    args, _ = read("--config_file", "1node.yaml", "train.py", "--hub_token", "xyz", "--beta", "0")
    at = Rendezvous(ranks_by_node=(7,), node_rank=0, head_address="127.0.0.1", port=1)
    place = Place(nodes=("a",), node="a", head_address="a", port=1, command="grpo launch")
    with mock.patch.dict(os.environ):
        assert command._launch(args, place, at, [], 100.0, []) == FAILED
    plan = "grpo plan --config_file 1node.yaml --num_processes 7 --num_machines 1 -- --hub_token '<masked>' --beta 0"
    assert capsys.readouterr().err.splitlines() == [
        "[grpo] not started again: this would fail again",
        f"[grpo] what each phase needs: {plan}",
    ]


@pytest.mark.parametrize(("words", "seconds"), [((), 1800.0), (("--start-timeout", "77"), 77.0)])
def test_start_timeout_sets_report_timeout(
    words: tuple[str, ...], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Place] = []
    monkeypatch.setattr(command, "_meet_and_launch", lambda args, place, *_: places.append(place) or 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "mine.py").touch()
    args, _ = read(*words, str(tmp_path / "mine.py"))
    assert command.run(args) == 0
    assert [place.report_timeout_s for place in places] == [seconds]


def test_launch_with_sigterm_while_waiting_for_head_returns_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node has done its part: the head's model is what is waited for."""

    def run_launcher(*_: object, **__: object) -> Ending:
        signal.signal(signal.SIGTERM, _terminate_process_handler)  # as torchrun leaves it
        run = RunFolder(tmp_path, os.environ)
        run.update(state="finished", why="all steps are done")
        run.release()
        return Ending(has_succeeded=True)

    monkeypatch.setattr(agent, "run_launcher", run_launcher)
    args, _ = read("--output-dir", str(tmp_path), "mine.py")
    with socket.create_server(("127.0.0.1", 0)) as store, mock.patch.dict(os.environ):
        port = store.getsockname()[1]
        at = Rendezvous(ranks_by_node=(1, 1), node_rank=1, head_address="127.0.0.1", port=port)
        place = Place(nodes=("a", "b"), node="b", head_address="127.0.0.1", port=port, command="grpo launch")

        def end_it() -> None:
            store.accept()[0].close()  # it looks whether the head is there
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=end_it, daemon=True).start()
        assert command._launch(args, place, at, [], 100.0, []) == DONE


def test_launch_with_own_options_behind_script_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_meet_and_launch", lambda *_: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    script = str(ROOT / "train.py")
    trainers = ["--output_dir", "runs/x", "--script=a", "--max_steps", "2"]
    for behind, said in ((["--ranks-per-node", "2", "--nodes=a,b"], "--ranks-per-node, --nodes"), ([], "")):
        assert command.run(read("--ranks-per-node", "1", script, *trainers, *behind)[0]) == 0
        expected = f"[grpo] {script} gets {said}: options of grpo launch go before it\n" if said else ""
        assert capsys.readouterr().err == expected


SECRETS = ("mine.py", "--hub_token", "xyz", "--wandb_api_key=abc", "--url", "https://me:pass@host/x", "--lr", "1e-6")


def test_show_masks_secrets_in_line(capsys: pytest.CaptureFixture[str]) -> None:
    at = Rendezvous(ranks_by_node=(1,), node_rank=0, head_address="127.0.0.1", port=1)
    place = Place(nodes=("a",), node="a", head_address="a", port=1, command="grpo launch")
    line.show(place, at, "counted", [], ["torchrun", *SECRETS])
    shown = capsys.readouterr().out
    assert "torchrun mine.py --hub_token '<masked>' '--wandb_api_key=<masked>' --url 'https://<masked>@host/x'" in shown
    assert "--lr 1e-6" in shown


def test_launch_inputs_compare_secrets_by_digest() -> None:
    reported = [
        command._inputs(*read("-m", *(word.replace("xyz", token) for word in SECRETS)))["arguments"]
        for token in ("xyz", "xyz", "other")
    ]
    assert reported[0] == reported[1] != reported[2]
    assert not [text for text in reported for secret in ("xyz", "other", "abc", "pass@") if secret in text]
    assert command._inputs(*read("-m", "mine", "--lr", "1e-6"))["arguments"] == "--lr 1e-6"
