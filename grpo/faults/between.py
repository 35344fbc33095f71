"""What a sentinel needs of those of other nodes, and how it takes leave of them."""

import time
from collections.abc import Callable

from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import Loop, Place
from grpo.faults.peer import Peer
from grpo.faults.progress import Table

GOODBYE_S = 3.0

Answer = Callable[[Table], object]


class Between:
    """What a sentinel needs of the others. This one has none: a job on one node."""

    record: FailureRecord | None = None
    """The job's."""

    def __init__(self, place: Place, loop: Loop) -> None:
        self.place, self._loop = place, loop

    def report(self, record: FailureRecord) -> None:
        """Make it the job's, unless one is there already."""
        if self.record is None:
            self.record = record

    def beat(self, table: Table) -> None:
        """Once an interval: say that this node lives, and look who else does."""

    def ask(self, table: Table, answer: Answer) -> None:
        """`answer` gets the table of all ranks, now or later; `table` is that of this node's."""
        answer(table)

    def leave(self) -> None:
        """Say goodbye; blocks `GOODBYE_S` at most, and where a network is cut until it is whole or a peer is lost."""


def await_goodbyes(peers: Callable[[], list[Peer]], loop: Loop, look: Callable[[], None]) -> None:
    """Until the others have read everything, and have ended their connections: what is unread when a connection is
    closed may be lost with it. One that is held will read it later; one that is cut off has to come back for it.

    Args:
        peers: those that are still there.
        look: called in between.
    """
    deadline = time.monotonic() + GOODBYE_S
    while waited_for := peers():
        if time.monotonic() > deadline and all(peer.knows_all() for peer in waited_for):
            break
        for key, _ in loop.selector.select(0.05):
            key.data()
        loop.clock.tick()
        look()
