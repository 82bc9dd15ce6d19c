"""Tests of dpex's messages on stderr, in programs that configure logging and in others."""

from __future__ import annotations

import subprocess
import sys

import pytest

MESSAGES = """
import logging
import dpex
from dpex.log import announce

logger = logging.getLogger("dpex")
{configuration}
announce("local Ray on %d cores")
logger.warning("slow: %s", 3)
logger.info("hidden")
"""
START, SLOW = "dpex: local Ray on %d cores", "dpex: slow: 3"


@pytest.mark.parametrize(
    ("configuration", "lines"),
    [
        ("", [START, SLOW]),
        ("dpex.log.show_messages()", [START, SLOW]),
        ("logger.setLevel(logging.WARNING)", [SLOW]),
        ("logger.setLevel(logging.INFO)", [START, SLOW, "dpex: hidden"]),
        ("logging.basicConfig(format='%(name)s %(message)s')", ["dpex slow: 3"]),
        (
            "logging.basicConfig(format='%(name)s %(message)s', level=logging.INFO)",
            ["dpex local Ray on %d cores", "dpex slow: 3", "dpex hidden"],
        ),
        ("logger.addHandler(logging.NullHandler())", []),
        ("logger.propagate = False", []),
        ("logger.disabled = True", []),
    ],
)
def test_messages_on_stderr(configuration: str, lines: list[str]) -> None:
    program = MESSAGES.format(configuration=configuration)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines() == lines
    assert not done.stdout


@pytest.mark.parametrize("state", ["sys.stderr = None", "os.close(2)", "sys.stderr.close()"])
def test_a_message_that_nobody_can_read_is_no_error(state: str) -> None:
    program = f"import os, sys\n{state}\n" + MESSAGES.format(configuration="") + "print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "goes on\n"
