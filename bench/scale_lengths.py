"""Completions with lengths, in `bench.scale`: nodes simulated step by step, with up to 8 batches under way.

What `bench.scale_model` leaves out: completions of a batch differ in length, and an engine is the slower for each
sequence the more it runs at once. So a batch's longest completions go on alone, on engines that are nearly empty.

- Engine: one decoding step of b sequences takes `STEP_S` + `SEQUENCE_S` b; 64 of them make the 6,000 tokens/s that
  `bench.scale` assumes, one makes 124, 256 make 13,700. At most `Lengths.places` run at once, and others wait in the
  queue of their site, oldest batch first. Node-local: a site is a node; central pool: all engines are one.
- Lengths: log-normal, cut at `Lengths.longest`; the completions of a prompt share a part of it.
- Nodes differ in speed by a factor that lasts (`Cluster.spread`). It is the harder case: what differs from step to step
  is absorbed by batches under way.
- Training: the tokens of the batch at `train_tokens_per_s`, all ranks alike. Weight syncs as in `bench.scale_model`;
  with two batches or more under way engines stand still for one and go on, before that they are at rest.
- Lookahead 0: sample, train, weight sync. 1: the ranks collect a batch, weight sync, submit the next and train. N of 2
  or more: weight sync, collect the oldest, share the batch after N others out by the real `plan_moves`, train. Batches
  are taken in order.
- Colocated: all GPUs sample one batch, then all train, nothing overlaps.

GPUs to reserve are the best for two nodes, for each layout by itself. Both constants of the engine are assumed, as
lengths and speeds are. Left out: prompts, preemption for want of KV cache, tools, rewards, ZeRO's own traffic, unequal
ranks, what share of its bound an overlapped step reaches (it would be the same for all that look ahead), and what it
costs in learning that completions are older.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import scale_model
from bench.scale_model import Cluster, Node, Step
from bench.scale_sites import Site
from grpo.rollout.balance import BACKLOG_SMOOTHING, plan_moves

NODE_COUNTS = (1, 8, 64)
DEPTHS = (0, 1, 2, 4, 8)
GROUP = 8  # completions of a prompt
SHARED = 0.6  # of the spread of lengths, the part of the prompt: 36 % of the variance
TRIED_NODES = 2  # on which the number of inference GPUs is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long completions are, and how many an engine's cache holds."""

    name: str
    median: float
    sigma: float
    """Of the logarithm."""
    longest: int
    places: int
    """Sequences that an engine runs at once."""

    def group(self, rng: random.Random) -> list[int]:
        """Tokens of the completions of one prompt."""
        own = math.sqrt(1 - SHARED**2) * self.sigma
        mean = math.log(self.median) + rng.gauss(0, SHARED * self.sigma)
        return [max(16, min(self.longest, int(math.exp(rng.gauss(mean, own))))) for _ in range(GROUP)]


SHORT = Lengths(name="answers", median=870, sigma=0.57, longest=4096, places=256)  # 1.0k tokens in the mean
TAIL = Lengths(name="reasoning", median=3000, sigma=1.1, longest=32768, places=160)  # 5.2k


