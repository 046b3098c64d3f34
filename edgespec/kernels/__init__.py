"""The processor kernels: C sources, what compiles them, and, where that worked, the shared library they make."""
