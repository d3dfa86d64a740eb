#!/bin/sh
# Runs parts of `verax bench accelerator` on a machine that is there for minutes, without a network:
#
#   make device-wheels                            # before, at home
#   sh tools/device.sh FOLDER tests,operations    # there, in a copy of the checkout with build/device-wheels
#
# FOLDER gets few files: results.tgz, packed again every ten seconds, with what was measured after each part and all logs;
# page.md, which is printed last; and what was compiled, in pieces of 15 MB, for build/device-cache.tgz of the next run.
# SECONDS_LEFT (240) is the time of the whole run, JOBS (6) the number of parts that compile at the same time. REHEARSE=1
# runs tiny sizes, on a CPU too.
set -eu
folder=$1
parts=${2:-}
python=${PYTHON:-python3}
results=build/device-results
mkdir -p "$folder" "$results" build/device-site build/device-cache

"$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target build/device-site build/device-wheels/*.whl
# The package is run from the checkout. Its metadata is needed, which a wheel of it brings.
rm -rf build/device-site/verax
export PYTHONPATH="$PWD/src:$PWD:$PWD/build/device-site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export JAX_COMPILATION_CACHE_DIR="$PWD/build/device-cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
[ ! -f build/device-cache.tgz ] || tar -xzf build/device-cache.tgz -C build/device-cache

pack() {
  tar -czf "$results.$1.tgz" -C "$results" . && cp "$results.$1.tgz" "$folder/results.tgz"
}
while sleep 10; do pack so-far || true; done &
packing=$!
trap 'kill $packing' EXIT

"$python" -m verax bench accelerator --folder "$results" --seconds "${SECONDS_LEFT:-240}" --jobs "${JOBS:-6}" \
  ${parts:+--only "$parts"} ${REHEARSE:+--rehearse} > "$folder/page.md" 2> "$results/errors.log" || status=$?
kill $packing  # or it might write at the same time
trap - EXIT
pack all
tar -czf - -C build/device-cache . | split -b 15m - "$folder/cache."
cat "$folder/page.md"
exit "${status:-0}"
