"""What a person sees: text, colours, status lines, progress; and signals."""
