"""What happened when, on every node: spans and usage, in `<output_dir>/timeline/node<k>.jsonl`.

Everyone who does something that takes time may import it; the tools read it.
It must not know what the spans mean: engines, weights and rewards name their own.
"""
