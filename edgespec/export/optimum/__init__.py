"""Export through Optimum in an environment of its own."""
