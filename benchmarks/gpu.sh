#!/usr/bin/env bash
# On a machine with a CUDA device: is the engine right, and how fast? One go, results in a folder.
#
#   benchmarks/gpu.sh [FOLDER]            # default: gpu-results
#   LAYERS=28 USERS=8 benchmarks/gpu.sh  # sizes of the table
#
# Writes conformance-float32.xml and conformance-bfloat16.xml (JUnit), bench.json, growth.json,
# device.txt, and last summary.json; where TensorRT-LLM can be imported also checkup-trtllm.txt,
# conformance-trtllm.xml and bench-trtllm.json (docs/trtllm.md). MODEL=folder: the checkpoint of the
# checkup. Ends with 1 when a conformance test failed; the tables are taken all the same, and
# summary.json says so.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${1:-gpu-results}
LAYERS=${LAYERS:-28}
USERS=${USERS:-4}
mkdir -p "$OUT"

"$PYTHON" - <<'PY' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("no CUDA device: this torch is " + torch.__version__)
print(torch.cuda.get_device_name(0), "torch", torch.__version__, "CUDA", torch.version.cuda)
PY
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$OUT/device.txt" || true

failed=0
for dtype in float32 bfloat16; do
  "$PYTHON" -m pytest tests/conformance --backend torch --device cuda --dtype "$dtype" -q \
    --junitxml "$OUT/conformance-$dtype.xml" || failed=1
done

trtllm=0
if "$PYTHON" -c 'import tensorrt_llm' 2>/dev/null; then
  trtllm=1
  "$PYTHON" -m engine.backends.trtllm.checks ${MODEL:+"$MODEL"} | tee "$OUT/checkup-trtllm.txt"
  "$PYTHON" -m pytest tests/conformance --backend trtllm -q \
    --junitxml "$OUT/conformance-trtllm.xml" || failed=1
fi

bench=0
"$PYTHON" -m benchmarks --device cuda --layers "$LAYERS" --users "$USERS" --batch-users 64 \
  --soft-users 256 --run-users 4096 --json "$OUT/bench.json" "${@:2}" || bench=1
if [ "$trtllm" = 1 ]; then
  "$PYTHON" -m benchmarks --backend trtllm --device cuda --layers "$LAYERS" --users "$USERS" \
    --batch-users 64 --soft-users 256 --no-pipeline --json "$OUT/bench-trtllm.json" "${@:2}" \
    || bench=1
fi
"$PYTHON" -m benchmarks.growth --device cuda --layers "$LAYERS" --json "$OUT/growth.json" \
  >/dev/null || bench=1

"$PYTHON" - "$OUT" "$failed" <<'PY'
import json, pathlib, sys
out, failed = pathlib.Path(sys.argv[1]), sys.argv[2] == "1"
device = (out / "device.txt").read_text().strip() if (out / "device.txt").is_file() else None
bench = json.loads((out / "bench.json").read_text()) if (out / "bench.json").is_file() else {}
keys = ("machine", "model", "ratios", "mfu", "pipeline_overhead", "peak_memory_ratio")
summary = {"conformance_passed": not failed, "device": device} | {k: bench.get(k) for k in keys}
trtllm = out / "bench-trtllm.json"
if trtllm.is_file():
    summary["trtllm"] = {k: json.loads(trtllm.read_text()).get(k) for k in keys}
(out / "summary.json").write_text(json.dumps(summary) + "\n")
print(json.dumps(summary))
PY
exit $((failed || bench))
