"""What of a job listens, where strangers can try to speak to it; and strangers that do."""

import contextlib
import ipaddress
import os
import pickle
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.support.contract import inner_process
from tests.support.launching import ROOT, Job

PATIENCE_S = 2.0  # that a stranger gives the other end
_LISTENS_TCP, _ACCEPTS = "0A", 0x10000  # of /proc/net/tcp's `st`, and of /proc/net/unix' flags


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Listening:
    """One socket that takes connections."""

    kind: str
    """tcp or unix."""
    address: str
    """An IP address, or the path of a unix socket, `@name` for one without a file."""
    port: int
    """0 of a unix socket."""
    style: int = socket.SOCK_STREAM
    """Of a unix socket: SOCK_STREAM or SOCK_SEQPACKET."""
    pids: tuple[int, ...]
    """Who holds it, ascending."""

    def __str__(self) -> str:
        return f"{self.kind} {self.address}{f' port {self.port}' if self.port else ''}"

    def connect(self) -> socket.socket:
        """As somebody on this machine."""
        if self.kind == "unix":
            one = socket.socket(socket.AF_UNIX, self.style)
            target: str | tuple[str, int] = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        else:
            address = ipaddress.ip_address(self.address)
            if address.is_unspecified:
                address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
            one = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6)
            target = (str(address), self.port)
        one.settimeout(PATIENCE_S)
        one.connect(target)
        return one


def listening(pids: Collection[int]) -> list[Listening]:
    """All that these processes listen on, in the network that they see."""
    holders: dict[int, set[int]] = {}  # by the socket's inode
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith("socket:["):
                        holders.setdefault(int(target[8:-1]), set()).add(pid)
    found = []
    for inode, there in _all_listening():
        if inode in holders:
            found.append(replace(there, pids=tuple(sorted(holders[inode]))))
    return sorted(found)


def _all_listening() -> Iterator[tuple[int, Listening]]:
    """Every socket of this machine that takes connections, by inode; whose it is, is not known."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS_TCP:
                host, _, port = words[1].partition(":")
                yield int(words[9]), Listening(kind="tcp", address=_address(host), port=int(port, 16), pids=())
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & _ACCEPTS:
            address = words[7] if len(words) > 7 else ""
            yield int(words[6]), Listening(kind="unix", address=address, port=0, pids=(), style=int(words[4], 16))


def _address(hexadecimal: str) -> str:
    """The kernel prints words of 32 bits as the machine holds them."""
    words = [int(hexadecimal[i : i + 8], 16) for i in range(0, len(hexadecimal), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


class _Writes:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.marker), "w")


class Strangers:
    """They speak to every socket, and stay until `leave`.

    Args:
        marker: a file that is there as soon as anybody unpickles what they send.
    """

    def __init__(self, marker: Path) -> None:
        assert not marker.exists()
        self.marker = marker
        self._open: list[socket.socket] = []
        poison = pickle.dumps(_Writes(marker))
        pickle.loads(poison).close()
        assert marker.exists(), "the pickle is harmless"
        marker.unlink()
        self.letters = {
            "noise": bytes(range(256)) * 16,
            "zeros": bytes(4096),
            "half a word": b"\x01",
            "a huge length": struct.pack("<Q", 2**62) + b"x",
            "a pickle": poison,
            "a pickle behind its length": struct.pack(">I", len(poison)) + poison,  # multiprocessing's connections
            "a pickle behind 8 bytes": struct.pack("<Q", len(poison)) + poison,
            "a web request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        }

    def visit(self, there: Listening) -> list[str]:
        """Say everything there, each on a connection of its own, and be silent on one. None is closed before `leave`.

        Returns:
            What was not taken: letters whose connection was refused, or broken before they were sent.
        """
        refused = []
        for name, letter in {**self.letters, "nothing": b""}.items():
            try:
                one = there.connect()
                self._open.append(one)
                one.sendall(letter)
            except OSError:
                refused.append(name)
                continue
            if letter:
                with contextlib.suppress(OSError):  # it was thrown out already
                    one.shutdown(socket.SHUT_WR)
        return refused

    def leave(self) -> None:
        for one in self._open:
            one.close()


def where(there: Listening) -> str:
    """As `docs/security.md` says it."""
    if there.kind == "tcp":
        return f"tcp, {'every address' if ipaddress.ip_address(there.address).is_unspecified else 'one address'}"
    if there.address.startswith("@") or not there.address:
        return "unix, without a file"
    folder = Path(there.address).parent.stat()
    is_private = folder.st_uid == os.getuid() and not folder.st_mode & 0o077
    return f"unix, {'in a private folder' if is_private else 'in a folder of others'}"


def who(job: Job) -> dict[int, str]:
    """Every process of a running job, as `docs/security.md` calls them, by pid."""
    hosts = [pid for rank in range(len(job.launchers)) for pid in job.rank(rank)["hosts"]]
    cores = [inner_process(host) for host in hosts]
    named = {launcher.pid: f"launcher of node {node}" for node, launcher in enumerate(job.launchers)}
    named |= {job.rank(rank)["pid"]: "rank" for rank in range(len(job.launchers))}
    named |= dict.fromkeys(hosts, "engine host") | {core.pid: "EngineCore" for core in cores}
    named |= {worker.pid: "engine worker" for core in cores for worker in core.children(recursive=True)}
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # the sentinel's `touch`, which has ended
            if "grpo.faults.sentinel" in process.cmdline():
                named[process.pid] = "sentinel"
    return {process.pid: named.get(process.pid, "another process") for process in job.processes()}


def documented() -> dict[str, set[tuple[str, str]]]:
    """The table of `docs/security.md`: who listens where, by when."""
    found: dict[str, set[tuple[str, str]]] = {}
    table = (ROOT / "docs" / "security.md").read_text().partition("| held by |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        held_by, place, when = [cell.strip() for cell in line.strip("|").split("|")][:3]
        found.setdefault(when, set()).add((held_by, place))
    return found
