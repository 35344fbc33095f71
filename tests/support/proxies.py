"""A wire between two ends of a TCP connection, which can be reset or ended as routers and firewalls do it."""

import contextlib
import select
import socket
import struct
import threading


def pipe(one: socket.socket, other: socket.socket, swallows: threading.Event | None = None) -> None:
    """Passes on what comes from either, until one has ended, or none of it."""
    with one, other, contextlib.suppress(OSError):
        while ready := select.select([one, other], [], [])[0]:
            for end in ready:
                if not (chunk := end.recv(1 << 16)):
                    return
                if swallows is None or not swallows.is_set():
                    (other if end is one else one).sendall(chunk)


class Wire:
    """Listens at `port`, and passes on to a port of this machine what comes there."""

    def __init__(self, port: int) -> None:
        self.joined = 0
        """Connections so far."""
        self._to = port
        self._ends: list[socket.socket] = []
        self._swallows = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # it has ended
                here.close()
                continue
            self._ends += [here, there]
            self.joined += 1
            threading.Thread(target=pipe, args=[here, there, self._swallows], daemon=True).start()

    def reset(self) -> None:
        """Both ends of all connections get a reset; new ones are passed on."""
        ends, self._ends = [end for end in self._ends if end.fileno() >= 0], []
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for end in ends:
            with contextlib.suppress(OSError):  # its thread has closed it
                end.shutdown(socket.SHUT_RD)  # wakes the thread, which closes both

    def swallow(self) -> None:
        """Nothing comes through the connections that there are; new ones are passed on."""
        self._swallows.set()
        self._swallows = threading.Event()

    def refuse(self) -> None:
        """New connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
