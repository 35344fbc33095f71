"""Packed copies of weights for vLLM's CPU kernels, which a reload does not update.

Runs in vLLM's worker processes.
"""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def refresh_packed_weights(model: torch.nn.Module, reloaded: set[torch.nn.Module]) -> None:
    """Fix two silent errors in reloads by vLLM's CPU backend (0.31).

    It packs weights for its kernels when it loads them. First, a tied head receives nothing in a reload, so its packed
    copy stays old: log-probabilities are off by 0.4 to 1.7 (Qwen2, Qwen3). Second, experts are packed on the first load
    only: a reload writes plain values where the kernel expects packed ones, off by 0.02 to 0.4 (Qwen3-MoE).

    Args:
        reloaded: layers that received values in this weight sync; the others are packed already.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    written = {parameter.data_ptr() for layer in reloaded for parameter in layer.parameters(recurse=False)}
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear") and layer.weight.data_ptr() in written:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if layer in reloaded and isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch:
            for weight in (layer.w13_weight, layer.w2_weight):
                weight.data.copy_(cpu_prepack_moe_weight(weight.data, experts.isa))
