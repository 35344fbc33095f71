"""Messages between a local main and its engine host.

Pickled by `multiprocessing.connection.Connection` over a socketpair held by the two processes alone. The local main
sends `Start` first, once; the host answers `Ready` or `Died`. After that any of the others, in any order. There is no
goodbye: an engine has no state to save, and ends by SIGKILL (`grpo.engine.lifetime`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.faults.failure import FailureKind

if TYPE_CHECKING:
    import numpy as np  # not beside torch everywhere: the transports' tests on a GPU want torch alone


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Settings to build the engine.

    Example:
        EngineSpec(engine_args={"model": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}, sampling={"temperature": 1.0})
    """

    engine_args: dict[str, Any]
    """Arguments of vLLM's `AsyncEngineArgs`; `weight_transfer_config` is the backend's name alone."""
    sampling: dict[str, Any]
    """Arguments of `SamplingParams` common to all completions; `seed` comes with each `Sample`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Engine for a waiting host to run."""

    spec: EngineSpec
    environment: dict[str, str]
    """Environment of this engine; the host was started with the part known before."""
    log_path: Path
    """Absolute path; appended to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine has started and waits for work."""

    max_model_len: int
    """Longest sequence, prompt and completion, in tokens."""
    max_num_seqs: int
    """Number of sequences the engine runs at once."""
    startup_s: float
    """Seconds from the process's first line to here, without its wait for `Start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The engine cannot continue; the host ends after sending this."""

    cause: str
    kind: FailureKind = FailureKind.ENGINE

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", FailureKind(self.kind))  # a string in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """First tokens of a completion."""

    token_ids: "np.ndarray"
    """[T] int32."""
    engine_logprobs: "np.ndarray"
    """[T] float32, natural log, of the distributions sampled from."""
    is_whole: bool = False
    """True if it has ended, and waits for others of its prompt to be answered with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sample completions of one prompt; one `Sampled` follows for each, in some `Answers`.

    Example:
        Sample(ids=range(8, 16), token_ids=np.array([9707, 11], np.int32), seed=42)
    """

    ids: range
    """Ids of the completions; unique within an engine."""
    token_ids: "np.ndarray"
    """[L] int32, the prompt."""
    seed: int
    """Seed of the first completion; the i-th has seed + i."""
    together: bool = False
    """True: all are answered after the last one has ended, which costs less. False: each when it ends."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Sampling arguments of these completions, overriding the spec's."""
    end_tokens: tuple[int, ...] = ()
    """End tokens of a completion, in addition to `stop_token_ids` of these settings; not with `ignore_eos`."""
    cache_salt: str | None = None
    """Prompts share prefix-cache entries only with prompts of the same salt; None: with others without a salt."""
    adapter: int | None = None
    """Number of the adapter to sample with, from the first token to the last; None: the newest, or the base before
    it."""
    pictures: tuple[bytes, ...] = ()
    """Image files of the prompt, in order; `token_ids` has one placeholder for each."""
    expanded: "np.ndarray | None" = None
    """[L'] int32, with images: the expected expansion of the prompt."""
    begun: Begun | None = None
    """First tokens of a single completion: not sampled again, and part of the answer."""

    @property
    def num_tokens(self) -> int:
        """Number of the prompt's tokens, with images expanded."""
        return len(self.token_ids if self.expanded is None else self.expanded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion, or the error instead of it."""

    completion_id: int
    token_ids: "np.ndarray"
    """[T] int32."""
    engine_logprobs: "np.ndarray"
    """[T] float32, natural log, of the distribution sampled from."""
    error: str | None = None
    is_refusal: bool = False
    """True if the error is about the prompt, and the engine continues."""
    finish_reason: str | None = None
    """Reason from vLLM: `stop`, `length` or `repetition`."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the engine's prefix cache."""
    num_begun: int = 0
    """Number of tokens from `Sample.begun`, not sampled by this engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Completions ended at about the same time: one message costs less than one each."""

    sampled: "tuple[Sampled, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Drop these completions; no `Sampled` follows for them."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A control call; answered by one `Reply` with the same id."""

    call_id: int
    method: str
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    call_id: int
    value: Any
    error: str | None
    """Text of the exception, if the call failed."""
    kind: FailureKind = FailureKind.ENGINE
    """Kind of the exception."""
