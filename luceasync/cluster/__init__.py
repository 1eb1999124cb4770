"""Servers on a Ray cluster: what cluster.toml asks for, what keeps it so, and Ray Serve.

Ray places, starts and watches; no token and no payload passes through it. Nothing imports ray at
its top: it comes with the extra `ray`.
"""
