"""Pages of `grpo report`: what they hold, and texts that a page may not run."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NASTY = '</script><script>alert(1)</script><!-- <b>&amp; \u2028 \U0001f600 \x00 {{ 7 * 7 }} "quoted\\'


def data_of(page: str) -> dict[str, Any]:
    """What the script of a page reads."""
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def with_texts(folder: Path, text: str, times: int = 1) -> Path:
    """Completions of one prompt that are all that text."""
    row = {"step": 10, "prompt_id": "p", "prompt": text, "completion": text * times, "reward": 1.0}
    pq.write_table(pa.Table.from_pylist([row]), folder / "completions" / "step-00000010.parquet")
    return folder
