"""In which form the trainer's tensors travel: what the engines are asked once, before the first weight sync, and
answer.

Imports neither vLLM nor DeepSpeed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo.place.wire import Wire

if TYPE_CHECKING:
    from grpo.engine.like import EngineLike  # vLLM's workers import this file


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """One projection of all experts of a layer, as transformers holds it: [experts, rows, columns]."""

    name: str
    """In the trainer's model, under which it travels if the engine takes it whole."""
    shape: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...]
    """The checkpoint's names: of each equal part of the rows (gate and up), expert by expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat(Wire):
    """The engines' answer."""

    dtypes: dict[str, str] = field(default_factory=dict)
    """By the checkpoint's name: what the engine holds in another dtype than its own, a router's bias in float32."""
    whole_experts: tuple[str, ...] = ()
    """Names of the `StackedExperts` that the engine loads in one call for each part; others travel one by one."""
    computed: tuple[str, ...] = ()
    """Buffers that the engine takes from no checkpoint, since it computes them itself: they stay at home."""
    unplaced: tuple[str, ...] = ()
    """Parameters of which nothing arrives anywhere: some of vLLM's models pass over names that they do not know."""


def ask_engines(clients: Sequence["EngineLike"], question: dict[str, Any], timeout_s: float) -> WireFormat:
    """Ask every engine of a node, each in turn.

    Args:
        question: as `GatheredSource.question` gives it.

    Raises:
        EngineError: an engine does not know a parameter's name, or did not answer in time.
        RuntimeError: two of them, or two workers of one, differ.
    """
    answers: list[str] = []  # of every worker
    for client in clients:
        answers += client.call("wire_format", timeout_s, question=question)
    return agreed([WireFormat.loads(answer) for answer in answers])


def agreed(answers: Sequence[WireFormat]) -> WireFormat:
    """The one answer that all gave.

    Raises:
        RuntimeError: they differ.
    """
    first = answers[0]
    for other in answers[1:]:
        if other != first:
            odd = sorted(
                dict(first.dtypes.items() ^ other.dtypes.items()).keys()
                | ({*first.whole_experts} ^ {*other.whole_experts})
                | ({*first.computed} ^ {*other.computed})
                | ({*first.unplaced} ^ {*other.unplaced})
            )
            raise RuntimeError(
                f"two engines hold {odd[:3]} in different forms, and one weight sync cannot serve both: run the same "
                "vLLM on devices of one kind on all nodes"
            )
    return first
