"""Print the table of private names, as ``docs/private_names.md`` has it."""

import sys

from dpex.compat.table import table

sys.stdout.write(table())
