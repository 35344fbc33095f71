"""Which quantised models are trained, and in which dtype they compute; others are refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AwqConfig, BitsAndBytesConfig, GPTQConfig

from grpo import GRPOConfig, GRPOTrainer
from grpo.config.checks import check_quantised_engine
from grpo.config.models import describe_model
from grpo.place.topology import read_topology
from grpo.preflight.lora import choose_lora
from grpo.preflight.quantisation import check_own_quantisation, four_bits_of, settle_quantisation
from tests.support.tiny_models import save_tiny_model, tiny_config

DATA = Dataset.from_dict({"prompt": ["1+1="]})
LORA = LoraConfig(r=4, target_modules=["q_proj"])


def args_of(tmp_path: Path, **settings: Any) -> GRPOConfig:
    return GRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", **settings})


def four_bits(**settings: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, **settings)


def settled(tmp_path: Path, model: Any, asked: Any, *, lora: Any = LORA, **settings: Any) -> dict[str, Any]:
    arguments = {"args": args_of(tmp_path, **settings), "model": model, "peft_config": lora}
    arguments["quantization_config"] = asked
    settle_quantisation(arguments)
    return arguments


REFUSED = {
    "AWQ": (AwqConfig(), {}, r"is a AwqConfig: .*AWQ and GPTQ need calibration data"),
    "GPTQ": (GPTQConfig(bits=4, dataset="c4"), {}, r"is a GPTQConfig: .*calibration data"),
    "AWQ of a file": ({"quant_method": "awq"}, {}, r"quant_method 'awq': .*take load_in_4bit: true"),
    "a misspelt key": ({"load_in_4bits": True}, {}, r"no key 'load_in_4bits' \(did you mean load_in_4bit\?\)"),
    "8 bits": (BitsAndBytesConfig(load_in_8bit=True), {}, r"quantization_config has load_in_8bit, whose layers round"),
    "no bits": (BitsAndBytesConfig(), {}, r"quantization_config has no load_in_4bit"),
    "another kind": (four_bits(bnb_4bit_quant_type="int4"), {}, r"bnb_4bit_quant_type is 'int4': it is 'nf4' or 'fp4'"),
    "all of it trained": (four_bits(), {"has_adapter": False}, r"without peft_config: .*no gradients"),
    "ZeRO-3": (four_bits(), {"zero3": True}, r"quantization_config with ZeRO-3.*set zero_stage to 2"),
    "FSDP's storage": (four_bits(bnb_4bit_quant_storage="bfloat16"), {}, r"bnb_4bit_quant_storage is torch.bfloat16"),
    "another dtype": (
        four_bits(bnb_4bit_compute_dtype="float16"),
        {},
        r"bnb_4bit_compute_dtype is torch.float16, but the engines compute in torch.bfloat16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_four_bits_of_unsupported_config_raises(case: str) -> None:
    asked, settings, reported = REFUSED[case]
    with pytest.raises(ValueError, match=reported):
        four_bits_of(asked, torch.bfloat16, **{"has_adapter": True, "zero3": False, **settings})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_bits_of_config_sets_engine_dtype(dtype: torch.dtype) -> None:
    given = four_bits(bnb_4bit_quant_type="nf4")
    found = four_bits_of(given, dtype, has_adapter=True, zero3=False)
    assert (found.bnb_4bit_compute_dtype, found.bnb_4bit_quant_type) == (dtype, "nf4")
    assert given.bnb_4bit_compute_dtype == torch.float32, "the user's stays as it is"
    asked = four_bits(bnb_4bit_compute_dtype=dtype)
    assert four_bits_of(asked, dtype, has_adapter=True, zero3=False) is asked
    assert four_bits_of(asked.to_dict(), dtype, has_adapter=True, zero3=False).to_dict() == asked.to_dict()


def test_settle_quantisation_accepts_argument_or_model_init_kwargs(tiny_model: Path, tmp_path: Path) -> None:
    said = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    inside = settled(tmp_path, str(tiny_model), None, model_init_kwargs={"quantization_config": said, "dtype": "auto"})
    assert inside["quantization_config"].bnb_4bit_use_double_quant
    assert inside["args"].model_init_kwargs == {"dtype": "auto"}, "a reward model gets these, too"
    beside = settled(tmp_path, str(tiny_model), four_bits(), bf16=True)
    assert beside["quantization_config"].bnb_4bit_compute_dtype == torch.bfloat16
    assert settled(tmp_path, str(tiny_model), None)["quantization_config"] is None
    with pytest.raises(ValueError, match="give one of the two"):
        settled(tmp_path, str(tiny_model), four_bits(), model_init_kwargs={"quantization_config": said})


def test_trainer_with_unsupported_quantisation_raises(tiny_model: Path, tmp_path: Path) -> None:
    def trainer(**arguments: Any) -> None:
        given = {"model": str(tiny_model), "args": args_of(tmp_path), "peft_config": LORA, **arguments}
        GRPOTrainer(**given, reward_funcs=print, train_dataset=DATA)

    with pytest.raises(ValueError, match="quantization_config has load_in_8bit"):
        trainer(quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(ValueError, match="the model is an object, which is loaded already"):
        trainer(model=model, quantization_config=four_bits())


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes"])
def test_settle_quantisation_with_quantised_checkpoint_raises(method: str, tmp_path: Path) -> None:
    folder = save_tiny_model("llama-untied", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"its config.json says by '{method}' \[GRPO-217\].*16-bit checkpoint"):
        settled(tmp_path, str(folder), None)
    check_own_quantisation(tiny_config("llama-untied"))
    check_own_quantisation(None)


def test_settle_quantisation_with_model_in_four_bits_requires_adapter(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=four_bits())
    with pytest.raises(ValueError, match="without peft_config"):
        settled(tmp_path, model, None, lora=None)
    arguments = settled(tmp_path, get_peft_model(model, LORA), None, lora=None)
    assert arguments["quantization_config"] is None, "TRL would warn that it ignores it"
    here = read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None, env={})
    described, folder = describe_model(model, args_of(tmp_path / "run"), None, here)
    assert folder is not None
    assert "quantization_config" not in json.loads((Path(described.path) / "config.json").read_text())


@pytest.mark.parametrize(
    ("settings", "lora", "has_gpus", "why"),
    [
        ({"vllm_lora": "merge"}, {}, False, "vllm_lora is merge"),
        ({}, {"use_dora": True}, False, "vLLM has no DoRA"),
        ({}, {}, True, "this engine computes in float32"),
    ],
)
def test_choose_lora_on_four_bits_refuses_merge(
    settings: dict, lora: dict, has_gpus: bool, why: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **lora})
    args = args_of(tmp_path, **settings)
    with pytest.raises(ValueError, match=rf"{why}.* \[GRPO-218\]"):
        choose_lora(str(tiny_model), config, four_bits(), args, has_gpus=has_gpus)
    choice = choose_lora(str(tiny_model), LORA, four_bits(), args_of(tmp_path), has_gpus=False)
    assert choice is not None
    assert choice.way == "adapter"
    with pytest.raises(ValueError, match=r"llm_int8_skip_modules is \['o_proj'\], so that the head.*add 'lm_head'"):
        choose_lora(
            str(tiny_model), LORA, four_bits(llm_int8_skip_modules=["o_proj"]), args_of(tmp_path), has_gpus=False
        )


@pytest.mark.parametrize("method", ["awq", "gptq_marlin", "AWQ"])
def test_config_with_awq_or_gptq_engine_raises(method: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"quantization '{method.lower()}' \[GRPO-419\]: AWQ and GPTQ"):
        args_of(tmp_path, vllm_engine_kwargs={"quantization": method})


def test_fp8_engine_raises_on_cpu_and_warns_on_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'fp8', which vLLM has for GPUs alone"):
        args_of(tmp_path, vllm_engine_kwargs={"quantization": "fp8"})
    with pytest.warns(UserWarning, match="'fp8': .* has not been tried on a GPU"):
        check_quantised_engine("fp8", use_cpu=False)
