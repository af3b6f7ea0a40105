#!/usr/bin/env bash
# Build the Python environment of a container image, .containers/NAME, from NAME.txt.
#
#     tests/containers/build.sh pytorch-2.12-cu130
#
# Exits with 3, and says why in one line, if this machine lacks something for it. In continuous
# integration only the Python version may be lacking.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=$1
file=tests/containers/$name.txt
compiled=tests/containers/$name.compiled.txt # packages that need a compiler, if any
environment=.containers/$name
log=build/container-$name.log
version=$(sed -n 's/^# Python //p' "$file")
added=$(sed -n 's/^# Jobs add //p' "$file") # files, each by a call of pip, as when a job starts

missing() {
    echo "container $name left out: $*" >&2
    exit 3
}

# A command may exist but not run, such as pyenv's shims.
for python in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
    "$python" -c 'import ensurepip' 2>/dev/null && break
    python=
done
[ -n "$python" ] || missing "install Python $version with its venv module."
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [ -e "$compiled" ] && { ! command -v c++ >/dev/null || [ ! -e "$headers/Python.h" ]; }; then
    echo "container $name left out: install a C++ compiler and the headers of Python $version." >&2
    exit $([ -z "${CI:-}" ] && echo 3 || echo 1)
fi

echo "Building $environment (Python $version), once; details in $log"
mkdir -p build
rm -rf "$environment"
exec 3>&2
trap 'tail -n 15 "$log" >&3; echo "$environment could not be built: see $log." >&3; exit 1' ERR
{
    "$python" -m venv "$environment"
    if toolkit=$(grep ^sagemaker-training== "$file") && [ ! -e "$compiled" ]; then
        # Without its C code, see scripts/setup.sh.
        CC=true "$environment/bin/pip" install --no-cache-dir --no-deps "$toolkit"
        touch "$environment/lib/python$version/site-packages/gethostname.py"
    fi
    "$environment/bin/pip" install -r "$file"
    if [ -n "$added" ]; then
        for requirements in $added; do
            "$environment/bin/pip" install -r "$requirements"
        done
        # It must not change the image's own versions: pip must have nothing to reinstall.
        "$environment/bin/pip" install --dry-run --no-deps -r "$file" |
            (! grep "Would install")
    fi
    if [ -e "$compiled" ]; then
        # Horovod 0.27 has a Gloo of 2022, which needs changes for today's headers and compilers.
        headers=$PWD/$environment/include-linux
        mkdir -p "$headers/linux"
        sed 's/link_mode_masks\[\]/link_mode_masks[0]/' /usr/include/linux/ethtool.h \
            >"$headers/linux/ethtool.h"
        PATH="$PWD/$environment/bin:$PATH" CPLUS_INCLUDE_PATH="$headers" CXXFLAGS="-include array" \
            HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
            HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
            "$environment/bin/pip" install --no-cache-dir --no-build-isolation \
            -r "$compiled"
    fi
} >"$log" 2>&1
touch "$environment/.ready"
