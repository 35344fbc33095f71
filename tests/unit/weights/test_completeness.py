"""What a weight sync has left out is named."""

from grpo.weights.completeness import unsent_names


def test_unsent_names_lists_missing_parameters() -> None:
    known = {"a", "b", "c"}
    assert unsent_names(known=set(), received=known, held=()) == []
    assert unsent_names(known=known, received={"a", "b"}, held={"c"}) == []
    assert unsent_names(known=known, received={"a"}, held={"c"}) == ["b: not sent, and not among the frozen ones"]
    assert unsent_names(known=set(), received={"a"}, held={"c"}) == ["c: left out, but never sent before"]
