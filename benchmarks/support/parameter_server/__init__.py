"""Workers and servers of benchmarks/parameter_server.py, and the turns that they take."""
