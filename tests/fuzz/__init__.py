"""Fuzzers: random work for minutes, with a seed that is printed. `make fuzz` runs them."""
