#!/usr/bin/env bash
# Build the environments of AWS's images where they are missing or old, and run the examples' jobs in
# them: `make containers`. With names of images, such as tensorflow-2.12, only in those.
#
# The jobs run in namespaces that end, with all that is in them, when they do: a network that nothing
# leads out of, with a bridge for the hosts; mounts; processes.
set -euo pipefail
cd "$(dirname "$0")/../.."

left_out() {
    echo "make containers left out: $*" >&2
    exit $([ -z "${CI:-}" ] || [ "$(id -u)" != 0 ] && echo 0 || echo 1)
}
unshare --net --mount --pid --fork true 2>/dev/null ||
    left_out "its hosts need namespaces, which need root (in Docker: --privileged) and util-linux."
command -v ip >/dev/null || left_out "no ip (Debian: iproute2)."

here=tests/containers
all=$(grep -l '^# Python' $here/*.txt | xargs -n 1 basename -s .txt)
declare -A builds
for name in ${*:-$all}; do # side by side: they wait for the network in turn
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
    [ $status = 3 ] && continue # left out, and said why
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
    # /opt/ml, where containers have their tree, is there for these namespaces only.
    mount -t tmpfs opt build/opt
    mkdir build/opt/upper build/opt/work
    mount -t overlay opt -o lowerdir=/opt,upperdir=build/opt/upper,workdir=build/opt/work /opt
    mkdir -p /opt/ml
    exec .venv/bin/python -m pytest -q -rs tests/containers/in_containers.py
'
