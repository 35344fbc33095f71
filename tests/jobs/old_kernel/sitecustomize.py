"""For Python processes that have this folder in their path: TCP_RTO_MAX_MS is unknown, as before Linux 6.15."""

import errno
import socket
from typing import Any

_set = socket.socket.setsockopt


def _setsockopt(self: socket.socket, level: int, option: int, *value: Any) -> None:
    if (level, option) == (socket.IPPROTO_TCP, 44):
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")
    _set(self, level, option, *value)


socket.socket.setsockopt = _setsockopt  # type: ignore[method-assign,assignment]
