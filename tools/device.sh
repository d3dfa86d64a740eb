#!/bin/sh
# Runs parts of `verax bench accelerator` on a machine that is lent for minutes, without a network:
#
#   make device-wheels                            # before, at home
#   sh tools/device.sh FOLDER tests,operations    # there, in a copy of the checkout with build/device-wheels
#
# FOLDER gets what was measured after each part (parts/NAME.json), all logs as one archive, and at the end the page, which
# is printed last. SECONDS_LEFT (240) is the time of the whole run, JOBS (6) the number of parts that compile at the same
# time. Programs that an earlier run compiled are taken from build/device-cache.tgz if it is there; FOLDER gets them in
# pieces of 15 MB. REHEARSE=1 runs tiny sizes, on a CPU too.
set -eu
folder=$1
parts=${2:-}
python=${PYTHON:-python3}
mkdir -p "$folder/parts" build/device-site build/device-cache

"$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target build/device-site build/device-wheels/*.whl
# The package is run from the checkout; its metadata alone comes from the wheel.
rm -rf build/device-site/verax
export PYTHONPATH="$PWD/src:$PWD:$PWD/build/device-site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export JAX_COMPILATION_CACHE_DIR="$PWD/build/device-cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
[ ! -f build/device-cache.tgz ] || tar -xzf build/device-cache.tgz -C build/device-cache

"$python" -m verax bench accelerator --folder "$folder" --seconds "${SECONDS_LEFT:-240}" --jobs "${JOBS:-6}" \
  ${parts:+--only "$parts"} ${REHEARSE:+--rehearse} > "$folder/page.md" 2> "$folder/errors.log" || status=$?
tar -czf "$folder/logs.tgz" -C "$folder" parts errors.log
tar -czf - -C build/device-cache . | split -b 15m - "$folder/cache."
cat "$folder/page.md"
exit "${status:-0}"
