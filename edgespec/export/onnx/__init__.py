"""Exports models as ONNX graphs."""