class _Backlog:
    """The nodes' speeds as they are measured, and who samples what."""

    def __init__(self, num_nodes: int) -> None:
        self._tokens_per_s = [0.0] * num_nodes
        self._seen = [(0, 0.0)] * num_nodes

    def share_out(self, sites: Sequence[Site], groups: Sequence[Sequence[list[int]]]) -> list[list[list[int]]]:
        """The groups that each node samples, of those that each asks for."""
        self._note(sites)
        known = self._tokens_per_s if all(self._tokens_per_s) else [1.0] * len(sites)
        sizes = [[len(group) for group in of_node] for of_node in groups]
        moves = plan_moves(sizes, known, [site.owed for site in sites])
        gone = {(move.source, number) for move in moves for number in move.requests}
        sampled = [
            [group for number, group in enumerate(of_node) if (node, number) not in gone]
            for node, of_node in enumerate(groups)
        ]
        for move in moves:
            sampled[move.target] += [groups[move.source][number] for number in move.requests]
        return sampled

    def _note(self, sites: Sequence[Site]) -> None:
        for node, site in enumerate(sites):
            tokens, busy_s = site.tokens - self._seen[node][0], site.busy_s - self._seen[node][1]
            self._seen[node] = (site.tokens, site.busy_s)
            if tokens and busy_s:
                old, new = self._tokens_per_s[node], tokens / busy_s
                self._tokens_per_s[node] = BACKLOG_SMOOTHING * new + (1 - BACKLOG_SMOOTHING) * (old or new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where completions are sampled, and how many batches are under way."""

    lookahead: int
    central: bool = False

    @property
    def name(self) -> str:
        return f"{'central pool' if self.central else 'node-local'}, lookahead {self.lookahead}"


LAYOUTS = (
    *(Layout(lookahead=depth) for depth in DEPTHS),
    *(Layout(lookahead=depth, central=True) for depth in DEPTHS[1:]),
)


def simulate(
    node: Node, cluster: Cluster, lengths: Lengths, *, node_counts: Sequence[int], reserved: int | None, steps: int = 10
) -> list[Step]:
    """All layouts at all sizes; `reserved` None: what is best for two nodes, for each layout by itself."""
    found = []
    best = {layout: reserved or best_reserved(node, cluster, lengths, layout, steps) for layout in LAYOUTS}
    for nodes in node_counts:
        for layout in LAYOUTS:
            found.append(step_of(node, cluster, lengths, layout, nodes=nodes, reserved=best[layout], steps=steps))
        found.append(colocated(node, cluster, lengths, nodes=nodes, steps=steps))
    return found


def best_reserved(node: Node, cluster: Cluster, lengths: Lengths, layout: Layout, steps: int) -> int:
    def step_s(reserved: int) -> float:
        return step_of(node, cluster, lengths, layout, nodes=TRIED_NODES, reserved=reserved, steps=steps).step_s

    return min(range(1, node.gpus), key=step_s)


def step_of(
    node: Node, cluster: Cluster, lengths: Lengths, layout: Layout, *, nodes: int, reserved: int, steps: int
) -> Step:
    """The mean of so many steps, after as many as it takes for the batches under way to be usual ones."""
    rng = random.Random(nodes)
    speeds = _speeds(rng, cluster, nodes)
    of_layout = scale_model.central_pool if layout.central else _node_local
    sync_s = of_layout(node, cluster, nodes=nodes, reserved=reserved).sync_s
    engines = [speed for speed in speeds for _ in range(reserved)]
    sites = (
        [Site(engines, lengths.places)]
        if layout.central
        else [Site([speed] * reserved, lengths.places) for speed in speeds]
    )
    loop = Loop(node, lengths.group, sites, rng, nodes=nodes, ranks=(node.gpus - reserved) * nodes, sync_s=sync_s)
    warm_up = loop.warm_up(layout.lookahead)
    begun = (loop.now, loop.busy_s())
    for _ in range(steps):
        loop.step(layout.lookahead)
    step_s = (loop.now - begun[0]) / steps
    busy = (loop.busy_s() - begun[1]) / (loop.now - begun[0]) / len(engines)
    train_s = statistics.mean(loop.train_s[warm_up:])
    return Step(
        layout=layout.name,
        nodes=nodes,
        engine_gpus=len(engines),
        generate_s=statistics.mean(loop.generate_s[warm_up:]),
        train_s=train_s,
        sync_s=sync_s,
        step_s=step_s,
        training_idle=1 - train_s / step_s,
        engine_idle=1 - busy,
    )


class Loop:
    """Generation batches, weight syncs and training, in the order of the real loop."""

    def __init__(
        self,
        node: Node,
        group: Callable[[random.Random], list[int]],
        sites: list[Site],
        rng: random.Random,
        *,
        nodes: int,
        ranks: int,
        sync_s: float,
        speed_beside: float = 1.0,
    ) -> None:
        self._group, self._sites, self._rng = group, sites, rng
        self._nodes, self._groups = nodes, node.completions // GROUP
        self._train_s = node.train_s / node.completion_tokens / ranks  # of a token
        self._sync_s, self._speed_beside = sync_s, speed_beside
        self._balance = _Backlog(nodes) if 1 < nodes == len(sites) else None
        self._tokens: list[int] = []
        self._submitted_s: list[float] = []
        self.now = 0.0
        self.train_s: list[float] = []
        self.generate_s: list[float] = []

    def busy_s(self) -> float:
        for site in self._sites:
            site.run_to(self.now)
        return sum(site.busy_s for site in self._sites)

    def submit(self, *, balances: bool = False) -> None:
        """Ask for one more batch."""
        groups = [[self._group(self._rng) for _ in range(self._groups)] for _ in range(self._nodes)]
        batch = len(self._tokens)
        self._tokens.append(sum(map(sum, (group for of_node in groups for group in of_node))))
        self._submitted_s.append(self.now)
        if balances and self._balance is not None:
            groups = self._balance.share_out(self._sites, groups)
        if len(self._sites) == 1:
            groups = [[group for of_node in groups for group in of_node]]
        for site, of_site in zip(self._sites, groups, strict=True):
            site.add(batch, [length for group in of_site for length in group])

    def warm_up(self, lookahead: int) -> int:
        """As many steps as it takes for the batches under way to be usual ones. Returns how many."""
        for _ in range(lookahead):
            self.submit()
        for _ in range(lookahead + 4):
            self.step(lookahead)
        return lookahead + 4

    def step(self, lookahead: int) -> None:
        """One optimizer step, from the end of the one before."""
        if lookahead == 0:
            self.submit()
        if lookahead >= 2:
            self._sync()
        batch = len(self.train_s)
        ends_s = max(site.finish(batch) for site in self._sites)
        self.generate_s.append(ends_s - self._submitted_s[batch])
        self._run_to(max(self.now, ends_s))
        if lookahead == 1:
            self._sync()
        if lookahead:
            self.submit(balances=lookahead >= 2)
        self.train_s.append(self._tokens[batch] * self._train_s)
        self._set_speed(self._speed_beside)
        self._run_to(self.now + self.train_s[-1])
        self._set_speed(1 / self._speed_beside)
        if lookahead == 0:
            self._sync()

    def _set_speed(self, factor: float) -> None:
        if factor != 1.0:
            for site in self._sites:
                site.change_speed(factor)

    def _sync(self) -> None:
        for site in self._sites:
            site.pause(self._sync_s)
        self._run_to(self.now + self._sync_s)

    def _run_to(self, until_s: float) -> None:
        self.now = until_s
        for site in self._sites:
            site.run_to(until_s)


def colocated(node: Node, cluster: Cluster, lengths: Lengths, *, nodes: int, steps: int) -> Step:
    """All GPUs of a node sample its batch from one queue, and the next phase waits for the slowest node."""
    rng = random.Random(nodes)
    speeds = _speeds(rng, cluster, nodes)
    sync_s = scale_model.colocated(node, cluster, nodes=nodes).sync_s
    of_batches: list[tuple[float, float, float]] = []
    for _ in range(steps):
        sites = [Site([speed] * node.gpus, lengths.places) for speed in speeds]
        tokens = 0
        for site in sites:
            asked = [length for _ in range(node.completions // GROUP) for length in lengths.group(rng)]
            tokens += sum(asked)
            site.add(0, asked)
        generate_s = max(site.finish(0) for site in sites)
        for site in sites:
            site.run_to(generate_s)
        busy_s = statistics.mean(site.busy_s for site in sites) / node.gpus
        of_batches.append((generate_s, busy_s, tokens * node.train_s / node.completion_tokens / (node.gpus * nodes)))
    generate_s, busy_s, train_s = (statistics.mean(values) for values in zip(*of_batches, strict=True))
    step_s = generate_s + train_s + sync_s
    idle = 1 - (busy_s + train_s) / step_s
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


def _node_local(node: Node, cluster: Cluster, *, nodes: int, reserved: int) -> Step:
    return scale_model.node_local(node, cluster, nodes=nodes, reserved=reserved, lookahead=1)


def _speeds(rng: random.Random, cluster: Cluster, nodes: int) -> list[float]:
    """Of each node's engines, relative to what the constants say."""
    return [1 / max(0.5, 1 + rng.gauss(0, cluster.spread)) for _ in range(nodes)]
