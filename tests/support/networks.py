"""Machines at a switch, each a network namespace, in a user namespace: needs no root, and nobody else sees them."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

WAITS = ("sh", "-c", "echo there; read _")
HOLD = ("unshare", "--user", "--map-root-user", "--net")


def why_not() -> str:
    """Why there can be none here, and what to do about it; empty if there can."""
    if missing := [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]:
        return f"{missing[0]} is missing: apt-get install --no-install-recommends iproute2 util-linux"
    tried = subprocess.run(
        [*HOLD, "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"namespaces are forbidden ({tried.stderr.strip()}): by sysctl, AppArmor or a container's seccomp"
    return ""


class Network:
    """So many machines, 10.0.0.1 and on."""

    def __init__(self, stack: contextlib.ExitStack, hosts: int) -> None:
        self._stack = stack
        self._switch = self._hold(HOLD)
        self._at_switch("ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        self._at_switch("ip", "link", "set", "switch", "up")
        self._hosts = [self._hold([*self._enter(self._switch), "unshare", "--net"]) for _ in range(hosts)]
        for host, pid in enumerate(self._hosts):
            self._at_switch(
                "ip", "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)
            )
            self._at_switch("ip", "link", "set", f"port{host}", "up")
            for line in ("link set lo up", "link set eth0 up", f"addr add {self.address(host)}/24 dev eth0"):
                subprocess.run(self.inside(host, ["ip", *line.split()]), check=True)
            self.join(host)

    def _hold(self, command: Sequence[str]) -> int:
        """The pid of a process that does nothing in namespaces of its own."""
        process = subprocess.Popen([*command, *WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n", f"{command}: there are no namespaces"
        return process.pid

    def _enter(self, pid: int) -> list[str]:
        return ["nsenter", "--target", str(pid), "--user", "--net", "--preserve-credentials"]

    def _at_switch(self, *command: str) -> None:
        subprocess.run([*self._enter(self._switch), *command], check=True)

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, as it is run on a machine."""
        return [*self._enter(self._hosts[host]), *command]

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"

    def cut(self, host: int) -> None:
        """Nothing reaches it or comes from it, and no process gets an error."""
        self._at_switch("ip", "link", "set", f"port{host}", "nomaster")

    def reset(self, host: int) -> None:
        """Every connection that it has with another gets a reset, as by a firewall that forgets; new ones are made."""
        for other in range(len(self._hosts)):
            if other != host:
                kill = self.inside(host, ["ss", "--kill", "--tcp", "dst", self.address(other)])
                subprocess.run(kill, check=True, stdout=subprocess.DEVNULL)

    def join(self, host: int) -> None:
        self._at_switch("ip", "link", "set", f"port{host}", "master", "switch")


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        yield Network(stack, hosts)
