"""The Ray on which a loader's workers run: an existing cluster, or a local Ray."""
