#!/usr/bin/env bash
# What a machine with one GPU proves, in ten minutes: the numbers of every kernel, speed beside PyTorch, a cluster on the GPU and
# what becomes of it when a rank is killed. Ends with a table; every step's output stays in the folder it names.
#
#   EAGLET_CUDA_PATH   where the CUDA libraries are, if the loader does not find them (docs/cuda.md)
#   PYTHON             an interpreter with torch for CUDA, speculators and accelerate; without them nothing is compared
#   OUT                where the output goes (a new folder)
#   SETS               words for every launch, such as "--set training.tokens_per_row=64"
#   CASES              names of steps to run, separated by spaces (all)
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
PYTHON=${PYTHON:-python3}
EAGLET=target/release/eaglet
GPU=cuda:0
SETS=${SETS:-}
failed=0
table=()

say() { printf '%s\n' "$*" >&2; }

# step NAME LIMIT_S FACT COMMAND...: runs a command with a time limit; FACT is a pattern of the output line for the table.
step() {
    local name=$1 limit=$2 fact=$3 log="$OUT/$1.log" begun=$SECONDS result
    shift 3
    if [[ -n ${CASES:-} && " $CASES " != *" $name "* ]]; then
        table+=("$name|left out|-|")
        return
    fi
    say "== $name"
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
    case $? in
    0) result=passed ;;
    77) result=skipped ;;
    124 | 137) result="over $limit s" failed=1 ;;
    *) result=FAILED failed=1 ;;
    esac
    table+=("$name|$result|$((SECONDS - begun)) s|$(grep -E "$fact|^skipped" "$log" | tail -n 1 | cut -c1-150)")
    [[ $result == FAILED || $result == over* ]] && tail -n 30 "$log" >&2
    return 0
}

skip() { # REASON: ends a step that this machine cannot do
    echo "skipped: $*"
    exit 77
}

build() {
    cargo build --release --workspace && cargo test --release --workspace --no-run
}

kernels() {
    EAGLET_TEST_GPU=1 cargo test --release --workspace --test cuda -- --nocapture --test-threads=1
}

golden() {
    EAGLET_TEST_GPU=1 cargo test --release --workspace --test golden_draft --test golden_verifier -- \
        --nocapture --test-threads=1 cuda
}

train() { # DTYPE
    "$EAGLET" bench train --device "$GPU" --dtype "$1" --tokens 4096 --documents 4
}

verifier() {
    [[ -e $OUT/verifier/model.safetensors ]] || "$PYTHON" tests/gpu/random_verifier.py "$OUT/verifier"
}

extract() { # DTYPE
    verifier && "$EAGLET" bench extract --verifier "$OUT/verifier" --device "$GPU" --dtype "$1" --tokens 8192 --documents 8
}

has_torch() {
    "$PYTHON" -c 'import torch, speculators; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null ||
        skip "$PYTHON has no torch for CUDA with speculators; set PYTHON"
}

peers() { # CASE WORDS...
    has_torch
    verifier && "$PYTHON" tests/peers/speed "$1" --device "$GPU" --rounds 2 --repeats 3 "${@:2}"
}

ranks() { # DRAFTS: a verifier and so many drafts on the one GPU
    local list="{role=\"verifier\",device=\"$GPU\",threads=1}"
    for _ in $(seq "$1"); do list+=",{role=\"draft\",device=\"$GPU\",threads=1}"; done
    printf 'ranks=[%s]' "$list"
}

launch() { # FOLDER DRAFTS WORDS...: forty steps of the demo
    "$EAGLET" launch cluster.toml --plain --set "run.directory=\"$1\"" --set "$(ranks "$2")" --set training.steps=40 \
        --set training.evaluate_every_steps=0 --set checkpoints.every_steps=20 --set draft_restarts.backoff_initial_ms=1 \
        "${@:3}" $SETS
}

digest() { # FOLDER: of the weights that a run ended with
    cat "$1"/checkpoints/step-000040/model.safetensors | sha256sum | cut -c1-16
}

cluster() { # NAME DRAFTS WORDS...: twice, once with a killed draft; both end with the same bits
    local quiet="$OUT/$1-quiet" hurt="$OUT/$1-hurt" drafts=$2
    shift 2
    rm -rf "$quiet" "$hurt"
    launch "$quiet" "$drafts" "$@" || return 1
    launch "$hurt" "$drafts" "$@" &
    local cluster=$! pid=
    for _ in $(seq 600); do
        # The first checkpoint is half of the way.
        [[ -d $hurt/checkpoints/step-000020 ]] && break
        kill -0 "$cluster" 2>/dev/null || return 1
        sleep 0.1
    done
    pid=$("$EAGLET" ranks list --run "$hurt" --json | "$PYTHON" -c '
import json, sys
print(next(rank["pid"] for rank in json.load(sys.stdin) if rank["seat"] == {"role": "draft", "index": 0}))')
    kill -9 "$pid" || return 1
    wait "$cluster" || return 1
    local before after
    before=$(digest "$quiet") after=$(digest "$hurt")
    echo "weights of the quiet run $before, of the one whose draft was killed $after"
    [[ $before == "$after" ]]
}

nccl() { # two draft ranks on one GPU
    "$EAGLET" devices | grep -qE 'NCCL' || skip "NCCL is not there"
    export NCCL_MULTI_RANK_GPU_ENABLE=1
    cluster nccl 2 --set 'training.collective="nccl"'
}

export -f build kernels golden train verifier extract has_torch peers ranks launch digest cluster nccl skip
export OUT PYTHON EAGLET GPU SETS

step build 1200 'Finished' bash -c build
step devices 30 'cuda:0' "$EAGLET" devices
step kernels 240 'test result' bash -c kernels
step golden 240 'test result' bash -c golden
step train-f32 60 'tokens/s \(' bash -c 'train f32'
step train-bf16 60 'tokens/s \(' bash -c 'train bf16'
step extract-f32 60 'tokens/s \(' bash -c 'extract f32'
step extract-bf16 60 'tokens/s \(' bash -c 'extract bf16'
step peers-train 240 'bf16' bash -c 'peers train --tokens 4096 --documents 4 --attention sdpa --dtype f32,bf16'
step peers-extract 120 'bf16' bash -c "peers extract --verifier '$OUT/verifier' --tokens 8192 --documents 8 --dtype f32,bf16"
step one-draft 180 'weights of the quiet run|failed' bash -c 'cluster one-draft 1'
step two-drafts 180 'weights of the quiet run|failed' bash -c 'cluster two-drafts 2'
step nccl 180 'weights of the quiet run|failed|skipped' bash -c nccl

printf '\n%-14s %-12s %-8s %s\n' step result took what
for line in "${table[@]}"; do
    IFS='|' read -r name result took fact <<<"$line"
    printf '%-14s %-12s %-8s %s\n' "$name" "$result" "$took" "$fact"
done
say "output of every step: $OUT"
exit "$failed"
