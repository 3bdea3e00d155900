#!/usr/bin/env bash
# On the Jetson: from the archive to a captioning loop.
#   examples/jetson/device.sh ARCHIVE PICTURE
set -euo pipefail
archive=${1:?the archive of workstation.sh} picture=${2:?a picture}
here=$(cd "$(dirname "$0")/.." && pwd)
tar -xzf "$archive"

# Plans for this GPU, in the form that its TensorRT has operators for.
vlmexport compile bundle --backend tensorrt

# Every byte is compared with its checksum once; then plain and speculative decoding should say the same.
vlmexport run bundle --device tensorrt --check --image "$picture"
plain=$(vlmexport run bundle --device tensorrt --image "$picture" --draft none --max-new-tokens 32)
drafted=$(vlmexport run bundle --device tensorrt --image "$picture" --max-new-tokens 32)
if [ "$plain" != "$drafted" ]; then
    echo "plain and drafted text differ, at a near-tie or by an error (\`vlmexport verify\` says which): $plain | $drafted" >&2
fi

# What drafting gains here, and where the time goes.
vlmexport bench bundle --device tensorrt --image "$picture" --max-new-tokens 32 --repeats 3
vlmexport profile bundle --device tensorrt

# An answer per tick, with a deadline.
python3 "$here/control_loop.py" bundle "$picture" --device tensorrt --period 0.5 --ticks 3
