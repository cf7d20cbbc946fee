"""TensorRT-LLM in tests: its strict double where the library itself is not installed.

The double stands last in `sys.path`, so that the library is preferred wherever there is one.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

DOUBLE = Path(__file__).parent / "engine" / "trtllm_double"


def installed() -> bool:
    """Whether the library itself can be imported; the double does not count."""
    found = find_spec("tensorrt_llm")
    return found is not None and not str(found.origin).startswith(str(DOUBLE))


def use_double() -> None:
    """From now on `import tensorrt_llm` finds the double, unless the library is installed."""
    if str(DOUBLE) not in sys.path:
        sys.path.append(str(DOUBLE))
