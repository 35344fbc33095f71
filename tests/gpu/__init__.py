"""What only GPUs can show, by how many it takes: one (with torch and pytest alone), two, three, four, eight.

`make test-gpu` runs what this machine can, and writes `runs/gpu-report.md`. Tests that take a `device` run on CPU too,
in `make test`: what they check is then known to hold where no GPU is at fault.
"""
