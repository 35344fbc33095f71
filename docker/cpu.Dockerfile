# grpo without a GPU: the demo, and scripts that are tried out. Not built by docker yet: its steps have run in an empty
# Debian 12, one after the other, with Python 3.11, and the demo at their end.
#
#   docker build -f docker/cpu.Dockerfile -t grpo-cpu:0.1.0 .        from the repository's root
#   docker run --shm-size 2g grpo-cpu:0.1.0
FROM python:3.12-slim

# vLLM and torch compile C++ on CPUs, and vLLM's kernels are linked with libnuma.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/grpo
COPY pyproject.toml setup.py README.md LICENSE train.py ./
COPY configs configs
COPY constraints constraints
COPY docs/troubleshooting.md docs/troubleshooting.md
COPY examples examples
COPY launch launch
COPY grpo grpo
COPY tools tools
# As `make install` does: exactly what constraints/cpu.txt names.
RUN python -m tools.install /opt/grpo --backend cpu
ENV PATH=/opt/grpo/bin:$PATH DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

# Not root. Runs are written below /workspace/grpo/runs: mount a volume there that user 1000 may write.
RUN useradd --uid 1000 --create-home grpo && mkdir runs && chown grpo runs
USER 1000
CMD ["accelerate", "launch", "--config_file", "configs/cpu.yaml", "train.py"]
