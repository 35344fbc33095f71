"""The arithmetic of `bench.scale`: one step of N nodes of G GPUs, for four places where completions may be sampled.

Every layout has the same N x G GPUs and trains on the same N x C completions a step. Sampling a completion takes s
GPU-seconds of an engine, training on it t GPU-seconds of a rank; both split over GPUs without loss.

- Node-local: R inference GPUs of each node sample for the G - R others. Generation: C s / R, and the step waits for
  the slowest node (below). Training: C t / (G - R). The weight sync is the slower of its two legs, gather over the
  network and broadcast inside the node (`_sync_legs_s`), over the measured share of that bound which the own weight
  sync reaches. A step is generation + weight sync + training, or with lookahead max(generation, training) + weight sync
  over the measured share of that bound.
- Central server: the S GPUs of one node sample for the G (N - 1) others; on a single node, R of its GPUs. Generation:
  N C s / S, and no wait for a slowest, for all requests stand in one queue. Rank 0 sends the weights to the server
  over the network while it gathers them: the slower of the two, over the same measured share. Prompts and completions
  cross the network (8 bytes a token). No lookahead, as in TRL's server mode.
- Central pool: the same with N x R engine GPUs, one queue and lookahead: what a central server would have to become. A
  broadcast to many servers takes as long as to one (RDMA, pipelined). Ranks fill whole nodes.
- Colocated: all GPUs sample, then all train: N C s / (N G), then N C t / (N G). The gather alone is the weight sync.
  Between the phases the engine's weights (bf16) go to host memory and come back, over the host link of each GPU.
  Nothing can overlap. The smaller KV cache that an engine has beside ZeRO's states is not counted.

The slowest of k engines that share no queue takes 1 + spread sqrt(2 ln k) times the mean (the limit for the largest of
k normal values, which is a little too much for small k). What all layouts pay alike is left out: ZeRO-3's own traffic
while training, rewards, data.
"""

import math
from dataclasses import dataclass

NETWORK_GBPS = 400.0  # one NDR adapter
NVLINK_GBPS = 2400.0  # an A100's; an H100's is 3600
WEIGHT_BYTES = 2  # bf16, in trainer and engine
COMPLETION_TOKEN_BYTES = 8  # an id (int32) and a log-probability (float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one node does, as measured or assumed."""

    name: str
    gpus: int
    parameters: int
    completions: int
    """C: that a node samples and trains on in a step."""
    completion_tokens: int
    sample_s: float
    """s: GPU-seconds of an engine for one completion."""
    train_s: float
    """t: GPU-seconds of a training GPU for one completion."""
    sync_efficiency: float = 1.0
    """Of the bound that follows from the links; at most 1."""
    overlap_efficiency: float = 1.0
    """Of max(generation, training) + weight sync; at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What connects the nodes, and how even they are."""

    network_gbps: float
    """Gigabits per second into one node, and out of it."""
    nvlink_gbps: float
    """Into one GPU from its node."""
    host_gbps: float
    """Between one GPU and host memory."""
    spread: float
    """Standard deviation of an engine's generation time, as a share of the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the whole job."""

    layout: str
    nodes: int
    engine_gpus: int
    """Of all nodes; colocated: all of them."""
    generate_s: float
    """Until the last completion is there."""
    train_s: float
    sync_s: float
    """Until every engine has the new weights, sleep and wake-up included."""
    step_s: float
    training_idle: float
    """Share of a step in which a training GPU does not train; colocated: neither trains nor samples."""
    engine_idle: float
    """Share of a step in which an engine's GPU does not sample; colocated: neither trains nor samples."""


def node_local(node: Node, cluster: Cluster, *, nodes: int, reserved: int, lookahead: int) -> Step:
    ranks = node.gpus - reserved
    mean_s = node.completions * node.sample_s / reserved
    generate_s = mean_s * slowest_of(nodes, cluster.spread)
    train_s = node.completions * node.train_s / ranks
    gather_s, broadcast_s = _sync_legs_s(node, cluster, nodes=nodes, ranks_per_node=ranks)
    sync_s = max(gather_s, broadcast_s) / node.sync_efficiency
    step_s = _step_s(node, generate_s, train_s, sync_s, lookahead)
    return Step(
        layout=f"node-local, lookahead {lookahead}",
        nodes=nodes,
        engine_gpus=nodes * reserved,
        generate_s=generate_s,
        train_s=train_s,
        sync_s=sync_s,
        step_s=step_s,
        training_idle=1 - train_s / step_s,
        engine_idle=1 - mean_s / step_s,
    )


def best_reserved(node: Node, cluster: Cluster, *, lookahead: int) -> int:
    """GPUs to reserve on each node for the shortest step of one node."""
    choices = range(1, node.gpus)
    return min(choices, key=lambda r: node_local(node, cluster, nodes=1, reserved=r, lookahead=lookahead).step_s)


def central_server(node: Node, cluster: Cluster, *, nodes: int, reserved: int) -> Step:
    """One node samples; on a single node, `reserved` of its GPUs."""
    engine_gpus = node.gpus if nodes > 1 else reserved
    return _central("central server", node, cluster, nodes=nodes, engine_gpus=engine_gpus, lookahead=0)


