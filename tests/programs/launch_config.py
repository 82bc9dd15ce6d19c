"""A module of settings, as in many scripts; ``launch_program.py`` adds ``name``."""

size = 0


class Config:
    scale = 1
