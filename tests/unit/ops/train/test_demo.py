from grpo.ops.train import demo


def test_demo_dataset_is_reproducible_and_splits_are_disjoint():
    train, test = demo.demo_dataset("train"), demo.demo_dataset("test")
    assert (len(train), len(test)) == (7588, 512)
    assert train.column_names == ["prompt", "answer"]
    assert train[:3] == demo.demo_dataset("train")[:3]
    for row in [*train.select(range(50)), *test]:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(row["prompt"]) == len("12+34=")
        assert int(a) + int(b) == int(row["answer"])
    assert not set(train["prompt"]) & set(test["prompt"])
