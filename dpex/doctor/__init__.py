"""The command ``dpex doctor``: its report, and the epochs that it compares."""
