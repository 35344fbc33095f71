"""TRL's `GRPOTrainer`, which imports vLLM where it is installed: here only once somebody builds a generator of TRL's.

A rank in local mode never does. It saves a third of a rank's imports, 4 s of processor time, and some 300 MB.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

_MODULES = ("trl.generation.vllm_client", "trl.generation.vllm_generation")  # 1.16; the second imports the first


@contextlib.contextmanager
def _without_vllm() -> Iterator[None]:
    """TRL's modules that are imported meanwhile take vLLM for missing."""
    checks = importlib.import_module("trl.import_utils")
    is_available = checks.is_vllm_available
    checks.is_vllm_available = lambda *args, **kwargs: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        checks.is_vllm_available = is_available  # type: ignore[attr-defined]


def _load_first(generator: Any) -> None:
    """Let a class of those modules give them their vLLM before its first object is made."""
    build = generator.__init__

    def build_with_vllm(self: Any, *args: Any, **kwargs: Any) -> None:
        generator.__init__ = build
        for name in _MODULES:  # into the same namespaces, where what is already defined looks its names up
            importlib.reload(sys.modules[name])
        build(self, *args, **kwargs)

    generator.__init__ = build_with_vllm


if any(name in sys.modules for name in _MODULES):
    from trl import GRPOTrainer as TRLTrainer  # the script has imported it: it has its vLLM
else:
    with _without_vllm():
        from trl import GRPOTrainer as TRLTrainer
        from trl.generation.vllm_client import VLLMClient
        from trl.generation.vllm_generation import VLLMGeneration
    sys.modules["trl.generation"].VLLMGeneration = VLLMGeneration  # type: ignore[attr-defined]  # as with vLLM
    _load_first(VLLMClient)
    _load_first(VLLMGeneration)

__all__ = ["TRLTrainer"]
