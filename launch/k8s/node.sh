#!/usr/bin/env bash
# What a pod of job.yaml runs: one node of the job, by `accelerate launch`. Arguments go to train.py.
#
# Ends with 0 when the job is done, with 85 when Kubernetes is to start the pod again, which does not count as a failure,
# and with 1 when starting again would not help, which ends the whole job. `grpo doctor` runs before each attempt; what
# it finds counts as a crash, and GRPO_MAX_CRASHES in a row end the job too.
set -euo pipefail

: "${NODES:?pods of the job}" "${JOB_NAME:?name of the job and of its service}" "${JOB_UID:?identity of the job}"
: "${JOB_COMPLETION_INDEX:?set by an Indexed Job}"
config_file=${GRPO_CONFIG_FILE:-configs/4node.yaml}
output_dir=${GRPO_OUTPUT_DIR:-runs/$JOB_NAME} # on a volume of all pods
reserved_gpus=${GRPO_RESERVED_GPUS:-1}        # of each pod, for its engines
ranks_per_cpu_node=${GRPO_RANKS_PER_CPU_NODE:-1}
stop_s=${GRPO_STOP_S:-600} # longest step and checkpoint; below terminationGracePeriodSeconds
max_crashes=${GRPO_MAX_CRASHES:-3}
state_wait_s=${GRPO_STATE_WAIT_S:-60} # until the other pods see what rank 0 has written
port=${GRPO_PORT:-29500}              # the pod's own: nobody else can have taken it

say() { printf '%(%F %T)T %s\n' -1 "$*"; }

# As process 1 of its container this shell gets the SIGTERM of a pod that is to go, and only if it has a handler.
running=
stopping=
request_stop() {
    say "SIGTERM: asking the ranks to checkpoint and end"
    stopping=yes
    [[ -z $running ]] || kill -TERM "$running"
}
trap request_stop TERM

# In the background, because bash runs no trap while it waits for a command in the foreground. The trap ends `wait`
# early, so it is called until the command is gone. Sets `status`.
run() {
    status=0
    "$@" &
    running=$!
    while kill -0 "$running" 2>/dev/null; do
        wait "$running" || true
    done
    wait "$running" || status=$?
    running=
}

mkdir -p -- "$output_dir"

# Nobody counts the restarts of the whole job: pod 0 does, in which rank 0 writes the state of each attempt.
attempt_file=$output_dir/attempt.$JOB_UID
attempt=$(cat "$attempt_file" 2>/dev/null || echo 0)
if ((JOB_COMPLETION_INDEX == 0)); then
    [[ ! -e $attempt_file ]] || attempt=$((attempt + 1))
    echo "$attempt" >"$attempt_file.new"
    mv -- "$attempt_file.new" "$attempt_file"
fi
export GRPO_JOB=$JOB_UID GRPO_ATTEMPT=$attempt GRPO_STARTED=$EPOCHSECONDS PYTHONUNBUFFERED=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$stop_s # after SIGTERM torchrun gives its ranks 30 s by default

# Pods come when there is room for them, and the launcher waits for the others ten minutes only.
for ((index = 0; index < NODES; index++)); do
    for ((tries = 0; ; tries++)); do
        [[ -z $stopping ]] || exit 85
        getent hosts "$JOB_NAME-$index.$JOB_NAME" >/dev/null && break
        ((tries % 12)) || say "waiting for pod $index"
        sleep 5
    done
done

# Names what is wrong where torch is built for GPUs and sees none, and nothing asks for CPUs.
gpus=$(python -m grpo.job.devices --config_file "$config_file" "$@") || exit 1
if ((gpus == 0)); then
    ranks_per_node=$ranks_per_cpu_node
elif ((gpus > reserved_gpus)); then
    ranks_per_node=$((gpus - reserved_gpus))
else
    say "$gpus GPUs are too few to train beside $reserved_gpus reserved ones: ask for more (nvidia.com/gpu in job.yaml)"
    exit 1
fi

pods=$(seq -s , -f "$JOB_NAME-%.0f.$JOB_NAME" 0 $((NODES - 1)))
run grpo doctor --nodes "$pods" --node-rank "$JOB_COMPLETION_INDEX" --port "$port" --output-dir "$output_dir" \
    --config_file "$config_file" -- "$@"
[[ -z $stopping ]] || exit 85
if ((status)); then
    # A pod that is started again may come to another node, and one that was drained meanwhile is missed by the others:
    # so this counts as a crash, of which a few in a row end the job.
    say "grpo doctor found pods that cannot train"
else
    run accelerate launch --config_file "$config_file" --deepspeed_multinode_launcher standard \
        --num_machines "$NODES" --num_processes "$((NODES * ranks_per_node))" --machine_rank "$JOB_COMPLETION_INDEX" \
        --main_process_ip "$JOB_NAME-0.$JOB_NAME" --main_process_port "$port" \
        train.py --resume auto "$@" --output_dir "$output_dir"
    say "the launcher has ended with $status"
fi

if ((JOB_COMPLETION_INDEX == 0)); then
    exec python launch/next_attempt.py "$output_dir" --job "$JOB_UID" --attempt "$attempt" --max_crashes "$max_crashes"
fi
# The other pods do what that state says. Crashes are pod 0's to count: they start again, unless it ends the job.
attempt=$(cat "$attempt_file" 2>/dev/null || echo 0) # now it is the number of the attempt that has ended
python launch/next_attempt.py "$output_dir" --job "$JOB_UID" --attempt "$attempt" --wait_s "$state_wait_s" --follow
