"""Stand-ins for an engine: one that answers at once, one that takes its time in a thread of its own; and for its host.

Imported beside torch alone, as tests on GPUs may be: NumPy and pydantic come where they are needed.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo.engine.client import EngineDied, EngineError
from grpo.engine.messages import Begun, EngineSpec, Ready, Sample, Sampled
from grpo.faults.failure import FailureKind

if TYPE_CHECKING:
    import numpy as np

DEADLINE_S = 20.0


def three_tokens(sample: Sample, number: int) -> list[int]:
    """What the completion with this number is, by its seed."""
    import numpy as np

    return np.random.default_rng(sample.seed + number).integers(5, 20, 3).tolist()


def agree(method: str, kwargs: dict[str, Any]) -> Any:
    """Answers as of an engine whose weights are what it was sent, and which computes no probabilities."""
    if method == "prompt_logprobs":
        return [[0.0] * (len(prompt) - 1) for prompt in kwargs["prompts"]]
    if method in ("pause", "so_far"):
        return {}
    if method == "wire_format":
        from grpo.weights.wire_format import WireFormat

        return [WireFormat().dumps()]
    return True


@dataclass(kw_only=True, eq=False)
class Script:
    """How the engines of a test answer, when they die, and what has happened to any of them."""

    tokens_of: Callable[[Sample, int], Sequence[int]] = three_tokens
    """Of a sample's completion with this number."""
    logprobs_of: "Callable[[Sample, Sequence[int]], Sequence[float] | None]" = lambda sample, tokens: None
    """Of such a completion's tokens; None: exp(-2.5) for each."""
    control: Callable[[str, dict[str, Any]], Any] = agree
    """Answers control calls; what it raises, the call raises."""
    max_model_len: int | None = None
    """Tokens that engines hold; None: as many as they are started with."""
    deaths: list[tuple[str, int]] = field(default_factory=list)
    """What any engine is asked, and at which time that kills the one that is asked."""
    dies_of: Callable[[Sample], bool] = lambda sample: False
    """Whether an engine that is asked for this dies."""
    asked: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    story: list[tuple] = field(default_factory=list)
    """("sync", version) and ("abort",), in order; tests add their own."""
    started: list["ScriptedEngine"] = field(default_factory=list)

    def start(
        self,
        spec: EngineSpec,
        *,
        name: str,
        environment: Mapping[str, str],
        log_path: Path,
        on_death: Callable[[EngineDied], None] | None,
        stopped_timeout_s: float,
        stall_timeout_s: float | None,
    ) -> "ScriptedEngine":
        """In the place of `EngineClient`."""
        space = self.max_model_len or spec.engine_args.get("max_model_len", 4096)
        engine = ScriptedEngine(name, self, on_death=on_death, max_model_len=space)
        self.started.append(engine)
        return engine


