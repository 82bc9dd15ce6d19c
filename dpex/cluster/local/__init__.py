"""The local Ray, which dpex starts if there is no cluster."""
