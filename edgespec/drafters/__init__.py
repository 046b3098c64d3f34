"""Who proposes tokens: a smaller model, a copy of the text so far, or a combination."""
