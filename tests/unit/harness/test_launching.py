"""What the tests hold jobs to must not be a matter of luck."""

import multiprocessing
from multiprocessing import shared_memory

from tests.launching import orphaned_shared_memory


def test_what_a_living_process_holds_is_no_orphan() -> None:
    lock = multiprocessing.get_context("spawn").Lock()  # vLLM's engine process holds one while its workers start
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        held = {f"/dev/shm/sem.{lock._semlock.name.lstrip('/')}", f"/dev/shm/{memory.name}"}
        assert not held & orphaned_shared_memory()
        memory.close()
        assert held & orphaned_shared_memory() == {f"/dev/shm/{memory.name}"}
    finally:
        memory.unlink()
