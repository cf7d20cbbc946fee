"""Time scoring and beams against what one would write with `transformers`, on this machine.

What is compared, in one process and on the same random-weight model:
- scoring: every candidate re-sends the prompt; the prompt's KV is computed once and copied per
  candidate; ours (a token tree per user);
- beams: `generate(num_beams=…, prefix_allowed_tokens_fn=…)`; ours.

The answers are compared first, and nothing is timed when they differ. Then the contenders take
turns, so that a noisy machine is noisy to all of them; ratios of medians are what to read.
stdout: a table, then one JSON document as the last line.

    python benchmarks/engine.py
    python benchmarks/engine.py --layers 28 --users 2 --repeats 1     # the whole Qwen3-0.6B
    python benchmarks/engine.py --dtype float32 --candidates 500 --json result.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# As a script this folder is the first place Python looks, where `engine` would be this very file.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p).resolve() != _HERE)]


def positive(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": positive, "metavar": "N"}
    parser.add_argument("--layers", default=4, help="of 28 [4]", **number)
    parser.add_argument("--users", default=4, help="users in the batch [4]", **number)
    parser.add_argument("--candidates", default=100, help="items to score per user [100]", **number)
    parser.add_argument("--width", default=16, help="beams per user [16]", **number)
    parser.add_argument("--k", default=10, help="items returned by beams, <= width [10]", **number)
    parser.add_argument("--prompt-tokens", default=64, help="tokens of a prompt [64]", **number)
    parser.add_argument("--items", default=10_000, help="items in the catalog [10000]", **number)
    parser.add_argument("--codes", default=256, help="codes of each of 3 levels [256]", **number)
    parser.add_argument("--repeats", default=3, help="turns of each contender [3]", **number)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the JSON document here")
    args = parser.parse_args(argv)
    if args.k > args.width:
        parser.error(f"--k {args.k} is above --width {args.width}")
    if args.candidates > args.items:
        parser.error(f"--candidates {args.candidates} is above --items {args.items}")
    return args


def main() -> int:
    """Run the comparison; 1 when the answers differ."""
    args = arguments()
    from benchmarks.compare import run  # torch and transformers take seconds to import

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
