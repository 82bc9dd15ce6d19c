"""The command ``dpex``, also available as ``python -m dpex``."""

from __future__ import annotations

import argparse
import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments after the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit status: 0 on success, 1 if ``dpex doctor`` finds a problem.
    """
    parser = argparse.ArgumentParser(prog="dpex", description="Look at dpex on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, which Ray would be used, and whether it works",
        description="Print what a bug report needs, and try dpex out beside torch's own loader.",
    )
    doctor.add_argument(
        "--head-address", default="auto", metavar="ADDRESS", help="as DpexDataLoader takes it"
    )
    doctor.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="when to give up (120)"
    )
    given = parser.parse_args(arguments)
    from dpex.doctor.report import examine

    return 0 if examine(given.head_address, timeout_s=given.timeout, out=sys.stdout) else 1


if __name__ == "__main__":
    sys.exit(main())
