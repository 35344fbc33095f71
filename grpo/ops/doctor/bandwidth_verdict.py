"""Verdict on measured times: GB/s, duration of a weight sync, slow nodes. Pure functions of the ranks' results."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo.ops.doctor.records import DoctorVerdict, Finding, merge
from grpo.ops.rendezvous.trouble import list_nodes
from grpo.place.wire import Wire

GB = 1e9
DTYPES = ("float32", "bfloat16", "float16")
SLOW = 0.7  # of the reference; healthy links vary by a tenth or two
MAX_ROUNDS = 8  # enough partners to distinguish a slow node from a slow partner, on any number of nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult(Wire):
    """Measurements of one rank. Seconds are the median of its repeats."""

    node: int
    host: str
    inside_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by operation (`all-reduce`, `all-gather`) among the ranks of its node; empty with one rank per node."""
    across_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by operation among all ranks; empty with one node."""
    pairs_s: tuple[tuple[int, float], ...] = ()
    """(partner's node, seconds) of each round of pairs with this rank's node."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Number formats in which an all-reduce over all ranks failed, each with the reason."""


def partners_of(node: int, num_nodes: int) -> list[int]:
    """Partners of a node, round by round, itself in a round without one; pairs are disjoint, and no pair occurs twice.

    In round k two nodes are partners if their numbers add up to k, modulo the number of nodes. All rounds together
    cover every pair, unless limited by `MAX_ROUNDS`.
    """
    return [(total - node) % num_nodes for total in range(min(num_nodes, MAX_ROUNDS))]


def below_reference(figures: Mapping[int, float]) -> dict[int, float]:
    """Figures below `SLOW` times the median, the upper one of two."""
    reference = statistics.median_high(figures.values()) if figures else 0.0
    return {node: figure for node, figure in figures.items() if figure < SLOW * reference}


def find_slow(speeds: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Slow nodes with their best figure, from the speeds of pairs measured at the same time.

    A node is as fast as its best pair: a healthy node has at least one healthy partner. Two nodes have only one figure,
    and no comparison.
    """
    nodes = sorted({node for pair in speeds for node in pair})
    return below_reference({node: max(s for pair, s in speeds.items() if node in pair) for node in nodes})


def name_nodes(hosts: Sequence[str]) -> tuple[str, ...]:
    """Names of the nodes: the host, with the node's number if several nodes run on one host."""
    return tuple(host if hosts.count(host) == 1 else f"{host}/{node}" for node, host in enumerate(hosts))


def bus_gb_per_s(operation: str, num_bytes: int, ranks: int, seconds: float) -> float:
    """Bus bandwidth of each rank's link: comparable with the hardware's figure, whatever the number of ranks.

    `num_bytes` is the size of the result on each rank.
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    factor = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": (ranks - 1) / ranks}[operation]
    return factor * num_bytes / seconds / GB


def judge_bandwidth(
    results: Sequence[RankResult],
    *,
    backend: str,
    num_bytes: int,
    pair_bytes: int,
    model_bytes: int | None,
    device: str = "CPUs",
    job_dtypes: Sequence[str] | None = None,
) -> DoctorVerdict:
    """Verdict over all ranks' results, in rank order.

    Args:
        num_bytes: result size of a collective on each rank; `pair_bytes`: sent by each rank to its partner.
        model_bytes: of one weight sync; None: not requested.
        device: used to try number formats; `job_dtypes`: the job's formats, None: unknown.
    """
    by_node: dict[int, list[RankResult]] = {}
    for result in results:
        by_node.setdefault(result.node, []).append(result)
    names = name_nodes([by_node[node][0].host for node in sorted(by_node)])
    findings = [
        Finding.passed("backend", backend),
        *_formats(results, f"{backend} on {device}", job_dtypes),
        *_inside(by_node, names, num_bytes, backend),
        *_across(results, num_bytes, len(names)),
        *_sync(results, num_bytes, model_bytes),
        *_pairs(results, names, pair_bytes * min(map(len, by_node.values()))),
    ]
    return DoctorVerdict(nodes=names, findings=merge(findings, names))


def _formats(results: Sequence[RankResult], backend: str, job_dtypes: Sequence[str] | None) -> list[Finding]:
    """Report failing number formats."""
    broken = {dtype: why for result in reversed(results) for dtype, why in result.broken.items()}
    if not broken:
        carried = f"{backend} carries {', '.join(job_dtypes or DTYPES)}"
        return [Finding.passed("number formats", carried)]
    message = f"{backend} does not carry {', '.join(f'{dtype}: {why}' for dtype, why in broken.items())}"
    fix = "train in another format (bf16, fp16), with the other ddp_backend, or with another build of torch"
    if job_dtypes is None and "float32" not in broken:  # every job exchanges float32
        return [Finding.warn("number formats", message, f"if the job trains in it: {fix}")]
    return [Finding.fail("number formats", message, fix)]


def _slowest(results: Sequence[RankResult], field_name: str) -> dict[str, float]:
    """Seconds by operation: a collective takes as long as on its slowest rank."""
    operations = getattr(results[0], field_name)
    return {operation: max(getattr(r, field_name)[operation] for r in results) for operation in operations}


def _rates(results: Sequence[RankResult], field_name: str, num_bytes: int) -> dict[str, float]:
    """GB/s by operation."""
    seconds = _slowest(results, field_name)
    return {operation: bus_gb_per_s(operation, num_bytes, len(results), s) for operation, s in seconds.items()}


def _inside(
    by_node: Mapping[int, Sequence[RankResult]], names: Sequence[str], num_bytes: int, backend: str
) -> list[Finding]:
    rates = {node: _rates(ranks, "inside_s", num_bytes) for node, ranks in by_node.items() if len(ranks) > 1}
    findings, shown = [], []
    fix = "is something else running there?"
    if backend == "nccl":
        fix += " Look at nvidia-smi topo -m, and at throttling: nvidia-smi -q -d PERFORMANCE"
    for operation in next(iter(rates.values()), {}):
        figures = {node: rate[operation] for node, rate in rates.items()}
        low, high = min(figures.values()), max(figures.values())
        shown.append(f"{operation} {low:.2f} GB/s" if len(figures) == 1 else f"{operation} {low:.2f}..{high:.2f} GB/s")
        for node, figure in below_reference(figures).items():
            message = f"{operation} {figure:.2f} GB/s on {names[node]}, up to {high:.2f} elsewhere"
            findings.append(Finding.warn("inside a node", message, fix, nodes=(names[node],)))
    if shown and not findings:
        sizes = sorted({len(by_node[node]) for node in rates})
        message = f"{', '.join(shown)} among {'..'.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))} ranks"
        findings.append(Finding.passed("inside a node", message))
    return findings


def _across(results: Sequence[RankResult], num_bytes: int, num_nodes: int) -> list[Finding]:
    rates = _rates(results, "across_s", num_bytes)
    shown = ", ".join(f"{operation} {rate:.2f} GB/s" for operation, rate in rates.items())
    message = f"{shown} over {len(results)} ranks on {num_nodes} nodes"
    return [Finding.passed("across nodes", message)] if rates else []


def _sync(results: Sequence[RankResult], num_bytes: int, model_bytes: int | None) -> list[Finding]:
    if model_bytes is None:
        return []
    seconds = _slowest(results, "across_s") or _slowest(results, "inside_s")
    gather_s = model_bytes / num_bytes * seconds["all-gather"]
    message = f"about {gather_s:.1f} s to gather {model_bytes / GB:.1f} GB; the copy into the engine comes on top"
    return [Finding.passed("one weight sync", message)]


def _pairs(results: Sequence[RankResult], names: Sequence[str], num_bytes: int) -> list[Finding]:
    """Report pairs of nodes.

    Args:
        num_bytes: of all ranks of a node together.
    """
    speeds: dict[tuple[int, int], float] = {}
    for result in results:
        for partner, seconds in result.pairs_s:
            first, second = sorted((result.node, partner))
            speed = num_bytes / seconds / GB
            speeds[first, second] = min(speed, speeds.get((first, second), speed))
    if not speeds:
        return []
    slowest, fastest = min(speeds, key=speeds.__getitem__), max(speeds.values())
    findings = []
    for node, figure in find_slow(speeds).items():
        message = f"{names[node]} is slow: {figure:.2f} GB/s with its best partner, {fastest:.2f} between others"
        fix = "leave it out (Slurm: --exclude), or look at its link: ibstat, ethtool, NCCL_DEBUG=INFO"
        findings.append(Finding.warn("pairs of nodes", message, fix, nodes=(names[node],)))
    both = " and ".join(names[node] for node in slowest)
    message = f"{speeds[slowest]:.2f} ({both}) to {fastest:.2f} GB/s each way between {len(speeds)} pairs"
    if len(speeds) == 1:
        message = f"{fastest:.2f} GB/s each way; with two nodes there is no other pair to compare with"
    return findings or [Finding.passed("pairs of nodes", message)]


def explain_failure(
    stage: str, what: str, late: Sequence[str], backend: str, *, route_interface: str, is_one_node: bool
) -> DoctorVerdict:
    """Verdict for a failed or unfinished stage, with a fix.

    Args:
        stage: for example `inside a node: all-reduce`.
        late: names of the nodes that did not reach the stage while others waited in it.
    """
    interface = route_interface or "INTERFACE"
    if late:
        fix = f"look at the output of {list_nodes(late)}: what keeps it before this stage?"
    elif backend != "nccl":
        fix = f"set GLOO_SOCKET_IFNAME={interface}: the interface that joins the nodes; grpo doctor names it"
    elif is_one_node or stage.startswith("inside"):
        fix = "try NCCL_P2P_DISABLE=1 (GPUs that cannot reach each other) and look at the space in /dev/shm; or train "
        fix += "with ddp_backend: gloo and vllm_sync_backend: shm"
    else:
        fix = f"set NCCL_SOCKET_IFNAME={interface} (the interface that joins the nodes); if that is right, "
        fix += "NCCL_IB_DISABLE=1 goes around a broken InfiniBand; or train with ddp_backend: gloo and "
        fix += "vllm_sync_backend: shm, slowly"
    message = f"{backend}, {stage}: {what}"
    message += f"; not there: {', '.join(late)}" if late else ""
    return DoctorVerdict(nodes=tuple(late), findings=(Finding.fail("bandwidth", message, fix),))
