"""The machine: processor, memory, power, and the limits set on them."""
