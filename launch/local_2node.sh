#!/usr/bin/env bash
# Two nodes on one machine, without Slurm: two launchers, each with its own ranks and its own vLLM engine. For trying out
# what only happens between nodes. With GPUs each node gets half of them, the last one of each half for its engine.
#
# start    launch/local_2node.sh                          the demo task; arguments go to train.py: --max_steps 20 ...
#          GRPO_RANKS_PER_CPU_NODE=2 launch/local_2node.sh        two ranks per node where there is no GPU (one)
# follow   tail -F runs/local_2node/logs/*.log
# stop     Ctrl-C, or kill PID          checkpoint and end with 85: the same command goes on from there
#          Ctrl-C once more             end now
#          touch runs/local_2node/stop  checkpoint and end with 0
set -euo pipefail
set -m # launchers in process groups of their own: Ctrl-C reaches this shell alone

output_dir=${GRPO_OUTPUT_DIR:-runs/local_2node}
reserved_gpus=${GRPO_RESERVED_GPUS:-1} # of each half
ranks_per_cpu_node=${GRPO_RANKS_PER_CPU_NODE:-1}
stop_s=${GRPO_STOP_S:-600} # longest step and checkpoint
max_crashes=${GRPO_MAX_CRASHES:-3}

die() {
    echo "$*" >&2
    exit 1
}

if [[ -z ${VIRTUAL_ENV:-} && -e .venv/bin/activate ]]; then
    # shellcheck source=/dev/null
    source .venv/bin/activate
fi
[[ -e train.py && -e launch/next_attempt.py ]] || die "call it from the project's root: launch/local_2node.sh"
# A script starts its background commands with SIGINT ignored, and what was ignored when a shell began it cannot trap.
if [[ $(trap -p INT) == "trap -- '' "* ]]; then
    exec python -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp("bash", sys.argv[1:])' \
        bash "$0" "$@"
fi
for argument in "$@"; do
    [[ $argument != --output_dir* ]] || die "set GRPO_OUTPUT_DIR instead of $argument"
done
mkdir -p -- "$output_dir/logs"

if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    devices=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -E '^(GPU-|MIG-|[0-9])' || true)
else
    devices=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true)
fi
mapfile -t gpus < <(grep . <<<"$devices")
half=$((${#gpus[@]} / 2))
if ((${#gpus[@]} == 0)); then
    # A torch that is built for GPUs says what is wrong, unless --use_cpu asks for CPUs.
    python -m grpo.job.devices "$@" >/dev/null || exit 1
    config_file=configs/cpu.yaml ranks_per_node=$ranks_per_cpu_node
elif ((half > reserved_gpus)); then
    config_file=configs/4node.yaml ranks_per_node=$((half - reserved_gpus))
else
    die "${#gpus[@]} GPUs are too few: each half needs $reserved_gpus for its engine and one to train"
fi

# Attempts are numbered, so that what an earlier one has left is not taken for this one's.
attempt_file=$output_dir/attempt.local
attempt=$(($(cat "$attempt_file" 2>/dev/null || echo -1) + 1))
echo "$attempt" >"$attempt_file"
export GRPO_JOB=local GRPO_ATTEMPT=$attempt GRPO_STARTED=$EPOCHSECONDS PYTHONUNBUFFERED=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$stop_s # after SIGTERM torchrun gives its ranks 30 s by default
stop_file=$output_dir/stop.local.$attempt
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

launch_node() {
    local node=$1
    shift
    if ((half)); then
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:node * half:half}")
        export CUDA_VISIBLE_DEVICES
    fi
    trap '' USR1 # torchrun would die of it; the ranks take it as a request to stop
    exec accelerate launch --config_file "$config_file" --deepspeed_multinode_launcher standard \
        --num_machines 2 --num_processes "$((2 * ranks_per_node))" --machine_rank "$node" \
        --main_process_ip 127.0.0.1 --main_process_port "$port" \
        train.py --resume auto "$@" --output_dir "$output_dir" >"$output_dir/logs/train-node$node.attempt-$attempt.log" 2>&1
}

launchers=()
end_launchers() { kill -s "$1" "${launchers[@]}" 2>/dev/null || true; }

request_stop() {
    if [[ -e $stop_file ]]; then
        end_launchers INT # torchrun passes it on
    else
        echo "asked to stop: checkpointing at the end of this step; once more to end now"
        : >"$stop_file"
    fi
}
trap request_stop INT TERM

for node in 0 1; do
    launch_node "$node" "$@" &
    launchers+=("$!")
done
echo "attempt $attempt: 2 nodes x $ranks_per_node ranks, logs in $output_dir/logs"

runs() { kill -0 "$1" 2>/dev/null; }
while runs "${launchers[0]}" || runs "${launchers[1]}"; do
    status=0
    wait -n || status=$? # ends early when a signal is trapped
    # When one node has failed, the other is asked to end.
    ((status == 0)) || { runs "${launchers[0]}" && runs "${launchers[1]}"; } || end_launchers TERM
done

rm -f -- "$stop_file"
python launch/next_attempt.py "$output_dir" --job local --attempt "$attempt" --max_crashes "$max_crashes"
