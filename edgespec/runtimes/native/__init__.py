"""edgespec's own processor kernels as a runtime."""
