"""The local Ray: the Ray that dpex starts where no cluster is given."""
