"""Exported ONNX folders, read as hostile input."""
