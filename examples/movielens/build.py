"""Run every step in order, skipping those whose outputs are up to date.

A step is up to date when its outputs exist and neither its script, common.py nor any step before it
has changed since. `--force` runs them all.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from common import HERE, arguments, say

# Step: what it must leave behind.
OUTPUTS = {
    "01_fetch": ("raw/ml-100k.inter", "raw/ml-100k.item"),
    "02_split": ("train.parquet", "test.parquet"),
    "03_embed": ("embeddings.npz",),
    "04_semantic_ids": ("catalog.parquet",),
    "05_train": (
        "model/config.json",
        "model/generation_config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "projector/projector.json",
        "projector/projector.safetensors",
    ),
    "06_tables": ("users.parquet", "candidates.parquet", "exclusions.parquet", "truth.parquet"),
}


def main() -> int:
    """Run the steps; the exit code of the first that fails comes back."""
    parser = arguments(__doc__)
    parser.add_argument("--force", action="store_true", help="run steps that are up to date too")
    args = parser.parse_args()
    stamps = args.build / "stamps"
    stamps.mkdir(parents=True, exist_ok=True)

    started, state = time.perf_counter(), digest(HERE / "common.py")
    for step, outputs in OUTPUTS.items():
        script = HERE / f"{step}.py"
        # A step's state covers the states before it: a change re-runs everything that follows.
        state = digest(script, state)
        stamp = stamps / step
        complete = all((args.build / name).exists() for name in outputs)
        if not args.force and complete and stamp.exists() and stamp.read_text() == state:
            say(f"[{step}] up to date")
            continue
        stamp.unlink(missing_ok=True)
        begun = time.perf_counter()
        command = [sys.executable, str(script), "--build", str(args.build)]
        # Threads that wait should sleep: spinning ones stall each other on a shared machine.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        code = subprocess.run(command, check=False, env=environment).returncode
        if code != 0:
            say(f"[{step}] failed")
            return code
        stamp.write_text(state)
        say(f"[{step}] {time.perf_counter() - begun:.1f} s")
    say(f"built {args.build} in {time.perf_counter() - started:.1f} s")
    return 0


def digest(file: Path, before: str = "") -> str:
    """A hash of a file's content and of the state before it."""
    return hashlib.sha256(before.encode() + file.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
