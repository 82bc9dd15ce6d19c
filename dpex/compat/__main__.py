"""Print the table of private names in ``docs/private_names.md``."""

import sys

from dpex.compat.private_names import table

sys.stdout.write(table())
