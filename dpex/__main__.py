"""The command ``dpex``, also as ``python -m dpex``."""

from __future__ import annotations

import argparse
import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says.

    Args:
        arguments: Those of the command line if None.

    Returns:
        The exit status: 0 where all is well.
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
