"""llama.cpp as a runtime."""
