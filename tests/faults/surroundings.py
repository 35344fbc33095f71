"""What a job of a cell stands on where its fault is not of a process: mounts, a network, a control group, an engine's
plugin. Each brings how the job is started there, and how the fault is put."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.matrix import NODES, Cell
from tests.support.memory_groups import memory_group
from tests.support.networks import network
from tests.support.stuck_engine import FOR_EVER, NextStep

DISK, SHM = "16m", "4m"  # of the file systems that are filled
FROZEN = "256m"  # of the one that is frozen
THAWED_S = 240  # at the latest, whatever becomes of the process that froze it
SPACE = 1 << 30  # bytes, beyond what a job has taken when its limit is set
_OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Of one job."""

    command: Callable[[int, list[str]], list[str]] = lambda node, command: command
    """A node's command, as it is run there."""
    addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2")
    """Of the nodes."""
    env: dict[str, str] = field(default_factory=dict)
    put: Callable[[], None] = lambda: None
    """The fault, when the job is where it belongs."""
    lift: Callable[[], None] = lambda: None
    """What may be taken back when all have seen it."""


def _mounted(commands: str) -> Surroundings:
    """In mounts of each launcher's own, after shell commands."""
    return Surroundings(command=lambda _, command: [*_OWN_MOUNTS, f'{commands} && exec "$@"', "sh", *command])


@contextlib.contextmanager
def _frozen(run: Path) -> Iterator[Surroundings]:
    """A disk of its own, which is frozen; needs root."""
    image = run.parent / "disk.img"
    subprocess.run(["truncate", "-s", FROZEN, image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, run], check=True)
    run.chmod(0o700)

    def freeze() -> None:
        subprocess.Popen(["sh", "-c", f"sleep {THAWED_S}; fsfreeze -u '{run}' 2>/dev/null"], start_new_session=True)
        subprocess.run(["fsfreeze", "-f", run], check=True)

    def thaw() -> None:
        subprocess.run(["fsfreeze", "-u", run], check=False, stderr=subprocess.DEVNULL)

    try:
        yield Surroundings(put=freeze, lift=thaw)
    finally:
        thaw()
        subprocess.run(["umount", "--lazy", run], check=True)


@contextlib.contextmanager
def _cut_or_reset(cell: Cell) -> Iterator[Surroundings]:
    """Machines at a switch, of which one loses its network or its connections."""
    nodes = NODES[cell.layout]
    struck = 0 if cell.fault.target.endswith(" 0") else nodes - 1
    with network(nodes) as wires:

        def put() -> None:
            if cell.fault.act == "cut":
                wires.cut(struck)
            else:
                wires.reset(struck)

        addresses = [wires.address(node) for node in range(nodes)]
        yield Surroundings(command=wires.inside, addresses=addresses, env={"GLOO_SOCKET_IFNAME": "eth0"}, put=put)


@contextlib.contextmanager
def _with_little_memory(engine: NextStep | None) -> Iterator[Surroundings]:
    """A limit for the whole job, which something reaches; the others have what they had, when it is gone."""
    with memory_group() as group:

        def put() -> None:
            group.limit(group.used_bytes + SPACE)
            if engine is not None:
                engine.takes_all_memory()

        yield Surroundings(
            command=lambda _, command: ["sh", "-c", f'echo $$ > {group.members} && exec "$@"', "sh", *command],
            env=engine.variables if engine is not None else {},
            put=put,
            lift=lambda: group.lift_after_a_kill(120.0),
        )


@contextlib.contextmanager
def surroundings(cell: Cell, out: Path) -> Iterator[Surroundings]:
    """Of a job with its output in `out/run`, which is there."""
    with contextlib.ExitStack() as stack:
        match cell.fault.act, cell.fault.target:
            case "fill", "disk":
                yield _mounted(f"mount -t tmpfs -o size={DISK} tmpfs {out / 'run'}")
            case "fill", "shm":
                yield _mounted(f"mount -t tmpfs -o size={SHM} tmpfs /dev/shm")
            case "freeze", _:
                yield stack.enter_context(_frozen(out / "run"))
            case (("cut" | "reset"), _):
                yield stack.enter_context(_cut_or_reset(cell))
            case "eat", "core":
                yield stack.enter_context(_with_little_memory(_plugin(out)))
            case "eat", _:
                yield stack.enter_context(_with_little_memory(None))
            case "stick", "core":
                engine = _plugin(out)
                yield Surroundings(env=engine.variables, put=lambda: engine.takes(FOR_EVER))
            case _:
                yield Surroundings()


def _plugin(out: Path) -> NextStep:
    folder = out / "plugin"
    folder.mkdir()
    return NextStep(folder)
