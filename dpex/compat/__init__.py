"""Every private name of Ray and torch that dpex uses, by subject.

A private name buys speed or seclusion, never correctness. Each file declares its names in
``Shortcut`` objects: what each name is for, what is lost without it, and how dpex checks its
meaning. If a name is missing, or fails in use, the public way takes over in this process, and dpex
warns once. ``python -m dpex.compat`` prints the table of all names.

``DPEX_PUBLIC_RAY_ONLY=1`` forces the public ways; the tests run both.
"""
