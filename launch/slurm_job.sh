# shellcheck shell=bash
# What launch/train.sbatch and launch/train_torchrun.sbatch have in common. They set the variables that are used here.
#
#   prepare_job        sets head_address, port and ranks_per_node; from now on SIGUSR1 is a request to stop
#   check_nodes        `grpo doctor` on every node; ends the job if one of them cannot train
#   train_on_each_node the launcher on every node, until all have ended
#   finish_attempt     requeues the job, or ends it

say() { printf '%(%F %T)T %s\n' -1 "$*"; }

die() {
    say "$*"
    exit 1
}

prepare_job() {
    local argument
    for argument in "${arguments[@]}"; do
        [[ $argument != --output_dir* ]] || die "set output_dir or GRPO_OUTPUT_DIR instead of $argument"
    done
    attempt=${SLURM_RESTART_COUNT:-0}
    output_dir=$(realpath --canonicalize-missing -- "$output_dir")
    mkdir -p -- "$output_dir/logs"
    if ((attempt > 0)) && [[ -e $output_dir/stop ]]; then
        rm -- "$output_dir/stop"
        say "$output_dir/stop was written while the job waited in the queue: not training"
        exit 0
    fi
    stop_file=$output_dir/stop.$SLURM_JOB_ID.$attempt
    trap request_stop USR1

    # How the trainer knows its stop file, and marks what it writes to run_state.json.
    export GRPO_JOB=$SLURM_JOB_ID GRPO_ATTEMPT=$attempt GRPO_STARTED=$EPOCHSECONDS
    # After SIGTERM torchrun gives its ranks 30 s by default, less than a step and a checkpoint take.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$stop_s
    # The trainer warns when a generation batch and a checkpoint take longer.
    export GRPO_STOP_LEAD_S=$stop_s
    export PYTHONUNBUFFERED=1

    find_head
    # Below the ephemeral range (32768 and up), so that no outgoing connection has taken it.
    port=$((10000 + SLURM_JOB_ID % 20000))
    find_devices
    say "attempt $attempt of job $SLURM_JOB_ID: $SLURM_NNODES nodes x $ranks_per_node ranks, head $head_address:$port," \
        "logs in $output_dir/logs"
}

# The signal reaches this shell alone (--signal=B:). The ranks look for the file at the end of every step.
request_stop() {
    say "asked to stop: the job checkpoints at the end of this step and is requeued"
    : >"$stop_file"
}

find_head() {
    local hosts
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    head_address=${hosts%%$'\n'*}
    if ! getent hosts "$head_address" >/dev/null; then
        head_address=$(scontrol show node "$head_address" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    fi
}

# GPUs and CPUs of a step, and the ranks that fit beside the engines.
find_devices() {
    local gpus counts fewest most
    # srun does not take over what sbatch was told (Slurm 22.05), and nodes may differ: what the smallest one has.
    cpus_per_task=$(tr ',' '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)
    # An exclusive job is given all GPUs of its nodes, but its steps only those that somebody has asked for.
    gpus=$(scontrol show job --details "$SLURM_JOB_ID" | sed -n 's/^ *JOB_GRES=//p' | tr ',' '\n' |
        awk -F: '$1 == "gpu" { sum += $NF } END { print sum + 0 }')
    step_gpus=()
    ((gpus == 0)) || step_gpus=(--gpus="$gpus")

    counts=$(on_each_node bash -c "$(declare -f count_visible_gpus); count_visible_gpus \"\$@\"" count \
        --config_file "$config_file" "${arguments[@]}" | sort -n) ||
        die "a node cannot train on what it sees: ask for GPUs on sbatch's command line (--gres=gpu:8), or write" \
            "--use_cpu behind the template's name"
    fewest=${counts%%$'\n'*} most=${counts##*$'\n'}
    if ((${most% *} == 0)); then
        ranks_per_node=$ranks_per_cpu_node
    elif ((${fewest% *} > reserved_gpus)); then
        ranks_per_node=$((${fewest% *} - reserved_gpus)) # torchrun wants the same number on every node
    else
        die "${fewest#* } sees ${fewest% *} GPUs (${most#* } sees ${most% *}): too few to train beside $reserved_gpus" \
            "reserved ones; a cluster may need --gres=gpu:N on sbatch's command line"
    fi
}

# Prints "COUNT NODE": what CUDA_VISIBLE_DEVICES names, or where nobody has set it what the driver shows. Where that is
# nothing torch is asked, which says what is wrong if it is built for GPUs and the job's files ($@) do not ask for CPUs.
count_visible_gpus() {
    local devices count
    if [[ -v CUDA_VISIBLE_DEVICES ]]; then
        devices=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -E '^(GPU-|MIG-|[0-9])' || true)
    else
        devices=$(nvidia-smi --list-gpus 2>/dev/null | grep '^GPU ' || true)
    fi
    count=$(grep -c . <<<"$devices" || true)
    ((count)) || count=$(python -m grpo.job.devices "$@") || return 1
    echo "$count $SLURMD_NODENAME"
}

# One task on every node, with all CPUs and GPUs that the job has there.
on_each_node() {
    srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$cpus_per_task" \
        --mem=0 "${step_gpus[@]}" "$@"
}

check_nodes() {
    # Every node is to say what is wrong with it, so the first that fails does not end the others.
    on_each_node --kill-on-bad-exit=0 --label \
        grpo doctor --head "$head_address" --port "$port" --output-dir "$output_dir" \
        --config_file "$config_file" -- "${arguments[@]}" ||
        die "grpo doctor found nodes that cannot train"
}

# $1 is the command line of a node's launcher, in which "$@" stands for the other arguments.
train_on_each_node() {
    local launch=$1 step status=0
    shift
    # SIGUSR1 and SIGTERM to the steps (scancel --signal) are for the ranks. torchrun would die of the first, and hands
    # the second on; this shell outlives both. It passes a failure on late, because --kill-on-bad-exit then ends the
    # other nodes, and rank 0 on one of them may still be writing how the attempt has ended.
    launch="trap '' USR1; trap : TERM; $launch || { status=\$?; sleep 10; exit \$status; }"
    on_each_node --kill-on-bad-exit=1 --output="$output_dir/logs/train-node%n.job-$SLURM_JOB_ID.attempt-$attempt.log" \
        bash -c "$launch" launcher "$@" &
    step=$!
    # In the background, because bash runs no trap while it waits for a command in the foreground. The trap ends `wait`
    # early, so it is called until the step is gone.
    while kill -0 "$step" 2>/dev/null; do
        wait "$step" || true
    done
    wait "$step" || status=$?
    say "srun has ended with $status"
}

finish_attempt() {
    local next=0
    rm -f -- "$stop_file"
    python launch/next_attempt.py "$output_dir" --job "$SLURM_JOB_ID" --attempt "$attempt" \
        --max_crashes "$max_crashes" || next=$?
    ((next == 85)) || exit "$next"
    if scontrol requeue "$SLURM_JOB_ID"; then
        say "requeued"
        exit 0
    fi
    say "Slurm does not requeue this job; to go on:"
    say "  GRPO_OUTPUT_DIR=$output_dir sbatch $(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')"
    exit 85
}
