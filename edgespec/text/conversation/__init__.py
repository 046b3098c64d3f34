"""Messages in, and what an answer consists of."""
