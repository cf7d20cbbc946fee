#!/usr/bin/env bash
# Airflow on this machine, for looking at the DAGs: everything on loopback, everybody an admin.
# `make airflow` runs it; AIRFLOW_HOME, AIRFLOW__API__PORT and NIGHTSHELF_SURFACES may be set.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
export PATH="$root/.venv-airflow/bin:$PATH"
export AIRFLOW_HOME="${AIRFLOW_HOME:-$root/.airflow}"
export AIRFLOW__API__PORT="${AIRFLOW__API__PORT:-8080}"
export AIRFLOW__API__HOST=127.0.0.1
export AIRFLOW__API__WORKERS=1
export AIRFLOW__CORE__EXECUTION_API_SERVER_URL="http://127.0.0.1:$AIRFLOW__API__PORT/execution/"
export AIRFLOW__CORE__DAGS_FOLDER="$root/airflow/dags"
export AIRFLOW__CORE__LOAD_EXAMPLES=False
export AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS=True
export AIRFLOW__CORE__PARALLELISM="${AIRFLOW__CORE__PARALLELISM:-4}"
export AIRFLOW__USAGE_DATA_COLLECTION__ENABLED=False
export AIRFLOW__CORE__EXECUTOR=LocalExecutor
mkdir -p "$AIRFLOW_HOME"
airflow db migrate

# The parts of `airflow standalone`, but without its log servers: those listen on every interface.
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
airflow scheduler --skip-serve-logs &
airflow triggerer --skip-serve-logs &
airflow dag-processor &
airflow api-server &
airflow pools set gpu "${GPUS:-1}" "GPUs"
echo "Airflow comes up at http://127.0.0.1:$AIRFLOW__API__PORT (Ctrl-C ends it)"
wait -n  # one part that ends takes the others with it
