"""Frameworks that make a loader of their own from the one they are given.

Each module is for one framework, and is imported by nobody but its user.
"""
