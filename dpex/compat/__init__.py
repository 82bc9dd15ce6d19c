"""Every private name of Ray and torch that dpex uses, by subject.

dpex uses private names of Ray for speed or isolation, never for correctness. torch's private names
have no public replacement. Each module declares its names in ``Shortcut`` objects. A ``Shortcut``
states the purpose of each name, the effect of its absence, and how dpex checks its meaning. If a
name of Ray is missing or fails, this process uses the public API from then on, and dpex warns once.
``python -m dpex.compat`` prints the table of all names.

``DPEX_PUBLIC_RAY_ONLY=1`` makes dpex use Ray's public API only. The tests run both ways.
"""
