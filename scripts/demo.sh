#!/bin/sh
# The demo behind `make demo`: build the CPU stack, make its models, run the image's own benchmark.
# demo.sh [model|all]
set -eu
cd "$(dirname "$0")/.."
buildctl=.venv/bin/buildctl
stack=cpu-demo
began=$(date +%s)

say() { printf '\n== %s (%s s)\n' "$1" "$(($(date +%s) - began))"; }

say "build: $stack"
"$buildctl" build sglang --stack "$stack"
image=$("$buildctl" plan sglang --stack "$stack" --json | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["images"][0]["tags"][1])')

# the container's user owns what it writes; root on the host stays out of the container
user=$(id -u):$(id -g)
data=$PWD/.buildctl/demo
mkdir -p "$data/models"
if [ "$(id -u)" = 0 ]; then
    user=1000:1000
    chown 1000:1000 "$data/models"
fi

say "models"
docker run --rm --user "$user" -v "$data/models:/models" "$image" \
    python /opt/entrypoint/lib/entrypoints/demo_model.py /models
[ "${1:-all}" = all ] || exit 0

say "benchmark: baseline against EAGLE-3"
"$buildctl" bench "$image" --model "$data/models/target" --draft "$data/models/draft" --cache buildctl-demo -- \
    --effort quick --pairs 4 --prompts-per-stratum 3 --max-tokens 128 --exit-zero-on-valid
say "done; reports lie in results/"
