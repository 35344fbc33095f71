"""Timeline of every node: spans and usage, in `<output_dir>/timeline/node<k>.jsonl`.

Any package with work to time may import it; the tools read it. It must not know the meaning of spans: engines, weights
and rewards name their own.
"""
