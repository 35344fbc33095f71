"""TRL without its vLLM until somebody builds a generator of TRL's."""

import subprocess
import sys

USED_AFTERWARDS = """
import sys
import grpo.trainer
assert "vllm" not in sys.modules
from trl.generation import VLLMGeneration
from trl.generation.vllm_client import VLLMClient
from trl.trainer import grpo_trainer
assert grpo_trainer.VLLMGeneration is VLLMGeneration
try:
    VLLMClient(base_url="http://127.0.0.1:9", connection_timeout=0)  # nobody listens on the port "discard"
except OSError as error:
    print(error)
assert sys.modules["trl.generation.vllm_generation"].LLM is sys.modules["vllm"].LLM
assert sys.modules["trl.generation.vllm_client"].is_vllm_available()
"""

IMPORTED_BEFORE = """
import sys
from trl.generation import VLLMGeneration
assert "vllm" in sys.modules
import grpo.trainer, trl
print(issubclass(grpo.trainer.GRPOTrainer, trl.GRPOTrainer))
"""


def run(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_lazy_vllm_loads_on_use_by_trl() -> None:
    assert "can't be reached" in run(USED_AFTERWARDS)


def test_lazy_vllm_with_vllm_already_imported_subclasses_trl() -> None:
    assert run(IMPORTED_BEFORE).splitlines()[-1] == "True"
