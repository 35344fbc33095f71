"""A vLLM without anything of ours around it, for `bench.generate`: `python -m bench.bare_vllm SETTINGS.json`.

Builds `LLM` with the same engine arguments. Then for each line on standard input, `seeded` or `unseeded`, samples all
prompts once and answers with one line of JSON: the seconds of `LLM.generate`, and the tokens.
"""

import json
import os
import sys
from pathlib import Path
from time import perf_counter


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    from vllm import LLM, SamplingParams

    llm = LLM(**settings["engine_args"])

    def sample(seeded: bool) -> dict:
        params = [
            SamplingParams(
                **settings["sampling"],
                n=settings["n"],
                seed=seed if seeded else None,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in settings["seeds"]
        ]
        begun = perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in settings["prompts"]], params, use_tqdm=False)
        seconds = perf_counter() - begun
        return {"seconds": seconds, "completion_ids": [list(s.token_ids) for o in outputs for s in o.outputs]}

    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(sample(line.strip() == "seeded")), file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)  # vLLM's destructors print tracebacks when the interpreter takes itself apart under them (0.31)


if __name__ == "__main__":
    main()
