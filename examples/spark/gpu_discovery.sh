#!/usr/bin/env bash
# Tells Spark which GPUs this machine has: one line of JSON with a resource's name and addresses.
#
#   spark.executor.resource.gpu.discoveryScript  = /path/to/gpu_discovery.sh   (YARN, Kubernetes)
#   spark.worker.resource.gpu.discoveryScript    = /path/to/gpu_discovery.sh   (standalone)
#
# Addresses are UUIDs, which mean the same GPU in every process, whatever CUDA_VISIBLE_DEVICES says
# there. A GPU that is cut up by MIG is listed by its MIG devices. Where CUDA_VISIBLE_DEVICES limits
# this process, only GPUs that it names are listed. Without a GPU the list is empty.
set -euo pipefail

name=${GPU_RESOURCE_NAME:-gpu}

if ! command -v nvidia-smi > /dev/null; then
  printf '{"name":"%s","addresses":[]}\n' "$name"
  exit 0
fi

# Lines of `nvidia-smi -L`:
#   GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-…)
#     MIG 1g.5gb      Device  0: (UUID: MIG-c7384736-…)
nvidia-smi -L | awk -v name="$name" -v visible="${CUDA_VISIBLE_DEVICES-all}" '
  function wanted(index_, uuid, i) {
    if (visible == "all") return 1
    for (i = 1; i <= count; i++)
      if (entries[i] == index_ || (entries[i] !~ /^[0-9]+$/ && index(uuid, entries[i]) == 1)) return 1
    return 0
  }
  function close_gpu() {  # a GPU is listed itself only if it has no MIG devices
    if (gpu != "" && migs == 0 && wanted(number, gpu)) add(gpu)
    gpu = ""
  }
  function add(uuid) { list = list (list == "" ? "" : ",") "\"" uuid "\"" }
  function uuid_of(line) { sub(/.*UUID: /, "", line); sub(/\).*/, "", line); return line }
  BEGIN {
    count = split(visible, entries, /[ ,]+/)
    for (i = 1; i <= count; i++) if (entries[i] == "-1") { count = i - 1; break }
  }
  /^GPU [0-9]+:/ { close_gpu(); gpu = uuid_of($0); number = $2; sub(":", "", number); migs = 0 }
  /^ +MIG / {
    migs++
    mig = uuid_of($0)
    if (visible == "all" || wanted(number, mig)) add(mig)
  }
  END { close_gpu(); printf "{\"name\":\"%s\",\"addresses\":[%s]}\n", name, list }
'
