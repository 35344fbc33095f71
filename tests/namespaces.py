"""Network namespaces without root, in which tests cut the network between sentinels.

`python -m tests.namespaces report` says in one line what was not tested without them: `make test` calls it.
GRPO_TEST_NAMESPACES=1: a machine where they are missing fails the tests that need them.
"""

import os
import sys

from tests.support.networks import why_not


def is_promised() -> bool:
    """Whether a test without them fails instead of being skipped."""
    return os.environ.get("GRPO_TEST_NAMESPACES") == "1"


if __name__ == "__main__":
    if sys.argv[1:] != ["report"]:
        sys.exit("python -m tests.namespaces report")
    if reason := why_not():
        print(f"NOT TESTED: cuts of the network between nodes: {reason}")
