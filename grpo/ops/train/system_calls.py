"""System calls denied to a model's program: a seccomp filter, as the bytes of a BPF program.

Denied are calls for memory not counted by RLIMIT_AS, and calls reaching into other processes or far into the kernel.
"""

import struct
from collections.abc import Iterable

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h
_NUMBERS = {  # of x86_64, of aarch64
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),  # a pipe then keeps the pages after they are unmapped
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
_SIGNALS = {  # without namespaces: a program could kill the process that supervises it
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
_FCNTL, _F_SETPIPE_SZ = (72, 25), 1031  # root's pipes hold gigabytes
_OTHER_ABI = 0x40000000  # x32: other numbers for the same calls

_NUMBER_AT, _ARCHITECTURE_AT, _SECOND_ARGUMENT_AT = 0, 4, 24  # in struct seccomp_data; both are little-endian
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050001  # the last one: EPERM


def seccomp_filter(machine: str, *, isolated: bool) -> bytes | None:
    """Return `struct sock_filter[]` for a machine as named by `os.uname`; None for an unknown one.

    Args:
        isolated: True if the program has its own process namespace, where it may send signals.
    """
    if machine not in _ARCHITECTURES:
        return None
    column = [*_ARCHITECTURES].index(machine)
    denied = _NUMBERS if isolated else _NUMBERS | _SIGNALS
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_deny(_IF_AT_LEAST, [_OTHER_ABI]),
        *_deny(_IF_EQUAL, [numbers[column] for numbers in denied.values()]),
        (_IF_EQUAL, 0, 3, _FCNTL[column]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
        *_deny(_IF_EQUAL, [_F_SETPIPE_SZ]),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *each) for each in code)


def _deny(comparison: int, values: Iterable[int]) -> Iterable[tuple[int, int, int, int]]:
    for value in values:
        yield comparison, 0, 1, value
        yield _RETURN, 0, 0, _DENY
