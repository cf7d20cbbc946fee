"""Fetch MovieLens-100K: 100,000 ratings of 1,682 films by 943 users.

Reads  the package index pip is set up with (the data ships inside the package recbole 1.2.1)
Writes raw/ml-100k.inter, raw/ml-100k.item

The data belongs to GroupLens and may not be redistributed, so it is never committed: everybody
fetches it for themselves. F. M. Harper and J. A. Konstan (2015). The MovieLens Datasets: History
and Context. ACM Transactions on Interactive Intelligent Systems 5(4), article 19.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import StepError, arguments, read_build, run_step, say

PACKAGE = "recbole==1.2.1"
FOLDER = "recbole/dataset_example/ml-100k/"
SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}


def main() -> None:
    """Run the step."""
    build = read_build(arguments(__doc__))
    build.raw.mkdir(parents=True, exist_ok=True)
    if not all(is_intact(build.raw / name) for name in SHA256):
        with tempfile.TemporaryDirectory() as folder:
            extract(download(Path(folder)), build.raw)
    say(f"fetch: MovieLens-100K is in {build.raw}")


def is_intact(file: Path) -> bool:
    """Whether a file is there and holds what it should."""
    return file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == SHA256[file.name]


def download(folder: Path) -> Path:
    """Let pip download the wheel (2 MB, nothing is installed); its path comes back."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = reasons[-1] if reasons else "pip gave no reason"
        raise StepError(
            f"MovieLens-100K could not be downloaded: pip download {PACKAGE} failed ({reason}). "
            "Check the network and the package index of pip, then run this again; or put "
            f"{' and '.join(SHA256)} into build/raw yourself."
        )
    return wheels[0]


def extract(wheel: Path, to: Path) -> None:
    """Take the two files out of the wheel and check that they are the ones expected."""
    with zipfile.ZipFile(wheel) as archive:
        for name, expected in SHA256.items():
            content = archive.read(FOLDER + name)
            got = hashlib.sha256(content).hexdigest()
            if got != expected:
                raise StepError(
                    f"{name} is not the file this example was written for: "
                    f"expected sha256 {expected}, got {got}. Use {PACKAGE} from PyPI."
                )
            (to / name).write_bytes(content)


if __name__ == "__main__":
    run_step(main)
