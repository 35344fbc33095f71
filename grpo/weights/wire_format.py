"""Wire format of a weight sync: a question to the engines, once before the first sync, and their answer.

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
    """Name in the trainer's model; also in the weight sync, if the engine loads it stacked."""
    shape: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...]
    """Checkpoint names: for each equal part of the rows (gate and up), expert by expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat(Wire):
    """Answer of the engines.

    Example:
        WireFormat(dtypes={"model.layers.0.mlp.gate.e_score_correction_bias": "float32"})
    """

    dtypes: dict[str, str] = field(default_factory=dict)
    """Dtype by checkpoint name, for tensors in another dtype than the engine's, such as a router's bias in float32."""
    whole_experts: tuple[str, ...] = ()
    """Names of the `StackedExperts` the engine loads in one call per part; others are sent one by one."""
    computed: tuple[str, ...] = ()
    """Buffers that the engine computes itself, and takes from no checkpoint: they are not sent."""
    unplaced: tuple[str, ...] = ()
    """Parameters without a place in the engine: some of vLLM's models skip unknown names."""


def ask_engines(clients: Sequence["EngineLike"], question: dict[str, Any], timeout_s: float) -> WireFormat:
    """Ask every engine of a node, one after the other.

    Args:
        question: from `GatheredSource.question`.

    Raises:
        EngineError: an engine does not know a parameter's name, or did not answer in time.
        RuntimeError: two engines, or two workers of one, differ.
    """
    answers: list[str] = []  # of every worker
    for client in clients:
        answers += client.call("wire_format", timeout_s, question=question)
    return agreed([WireFormat.loads(answer) for answer in answers])


def agreed(answers: Sequence[WireFormat]) -> WireFormat:
    """Return the common answer.

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
