"""Faults, phases and layouts: what is expected of each combination, or why there is none. Data; `run.py` runs it.

A fault that comes in a phase ends the job on every node within `PROMISED_S`, with one record that names node, rank,
phase and cause, unless the expectation says that the job goes on. Nothing of the job stays.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from grpo import GRPOConfig

PROMISED_S = 60.0
_OPTIONS = {each.name for each in fields(GRPOConfig)}
REWARD_S = 15  # of `reward_timeout` where the reward hangs

PHASES = {
    "start": "an engine has been started, the model is not loaded yet",
    "generate": "completions are under way in the engines, all ranks wait for them",
    "sync": "a bucket is on its way to the engines, the other ranks gather",
    "train": "before a training step's forward, on every rank",
    "save": "ranks have written their parts of a checkpoint, which is not complete",
    "resume": "a checkpoint is being loaded",
}
NODES = {"one": 1, "two": 2, "three": 3}
LAYOUTS = {
    "one": "one node by torchrun: 2 ranks with ZeRO-3 and an engine; faults strike its processes",
    "two": "two nodes by `grpo launch --nodes 127.0.0.1,127.0.0.2`, each a rank with ZeRO-3 and an engine; faults "
    "strike node 1, unless they name node 0",
    "three": "three nodes as on two, each in a network namespace of its own",
}
STALL_S = 40  # of the deadline of what is stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong. What it strikes depends on the layout: `targets`."""

    name: str
    shown: str
    act: str
    """kill or stop (SIGSTOP) a process; stick: it goes nowhere; eat: it takes more memory than there is; fill or freeze
    a file system; cut or reset a node's network; or asked: the job is started with what goes wrong."""
    target: str = ""
    """See `strike.py`; of `fill` the file system."""
    phases: tuple[str, ...] = tuple(PHASES)
    layouts: tuple[str, ...] = ("one", "two")
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the job script."""

    @property
    def holds_ranks(self) -> bool:
        """Whether ranks stay where they are when it has come: what it takes is noticed beside them, in any phase."""
        return self.target.startswith("agent") or self.act == "cut"

    @property
    def is_engines(self) -> bool:
        """Whether it takes an engine and nothing else."""
        return self.target in ("host", "core", "worker")


TENSOR_PARALLEL = {"vllm_tensor_parallel_size": 2}
_PROCESSES = (
    ("host", "engine host", {}),
    ("core", "vLLM's EngineCore", {}),
    ("worker", "a tensor-parallel worker of vLLM", TENSOR_PARALLEL),
    ("main", "local main (on one node rank 0, on two the one of node 1)", {}),
    ("other", "another rank of the node", {}),
    ("agent", "launcher (agent)", {}),
    ("agent 0", "node 0's launcher, which holds the job's store", {}),
    ("node", "all processes of a node", {}),
    ("node 0", "all processes of node 0", {}),
)
_ACTS = (("kill", "killed"), ("stop", "stopped"))
_RUNNING = ("generate", "train")
_ONE = {"phases": _RUNNING, "layouts": ("one",)}
FAULTS = (
    Fault(
        name="engine-refuses",
        shown="engine fails at start",
        act="asked",
        phases=("start",),
        config={"vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_dtype": "no-such-type"}},
    ),
    *(
        Fault(name=f"{target.replace(' ', '')}-{done}", shown=f"{what} {done}", act=act, target=target, config=config)
        for target, what, config in _PROCESSES
        for act, done in _ACTS
    ),
    Fault(name="disk-full", shown="no space in the output folder", act="fill", target="disk"),
    Fault(name="shm-full", shown="no space in /dev/shm", act="fill", target="shm"),
    Fault(
        name="prompt-refused",
        shown="prompts of a stream, longer than the engine holds",
        act="asked",
        phases=("generate",),
        settings={"prompt_words": 40},
        config={"vllm_max_refused": 0},
    ),
    Fault(
        name="reward-raises",
        shown="the reward raises on one rank",
        act="asked",
        phases=("train",),
        settings={"reward": "raises"},
    ),
    *(
        Fault(
            name=name,
            shown=shown,
            act="asked",
            phases=("train",),
            settings={"reward": wish},
            config={"reward_timeout": REWARD_S},
        )
        for name, shown, wish in (
            ("reward-hangs", "the reward hangs on one rank", "hangs"),
            ("reward-hangs-everywhere", "the reward hangs on all ranks", "all hang"),
        )
    ),
    *(
        Fault(name=f"{what.replace(' ', '')}-{done}", shown=shown, act=act, target=what, phases=_RUNNING, layouts=where)
        for what, act, done, shown, where in (
            ("network", "cut", "cut", "network of node 1 cut", ("two",)),
            ("network", "reset", "reset", "all connections of node 1 reset", ("two",)),
            ("network 0", "cut", "cut", "node 0's uplink cut", ("three",)),
        )
    ),
    *(
        Fault(
            name=f"{target}-stuck", shown=f"{what} alive and stuck", act="stick", target=target, config=limits, **_ONE
        )
        for target, what, limits in (
            ("core", "vLLM's EngineCore", {"vllm_stall_timeout": STALL_S}),
            ("main", "local main", {"rank_stall_timeout": STALL_S, "vllm_generate_timeout": STALL_S}),
        )
    ),
    *(
        Fault(
            name=f"{target}-out-of-memory", shown=f"{what} killed for want of memory", act="eat", target=target, **_ONE
        )
        for target, what in (("core", "vLLM's EngineCore"), ("main", "local main"))
    ),
    Fault(
        name="folder-hangs",
        shown="the output folder hangs",
        act="freeze",
        target="disk",
        config={"rank_stall_timeout": 30},
        **_ONE,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How it ends."""

    goes_on: bool = False
    """Whether the job trains on, to its last step."""
    says: tuple[str, ...] = ()
    """Parts of the record, in any order; `|` between words of which one will do."""
    within_s: float = PROMISED_S
    """From the fault to the job's last process, or to the next logged step."""
    spared: str = ""
    """Whose processes stay: they are stopped and nobody on their node is left to end them, or the kernel holds them."""
    records: int = 1
    """So many, where nodes cannot hear of each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    fault: Fault
    phase: str
    layout: str
    expected: Expected | None
    """None: not run; `why_not` says why."""
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault.name}/{self.phase}/{self.layout}"

    def config(self) -> dict[str, Any]:
        """Fields of `GRPOConfig`, those that it has."""
        wanted = dict(self.fault.config)
        if self.expected is not None and not self.expected.goes_on:
            wanted |= {"max_steps": 100_000}  # a fault that keeps nobody from training must end the job, too
        if self.phase == "save":
            wanted |= {"save_strategy": "steps", "save_steps": 2}
        if self.phase == "resume":
            wanted |= {"resume_from_checkpoint": "auto"}
        return {name: value for name, value in wanted.items() if name in _OPTIONS}


_OTHER_LAYOUT = "as in the other layout, or nothing of it depends on the number of nodes"
_AS_ON_ONE = "as on one node: nothing in it depends on the number of nodes"
_REASONS = {  # by patterns of cells' names; the first one holds
    "agent0-*/*/one": "the only launcher: the row of the launcher",
    "node0-*/*/one": "the only node: nobody is left to expect anything of",
    "node-*/*/one": "the only node: nobody is left to expect anything of",
    "other-*/*/two": "a node has one rank there",
    "worker-*/*/two": _AS_ON_ONE,
    "engine-refuses/start/two": _AS_ON_ONE,
    "prompt-refused/*/two": _AS_ON_ONE,
    "reward-raises/*/two": _AS_ON_ONE,
    "reward-hangs-everywhere/*/two": _AS_ON_ONE,
    "*-full/*/two": _AS_ON_ONE,
    "core-*/start/*": "it is not there yet; the host is",
    "core-*/*/two": _AS_ON_ONE,
    "host-*/save/two": _AS_ON_ONE,
    "host-*/resume/two": _AS_ON_ONE,
    "disk-full/resume/one": "nothing is written between the start and the first step",
    "disk-full/generate/one": "nothing is written to the output folder there; the engine's log may lose lines",
    "disk-full/sync/one": "nothing is written to the output folder there; the engine's log may lose lines",
    "shm-full/train/one": "nothing takes shared memory there: data-loader workers have theirs since the first step",
    "shm-full/save/one": "nothing takes shared memory there",
    "shm-full/generate/one": "what engines share they have had since their start",
    "shm-full/sync/one": "weight syncs go through an unnamed memory file, which takes no space in /dev/shm",
    "shm-full/resume/one": "as in the start, which it follows",
    "worker-*/start/one": "the workers are not there yet",
}


_SAID = {phase: f"phase '{phase}'" for phase in PHASES} | {"start": "phase 'start'|phase 'engine start'"}


def _reason(name: str) -> str:
    return next((why for pattern, why in _REASONS.items() if fnmatchcase(name, pattern)), "")


def _expected(fault: Fault, phase: str, layout: str) -> Expected:
    node = "node 0" if NODES[layout] == 1 or fault.target.endswith(" 0") else "node 1"
    if fault.is_engines and phase not in ("start", "resume"):  # where engines have not served yet, a death is the end
        return Expected(goes_on=True, within_s=PROMISED_S + (STALL_S if fault.act == "stick" else 0))
    if fault.act == "asked":
        return {
            "engine-refuses": Expected(says=("node 0", "rank 0", "engine start", "no-such-type")),
            "prompt-refused": Expected(says=("phase 'generate'", "vllm_max_refused", "GRPO-412")),
            "reward-raises": Expected(says=("node 0", "rank 1", "train|reward", "went wrong")),
        }.get(fault.name, Expected(says=(node, "reward"), within_s=PROMISED_S + REWARD_S))
    if fault.act in ("cut", "reset"):
        return _of_the_network(fault)
    if fault.act == "freeze":
        return Expected(says=(node, "GRPO-622", "/run/logs"), spared="those that the kernel holds")
    if fault.act == "stick":
        return Expected(says=(node, "rank 0", _SAID[phase]), within_s=PROMISED_S + STALL_S)
    if fault.act == "eat":
        return Expected(says=(node, "rank 0", "GRPO-628"))
    if fault.act == "fill":
        return Expected(says=(node, "GRPO-702|No space left|Insufficient space|no space|full|Bus error|GRPO-601"))
    if fault.is_engines:
        return Expected(says=(node, "engine start|start", "GRPO-404|GRPO-406" if fault.act == "kill" else "stopped"))
    if fault.target.startswith("node"):
        spared = fault.target if fault.act == "stop" else ""
        return Expected(says=(node, _SAID[phase], "GRPO-604|GRPO-605"), spared=spared)  # as it said last
    if fault.target.startswith("agent"):
        # Completions come while a stopped one is waited for, and ranks go on.
        said = "phase '" if (fault.act, phase) == ("stop", "generate") else _SAID[phase]
        return Expected(says=(node, said, "GRPO-602|GRPO-603|store"))
    place = (node, _SAID[phase])
    rank = {"main": "rank 0" if layout == "one" else "rank 1", "other": "rank 1"}[fault.target]
    return Expected(says=(*place, rank, "GRPO-601" if fault.act == "kill" else "GRPO-603"))


def _of_the_network(fault: Fault) -> Expected:
    if fault.act == "reset":
        return Expected(says=("node", "rank"))
    if fault.target.endswith(" 0"):  # each of the three is alone
        return Expected(says=("node 0", "GRPO-616"), records=3)
    return Expected(says=("node 0", "node 1", "GRPO-614"))


def cells() -> Iterator[Cell]:
    """Every fault in every phase in every layout."""
    for fault in FAULTS:
        for phase in PHASES:
            for layout in LAYOUTS:
                why_not = _reason(f"{fault.name}/{phase}/{layout}")
                if phase not in fault.phases:
                    why_not = f"it comes in {' and '.join(fault.phases)} alone"
                if layout not in fault.layouts:
                    why_not = _OTHER_LAYOUT
                expected = None if why_not else _expected(fault, phase, layout)
                yield Cell(fault=fault, phase=phase, layout=layout, expected=expected, why_not=why_not)


IN_TESTS = ("node-killed/train/two",)
"""Those that `make test` runs: of others `tests/multiprocess/test_failures.py` has the like."""
IN_LONG_TESTS = ("core-killed/save/one", "disk-full/save/one")
"""Those that `make test-long` runs."""


def find(patterns: list[str]) -> list[Cell]:
    """Cells that can be run, by patterns of their names as in a shell; all without patterns."""
    found = [cell for cell in cells() if cell.expected is not None]
    return [cell for cell in found if not patterns or any(fnmatchcase(cell.name, each) for each in patterns)]
