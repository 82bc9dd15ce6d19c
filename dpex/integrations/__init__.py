"""Support for frameworks that make a new loader from the loader they are given.

There is one module for each framework. The rest of dpex imports none of them.
"""
