"""What `import trainwright` costs over `import torch`: CPU-seconds of a fresh process, compiled files in place.

    python tests/benchmarks/cold_import.py [--rounds 15]

Torch is imported first and not counted; the first round writes the compiled files and is dropped.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile

import torch

SCRIPT = (
    "import time, torch; begun = time.process_time(); import trainwright; "
    "print(time.process_time() - begun, __import__('sys').dont_write_bytecode)"
)


def measured(environment: dict[str, str]) -> float:
    """CPU-seconds of one import."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    seconds, uncompiled = done.stdout.split()
    assert uncompiled == "False", "compiled files are needed"
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as compiled:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**kept, "PYTHONPYCACHEPREFIX": compiled, "OMP_NUM_THREADS": "1"}
        times = [measured(environment) for _ in range(rounds + 1)][1:]
    print(f"import trainwright over import torch: {statistics.median(times):.3f} CPU-s, median of {rounds}")
    print(
        f"least {min(times):.3f}, most {max(times):.3f}; torch {torch.__version__}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
