"""What a push has left out is named."""

from grpo.weights.completeness import _missing_parts, unsent_names


def test_a_push_is_checked_by_name_too() -> None:
    known = {"a", "b", "c"}
    assert unsent_names(known=set(), received=known, held=()) == []
    assert unsent_names(known=known, received={"a", "b"}, held={"c"}) == []
    assert unsent_names(known=known, received={"a"}, held={"c"}) == ["b: not sent, and not among the frozen ones"]
    assert unsent_names(known=set(), received={"a"}, held={"c"}) == ["c: left out, but never sent before"]


def test_a_layer_is_not_taken_for_one_whose_number_ends_alike() -> None:
    """Layer 11 was sent, layer 1 is frozen and was not; names differ before the layers."""
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    sent = {f"model.language_model.layers.11.self_attn.{part}.weight" for part in parts["qkv_proj"]}
    assert _missing_parts("model.layers.11.self_attn.qkv_proj", parts, sent) == []
    assert len(_missing_parts("model.layers.1.self_attn.qkv_proj", parts, sent)) == 3
    assert _missing_parts("lm_head", {}, {"lm_head.weight"}) == []
