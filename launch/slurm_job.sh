# shellcheck shell=bash
# What launch/train.sbatch and launch/train_torchrun.sbatch have in common. They set the variables that are used here.

say() { printf '%(%F %T)T %s\n' -1 "$*"; }

# One job of an array has the whole array's number, and what is asked of that one happens to all.
slurm_job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || slurm_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

run_job() {
    local script=train.py replaced nodes here used lost attempt status stop_file='' asked_to_stop=''
    if [[ ${1:--} != -* ]]; then
        script=$1
        shift
    fi
    # shellcheck disable=SC2207  # names of nodes hold no white space
    nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
    here=${nodes[0]}
    used=$((SLURM_NNODES - spare_nodes))
    if ((spare_nodes < 0 || used < 1)); then
        say "GRPO_SPARE_NODES is $spare_nodes, but the job has $SLURM_NNODES nodes: ask for more by --nodes"
        exit 2
    fi
    output_dir=$(realpath --canonicalize-missing -- "$output_dir")
    # shellcheck disable=SC2174  # this folder alone
    mkdir -p -m 700 -- "$output_dir" # if it is new: prompts, completions and arguments are its owner's
    mkdir -p -- "$output_dir/logs"
    if ((${SLURM_RESTART_COUNT:-0} > 0)) && [[ -e $output_dir/stop ]]; then
        rm -- "$output_dir/stop"
        say "$output_dir/stop was written while the job waited in the queue: not training"
        exit 0
    fi
    # The signal reaches this shell alone (--signal=B:). The ranks look for the file at the end of every step.
    trap 'say "asked to stop: the job checkpoints at the end of this step and is requeued"
        asked_to_stop=yes; [[ -z $stop_file ]] || : >"$stop_file"' USR1

    replaced=$output_dir/replaced_nodes.$SLURM_JOB_ID # a line for each attempt whose lost nodes others have replaced
    while :; do
        attempt=${SLURM_RESTART_COUNT:-0}
        [[ ! -e $replaced ]] || ((attempt += $(wc -l <"$replaced")))
        run_attempt "$script" "$@"
        conclude_attempt
        say "lost ${lost[*]}: another attempt on ${nodes[*]:0:used}"
        echo "$attempt ${lost[*]}" >>"$replaced"
    done
}

