"""`python -m grpo` is the command `grpo`."""

import sys

from grpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
