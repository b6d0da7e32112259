"""Throughput and server CPU of one stream, beside a server that keeps nothing."""
