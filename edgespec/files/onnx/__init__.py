"""Reads exported ONNX folders as hostile input."""
