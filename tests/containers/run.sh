#!/usr/bin/env bash
# Build the environments of AWS's images where they are missing or old, and run the examples' jobs in
# them: `make containers`. With names of images, such as tensorflow-2.12, only in those.
#
# The jobs run in namespaces that end, with all that is in them, when they do: a network that nothing
# leads out of, with a bridge for the hosts; mounts; processes.
set -euo pipefail
cd "$(dirname "$0")/../.."

here=tests/containers
all=$(grep -l '^# Python' $here/*.txt | xargs -n 1 basename -s .txt)
built=()
for name in ${*:-$all}; do
    ready=.containers/$name/.ready
    if [ $here/build.sh -nt "$ready" ] || [ "$here/$name.txt" -nt "$ready" ]; then
        status=0
        $here/build.sh "$name" || status=$?
        [ $status = 3 ] && continue # left out, and said why
        [ $status = 0 ] || exit $status
    fi
    built+=("$name")
done
[ ${#built[@]} -gt 0 ] || exit 0

export CONTAINERS="${built[*]}"
# Where containers have their tree mounted; removed again where it was not there.
[ -d /opt/ml ] || { mkdir -p /opt/ml && trap 'rmdir /opt/ml' EXIT; }
unshare --net --mount --pid --fork --kill-child --mount-proc bash -c '
    ip link set lo up
    ip link add hosts type bridge
    ip link set hosts up
    exec .venv/bin/python -m pytest -q -rs tests/containers/in_containers.py
'
