"""The command ``dpex``, also available as ``python -m dpex``."""

from __future__ import annotations

import argparse
import math
import sys

import dpex

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments after the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit status: 0 on success, 1 if ``dpex doctor`` finds a problem.
    """
    parser = argparse.ArgumentParser(prog="dpex", description="Look at dpex on this machine.")
    parser.add_argument("--version", action="version", version=f"dpex {dpex.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, which Ray would be used, and whether it works; time a loader",
        description="Print what a bug report needs, and try dpex out beside torch's own loader. "
        "With --loader, time your own loader, and say what limits it.",
    )
    doctor.add_argument(
        "--head-address", metavar="ADDRESS", help="as DpexDataLoader takes it (auto)"
    )
    doctor.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="time limit (120; 600 with --loader)",
    )
    doctor.add_argument(
        "--loader",
        metavar="MODULE:FUNCTION",
        help="time the loader that a function returns; also path/to/file.py:function",
    )
    doctor.add_argument(
        "--seconds", type=_positive, default=20.0, help="how long to time the loader (20)"
    )
    doctor.add_argument(
        "--step-ms",
        type=_positive,
        metavar="MS",
        help="time of one training step, to say how many samples it needs",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    from dpex.doctor.report import examine

    well = examine(
        given.head_address,
        timeout_s=given.timeout or (120 if given.loader is None else 600),
        out=sys.stdout,
        as_json=given.json,
        target=given.loader,
        trial_s=given.seconds,
        step_s=given.step_ms and given.step_ms / 1000,
    )
    return 0 if well else 1


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
