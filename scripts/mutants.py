#!/usr/bin/env python3
"""Plants one error of tests/mutants.txt at a time in a copy; do the fast tests notice it?

    python scripts/mutants.py [--check] [WORD ...]

WORDs choose errors whose file, texts or tests hold one of them; --check only looks whether all can
be planted.
Ends with 0 if all are noticed, 1 if one is not, 2 if one cannot be planted or tests fail without.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.txt"
LONGEST = 900  # seconds of tests; an error after which they hang is noticed
NOTICED, MISSED = "noticed", "NOT NOTICED"


def mutants() -> Iterator[tuple[str, str, str, str]]:
    """Read the table: file, text, what that becomes, tests."""
    file = tests = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("    "):
            old, new = line.strip().split(" => ")
            yield file, old, new, tests
        elif not line.startswith("#"):
            file, tests = line.split(": ", 1)


def copy_to(target: Path) -> None:
    """Copy what git knows of the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def ending(root: Path, tests: str) -> str:
    """Run tests in the copy and say how they end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *shlex.split(tests)]
    place = {"cwd": root / "tests", "env": {**os.environ, "PYTHONPATH": str(root)}}
    try:
        done = subprocess.run(command, **place, capture_output=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"{NOTICED}, they hang"
    if done.returncode < 0:
        return f"{NOTICED}, they crash"
    return {0: MISSED, 1: NOTICED}.get(done.returncode, f"PYTEST ENDED {done.returncode}")


ending_without = cache(ending)  # an error: tests that fail anyway notice nothing


def outcome(root: Path, mutant: tuple[str, ...], *, check: bool) -> str:
    """Try one error and leave the copy as it was."""
    file, old, new, tests = mutant
    path = root / "megatron_burst" / file
    original = path.read_text() if path.exists() else ""
    if original.count(old) != 1:
        return f"DID NOT APPLY, found {original.count(old)} times"
    if check:
        return "applies"
    if ending_without(root, tests) != MISSED:
        return "ITS TESTS FAIL ANYWAY"
    path.write_text(original.replace(old, new))
    try:
        return ending(root, tests)
    finally:
        path.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--check", action="store_true", help="only look whether all can be planted")
    options = parser.parse_args()
    words = options.words or [""]
    chosen = [m for m in mutants() if any(word in " ".join(m) for word in words)]
    if not chosen:
        parser.error(
            f"no error of {TABLE.name} has any of these in its file, texts or tests: {words}"
        )
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for mutant in chosen:
            outcomes.append(outcome(Path(folder), mutant, check=options.check))
            print(f"{outcomes[-1]:<12} {mutant[0]:<34} {mutant[1]} => {mutant[2]}", flush=True)
    for text, number in Counter(outcomes).items():
        print(f"{number} of {len(outcomes)}: {text}")
    if any(not o.startswith((NOTICED, MISSED, "applies")) for o in outcomes):
        return 2
    return int(MISSED in outcomes)


if __name__ == "__main__":
    sys.exit(main())
