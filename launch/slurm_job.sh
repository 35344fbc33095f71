# shellcheck shell=bash
# What launch/train.sbatch and launch/train_torchrun.sbatch have in common. They set the variables that are used here.

say() { printf '%(%F %T)T %s\n' -1 "$*"; }

run_job() {
    local attempt=${SLURM_RESTART_COUNT:-0} script=train.py step status=0
    if [[ ${1:--} != -* ]]; then
        script=$1
        shift
    fi
    output_dir=$(realpath --canonicalize-missing -- "$output_dir")
    mkdir -p -- "$output_dir/logs"
    if ((attempt > 0)) && [[ -e $output_dir/stop ]]; then
        rm -- "$output_dir/stop"
        say "$output_dir/stop was written while the job waited in the queue: not training"
        exit 0
    fi
    # The signal reaches this shell alone (--signal=B:). The ranks look for the file at the end of every step.
    stop_file=$output_dir/stop.$SLURM_JOB_ID.$attempt
    trap 'say "asked to stop: the job checkpoints at the end of this step and is requeued"; : >"$stop_file"' USR1

    # srun does not take over what sbatch was told (Slurm 22.05), and nodes may differ: what the smallest one has.
    local cpus gpus options
    cpus=$(tr ',' '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)
    # An exclusive job is given all GPUs of its nodes, but its steps only those that somebody has asked for.
    gpus=$(scontrol show job --details "$SLURM_JOB_ID" | sed -n 's/^ *JOB_GRES=//p' | tr ',' '\n' |
        awk -F: '$1 == "gpu" { sum += $NF } END { print sum + 0 }')
    options=(--ntasks-per-node=1 --cpus-per-task="$cpus" --mem=0)
    ((gpus == 0)) || options+=(--gpus="$gpus")

    # Slurm counts restarts from the first one on, and the output folder may be another job's: without these names
    # nobody would look for this stop file, and a crash would be counted under two.
    export GRPO_JOB=$SLURM_JOB_ID GRPO_ATTEMPT=$attempt
    # The trainer warns when a generation batch and a checkpoint take longer than the signal leaves.
    export GRPO_STOP_LEAD_S=$stop_s
    say "attempt $attempt of job $SLURM_JOB_ID: $SLURM_NNODES nodes, logs in $output_dir/logs"
    # In the background, because bash runs no trap while it waits for a command in the foreground. Whoever ends first
    # leaves the others two minutes: node 0 may still be writing how the attempt has ended.
    srun "${options[@]}" --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --kill-on-bad-exit=0 --wait=120 \
        --output="$output_dir/logs/train-node%n.job-$SLURM_JOB_ID.attempt-$attempt.log" \
        grpo launch --doctor --launcher "$launcher" ${config_file:+--config_file "$config_file"} \
        ${ranks_per_node:+--ranks-per-node "$ranks_per_node"} --output-dir "$output_dir" --resume auto \
        --max-crashes "$max_crashes" --stop-s "$stop_s" "$script" "$@" &
    step=$!
    while kill -0 "$step" 2>/dev/null; do # the trap ends `wait` early
        wait "$step" || true
    done
    wait "$step" || status=$?
    rm -f -- "$stop_file"
    say "srun has ended with $status"
    if ((status == 2)); then # on every node, for srun returns the highest code
        say "grpo launch did not understand what it was told, or is not installed: $output_dir/logs says more"
        exit 2
    fi

    if ((status == 0)); then
        say "every node has ended well"
        exit 0
    fi
    status=0
    python -m grpo.launch.next_attempt "$output_dir" --job "$SLURM_JOB_ID" --attempt "$attempt" \
        --max_crashes "$max_crashes" || status=$?
    ((status == 85)) || exit "$status"
    if scontrol requeue "$SLURM_JOB_ID"; then
        say "requeued"
        exit 0
    fi
    say "Slurm does not requeue this job; to go on:"
    say "  GRPO_OUTPUT_DIR=$output_dir sbatch $(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')"
    exit 85
}
