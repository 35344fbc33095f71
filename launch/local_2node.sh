#!/usr/bin/env bash
# Two nodes on one machine, without Slurm: two launchers, each with its own ranks and its own vLLM engine. For trying out
# what only happens between nodes. With GPUs each node gets half of them, the last one of each half for its engine.
#
# start    launch/local_2node.sh --max_steps 20           train.py, and its arguments
#          launch/local_2node.sh my_script.py ...         another script
#          GRPO_RANKS_PER_NODE=2 launch/local_2node.sh    two ranks per node (one where there is no GPU)
# follow   tail -F runs/local_2node/logs/train-node*.log
# stop     Ctrl-C, or kill PID          checkpoint and end with 85: the same command goes on from there
#          Ctrl-C once more             end now, with 130
#          touch runs/local_2node/stop  checkpoint and end with 0
set -euo pipefail
set -m # launchers in process groups of their own: Ctrl-C reaches this shell alone

output_dir=${GRPO_OUTPUT_DIR:-runs/local_2node}
ranks_per_node=${GRPO_RANKS_PER_NODE:-}

if [[ -z ${VIRTUAL_ENV:-} && -e .venv/bin/activate ]]; then
    # shellcheck source=/dev/null
    source .venv/bin/activate
fi
# A script starts its background commands with SIGINT ignored, and what was ignored when a shell began it cannot trap.
if [[ $(trap -p INT) == "trap -- '' "* ]]; then
    exec python -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp("bash", sys.argv[1:])' \
        bash "$0" "$@"
fi
script=train.py
if [[ ${1:--} != -* ]]; then
    script=$1
    shift
fi
# shellcheck disable=SC2174  # this folder alone
mkdir -p -m 700 -- "$output_dir" # if it is new: prompts, completions and arguments are its owner's
mkdir -p -- "$output_dir/logs"

if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    devices=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -E '^(GPU-|MIG-|[0-9])' || true)
else
    devices=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true)
fi
mapfile -t gpus < <(grep . <<<"$devices")
half=$((${#gpus[@]} / 2))
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

launch_node() {
    local node=$1
    shift
    if ((half)); then
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:node * half:half}")
        export CUDA_VISIBLE_DEVICES
    fi
    exec grpo launch --nodes 127.0.0.1,127.0.0.2 --node-rank "$node" --port "$port" \
        ${ranks_per_node:+--ranks-per-node "$ranks_per_node"} ${GRPO_CONFIG_FILE:+--config_file "$GRPO_CONFIG_FILE"} \
        --output-dir "$output_dir" --resume auto "$script" "$@" >"$output_dir/logs/train-node$node.log" 2>&1
}

launchers=()
trap 'echo "asked to stop; once more to end now"; kill -INT "${launchers[@]}" 2>/dev/null || true' INT TERM
for node in 0 1; do
    launch_node "$node" "$@" &
    launchers+=("$!")
done
printf '2 nodes on this machine; node 0 shows the steps. To follow: tail -F %q/logs/train-node*.log\n' "$output_dir"

statuses=()
for launcher in "${launchers[@]}"; do
    status=0
    while kill -0 "$launcher" 2>/dev/null; do # a trap ends `wait` early
        wait "$launcher" || true
    done
    wait "$launcher" || status=$?
    statuses+=("$status")
done
tail -n 1 "$output_dir/logs/train-node0.log"
exit "${statuses[0]}"
