"""Real server processes on real sockets: what no test client can show."""
