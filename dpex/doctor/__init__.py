"""The command ``dpex doctor``: what it reports, and the epochs that it compares."""
