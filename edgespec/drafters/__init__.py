"""The drafters: a smaller model, copies of the text so far, or a combination."""
