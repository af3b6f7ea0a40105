#!/usr/bin/env bash
# Run the tests of what people copy with each version of Python that the project supports, except
# that of .venv, and the loader's with the oldest versions that it needs: `make versions`. With
# arguments, such as 3.12 or oldest: only with these. The tests that take longest, such as those that
# start jobs, run with the newest Python only; `make containers` has jobs with Python 3.10 and 3.12.
#
# Each Python gets a copy of the repository in build/versions, where the set-up runs. In continuous
# integration, tests that fail run again alone.
set -euo pipefail
cd "$(dirname "$0")/.."

own=$(.venv/bin/python -c 'import sys; print("{}.{}".format(*sys.version_info))')
supported=$(sed -n 's/^supported="\(.*\)"$/\1/p' scripts/setup.sh)
oldest_python=3.10 oldest_torch=2.6.0
pytorch=tests/pt.grpc.sagemaker tensorflow=tests/tf.data.service.sagemaker
loader=("$pytorch"/test_{feed,streams,travel}.py)
copied=("${loader[@]}" "$tensorflow"/test_service_pipelines.py tests/shared/test_costs.py)
longer=("$pytorch"/test_{inherit,runtime,reason}.py "$tensorflow"/test_service.py
    tests/hello.world.sagemaker/test_helloworld.py)

# copy FOLDER: copy all files that git tracks, as they are here. Keep an environment in FOLDER.
copy() {
    mkdir -p "$1"
    find "$1" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
    git ls-files -z | xargs -0 cp --parents --preserve=timestamps -t "$1"
}

# install_oldest PYTHON: make the environment with the oldest versions, for the loader's tests only.
install_oldest() {
    local needs=pt.grpc.sagemaker/code/requirements.txt
    [ .venv/.ready -nt $needs ] && [ .venv/.ready -nt tests/versions.sh ] && return
    sed 's/>=\([^,]*\).*/==\1/' $needs >oldest.txt
    "$1" -m venv --clear .venv &&
        "$uv" pip install -q --python .venv/bin/python --index-strategy unsafe-best-match \
            "torch==$oldest_torch" numpy==1.26.4 -r oldest.txt \
            nbval pillow psutil pytest pytest-timeout pytest-xdist &&
        touch .venv/.ready
}

run() {
    .venv/bin/python -m pytest -q -n 4 --dist loadfile -m "not thorough" "$@" ||
        { [ -n "${CI:-}" ] && .venv/bin/python .ci/retry.py; }
}

uv=$PWD/.venv/bin/uv failed=0
for version in ${*:-$supported oldest}; do
    [ "$version" != "$own" ] || continue
    number=${version/oldest/$oldest_python}
    # A command may exist but not run, such as pyenv's shims.
    for python in "python$number" "$HOME/.pyenv/versions/$number".*/bin/python; do
        "$python" -c 'import ensurepip' 2>/dev/null && break
        python=
    done
    if [ -z "$python" ]; then
        echo "make versions left out Python $number: install it with its venv module." >&2
        [ -z "${CI:-}" ] || failed=1
        continue
    fi
    echo "Python $number${version//[0-9.]/}:"
    copy "build/versions/$version"
    pushd "build/versions/$version" >/dev/null
    if [ "$version" = oldest ]; then
        install_oldest "$python" && run "${loader[@]}" "$pytorch"/test_inherit.py || failed=1
    else
        tests=("${copied[@]}")
        [ "$version" != "${supported##* }" ] || tests+=("${longer[@]}")
        PYTHON=$python make --no-print-directory .venv/.ready && run "${tests[@]}" || failed=1
    fi
    popd >/dev/null
done
exit $failed