class ScriptedEngine:
    """Does what its script says, at once and in the caller's thread; only its death is distinguished from another."""

    pid = 0

    def __init__(
        self,
        name: str = "engine 0",
        script: Script | None = None,
        *,
        on_death: Callable[[EngineDied], None] | None = None,
        max_model_len: int = 64,
    ) -> None:
        self.name = name
        self.script = script or Script()
        self.private_folder = Path("unused") / name
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_closed = False
        self._on_death = on_death  # a real engine's thread holds it
        self._max_model_len = max_model_len
        self._on_answer: Callable[[Sampled | EngineError], None] = lambda answer: None
        self._death: EngineDied | None = None

    def die(self) -> None:
        """As a real one: whoever waits hears of it, and then its supervisor, from another thread."""
        death = self._death = EngineDied(f"{self.name} was killed by signal 9; the last lines of its log:\nnothing")
        on_answer = self._on_answer

        def report_death() -> None:
            on_answer(death)
            if self._on_death is not None:
                self._on_death(death)

        threading.Thread(target=report_death, daemon=True).start()

    def _is_asked(self, what: str) -> None:
        self.script.asked[what] += 1
        if (what, self.script.asked[what]) in self.script.deaths:
            self.die()
        if self._death is not None:
            raise self._death

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def wait_ready(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> Ready:
        self._is_asked("wait_ready")
        return Ready(max_model_len=self._max_model_len, max_num_seqs=16, startup_s=1.0)

    def listen(self, on_answer: Callable[[Sampled | EngineError], None]) -> None:
        self._on_answer = on_answer
        if self._death is not None:
            on_answer(self._death)

    def submit(self, sample: Sample) -> None:
        try:
            self._is_asked("submit")
        except EngineDied:
            return
        if self.script.dies_of(sample):
            self.die()
            return
        self.script.samples.append(sample)
        for number, completion_id in enumerate(sample.ids):
            tokens = self.script.tokens_of(sample, number)
            self._on_answer(answer(completion_id, tokens, self.script.logprobs_of(sample, tokens)))

    def abort(self, ids: Sequence[int]) -> None:
        self.script.story.append(("abort",))

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        self.calls.append((method, kwargs))
        self._is_asked(method)
        if method == "finish_weight_update":
            self.script.story.append(("sync", int(kwargs["weight_version"])))
        return self.script.control(method, kwargs)

    def error(self, what: str, kind: FailureKind | None = None) -> EngineError:
        return EngineError(f"{self.name} {what}", kind=kind)

    def close(self) -> None:
        self.is_closed = True


def answer(completion_id: int, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Sampled:
    """A completion that ended by itself; every token with probability exp(-2.5) unless it is said."""
    import numpy as np

    return Sampled(
        completion_id=completion_id,
        token_ids=np.asarray(tokens, np.int32),
        engine_logprobs=np.asarray([-2.5] * len(tokens) if logprobs is None else logprobs, np.float32),
        finish_reason="stop",
    )


def answer_to(token_ids: "np.ndarray", seed: int) -> list[int]:
    """What any `ThreadedEngine` samples for a prompt and a seed."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return [*token_ids.tolist(), *rng.integers(0, 100, size=rng.integers(0, 40)).tolist()]


class Owed(NamedTuple):
    """A completion that an engine has not answered."""

    completion_id: int
    token_ids: "np.ndarray"
    seed: int
    begun: Begun | None = None


class ThreadedEngine(ScriptedEngine):
    """Runs `num_slots` sequences at a time, one token each in `token_s`, from a thread of its own."""

    def __init__(self, name: str, *, num_slots: int = 4, token_s: float = 0.0) -> None:
        super().__init__(name)
        self.num_slots, self.token_s = num_slots, token_s
        self.reported: list[tuple[str, tuple[int, ...]]] = []
        self.samples: list[Sample] = []
        self.dies_after: int | None = None
        self.refuses: Callable[[Owed], bool] = lambda owed: False
        self.dies_of: Callable[[Owed], bool] = lambda owed: False
        self.reads = threading.Event()
        self.reads.set()
        self.works = threading.Event()
        self.works.set()
        self._waiting: list[Owed] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, sample: Sample) -> None:
        assert self.reads.wait(DEADLINE_S)
        with self._lock:
            self.samples.append(sample)
            self.reported.append(("sample", tuple(sample.ids)))
            self._waiting += [
                Owed(ident, sample.token_ids, sample.seed + i, sample.begun) for i, ident in enumerate(sample.ids)
            ]

    def abort(self, ids: Sequence[int]) -> None:
        assert self.reads.wait(DEADLINE_S)
        with self._lock:
            self.reported.append(("abort", tuple(ids)))
            self._waiting = [owed for owed in self._waiting if owed.completion_id not in ids]

    def die(self) -> None:
        """As a kill from outside, whatever it does; returns when whoever listens knows."""
        self._ended.set()
        self._thread.join(DEADLINE_S)
        self._report_death()

    def close(self) -> None:
        self.reads.set()
        self._ended.set()
        self._thread.join(DEADLINE_S)
        super().close()

    # its own thread

    def _run(self) -> None:
        answered = 0
        while not self._ended.wait(self.token_s or 0.0001):
            if not self.works.is_set():
                continue
            with self._lock:
                running = self._waiting[: self.num_slots]
            if any(map(self.dies_of, running)):
                self._report_death()
                return
            for owed in running:
                tokens = [] if owed.begun is None else owed.begun.token_ids.tolist()
                tokens += answer_to(owed.token_ids, owed.seed)
                self._ended.wait(self.token_s * len(tokens) / self.num_slots)
                if answered == self.dies_after:
                    self._report_death()
                    return
                with self._lock:
                    left = [other for other in self._waiting if other.completion_id != owed.completion_id]
                    if len(left) == len(self._waiting):
                        continue  # aborted
                    self._waiting = left
                answered += 1
                if self.refuses(owed):
                    refusal = replace(answer(owed.completion_id, []), error="ValueError: too odd", is_refusal=True)
                    self._on_answer(refusal)
                else:
                    self._on_answer(answer(owed.completion_id, tokens, [-float(token) for token in tokens]))

    def _report_death(self) -> None:
        self._death = EngineDied(f"{self.name} was killed by signal 9")
        self._on_answer(self._death)


class MadeUpHost:
    """Stands where `HostProcess` does."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.runs = True

    def is_running(self) -> bool:
        return self.runs

    def close(self) -> None:
        self.runs = False
