#!/usr/bin/env bash
# Build the environments of AWS's images that are missing or old, and run the examples' jobs in
# them, or the set-up in Studio's: `make containers`. Names of images as arguments, such as
# tensorflow-2.12 or studio, select these.
#
# The tests run in namespaces, which end with them and take everything along: mounts; processes; and
# for the jobs a network without a way out, with a bridge for the hosts.
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
    made_from=("$here/build.sh" "$here/$name".*txt {pt.grpc.sagemaker/code,docs/ray}/requirements.txt)
    if [ ! -e "$ready" ] || [ -n "$(find "${made_from[@]}" -newer "$ready")" ]; then
        $here/build.sh "$name" &
        builds[$name]=$!
    fi
done
built=() studio=
for name in ${*:-$all}; do
    status=0
    [ -z "${builds[$name]:-}" ] || wait "${builds[$name]}" || status=$?
    [ $status = 3 ] && continue # left out: build.sh has said why
    [ $status = 0 ] || exit $status
    if [ "$name" = studio ]; then studio=yes; else built+=("$name"); fi
done

# run FILE FOLDERS COMMANDS OPTION...: run these commands and then a file of tests in new namespaces.
# OPTIONs of unshare add more of them. What is written to FOLDERS exists only there.
run() {
    unshare "${@:4}" --mount --pid --fork --kill-child --mount-proc bash -ec "
        mount -t tmpfs over build/over
        for folder in $2; do
            mkdir -p build/over\$folder/{upper,work}
            (cd build/over\$folder &&
                mount -t overlay -o lowerdir=\$folder,upperdir=upper,workdir=work over \$folder)
        done
        mkdir -p /opt/ml # where containers mount their files
        $3
        exec .venv/bin/python -m pytest -q -rs $here/$1
    "
}
export CONTAINERS="${built[*]}"
mkdir -p build/over
failed=0
if [ ${#built[@]} -gt 0 ]; then
    run in_containers.py /opt "
        ip link set lo up
        ip link add hosts type bridge
        ip link set hosts up
    " --net || failed=1
fi
if [ -n "$studio" ]; then
    # The other user must be able to reach Python in root's home folder.
    folders="/opt /home"
    [[ $HOME == /home/* ]] || folders+=" $HOME"
    run in_studio.py "$folders" "chmod a+x '$HOME'" || failed=1
fi
exit $failed
