"""Text and nothing but text: templates, tokenizers, incremental UTF-8, stop strings."""
