"""Timeouts that are not options, in one record passed to the code that waits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts in seconds."""

    blame_s: float = 3.0
    """Wait of a secondary error for the record of its cause."""
    signal_patience_s: float = 1.0
    """Delay between an engine's and our receipt of one signal from the scheduler."""
    alone_grace_s: float = 30.0
    """Slack beyond a deadline, in a process without a sentinel whose Python threads do not run either."""
    hub_join_s: float = 30.0
    """Attempts to reach node 0's sentinel, unless the port is closed."""
    hub_answer_s: float = 5.0
    """One connection to node 0's sentinel."""
    run_lock_s: float = 150.0
    """Release of a powered-off node's locks by a network file system."""
    device_free_s: float = 30.0
    """Release of a killed engine's memory by the driver."""
    engine_notice_s: float = 30.0
    """Decision of the supervisor after an engine has ended."""
    engine_abort_s: float = 10.0
    """End of a request after vLLM's abort, or of all requests after completions are aborted."""
    sync_stuck_s: float = 30.0
    """Slack beyond an engine's deadline, which ends the transport's operations; later waits are stuck."""
    compare_s: float = 60.0
    """Repeated calls of a reward function to compare its answers; no further call starts afterwards."""
    agent_end_s: float = 5.0
    """Time between SIGTERM and SIGKILL for an agent command."""
    agent_body_s: float = 60.0
    """Arrival of an agent's request body."""
    visible_s: float = 180.0
    """Visibility of other nodes' files on rank 0: NFS caches a folder for 60 s."""


USUAL = Timeouts()
