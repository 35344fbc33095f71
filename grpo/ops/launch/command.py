"""`grpo launch`: the same line on every node; after a rendezvous each becomes its node's launcher.

Exit codes are those of `grpo.ops.launch.next_attempt`: 0 done, 85 start again, 1 a restart would not help; 2 for an
invalid command line, 130 for an interrupt by a person.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo.faults.failure import Decision, FailureKind, FailureRecord, answer_to
from grpo.faults.liveness import START_TIMEOUT_S
from grpo.ops.launch import line, next_attempt
from grpo.ops.launch.faulty_host import DOCTOR_PHASE
from grpo.ops.launch.line import Rendezvous, Script
from grpo.ops.launch.ranks import Asked, counts_of
from grpo.ops.rendezvous import expected
from grpo.ops.rendezvous.expected import Place
from grpo.place.files import flag_of, read_settings, read_wishes
from grpo.place.launch import LAUNCH_FOLDER, check_is_for_cpus
from grpo.place.patches.stdlib import temporary_files_in
from grpo.place.startup import process_age_s
from grpo.record.provenance import command_without_secrets

DEFAULT_PORT = 29412  # next to the doctor's, below torchrun's 29500
JOIN_TIMEOUT_S = 120.0
STOP_S = 600
MAY_FOLLOW = {"output_dir", "resume", "command", "script", "arguments"}  # the trainer's too; no options
OWN = "-m grpo.train"  # as a person would type it; that module is above this package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; words after the script are the script's."""
    parser.add_argument("--config_file", metavar="FILE", help="accelerate's; with --launcher torchrun DeepSpeed's")
    parser.add_argument("--launcher", choices=("accelerate", "torchrun"), default="accelerate")
    parser.add_argument(
        "--ranks-per-node",
        type=counts_of,
        metavar="N | N,N,…",
        help="of all nodes alike, or of each in their order; default: as many as leave its engines a GPU",
    )
    parser.add_argument(
        "--num_machines",
        type=int,
        metavar="N",
        help="how many nodes there have to be; 1 takes a file for several on this machine alone",
    )
    parser.add_argument(
        "--main_process_port", type=int, metavar="PORT", help="of the ranks, on the head (default: a free one)"
    )
    run = parser.add_argument_group("the run", "for scripts that do not take these themselves")
    run.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        default=os.environ.get("GRPO_OUTPUT_DIR") or None,
        help="of the trainer, whatever the script says (default: GRPO_OUTPUT_DIR, or what the script says)",
    )
    run.add_argument(
        "--resume",
        metavar="auto|CHECKPOINT",
        default=os.environ.get("GRPO_RESUME") or None,
        help="from where the trainer goes on (default: GRPO_RESUME, or what the script says)",
    )
    run.add_argument("--max-crashes", type=int, default=3, help="in a row without a newer checkpoint (default: 3)")
    run.add_argument(
        "--stop-s", type=int, default=STOP_S, help="the longest step and checkpoint, in seconds (default: %(default)s)"
    )
    run.add_argument(
        "--doctor", action="store_true", help="`grpo doctor` on every node first; a FAIL counts as a crash"
    )
    expected.add_arguments(parser, default_port=_default_port(os.environ), join_timeout_s=JOIN_TIMEOUT_S)
    parser.add_argument(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        default=START_TIMEOUT_S,
        help="from a node's coming to its report: torch may come over a slow file system (default: %(default)g)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help=f"default: {OWN}; its options go behind ` -- `")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded: the store logs every wait that ends
    script = script_of(args)
    try:
        place = expected.find_place(args, os.environ, command="grpo launch")
        place = replace(place, report_timeout_s=args.start_timeout)
        file = read_settings(args.config_file, "--config_file") if args.config_file else {}
        _check_script(script)
        _check_nodes(args, place, file)
        line.note_misplaced(script, vars(args).keys() - MAY_FOLLOW)
        asked, is_readable = _asked(args, script, file)
    except (ValueError, OSError) as error:
        print(f"grpo launch: {error}", file=sys.stderr)
        return 2
    # Process 1 of a container ignores SIGTERM without a handler; torchrun installs its own later.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(next_attempt.START_AGAIN))
    received: list[int] = []  # a SIGUSR1, a request to stop, waits for the trainer
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))

    def on_interrupt(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        found, failed = _doctor(args, place, script.arguments if is_readable else ()) if args.doctor else (0, [])
        if found:
            why = f"grpo doctor {'found nodes that cannot train' if found == 1 else f'ended with {found}'}"
            return _not_started(args, place, FailureKind.USER if found == 2 else FailureKind.MACHINE, why, failed)
        return _meet_and_launch(args, place, script, file, asked, received)
    except KeyboardInterrupt:
        print("grpo launch: interrupted", file=sys.stderr)
        return next_attempt.INTERRUPTED


def _meet_and_launch(
    args: argparse.Namespace,
    place: Place,
    script: Script,
    file: Mapping[str, Any],
    asked: Asked,
    received: list[int],
) -> int:
    from grpo.ops.launch.agreement import NodeReport, meet, report

    def make_report() -> NodeReport:
        made = report(asked.wishes.use_cpu, _inputs(args, script))
        if signal.SIGINT in received:  # a library's import may have swallowed the exception: a bare `except` does
            raise KeyboardInterrupt
        return made

    here = replace(place, started=time.monotonic())  # excludes the doctor's time
    verdict = meet(here, make_report, asked, port=args.main_process_port)
    for trouble in verdict.troubles:
        if trouble.is_fatal or place.is_head:
            fix = f" → {trouble.fix}" if trouble.fix else ""
            print(f"grpo launch: {trouble.message}{fix}", file=sys.stderr, flush=True)
    if verdict.agreed is None:
        return _not_started(args, place, verdict.kind, "; ".join(one.message for one in verdict.troubles))
    at = Rendezvous(
        ranks_by_node=verdict.agreed.ranks_by_node,
        node_rank=place.nodes.index(place.node),
        head_address=place.head_address if len(place.nodes) > 1 else "127.0.0.1",  # address of the rendezvous
        port=verdict.agreed.port,
    )
    if not verdict.agreed.on_gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise every process logs that it has found no GPU
        share = len(os.sched_getaffinity(0)) // (at.ranks + 1)  # one for the engine; accelerate would take all
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    try:
        words = _line(args, script, file, at, asked, on_gpus=verdict.agreed.on_gpus)
        run, variables = line.in_place_of(words, script, at) if at.nodes_differ else (words, {})
    except ValueError as error:
        print(f"grpo launch: {error}", file=sys.stderr)
        return _not_started(args, place, FailureKind.USER, str(error))
    os.environ |= variables
    shown = [f"{name}={value}" for name, value in variables.items() if name.startswith("ACCELERATE_")]
    line.show(place, at, verdict.agreed.why, line.replaced(file, at), [*shown, *run])
    return _launch(args, place, at, run, verdict.agreed.started, received, accelerates=words)


def _doctor(args: argparse.Namespace, place: Place, train_flags: Sequence[str]) -> tuple[int, list[str]]:
    """Run the doctor; returns its exit code, the same on all nodes, and on the head the failed nodes."""
    words = ["--node-name", place.node, "--port", str(place.port), "--join-timeout", str(args.join_timeout)]
    words += ["--nodes", ",".join(place.nodes)]
    if place.head_address != place.head:
        words += ["--head", place.head_address]
    if args.output_dir is not None:
        words += ["--output-dir", str(args.output_dir)]
    if args.config_file is not None:
        words += ["--config_file", args.config_file]
    if train_flags and train_flags[0].startswith("-"):
        words += ["--", *train_flags]
    with tempfile.TemporaryDirectory(prefix=LAUNCH_FOLDER) as folder:
        failed = Path(folder, "failed_nodes")
        doctor = subprocess.Popen([sys.executable, "-m", "grpo", "doctor", "--failed-nodes", str(failed), *words])
        try:
            return doctor.wait(), failed.read_text().split() if failed.exists() else []
        finally:
            doctor.kill()


# -- the line -----------------------------------------------------------------------------------------------------


def _default_port(env: Mapping[str, str]) -> int:
    """Default port by Slurm's job id, since two jobs may share a node. Below the kernel's range for outgoing
    connections (32768 and up)."""
    job = env.get("SLURM_JOB_ID", "")
    return 10000 + int(job) % 20000 if job.isdigit() else DEFAULT_PORT


def script_of(args: argparse.Namespace) -> Script:
    """Return the named script; or the package's own, if there is none or only options."""
    if args.script is None or (args.script.startswith("-") and not args.module):
        words = [args.script, *args.arguments] if args.script else args.arguments
        return Script(name=OWN.removeprefix("-m "), arguments=tuple(words), is_module=True)
    return Script(name=args.script, arguments=tuple(args.arguments), is_module=args.module)


def _check_script(script: Script) -> None:
    if not script.is_module and not Path(script.name).is_file():
        raise ValueError(
            f"there is no script {script.name} in {Path.cwd()}: options of grpo launch go before its name, its own "
            "behind it"
        )


def _check_nodes(args: argparse.Namespace, place: Place, file: Mapping[str, Any]) -> None:
    """Raise ValueError if the file is for another number of nodes: a file for four nodes would become four jobs of
    one."""
    found, meant = len(place.nodes), args.num_machines
    if meant not in (None, found):
        raise ValueError(
            f"--num_machines is {meant}, and the nodes are {', '.join(place.nodes)}: name all with --nodes"
        )
    said = _count(file, "num_machines", args.config_file) or 1
    if meant is None and said > 1 and not place.is_reported:
        raise ValueError(
            f"{args.config_file} is for {said} nodes, and none is named: give --nodes A,B,… (or --hostfile FILE) on "
            "each of them, or --num_machines 1 to train on this one alone"
        )


def _asked(args: argparse.Namespace, script: Script, file: Mapping[str, Any]) -> tuple[Asked, bool]:
    """Return the job's settings; and True if the script's own arguments could be read as those of train.py."""
    is_readable = True
    try:
        wishes = read_wishes(script.arguments, config_file=args.config_file)
    except ValueError:  # another script's --config may be anything
        is_readable = False
        wishes = read_wishes(script.arguments, config_file=args.config_file, reads_files=False)
    asked = Asked(
        wishes=wishes,
        flag=args.ranks_per_node,
        scheduler=os.environ.get("PET_NPROC_PER_NODE"),
        file=args.config_file or "",
        num_processes=_count(file, "num_processes", args.config_file),
        num_machines=_count(file, "num_machines", args.config_file),
        resumed_ranks=_resumed_ranks(args),
    )
    return asked, is_readable


def _count(file: Mapping[str, Any], name: str, path: str) -> int | None:
    value = file.get(name)
    if value is None or type(value) is int:
        return value
    raise ValueError(f"{path} has {name}: {value!r}: write a whole number, without quotes")


def _resumed_ranks(args: argparse.Namespace) -> int | None:
    """Number of ranks of the newest complete checkpoint, if the job resumes it; else None."""
    if args.resume != "auto" or args.output_dir is None:
        return None
    newest = args.output_dir / f"checkpoint-{next_attempt.newest_checkpoint(args.output_dir)}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((newest / "complete.json").read_text())["world_size"])
    return None


def _inputs(args: argparse.Namespace, script: Script) -> dict[str, str]:
    """Digests of inputs that must be the same on all nodes, by their name on the screen."""
    from grpo.ops.launch.agreement import digest_of_file

    files = {} if script.is_module else {f"script {script.name}": Path(script.name)}
    if args.config_file:
        files[f"--config_file {args.config_file}"] = Path(args.config_file)
    for name in ("config", "deepspeed"):
        if value := flag_of(script.arguments, name):
            files[f"--{name} {value}"] = Path(value)
    texts = {"launcher": args.launcher, "arguments": _compared(script.arguments)}
    texts |= {"--output-dir": str(args.output_dir or ""), "--resume": args.resume or ""}
    return texts | {name: digest_of_file(path) for name, path in files.items()}


def _compared(arguments: Sequence[str]) -> str:
    """Arguments in a form for comparison between nodes: with a digest in place of secrets, so that differences show."""
    from grpo.ops.launch.agreement import digest

    given, shown = shlex.join(arguments), shlex.join(command_without_secrets(arguments))
    return given if given == shown else f"{shown} (digest {digest(given.encode())})"


def _line(
    args: argparse.Namespace, script: Script, file: Mapping[str, Any], at: Rendezvous, asked: Asked, *, on_gpus: bool
) -> list[str]:
    if file:
        line.check_file(file, args.config_file, launcher=args.launcher, processes=at.processes)
    if args.launcher == "torchrun":
        return line.torchrun_line(script, at)
    words = line.accelerate_line(script, at, config_file=args.config_file or line.own_file(on_gpus=on_gpus))
    if not on_gpus and not asked.wishes.use_cpu:
        check_is_for_cpus(words)
    return words


# -- the job ------------------------------------------------------------------------------------------------------


def _launch(
    args: argparse.Namespace,
    place: Place,
    at: Rendezvous,
    words: list[str],
    started: float,
    received: list[int],
    *,
    accelerates: Sequence[str] = (),
) -> int:
    """Run the launcher, and print the decision after its end."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from grpo.ops.launch.agent import run_launcher
    from grpo.ops.launch.attempt import Attempt
    from grpo.ops.launch.last_words import inform_waiting_ranks, outlast_head

    with tempfile.TemporaryDirectory(prefix=LAUNCH_FOLDER) as notes:
        attempt = Attempt(
            output_dir=args.output_dir,
            notes=Path(notes),
            launched=time.time() - process_age_s(),
            started=started,
            is_head=place.is_head,
            env=os.environ,
        )
        _prepare_environment(args, attempt)
        with temporary_files_in(notes):
            ending = run_launcher(
                words,
                attempt.ask_to_stop,
                is_reported=lambda: attempt.failed is not None,
                is_asked_already=signal.SIGUSR1 in received,
                accelerates=accelerates,
            )
        with contextlib.suppress(SignalException):  # torchrun's handlers remain; this node has done its part
            outlast_head(at, ending)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the rest is short, and informs the scheduler
        inform_waiting_ranks(at, ending, attempt.failed)
        code, why = attempt.conclude(ending, max_crashes=args.max_crashes)
        if place.is_head and attempt.is_hopeless and (attempt.failed or {}).get("kind") == FailureKind.MEMORY:
            file = args.config_file if args.launcher == "accelerate" else None
            why += f"\n[grpo] what each phase needs: {line.plan_line(file, script_of(args), at)}"
    print(f"[grpo] {why}", file=sys.stderr if code else sys.stdout, flush=True)
    return code


def _prepare_environment(args: argparse.Namespace, attempt: Any) -> None:
    """Set the environment for the ranks."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun's defaults, not visible in the line
    os.environ |= attempt.variables()
    os.environ["PYTHONUNBUFFERED"] = "1"
    # After SIGTERM torchrun gives its ranks 30 s by default, less than a step and a checkpoint take.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(args.stop_s))
    if args.output_dir is not None:
        os.environ["GRPO_OUTPUT_DIR"] = str(args.output_dir.absolute())
    if args.resume is not None:
        os.environ["GRPO_RESUME"] = args.resume
    if args.launcher == "torchrun" and args.config_file:
        os.environ |= line.deepspeed_variables(str(Path(args.config_file).absolute()))


def _not_started(
    args: argparse.Namespace, place: Place, kind: FailureKind, why: str, failed: Sequence[str] = ()
) -> int:
    """Return the exit code if no launcher could be started; on the head it counts as this attempt's end.

    Args:
        failed: nodes that failed the doctor; a single one is recorded.
    """
    if not place.is_head or args.output_dir is None:
        is_over = answer_to(kind, is_behind_first_step=False) is Decision.END
        return next_attempt.FAILED if is_over else next_attempt.START_AGAIN
    from grpo.ops.launch.attempt import record_no_start

    failure = None
    if len(failed) == 1 and kind is FailureKind.MACHINE:
        host, node = failed[0], place.nodes.index(failed[0])
        failure = FailureRecord(node=node, rank=-1, host=host, phase=DOCTOR_PHASE, cause=why, kind=kind)
    return record_no_start(args.output_dir, os.environ, why, kind, failure, max_crashes=args.max_crashes)
