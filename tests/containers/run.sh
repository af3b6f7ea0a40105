#!/usr/bin/env bash
# Run the jobs of in_containers.py in namespaces that end, with all that is in them, when they do:
# a network that nothing leads out of, with a bridge for the hosts; mounts; processes.
#
#     tests/containers/run.sh pytorch-2.12-cu130 ...      the environments that there are
set -euo pipefail
cd "$(dirname "$0")/../.."

export CONTAINERS="$*"
# Where containers have their tree mounted; removed again where it was not there.
[ -d /opt/ml ] || { mkdir -p /opt/ml && trap 'rmdir /opt/ml' EXIT; }
unshare --net --mount --pid --fork --kill-child --mount-proc bash -c '
    ip link set lo up
    ip link add hosts type bridge
    ip link set hosts up
    exec .venv/bin/python -m pytest -rA --show-capture=no tests/containers/in_containers.py
'
