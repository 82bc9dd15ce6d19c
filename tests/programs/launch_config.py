"""A module of settings, as many scripts have one. ``name`` comes later."""

size = 0
