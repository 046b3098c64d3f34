"""edgespec's processor kernels as a runtime."""
