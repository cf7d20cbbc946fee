"""Time scoring and beams against what one would write with `transformers`, on this machine.

What is compared, in one process and on the same random-weight model:
- scoring: every candidate re-sends the prompt; the prompt's KV is computed once and copied per
  candidate; ours (a token tree per user);
- beams: `generate(num_beams=…, prefix_allowed_tokens_fn=…)`; ours.

The answers are compared first, and nothing is timed when they differ. Then the contenders take
turns, so that a noisy machine is noisy to all of them. Read the ratio of medians; on a busy machine
the ratio of the best turns.
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

_NUMBERS = (
    ("layers", 4, "layers of the model, of 28"),
    ("users", 4, "users in the batch"),
    ("candidates", 100, "items to score per user"),
    ("width", 16, "beams per user"),
    ("k", 10, "items returned by beams, at most the width"),
    ("prompt-tokens", 64, "tokens of a prompt"),
    ("items", 10_000, "items in the catalog"),
    ("codes", 256, "codes of each of the 3 levels"),
    ("repeats", 5, "turns of each contender"),
)


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
    for name, default, meaning in _NUMBERS:
        text = f"{meaning} [{default}]"
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=text)
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
