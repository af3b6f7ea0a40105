#!/usr/bin/env bash
# Build the environments of AWS's images that are missing or old, and run the examples' jobs in
# them: `make containers`. Names of images as arguments, such as tensorflow-2.12, select these.
#
# The jobs run in namespaces, which end with them and take everything along: a network without a way
# out, with a bridge for the hosts; mounts; processes.
set -euo pipefail
cd "$(dirname "$0")/../.."

left_out() {
    echo "make containers left out: $*" >&2
    exit $([ -z "${CI:-}" ] || [ "$(id -u)" != 0 ] && echo 0 || echo 1)
}
unshare --net --mount --pid --fork true 2>/dev/null ||
    left_out "its hosts need namespaces, which need root (in Docker: --privileged) and util-linux."
command -v ip >/dev/null || left_out "install the command ip (Debian: apt install iproute2)."

here=tests/containers
all=$(grep -l '^# Python' $here/*.txt | xargs -n 1 basename -s .txt)
declare -A builds
for name in ${*:-$all}; do # in parallel: each waits for the network at times
    ready=.containers/$name/.ready
    made_from=("$here/build.sh" "$here/$name".*txt pt.grpc.sagemaker/code/requirements.txt)
    if [ ! -e "$ready" ] || [ -n "$(find "${made_from[@]}" -newer "$ready")" ]; then
        $here/build.sh "$name" &
        builds[$name]=$!
    fi
done
built=()
for name in ${*:-$all}; do
    status=0
    [ -z "${builds[$name]:-}" ] || wait "${builds[$name]}" || status=$?
    [ $status = 3 ] && continue # left out: build.sh has said why
    [ $status = 0 ] || exit $status
    built+=("$name")
done
[ ${#built[@]} -gt 0 ] || exit 0

export CONTAINERS="${built[*]}"
mkdir -p build/opt
unshare --net --mount --pid --fork --kill-child --mount-proc bash -c '
    ip link set lo up
    ip link add hosts type bridge
    ip link set hosts up
    # /opt/ml, where containers mount their files, exists only in these namespaces.
    mount -t tmpfs opt build/opt
    mkdir build/opt/upper build/opt/work
    mount -t overlay opt -o lowerdir=/opt,upperdir=build/opt/upper,workdir=build/opt/work /opt
    mkdir -p /opt/ml
    exec .venv/bin/python -m pytest -q -rs tests/containers/in_containers.py
'
