"""Parameters that come out of transformers under several names, or one: what has to be converted together."""

import pytest
import torch

from grpo.weights.names import conversion_units


def toy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`fused` becomes two, `q` and `k` become one, others stay."""
    out = dict(tensors)
    if "fused" in out:
        out["a"], out["b"] = out.pop("fused").chunk(2)
    if parts := [out.pop(name) for name in ("q", "k") if name in out]:
        out["qk"] = torch.cat(parts)
    return out


def test_conversion_units_join_parameters_of_one_tensor() -> None:
    placeholders = {name: torch.empty(4, 2, device="meta") for name in ("q", "fused", "k", "plain")}
    assert conversion_units(toy, placeholders) == [["q", "k"], ["fused"], ["plain"]]
    assert conversion_units(dict, placeholders) == [["q"], ["fused"], ["k"], ["plain"]]
    assert conversion_units(toy, {}) == []


def test_conversion_units_with_global_conversion_raises() -> None:
    def count(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{name}.of{len(tensors)}": tensor for name, tensor in tensors.items()}

    with pytest.raises(ValueError, match=r"cannot be converted one by one: p\.of1, p\.of2, q\.of1, q\.of2 depend"):
        conversion_units(count, {name: torch.empty(2, device="meta") for name in ("p", "q")})
