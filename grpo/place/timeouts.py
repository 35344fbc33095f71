"""How long waits may take for which there is no option: one record, handed to the code that waits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds."""

    blame_s: float = 3.0
    """That a secondary error waits for the record of its cause."""
    signal_patience_s: float = 1.0
    """A scheduler's signal to all processes may reach an engine before it reaches us."""
    alone_grace_s: float = 30.0
    """Beyond a deadline: a process without a sentinel, whose Python threads do not run either."""
    hub_join_s: float = 30.0
    """Of trying to reach node 0's sentinel, unless the port is closed."""
    hub_answer_s: float = 5.0
    """For one connection to it."""
    run_lock_s: float = 150.0
    """Until a network file system lets go of what a node held that is off."""
    device_free_s: float = 30.0
    """For a driver to give back what a killed engine held."""
    engine_notice_s: float = 30.0
    """From an engine's end until its supervisor has decided what follows."""
    engine_abort_s: float = 10.0
    """From vLLM's abort of a request to its own end, or from the abort of completions to that of their requests."""
    sync_stuck_s: float = 30.0
    """Beyond an engine's deadline, which ends the transport's operations: what still waits then is stuck."""
    compare_s: float = 60.0
    """That a function's calls may take which are made to compare its answers, before another is made."""
    agent_end_s: float = 5.0
    """From SIGTERM to SIGKILL of an agent that is a command."""
    agent_body_s: float = 60.0
    """That an agent has for the body of a request."""
    visible_s: float = 180.0
    """Until rank 0 sees what the others have written: NFS keeps what it knows of a folder for 60 s."""


USUAL = Timeouts()
