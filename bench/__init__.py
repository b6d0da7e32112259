"""Measurements: `python -m bench` takes all, `python -m bench.ground` those without a server.

Throughput and server CPU of one stream, beside a server that keeps nothing; the protocol layer
beside the official encoder and the official client's fold.
"""
