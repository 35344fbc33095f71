"""What crosses the socket between a local main and its engine host.

Pickled by `multiprocessing.connection.Connection` over a socketpair that only the two processes hold. The local main
sends `Start` first, once; the host answers `Ready` or `Died`. After that any of the others, in any order. There is
no farewell: an engine holds nothing worth saving, and ends by SIGKILL (`grpo.engine.lifetime`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.faults.failure import FailureKind

if TYPE_CHECKING:
    import numpy as np  # not beside torch everywhere: the transports' tests on a GPU want torch alone


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How to build the engine."""

    engine_args: dict[str, Any]
    """Arguments of vLLM's `AsyncEngineArgs`; `weight_transfer_config` is the backend's name alone."""
    sampling: dict[str, Any]
    """Arguments of `SamplingParams` common to all completions; `seed` comes with each `Sample`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a waiting host is to run, and where."""

    spec: EngineSpec
    environment: dict[str, str]
    """Of this engine; the host has been started with what was known before."""
    log_path: Path
    """Absolute; appended to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine has started and waits for work."""

    max_model_len: int
    """Tokens of prompt and completion that one sequence may have."""
    max_num_seqs: int
    """Sequences that the engine runs at once."""
    startup_s: float
    """From the process's first line to here, less its wait for `Start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The engine cannot go on; the host ends after sending this."""

    cause: str
    kind: FailureKind = FailureKind.ENGINE

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", FailureKind(self.kind))  # text, where it comes out of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Tokens that a completion has so far."""

    token_ids: "np.ndarray"
    """[T] int32."""
    engine_logprobs: "np.ndarray"
    """[T] float32, natural log, of the distributions that they were sampled from."""
    is_whole: bool = False
    """Whether it has ended, and waits for others of its prompt to be answered with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sample completions of one prompt; one `Sampled` follows for each, in some `Answers`."""

    ids: range
    """Of the completions; no two that an engine works on have the same."""
    token_ids: "np.ndarray"
    """[L] int32, the prompt."""
    seed: int
    """Of the first completion; the i-th has seed + i."""
    together: bool = False
    """Whether all are answered when the last one has ended, which costs less; else each when it ends."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Sampling arguments that replace those of the spec, for these completions alone."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a completion, beside `stop_token_ids` of these settings; not with `ignore_eos`."""
    cache_salt: str | None = None
    """The prefix cache gives this prompt the KV of prompts with the same salt alone; None: of all without one."""
    adapter: int | None = None
    """Number of the adapter to sample with, from the first token to the last; None: the newest, or none before that."""
    pictures: tuple[bytes, ...] = ()
    """Of the prompt's images, as files, in their order; `token_ids` has one placeholder for each."""
    expanded: "np.ndarray | None" = None
    """[L'] int32, with images: what the engine has to make of the prompt."""
    begun: Begun | None = None
    """Of a single completion: its first tokens, which are not sampled again, and come with the answer."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt, as the engine holds it."""
        return len(self.token_ids if self.expanded is None else self.expanded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion, or why there is none."""

    completion_id: int
    token_ids: "np.ndarray"
    """[T] int32."""
    engine_logprobs: "np.ndarray"
    """[T] float32, natural log, of the distribution that was sampled from."""
    error: str | None = None
    is_refusal: bool = False
    """Whether the error is about the prompt, and the engine goes on."""
    finish_reason: str | None = None
    """vLLM's: `stop`, `length` or `repetition`."""
    num_cached_tokens: int = 0
    """Of the prompt, that the engine's prefix cache held."""
    num_begun: int = 0
    """Of the tokens: those of `Sample.begun`, which this engine has not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Completions that ended at about the same time: one message costs less than one for each."""

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
    """The exception's text when the call failed."""
    kind: FailureKind = FailureKind.ENGINE
    """Of that exception."""
