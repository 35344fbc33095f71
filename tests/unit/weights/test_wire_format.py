"""In which form the engines hold what travels."""

import pytest

from grpo.weights.wire_format import WireFormat, agreed


def test_agreed_with_different_wire_formats_raises() -> None:
    one = WireFormat(dtypes={"gate.bias": "float32"}, whole_experts=("experts",))
    assert agreed([one, one]) == one
    with pytest.raises(RuntimeError, match=r"gate\.bias.* different forms"):
        agreed([one, WireFormat(whole_experts=("experts",))])
    with pytest.raises(RuntimeError, match=r"experts.* different forms"):
        agreed([one, WireFormat(dtypes=one.dtypes)])
