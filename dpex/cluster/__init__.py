"""Which Ray: a cluster that exists, or the local Ray that dpex starts."""
