"""The Ray that dpex uses: an existing cluster, or a local Ray that dpex starts."""
