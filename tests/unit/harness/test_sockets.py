"""What listens is seen, and a stranger's pickle shows where somebody unpickles: a test of real jobs leans on it."""

import contextlib
import os
import pickle
import socket
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.sockets import Strangers, listening, where


def test_listening_finds_all_kinds_of_sockets() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket() as open_to_all, socket.socket() as own:
        open_to_all.bind(("0.0.0.0", 0))
        own.bind(("127.0.0.1", 0))
        private, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        private.bind(f"{folder}/private")
        abstract.bind(f"\0grpo-test-{os.getpid()}")
        sockets = {
            open_to_all: "tcp, every address",
            own: "tcp, one address",
            private: "unix, in a private folder",
            abstract: "unix, without a file",
        }
        six = None
        if Path("/proc/net/if_inet6").exists():
            six = socket.socket(socket.AF_INET6)
            six.bind(("::", 0))
            sockets[six] = "tcp, every address"
        silent = socket.socket()  # bound, but takes no connections
        silent.bind(("127.0.0.1", 0))
        before = set(listening([os.getpid()]))
        for each in sockets:
            each.listen()
        found = set(listening([os.getpid()])) - before
        assert sorted(map(where, found)) == sorted(sockets.values())
        assert {there.port for there in found} >= {open_to_all.getsockname()[1], own.getsockname()[1]}
        for there in found:
            assert there.pids == (os.getpid(),)
            there.connect().close()
        for each in (private, abstract, silent, *([six] if six else [])):
            each.close()


def _obeys_raw(connection: socket.socket) -> None:
    pickle.loads(connection.makefile("rb").read())


def _obeys_as_multiprocessing(connection: socket.socket) -> None:
    Connection(connection.detach()).recv()


@pytest.mark.parametrize("serve", [_obeys_raw, _obeys_as_multiprocessing])
def test_strangers_visit_detects_unpickling_server(serve, tmp_path: Path) -> None:
    strangers = Strangers(tmp_path / "obeyed")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(32)
        server.settimeout(30)

        def take() -> None:
            for _ in strangers.letters:
                connection, _ = server.accept()
                with contextlib.suppress(Exception):  # most letters are no pickles
                    serve(connection)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        (there,) = [one for one in listening([os.getpid()]) if one.port == server.getsockname()[1]]
        strangers.visit(there)
        thread.join(30)
    strangers.leave()
    assert strangers.marker.exists()
