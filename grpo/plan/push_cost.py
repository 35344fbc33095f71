"""What a push moves, and how long that takes at least.

Two legs: the ZeRO-3 gather brings the model into every node, over the network; the push itself goes from the local main
to the engines beside it and never leaves the node.
"""

from dataclasses import dataclass

NETWORK_GBPS = 400.0
NVLINK_GBPS = 2400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How fast a node receives, in gigabits per second."""

    network_gbps: float
    """Into one node, over all its network adapters."""
    nvlink_gbps: float | None
    """Into one GPU from its node; None without GPUs, whose links nobody named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCost:
    """One push. Seconds are lower bounds: bytes over the speed of the link."""

    network_bytes_per_node: int
    """Into each node over the network: the shares of the model that the other nodes hold."""
    gathered_bytes_per_node: int
    """The whole model, in the engine's dtype, to which shards are cast before they are gathered."""
    engine_bytes: int
    """Pushed to each engine, inside the node, in the engine's dtype."""
    gather_s: float | None
    """The slower of network and the links inside the node; None without GPUs."""
    push_s: float | None
    """One broadcast to all engines of the node; a bucket's goes on while the next one is gathered."""


def push_cost(model_bytes: int, links: Links, *, num_nodes: int, ranks_per_node: int, zero3: bool = True) -> PushCost:
    """The push of a model of `model_bytes` in the engine's dtype.

    Of P bytes, each of N nodes holds 1/N and receives (N-1)/N over the network, whatever algorithm gathers them; each
    of W ranks holds 1/W, and its local main receives (W-1)/W over the links of its node. Without ZeRO-3 every rank
    holds all weights already.
    """
    gathered = model_bytes if zero3 else 0
    ranks = num_nodes * ranks_per_node
    network = gathered * (num_nodes - 1) // num_nodes
    gather_s = push_s = None
    if links.nvlink_gbps is not None:
        inside_s = _seconds(gathered * (ranks - 1) // ranks, links.nvlink_gbps)
        gather_s = max(_seconds(network, links.network_gbps), inside_s)
        push_s = _seconds(model_bytes, links.nvlink_gbps)
    return PushCost(
        network_bytes_per_node=network,
        gathered_bytes_per_node=gathered,
        engine_bytes=model_bytes,
        gather_s=gather_s,
        push_s=push_s,
    )


def _seconds(num_bytes: int, gbps: float) -> float:
    return num_bytes * 8 / (gbps * 1e9)
