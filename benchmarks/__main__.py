"""Time the engine beside its peers on this machine, and beside what the machine can do.

Every contender loads the same random-weight checkpoint and does the same work; answers are compared
first, and nothing is timed when they differ. Then contenders take turns. docs/performance.md says
what each figure means. stdout: tables, then one JSON document as the last line.

    python -m benchmarks                                # all cases, 8 layers
    python -m benchmarks --vllm                         # and vLLM, after `make bench-vllm`
    python -m benchmarks --quick                        # small, minutes
    python -m benchmarks --only 'score-*' --layers 28 --model qwen3-1.7b --json result.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import QUICK, Sizes, changed

if TYPE_CHECKING:
    from benchmarks.checkpoint import Checkpoint

_MODELS = ("qwen3-0.6b", "qwen3-1.7b", "tiny")


def positive(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; `sizes` holds the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="smaller defaults, a few minutes")
    parser.add_argument("--vllm", action="store_true", help="time vLLM too (make bench-vllm)")
    parser.add_argument("--only", metavar="PATTERN", help="the cases whose name matches; 'score-*'")
    parser.add_argument("--no-pipeline", action="store_true", help="leave `nightshelf run` out")
    parser.add_argument("--model", choices=_MODELS, default=_MODELS[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--backend", choices=("torch", "trtllm"), default="torch", help="what runs our side"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="of torch, on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--price-per-hour", type=float, default=1.0, metavar="X", help="of this device [1.0]"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here too")
    numbers = parser.add_argument_group("sizes", "default, and the default of --quick")
    for field in dataclasses.fields(Sizes):
        quick = getattr(QUICK, field.name)
        text = f"{field.metadata['help']} [{field.default}, {quick}]"
        flag = f"--{field.name.replace('_', '-')}"
        numbers.add_argument(flag, type=positive, metavar="N", help=text)
    args = parser.parse_args(argv)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)}
    args.sizes = changed(QUICK if args.quick else Sizes(), given)
    if max(args.sizes.candidates, args.sizes.few_candidates) > args.sizes.items:
        parser.error("there are more candidates than --items")
    if args.sizes.long_min > args.sizes.long_max:
        parser.error("--long-min is above --long-max")
    return args


def run_pipeline(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """Figures of `nightshelf run`, from a process that is small (benchmarks/pipeline.py)."""
    import subprocess

    sizes: Sizes = args.sizes
    command = [
        sys.executable, "-m", "benchmarks.pipeline",
        "--model", checkpoint.folder, "--dtype", args.dtype, "--device", args.device,
        "--codes", str(sizes.codes), "--users", str(sizes.run_users),
        "--memory-users", str(sizes.memory_users),
    ]  # fmt: skip
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Run the comparison; 1 when answers differ."""
    args = arguments()
    from benchmarks.answers import AnswersDiffer  # torch and transformers take seconds to import
    from benchmarks.compare import compare
    from benchmarks.play import say
    from benchmarks.table import show

    try:
        report = compare(args, None if args.no_pipeline else run_pipeline)
    except AnswersDiffer as err:
        say(f"refusing to time: {err}")
        return 1
    show(report)
    line = json.dumps(report)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
