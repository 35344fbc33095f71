"""GPUs by name: memory and speed, for `grpo plan --gpu`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Memory and speed of one GPU model."""

    name: str
    gib: int
    """Usable memory in GiB: the data sheet's, less driver and ECC, rounded down."""
    tflops: float
    """Dense bfloat16 throughput, in TFLOPS."""
    tbps: float
    """Memory bandwidth, in TB/s."""


# NVIDIA's public data sheets. If they only give tensor throughput with sparsity, half of it.
GPUS = {
    # 80GB HBM2e; 312 TFLOPS; 2,039 GB/s: nvidia.com, "NVIDIA A100 Tensor Core GPU" data sheet, column A100 80GB SXM.
    "a100": Gpu(name="A100 80GB SXM", gib=79, tflops=312.0, tbps=2.039),
    # 80GB HBM3; 1,979 TFLOPS with sparsity; 3.35TB/s: "NVIDIA H100 Tensor Core GPU" data sheet, column H100 SXM.
    "h100": Gpu(name="H100 SXM", gib=79, tflops=989.0, tbps=3.35),
    # 141GB HBM3e; 1,979 TFLOPS with sparsity; 4.8TB/s: "NVIDIA H200 Tensor Core GPU" data sheet, column H200 SXM.
    "h200": Gpu(name="H200 SXM", gib=139, tflops=989.0, tbps=4.8),
    # One eighth of "NVIDIA DGX B200": 1,440GB HBM3e; 72 PFLOPS in FP8 with sparsity (a quarter of it here); 64TB/s.
    "b200": Gpu(name="B200", gib=178, tflops=2250.0, tbps=8.0),
    # 48GB GDDR6 with ECC; 362.05 TFLOPS; 864GB/s: "NVIDIA L40S" data sheet.
    "l40s": Gpu(name="L40S", gib=44, tflops=362.0, tbps=0.864),
}

ASSUMED_GPU = Gpu(name="A100", gib=80, tflops=312.0, tbps=2.0)
"""Assumed without `--gpu`: round numbers; most of today's GPUs are faster."""
