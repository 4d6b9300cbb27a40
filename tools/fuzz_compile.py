"""Compile for Hopper what random calls launch, without a GPU: Triton's interpreter takes what no compiler would.

    python tools/fuzz_compile.py [--seconds N] [--seed S] [--count N] [--case NAME]

Cases are those of tools/fuzz_gpu.py. A failure is printed with the case's name and what the compiler said.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from fuzz_cases import ALIKE, KINDS, case_of, name_of

ROOT = Path(__file__).parent.parent
SHOWN = 600  # characters of what the compiler said


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import fuzz_calls

    from kernels.hopper import compile_launch, record_launches

    launches, compiled, failed, cases = record_launches(), set[str](), 0, 0
    begin = time.monotonic()
    names = options.case or (name_of(list(KINDS), options.seed, 0, ALIKE * n) for n in range(options.count))
    for name in names:
        if time.monotonic() - begin > options.seconds:
            break
        case, cases = case_of(name), cases + 1
        launches.clear()
        try:
            fuzz_calls.evaluate(case, *fuzz_calls.draw(case, "cpu"), "triton")
        except ValueError as problem:
            if fuzz_calls.refusal(problem) is None:
                raise
        for launch in [launch for launch in launches if launch.name not in compiled]:
            compiled.add(launch.name)
            try:
                compile_launch(launch)
            except Exception as problem:
                failed += 1
                print(f"FAILED {case}\n  {launch.name}\n  {_root(problem)}", flush=True)
    print(f"{cases} calls, {len(compiled)} kernels compiled, {failed} failed")
    return int(bool(failed))


def _root(problem: BaseException) -> str:
    """The compiler names every function on the way to what is wrong: the last error says what, the first where."""
    last = problem
    while last.__cause__ is not None:
        last = last.__cause__
    return f"{type(last).__name__}: {str(last)[-SHOWN:]}\n  {str(problem)[-SHOWN:]}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--case", action="append", metavar="NAME")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
