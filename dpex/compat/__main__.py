"""Print the table of private names in ``docs/private_names.md``."""

import sys

from dpex.compat.names_table import table

sys.stdout.write(table())
