"""What of the seam needs no engine."""

import numpy as np

from grpo.rollout.packing import SingleValues


def test_single_values_read_as_rows_of_one_value() -> None:
    values = SingleValues([-0.5, -1.0, -2.0])
    assert [row[0] for row in values] == [-0.5, -1.0, -2.0]  # GRPOTrainer._generate_single_turn of TRL
    assert [row[0] for row in values] == [-0.5, -1.0, -2.0]  # again
    assert (len(values), values[1], list(values[1:])) == (3, (-1.0,), [(-1.0,), (-2.0,)])
    assert np.array(list(values)).shape == (3, 1)