# Run one attempt on the first nodes. Sets `status`, srun's, and `lost`, the nodes that the attempt has lost.
run_attempt() {
    local script=$1 cpus gpus options step watch=''
    shift
    stop_file=$output_dir/stop.$SLURM_JOB_ID.$attempt
    [[ -z $asked_to_stop ]] || : >"$stop_file"
    # srun does not take over what sbatch was given (Slurm 22.05), and nodes may differ: what the smallest one has.
    cpus=$(tr ',' '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)
    options=(--ntasks-per-node=1 --cpus-per-task="$cpus" --mem=0)
    # An exclusive job is given all GPUs of its nodes, but its steps only those that somebody has asked for.
    mapfile -t gpus < <(gpus_per_node)
    if ((spare_nodes > 0)); then
        # As many on each node as the smallest has, so that any of them can take another's place. And whatever a step
        # still holds that waits for a lost node.
        options+=(--nodelist="$(comma_separated "${nodes[@]:0:used}")" --overlap)
        ((${gpus[0]-0} == 0)) || options+=(--gpus-per-node="${gpus[0]}")
    elif ((${#gpus[@]} > 0)); then
        options+=(--gpus=$(($(IFS=+ && echo "${gpus[*]}"))))
    fi

    # Slurm counts restarts from the first one on, and the output folder may be another job's: without these names
    # nobody would look for this stop file, and a crash would be counted under two.
    export GRPO_JOB=$SLURM_JOB_ID GRPO_ATTEMPT=$attempt
    # The trainer warns when a generation batch and a checkpoint take longer than the signal leaves.
    export GRPO_STOP_LEAD_S=$stop_s
    say "attempt $attempt of job $SLURM_JOB_ID: $used nodes, logs in $output_dir/logs"
    # In the background, because bash runs no trap while it waits for a command in the foreground. Whoever ends first
    # leaves the others two minutes: node 0 may still be writing how the attempt has ended.
    srun "${options[@]}" --nodes="$used" --ntasks="$used" --kill-on-bad-exit=0 --wait=120 \
        --output="$output_dir/logs/train-node%n.job-$SLURM_JOB_ID.attempt-$attempt.log" \
        grpo launch --doctor --launcher "$launcher" ${config_file:+--config_file "$config_file"} \
        ${ranks_per_node:+--ranks-per-node "$ranks_per_node"} --output-dir "$output_dir" --resume auto \
        --max-crashes "$max_crashes" --stop-s "$stop_s" "$script" "$@" &
    step=$!
    if ((${#nodes[@]} > used)); then # it ends an srun that waits for a lost node
        python -m grpo.ops.launch.lost_nodes "$output_dir" --job "$SLURM_JOB_ID" --attempt "$attempt" --srun "$step" \
            --here "$here" --nodes "$(comma_separated "${nodes[@]}")" --used "$used" >"$output_dir/lost_nodes.$SLURM_JOB_ID" &
        watch=$!
    fi
    status=0
    wait_for "$step" || status=$?
    say "srun has ended with $status"
    lost=()
    if [[ -n $watch ]]; then
        if ((status == 0)); then
            kill "$watch" 2>/dev/null || true
        fi
        wait_for "$watch" || true
        mapfile -t lost <"$output_dir/lost_nodes.$SLURM_JOB_ID"
        rm -f -- "$output_dir/lost_nodes.$SLURM_JOB_ID"
    fi
    rm -f -- "$stop_file"
}

# Ends the job as its attempt has ended; or returns, with the lost nodes out of `nodes`, if spare ones take their place.
conclude_attempt() {
    local node left=() next=0
    if ((status == 2)); then # on every node, for srun returns the highest code
        say "grpo launch did not understand what it was given, or is not installed: $output_dir/logs says more"
        exit 2
    fi
    if ((status == 0)); then
        say "every node has ended well"
        exit 0
    fi
    python -m grpo.ops.launch.next_attempt "$output_dir" --job "$SLURM_JOB_ID" --attempt "$attempt" --failed \
        --max_crashes "$max_crashes" || next=$?
    ((next == 85)) || exit "$next"
    for node in "${nodes[@]}"; do
        [[ " ${lost[*]-} " == *" $node "* ]] || left+=("$node")
    done
    # What is not a node's fault is not mended by another node.
    if ((${#left[@]} >= used)) && [[ "${left[*]:0:used}" != "${nodes[*]:0:used}" && -z $asked_to_stop ]]; then
        nodes=("${left[@]}")
        leave_lost_nodes
        return
    fi
    if scontrol requeue "$slurm_job"; then
        say "requeued"
        exit 0
    fi
    say "Slurm does not requeue this job; to go on:"
    say "  GRPO_OUTPUT_DIR=$output_dir sbatch $(scontrol show job "$slurm_job" | sed -n 's/^ *Command=//p')"
    exit 85
}

# Give back all nodes but `nodes`, and `here`, on which this runs: Slurm requeues the whole job as soon as it misses a
# node of it.
leave_lost_nodes() {
    local folder kept=("${nodes[@]}")
    [[ " ${nodes[*]} " == *" $here "* ]] || kept=("$here" "${nodes[@]}")
    ((${#kept[@]} < SLURM_NNODES)) || return 0
    folder=$(mktemp -d) # the command writes two files to where it is
    (cd "$folder" && timeout 30 scontrol update JobId="$slurm_job" NodeList="$(comma_separated "${kept[@]}")") \
        >"$folder/said" 2>&1 || say "scontrol does not shrink the job: $(head -n 1 "$folder/said")"
    rm -rf -- "$folder"
}

# Wait for a child, whatever signals come meanwhile; its exit code.
wait_for() {
    while kill -0 "$1" 2>/dev/null; do # the trap ends `wait` early
        wait "$1" || true
    done
    wait "$1"
}

comma_separated() {
    local IFS=,
    echo "$*"
}

# The numbers of GPUs that the job was given on its nodes, the smallest first; nothing on a cluster without.
gpus_per_node() {
    local names given node
    scontrol show job --details "$slurm_job" | sed -n 's/^ *Nodes=\([^ ]*\) .*GRES=\(.*\)/\1 \2/p' |
        while read -r names given; do
            for node in $(scontrol show hostnames "$names"); do
                echo "$node,$given"
            done
        done | sed 's/([^)]*)//g' | awk -F, '{
            sum = 0
            for (i = 2; i <= NF; i++) { parts = split($i, part, ":"); if (part[1] == "gpu") sum += part[parts] }
            print sum
        }' | sort -n | awk '{ all += $1; line[NR] = $1 } END { if (all > 0) for (i = 1; i <= NR; i++) print line[i] }'
}
