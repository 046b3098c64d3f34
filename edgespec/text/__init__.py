"""Chat templates, tokenizers and the marks around thinking."""