def central_pool(node: Node, cluster: Cluster, *, nodes: int, reserved: int) -> Step:
    """As many engine GPUs as node-local engines have, in one pool, sampling ahead."""
    engine_gpus = nodes * reserved
    return _central("central pool, lookahead 1", node, cluster, nodes=nodes, engine_gpus=engine_gpus, lookahead=1)


def colocated(node: Node, cluster: Cluster, *, nodes: int) -> Step:
    mean_s = node.completions * node.sample_s / node.gpus
    generate_s = mean_s * slowest_of(nodes * node.gpus, cluster.spread)
    train_s = node.completions * node.train_s / node.gpus
    gather_s, _ = _sync_legs_s(node, cluster, nodes=nodes, ranks_per_node=node.gpus)
    sleep_and_wake_s = 2 * _seconds(node.parameters * WEIGHT_BYTES, cluster.host_gbps)
    sync_s = gather_s / node.sync_efficiency + sleep_and_wake_s
    step_s = _step_s(node, generate_s, train_s, sync_s, lookahead=0)
    idle = 1 - (mean_s + train_s) / step_s
    return Step(
        layout="colocated, sleep and wake",
        nodes=nodes,
        engine_gpus=nodes * node.gpus,
        generate_s=generate_s,
        train_s=train_s,
        sync_s=sync_s,
        step_s=step_s,
        training_idle=idle,
        engine_idle=idle,
    )


def simulate(node: Node, cluster: Cluster, *, node_counts: tuple[int, ...], reserved: int | None) -> list[Step]:
    """All layouts at all sizes; `reserved` None: what is best for one node, for each lookahead by itself."""
    on_policy = reserved or best_reserved(node, cluster, lookahead=0)
    ahead = reserved or best_reserved(node, cluster, lookahead=1)
    return [
        step
        for nodes in node_counts
        for step in (
            node_local(node, cluster, nodes=nodes, reserved=on_policy, lookahead=0),
            node_local(node, cluster, nodes=nodes, reserved=ahead, lookahead=1),
            central_server(node, cluster, nodes=nodes, reserved=on_policy),
            central_pool(node, cluster, nodes=nodes, reserved=ahead),
            colocated(node, cluster, nodes=nodes),
        )
    ]


def slowest_of(engines: int, spread: float) -> float:
    """How much longer than the mean the slowest of so many takes."""
    return 1 + spread * math.sqrt(2 * math.log(engines))


def _central(layout: str, node: Node, cluster: Cluster, *, nodes: int, engine_gpus: int, lookahead: int) -> Step:
    """All requests in one queue, weights and completions over the network."""
    ranks = nodes * node.gpus - engine_gpus
    training_nodes = max(1, round(ranks / node.gpus))
    gather_s, _ = _sync_legs_s(node, cluster, nodes=training_nodes, ranks_per_node=ranks // training_nodes)
    link_gbps = cluster.network_gbps if nodes > 1 else cluster.nvlink_gbps
    send_s = _seconds(node.parameters * WEIGHT_BYTES, link_gbps)
    completions = nodes * node.completions
    transfer_s = _seconds(completions * node.completion_tokens * COMPLETION_TOKEN_BYTES, link_gbps)
    generate_s = completions * node.sample_s / engine_gpus + transfer_s
    train_s = completions * node.train_s / ranks
    sync_s = max(gather_s, send_s) / node.sync_efficiency
    step_s = _step_s(node, generate_s, train_s, sync_s, lookahead)
    return Step(
        layout=layout,
        nodes=nodes,
        engine_gpus=engine_gpus,
        generate_s=generate_s,
        train_s=train_s,
        sync_s=sync_s,
        step_s=step_s,
        training_idle=1 - train_s / step_s,
        engine_idle=1 - generate_s / step_s,
    )


def _step_s(node: Node, generate_s: float, train_s: float, sync_s: float, lookahead: int) -> float:
    if lookahead:
        return (max(generate_s, train_s) + sync_s) / node.overlap_efficiency
    return generate_s + sync_s + train_s


def _sync_legs_s(node: Node, cluster: Cluster, *, nodes: int, ranks_per_node: int) -> tuple[float, float]:
    """(gather, broadcast to the node's engines) at the speed of the links.

    Each of N nodes holds 1/N of the weights and receives the rest over the network, whatever algorithm gathers them;
    each of W ranks holds 1/W, and its local main receives the rest over the links of its node.
    """
    num_bytes = node.parameters * WEIGHT_BYTES
    ranks = nodes * ranks_per_node
    network_s = _seconds(num_bytes * (nodes - 1) / nodes, cluster.network_gbps)
    inside_s = _seconds(num_bytes * (ranks - 1) / ranks, cluster.nvlink_gbps)
    return max(network_s, inside_s), _seconds(num_bytes, cluster.nvlink_gbps)


def _seconds(num_bytes: float, gbps: float) -> float:
    return num_bytes * 8 / (gbps * 1e9)
