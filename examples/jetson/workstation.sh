#!/usr/bin/env bash
# On the workstation: from a model to an archive that a Jetson takes.
#   examples/jetson/workstation.sh MODEL FOLDER [DEVICE]
set -euo pipefail
model=${1:?a model: a folder, an alias of \`vlmexport models\`} folder=${2:?a folder for the archive} device=${3:-jetson-orin-nano-8gb}
mkdir -p "$folder"

# Half the bytes of float32, compared with PyTorch graph by graph.
vlmexport build --model "$model" --precision float16 -o "$folder/bundle"

# Does it fit, and what would its memory's bandwidth allow? Arithmetic from published figures.
vlmexport fit "$folder/bundle" --target "$device"

tar -C "$folder" -czf "$folder/bundle.tar.gz" bundle
echo "$folder/bundle.tar.gz: bring it to the device, with examples/"
